// Implicit GEMM: packed weights times panels of 32 output pixels that are gathered into scratch one
// chunk of (tap, channel) steps at a time; see conv.h.
#include "conv_common.h"
#include "gemm_micro.h"

namespace {
using namespace gc;

constexpr int P = GC_CONV_PANEL;
static_assert(P == GC_NR, "a panel of pixels is a panel of the micro-kernel");

// Up to 32 neighbouring output pixels of one image.
struct Pixels {
  int64_t count;
  int runs;               // stretches within one output row
  int run_begin[P + 1];
  int32_t d[P], h[P], w[P];  // input coordinates of tap 0 (transposed: of the scaled grid)

  void set(const gc_conv_shape* s, int64_t first) {
    const int64_t total = s->out[0] * s->out[1] * s->out[2];
    count = min64(P, total - first);
    int64_t ow = first % s->out[2], oh = first / s->out[2] % s->out[1],
            od = first / s->out[2] / s->out[1];
    const int64_t *step = s->stride, *pad = s->pad;
    runs = 0;
    for (int j = 0; j < P; j++) {
      if (j == 0 || (ow == 0 && j < count)) run_begin[runs++] = j;
      if (s->transposed) {
        d[j] = (int32_t)(od + pad[0]);
        h[j] = (int32_t)(oh + pad[1]);
        w[j] = (int32_t)(ow + pad[2]);
      } else {
        d[j] = (int32_t)(od * step[0] - pad[0]);
        h[j] = (int32_t)(oh * step[1] - pad[1]);
        w[j] = (int32_t)(ow * step[2] - pad[2]);
      }
      if (j + 1 < count && ++ow == s->out[2]) {
        ow = 0;
        if (++oh == s->out[1]) {
          oh = 0;
          od++;
        }
      }
    }
    run_begin[runs] = (int)count;
  }
};

// Where one tap reads for each pixel of a panel.
struct Tap {
  int32_t index[P];  // element within a channel
  int32_t mask[P];   // -1: inside the image, 0: padding
  int64_t number = -1;  // the tap this describes
  bool linear = false;  // index[j] == index[0] + j throughout
  bool whole = false;   // no padding
  int64_t low = 0, high = -1;  // smallest and largest index of a valid pixel (high < low: none)

