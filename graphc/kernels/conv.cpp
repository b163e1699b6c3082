// Implicit GEMM through a table of pixel addresses; see conv.h.
#include "conv_common.h"

namespace {
using namespace gc;

// `n` neighbouring pixels of an output row: addresses of the input pixels under each tap, `zeros`
// where it is padding.
template <class T>
static void row_addresses(const gc_conv_shape* s, const T* image, const char* zeros, int64_t d,
                          int64_t h, int64_t w, int64_t n, const char** dst, int64_t ld) {
  const int64_t stride = s->stride[2], step = stride * s->x_s[2];
  for (int64_t kd = 0; kd < s->kernel[0]; kd++) {
    const int64_t id = d * s->stride[0] - s->pad[0] + kd * s->dilation[0];
    for (int64_t kh = 0; kh < s->kernel[1]; kh++) {
      const int64_t ih = h * s->stride[1] - s->pad[1] + kh * s->dilation[1];
      const bool outside = id < 0 || id >= s->in[0] || ih < 0 || ih >= s->in[1];
      const T* row = image + id * s->x_s[0] + ih * s->x_s[1];
      for (int64_t kw = 0; kw < s->kernel[2]; kw++, dst += ld) {
        const int64_t iw = w * stride - s->pad[2] + kw * s->dilation[2];
        int64_t from = 0, to = 0;  // the pixels that read the image
        if (!outside) {
          from = iw >= 0 ? 0 : min64(n, (-iw + stride - 1) / stride);
          to = iw >= s->in[2] ? from : max64(from, min64(n, (s->in[2] - iw + stride - 1) / stride));
        }
        const T* at = row + iw * s->x_s[2];
        for (int64_t i = 0; i < from; i++) dst[i] = zeros;
        for (int64_t i = from; i < to; i++) dst[i] = (const char*)(at + i * step);
        for (int64_t i = to; i < n; i++) dst[i] = zeros;
      }
    }
  }
}

// Panels that one tile of pixels meets in turn, before the next tile: their weights stay in the
// second-level cache, and what is stored runs through longer stretches of a pixel's channels.
constexpr int64_t GROUP_BYTES = 1 << 16;

template <class T>
static void convolve(const gc_args* args, gc_epilogue epilogue, const gc_conv_finish* finish,
                     int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t W = s->out[2], H = s->out[1], area = s->out[0] * H * W, pixels = s->images * area;
  const int64_t taps = s->kernel[0] * s->kernel[1] * s->kernel[2];
  const int64_t blocks = (pixels + s->block - 1) / s->block;
  const Panels<T> panels(s->oc, s->c, taps);
  const Scratch<T> scratch(args, taps * s->block, panels.steps * panels.each);
  const int64_t most = max64(1, min64(GC_CONV_GROUP, GROUP_BYTES / (taps * panels.tap_bytes(0))));
  int64_t loaded = -1, count = 0;
  for (int64_t u = begin; u < end;) {
    const int64_t p0 = u % panels.count, block = u / panels.count % blocks,
                  g = u / panels.count / blocks, first = block * s->block;
    if (u / panels.count != loaded) {  // the panels of a block share its table
      loaded = u / panels.count;
      count = min64(s->block, pixels - first);
      const T* x = (const T*)args->ptr[0] + g * s->c;
      for (int64_t i = 0; i < count;) {
        const int64_t at = first + i, w = at % W, n = min64(W - w, count - i);
        row_addresses(s, x + at / area * s->x_n, scratch.zeros, at / (H * W) % s->out[0], at / W % H,
                      w, n, scratch.table + i, s->block);
        i += n;
      }
    }
    const int64_t p1 = min64(p0 + most, min64(p0 + end - u, panels.count));
    u += p1 - p0;
    const int64_t known = (p1 - p0 - 1) * GC_NR + panels.channels(p1 - 1);
    for (int64_t i = known; i < (p1 - p0) * GC_NR; i++) scratch.bias[i] = 0.0f;
    bias_values(s, args, g * s->oc + p0 * GC_NR, known, scratch.bias);
    const int64_t tiles = (count + GC_MR - 1) / GC_MR;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t r0 = t * count / tiles, mr = (t + 1) * count / tiles - r0;
      const int64_t z = (first + r0) / area, m = (first + r0) % area;
      for (int64_t p = p0; p < p1; p++) {
        const int64_t width = panels.width(p), nr = panels.channels(p), n0 = g * s->oc + p * GC_NR;
        const char* weights = (const char*)((const T*)args->ptr[1] + panels.start(g, p));
        gc_conv_tile tile = {scratch.table + r0, s->block, taps, 0, s->c, weights,
                             panels.tap_bytes(p), scratch.bias + (p - p0) * GC_NR, 0, scratch.sums,
                             nullptr, nullptr, nullptr};
        if (finish && nr == GC_NR && m + mr <= area) {
          tile.finish = finish;
          tile.out = finish->out + z * finish->out_z + m * finish->out_m + n0 * (int64_t)sizeof(T);
          if (finish->add)
            tile.add = finish->add + z * finish->add_z + m * finish->add_m + n0 * (int64_t)sizeof(T);
          conv_sum<T>(tile, mr, width);
          continue;
        }
        conv_sum<T>(tile, mr, width);
        for (int64_t r = 0; r < mr;) {  // a block may cross from one image to the next
          const int64_t at = first + r0 + r, m0 = at % area, n = min64(area - m0, mr - r);
          epilogue(args, scratch.sums + r * GC_NR, GC_NR, at / area, m0, n, n0, nr);
          r += n;
        }
      }
    }
  }
}

}  // namespace

#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_f32)
GC_CONV_FINISHED(f32) { convolve<float>(args, epilogue, finish, begin, end); }
#endif
#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_bf16)
GC_CONV_FINISHED(bf16) { convolve<bf16>(args, epilogue, finish, begin, end); }
#endif
