// Transposed convolution. Output pixels of one row that are a stride apart read through the same taps
// and read neighbours; each such phase is an implicit GEMM over the taps that reach it, so that no
// product with an inserted zero is made. See conv.h.
#include "conv_common.h"
#include "gemm_micro.h"

namespace {
using namespace gc;

constexpr int64_t P = GC_CONV_PANEL, SUM = 128;

// dst[n][32] from n channels: lanes [lo, hi) from src[lane], the others zero. [src + low, src + high)
// is memory that may be read.
template <class T>
static void gather(const T* src, int64_t step, int64_t n, int64_t lo, int64_t hi, int64_t low,
                   int64_t high, float* dst) {
  int32_t mask[P];
  for (int64_t j = 0; j < P; j++) mask[j] = j >= lo && j < hi ? -1 : 0;
  for (int64_t c = 0; c < n; c++, src += step, low -= step, high -= step, dst += P) {
    if (low <= 0 && P <= high) {
#pragma GCC unroll 4
      for (int v = 0; v < P; v += 8) {
        typedef int32_t vi8 __attribute__((vector_size(32)));
        store(dst + v, (vi8)load8(src + v) & load<vi8>(mask + v));
      }
    } else {
      for (int64_t j = 0; j < P; j++) dst[j] = mask[j] ? to_float(src[j]) : 0.0f;
    }
  }
}

// The input coordinate that output coordinate o reads through a tap, or -1.
static int64_t source(const gc_conv_shape* s, int i, int64_t o, int64_t tap) {
  const int64_t v = o + s->pad[i] - tap * s->dilation[i];
  return v < 0 || v % s->stride[i] || v / s->stride[i] >= s->in[i] ? -1 : v / s->stride[i];
}

template <class T>
static void convolve(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t phases = s->stride[2], W = s->out[2], ld = P * phases;
  const int64_t segments = (W + ld - 1) / ld, out_rows = s->out[0] * s->out[1];
  const int64_t depth = s->kernel[0] * s->kernel[1] * s->kernel[2] * s->c;
  const int64_t tiles = (s->oc + GC_MR - 1) / GC_MR, blocks = (s->oc + s->rows - 1) / s->rows;
  const int64_t extent = (s->images - 1) * s->x_n + (s->groups * s->c - 1) * s->x_c +
                         s->in[0] * s->in[1] * s->in[2];
  float* const chunk = (float*)args->scratch;  // [SUM][32]
  float* const sums = chunk + SUM * P;         // [rows][phase][32]
  float* const tile = sums + min64(s->oc, s->rows) * ld;  // [rows][32 * phases]
  for (int64_t u = begin; u < end; u++) {
    const int64_t ow = u % segments * ld, row = u / segments % out_rows,
                  outer = u / segments / out_rows;
    const int64_t block = outer % blocks, g = outer / blocks % s->groups,
                  image = outer / blocks / s->groups;
    const int64_t od = row / s->out[1], oh = row % s->out[1];
    const int64_t t0 = block * tiles / blocks, t1 = (block + 1) * tiles / blocks;
    const int64_t r0 = t0 * s->oc / tiles, rows = t1 * s->oc / tiles - r0;
    const float* weights = (const float*)args->ptr[1] + g * s->oc * depth;
    const int64_t base = image * s->x_n + g * s->c * s->x_c;
    const T* x = (const T*)args->ptr[0];
    memset(sums, 0, (size_t)(rows * ld) * sizeof(float));
    for (int64_t kd = 0; kd < s->kernel[0]; kd++) {
      const int64_t id = source(s, 0, od, kd);
      for (int64_t kh = 0; kh < s->kernel[1] && id >= 0; kh++) {
        const int64_t ih = source(s, 1, oh, kh);
        for (int64_t kw = 0; kw < s->kernel[2] && ih >= 0; kw++) {
          const int64_t shift = ow + s->pad[2] - kw * s->dilation[2];  // of phase 0, lane 0
          const int64_t q = ((-shift) % phases + phases) % phases, iw = (shift + q) / phases;
          const int64_t lo = max64(0, -iw), hi = min64(P, s->in[2] - iw);
          if (lo >= hi) continue;
          const int64_t k0 = ((kd * s->kernel[1] + kh) * s->kernel[2] + kw) * s->c;
          for (int64_t c = 0; c < s->c; c += SUM) {
            const int64_t n = min64(SUM, s->c - c);
            const int64_t at = base + c * s->x_c + (id * s->in[1] + ih) * s->in[2] + iw;
            gather(x + at, s->x_c, n, lo, hi, -at, extent - at, chunk);
            for (int64_t t = t0; t < t1; t++) {
              const int64_t r = t * s->oc / tiles, mr = (t + 1) * s->oc / tiles - r;
              MICRO[mr](weights + r * depth + (k0 + c) * mr, mr, chunk, P, n,
                        sums + (r - r0) * ld + q * P, ld, true);
            }
          }
        }
      }
    }
    const int64_t m0 = g * s->oc + r0, count = min64(ld, W - ow);
    for (int64_t r = 0; r < rows; r++) {
      const float bias = s->bias_type ? bias_value(s, args->ptr[2], m0 + r) : 0.0f;
      const float* from = sums + r * ld;
      float* to = tile + r * ld;
      for (int64_t q = 0; q < phases; q++)
        for (int64_t j = 0; j < P; j++) to[j * phases + q] = from[q * P + j] + bias;
    }
    epilogue(args, tile, ld, image, m0, rows, row * W + ow, count);
  }
}

}  // namespace

GC_CONV(transposed_f32) { convolve<float>(args, epilogue, begin, end); }
GC_CONV(transposed_bf16) { convolve<bf16>(args, epilogue, begin, end); }
GC_CONV(transposed_f16) { convolve<f16>(args, epilogue, begin, end); }