  void set(const gc_conv_shape* s, const Pixels& p, int64_t tap) {
    if (tap == number) return;
    number = tap;
    const int32_t kd = (int32_t)(tap / s->kernel[2] / s->kernel[1] * s->dilation[0]),
                  kh = (int32_t)(tap / s->kernel[2] % s->kernel[1] * s->dilation[1]),
                  kw = (int32_t)(tap % s->kernel[2] * s->dilation[2]);
    const int32_t D = (int32_t)s->in[0], H = (int32_t)s->in[1], W = (int32_t)s->in[2];
    const int32_t count = (int32_t)p.count;
    if (s->transposed) {
      const int32_t sd = (int32_t)s->stride[0], sh = (int32_t)s->stride[1],
                    sw = (int32_t)s->stride[2];
      for (int j = 0; j < P; j++) {
        const int32_t a = p.d[j] - kd, b = p.h[j] - kh, c = p.w[j] - kw;
        const bool inside = j < count && a >= 0 && b >= 0 && c >= 0 && a % sd == 0 && b % sh == 0 &&
                            c % sw == 0 && a / sd < D && b / sh < H && c / sw < W;
        mask[j] = inside ? -1 : 0;
        index[j] = inside ? (a / sd * H + b / sh) * W + c / sw : 0;
      }
    } else {
      for (int j = 0; j < P; j++) {
        const int32_t a = p.d[j] + kd, b = p.h[j] + kh, c = p.w[j] + kw;
        const int32_t inside = ((uint32_t)a < (uint32_t)D) & ((uint32_t)b < (uint32_t)H) &
                               ((uint32_t)c < (uint32_t)W) & (j < count);
        mask[j] = -inside;
        index[j] = (a * H + b) * W + c;
      }
    }
    int32_t straight = 1, all = -1, least = INT32_MAX, most = -1;
    for (int j = 0; j < P; j++) {
      straight &= (j >= count) | (index[j] == index[0] + j);
      all &= mask[j];
      const int32_t lo = mask[j] ? index[j] : INT32_MAX, hi = mask[j] ? index[j] : -1;
      least = lo < least ? lo : least;
      most = hi > most ? hi : most;
    }
    linear = straight != 0;
    whole = all != 0;
    low = least;
    high = most;
  }
};

template <class T> GC_INLINE void copy_lanes(const T* src, float* dst) {
#pragma GCC unroll 4
  for (int v = 0; v < P; v += 8) store(dst + v, load8(src + v));
}
template <> inline void copy_lanes<float>(const float* src, float* dst) {
#pragma GCC unroll 8
  for (int v = 0; v < P; v += VL) store(dst + v, load<vf>(src + v));
}

GC_INLINE void mask_lanes(float* dst, const int32_t* mask) {
#pragma GCC unroll 8
  for (int v = 0; v < P; v += VL) store(dst + v, load<vi>(dst + v) & load<vi>(mask + v));
}

// dst[channel][32] for `channels` channels of one tap. `x` is the first channel; [x + low, x + high)
// is memory that may be read.
template <class T>
static void gather(const gc_conv_shape* s, const Pixels& p, const Tap& tap, const T* x, int64_t low,
                   int64_t high, int64_t channels, float* dst) {
  if (tap.high < tap.low) {
    memset(dst, 0, (size_t)(channels * P) * sizeof(float));
    return;
  }
  const int64_t step = s->stride[2];
  for (int64_t c = 0; c < channels; c++, x += s->x_c, low -= s->x_c, high -= s->x_c, dst += P) {
    if (tap.linear && tap.index[0] >= low && tap.index[0] + P <= high) {
      copy_lanes(x + tap.index[0], dst);
      if (!tap.whole) mask_lanes(dst, tap.mask);
    } else if (!s->transposed && step <= 2 && tap.low >= low && tap.high + 16 <= high) {
      // Row by row; a vector may run over into the next row's lanes, which come later.
      for (int r = 0; r < p.runs; r++) {
        int j = p.run_begin[r], stop = p.run_begin[r + 1];
        while (j < stop && !tap.mask[j]) j++;
        while (j < stop && !tap.mask[stop - 1]) stop--;
        const T* src = x + tap.index[j];
        for (; j < stop; j += 8, src += 8 * step) {
          vf8 v = load8(src);
          if (step == 2) v = __builtin_shufflevector(v, load8(src + 8), 0, 2, 4, 6, 8, 10, 12, 14);
          if (j + 8 <= P) {
            store(dst + j, v);
          } else {
            for (int i = 0; j + i < P; i++) dst[j + i] = v[i];
          }
        }
      }
      if (!tap.whole) mask_lanes(dst, tap.mask);
    } else {
      for (int j = 0; j < P; j++) dst[j] = tap.mask[j] ? to_float(x[tap.index[j]]) : 0.0f;
    }
  }
}

template <class T>
static void convolve(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t pixels = s->out[0] * s->out[1] * s->out[2], panels = (pixels + P - 1) / P;
  const int64_t taps = s->kernel[0] * s->kernel[1] * s->kernel[2], depth = taps * s->c;
  const int64_t plane = s->in[0] * s->in[1] * s->in[2];
  const int64_t tiles = (s->oc + GC_MR - 1) / GC_MR;
  const int64_t blocks = (s->oc + GC_CONV_ROWS - 1) / GC_CONV_ROWS;
  float* const chunk = (float*)args->scratch;                         // [group][CHUNK][32]
  float* const tile = chunk + GC_CONV_GROUP * GC_CONV_CHUNK * P;      // [rows][group * 32]
  const T* const x0 = (const T*)args->ptr[0];
  const int64_t extent =
      (s->images - 1) * s->x_n + (s->groups * s->c - 1) * s->x_c + plane;  // readable elements
  while (begin < end) {
    const int64_t outer = begin / panels, first = begin % panels;
    const int64_t count = min64(min64(GC_CONV_GROUP, panels - first), end - begin);
    begin += count;
    const int64_t block = outer % blocks, g = outer / blocks % s->groups,
                  image = outer / blocks / s->groups;
    const int64_t t0 = block * tiles / blocks, t1 = (block + 1) * tiles / blocks;
    const int64_t r0 = t0 * s->oc / tiles, rows = t1 * s->oc / tiles - r0, ld = count * P;
    const float* weights = (const float*)args->ptr[1] + g * s->oc * depth;
    const int64_t offset = image * s->x_n + g * s->c * s->x_c;
    Pixels p[GC_CONV_GROUP];
    Tap tap[GC_CONV_GROUP];
    for (int64_t q = 0; q < count; q++) p[q].set(s, (first + q) * P);
    for (int64_t k0 = 0;;) {
      const int64_t kl = min64(GC_CONV_CHUNK, depth - k0);
      for (int64_t q = 0; q < count; q++) {
        float* const buffer = chunk + q * GC_CONV_CHUNK * P;
        for (int64_t k = k0; k < k0 + kl;) {
          const int64_t c = k % s->c, n = min64(s->c - c, k0 + kl - k);
          tap[q].set(s, p[q], k / s->c);
          const int64_t at = offset + c * s->x_c;
          gather(s, p[q], tap[q], x0 + at, -at, extent - at, n, buffer + (k - k0) * P);
          k += n;
        }
      }
      for (int64_t t = t0; t < t1; t++) {
        const int64_t r = t * s->oc / tiles, mr = (t + 1) * s->oc / tiles - r;
        for (int64_t q = 0; q < count; q++)
          MICRO[mr](weights + r * depth + k0 * mr, mr, chunk + q * GC_CONV_CHUNK * P, P, kl,
                    tile + (r - r0) * ld + q * P, ld, k0 > 0);
      }
      k0 += kl;
      if (k0 >= depth) break;
    }
    const int64_t n0 = first * P, m0 = g * s->oc + r0;
    if (s->bias_type) {
      for (int64_t r = 0; r < rows; r++) {
        const float b = bias_value(s, args->ptr[2], m0 + r);
        for (int64_t i = 0; i < ld; i++) tile[r * ld + i] += b;
      }
    }
    epilogue(args, tile, ld, image, m0, rows, n0, min64(pixels - n0, ld));
  }
}

// Packs run-time weights: ptr = {weights, packed}. One unit is one micro tile of one group.
template <class T>
static void pack_weights(const gc_args* args, int64_t begin, int64_t end) {
  const gc_conv_pack_shape* s = (const gc_conv_pack_shape*)args->imm;
  const int64_t tiles = (s->oc + GC_MR - 1) / GC_MR, depth = s->taps * s->c;
  for (int64_t g = begin; g < end; g++) {
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t r = t * s->oc / tiles, mr = (t + 1) * s->oc / tiles - r;
      const T* w = (const T*)args->ptr[0] + g * s->w_g + r * s->w_oc;
      float* dst = (float*)args->ptr[1] + (g * s->oc + r) * depth;
      for (int64_t tap = 0; tap < s->taps; tap++)
        for (int64_t c = 0; c < s->c; c++)
          for (int64_t i = 0; i < mr; i++)
            *dst++ = to_float(w[i * s->w_oc + c * s->w_c + tap * s->w_tap]);
    }
  }
}

}  // namespace

GC_CONV(f32) { convolve<float>(args, epilogue, begin, end); }
GC_CONV(bf16) { convolve<bf16>(args, epilogue, begin, end); }
GC_CONV(f16) { convolve<f16>(args, epilogue, begin, end); }

GC_EXPORT void gc_conv_pack_f32(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<float>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_bf16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<bf16>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_f16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<f16>(args, begin, end);
}
