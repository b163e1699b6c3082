// See conv_simple.h.
#include "conv_simple.h"

namespace {

// Input coordinate that output coordinate `o` reads through tap `k` in dimension i, or -1.
inline int64_t source(const gc_conv_shape* s, int i, int64_t o, int64_t k) {
  if (s->transposed) {
    const int64_t v = o + s->pad[i] - k * s->dilation[i];
    return v < 0 || v % s->stride[i] || v / s->stride[i] >= s->in[i] ? -1 : v / s->stride[i];
  }
  const int64_t v = o * s->stride[i] - s->pad[i] + k * s->dilation[i];
  return v < 0 || v >= s->in[i] ? -1 : v;
}

// A is the type sums are made in: unsigned for integers, so that they wrap.
template <class T, class A>
void convolve(const gc_args* args, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t* w_step = args->imm + sizeof(gc_conv_shape) / sizeof(int64_t);
  const int64_t channels = s->groups * s->oc, rows = s->out[0] * s->out[1], W = s->out[2];
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u % rows, m = u / rows % channels, image = u / rows / channels;
    const int64_t g = m / s->oc, od = row / s->out[1], oh = row % s->out[1];
    const T* x = (const T*)args->ptr[0] + image * s->x_n + g * s->c * s->x_c;
    const T* w = (const T*)args->ptr[1] + g * w_step[0] + m % s->oc * w_step[1];
    T* out = (T*)args->ptr[s->bias_type ? 3 : 2] + u * W;
    for (int64_t ow = 0; ow < W; ow++) {
      A sum = s->bias_type ? (A)((const T*)args->ptr[2])[m] : A(0);
      for (int64_t kd = 0; kd < s->kernel[0]; kd++) {
        const int64_t id = source(s, 0, od, kd);
        if (id < 0) continue;
        for (int64_t kh = 0; kh < s->kernel[1]; kh++) {
          const int64_t ih = source(s, 1, oh, kh);
          if (ih < 0) continue;
          for (int64_t kw = 0; kw < s->kernel[2]; kw++) {
            const int64_t iw = source(s, 2, ow, kw);
            if (iw < 0) continue;
            const T* xp = x + id * s->x_s[0] + ih * s->x_s[1] + iw * s->x_s[2];
            const T* wp = w + ((kd * s->kernel[1] + kh) * s->kernel[2] + kw) * w_step[3];
            for (int64_t c = 0; c < s->c; c++)
              sum += (A)xp[c * s->x_c] * (A)wp[c * w_step[2]];
          }
        }
      }
      out[ow] = (T)sum;
    }
  }
}

}  // namespace

GC_CONV_SIMPLE(f64) { convolve<double, double>(args, begin, end); }
GC_CONV_SIMPLE(i8) { convolve<int8_t, uint32_t>(args, begin, end); }
GC_CONV_SIMPLE(u8) { convolve<uint8_t, uint32_t>(args, begin, end); }
GC_CONV_SIMPLE(i16) { convolve<int16_t, uint32_t>(args, begin, end); }
GC_CONV_SIMPLE(i32) { convolve<int32_t, uint32_t>(args, begin, end); }
GC_CONV_SIMPLE(i64) { convolve<int64_t, uint64_t>(args, begin, end); }
