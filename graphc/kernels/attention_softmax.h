// Parts of the attention kernels: 2^x and masks.
#pragma once
#include "attention.h"
#include "gemm_micro.h"

namespace gc {

constexpr float LOG2E = 1.44269504088896340736f;
constexpr float NEGATIVE_INFINITY = -__builtin_inff();

// 2^x for x <= 0, relative error below 1e-7; 0 below -126, NaN stays NaN. Degree 6 minimax
// polynomial on [-0.5, 0.5].
GC_INLINE vf exp2_negative(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const vf t = x + magic, r = x - (t - magic);
  vf p = splat(0x1.41a6fcp-13f) * r + 0x1.5f44fp-10f;
  p = p * r + 0x1.3b2dfep-7f;
  p = p * r + 0x1.c6aed6p-5f;
  p = p * r + 0x1.ebfbdap-3f;
  p = p * r + 0x1.62e43p-1f;
  p = p * r + 1.0f;
  p *= (vf)(((vi)t + 127) << 23);
  return (vf)((vi)p & ~(vi)(x < -126.0f));
}
// x[0] of a scalar, through the same code.
static inline float exp2_negative1(float x) { return exp2_negative(splat(x))[0]; }

GC_INLINE vf max_or_first(vf a, vf b) { return b > a ? b : a; }

// An additive mask in units of log2. Finite values stay finite: a row of finfo.min is a row of equal
// scores, not a masked one.
template <class T> GC_INLINE float mask_value(T x) {
  const float natural = to_float(x), scaled = natural * LOG2E;
  return scaled == NEGATIVE_INFINITY && natural != NEGATIVE_INFINITY ? -__FLT_MAX__ : scaled;
}
template <> inline float mask_value<bool>(bool x) { return x ? 0.0f : NEGATIVE_INFINITY; }

template <class T>
static void mask_rows(const void* mask, int64_t offset, int64_t step_q, int64_t step_k, int64_t nq,
                      int64_t nk, float* rows, int64_t ld) {
  const T* m = (const T*)mask + offset;
  for (int64_t i = 0; i < nq; i++) {
    if (step_k == 1) {
      for (int64_t j = 0; j < nk; j++) rows[i * ld + j] = mask_value(m[i * step_q + j]);
    } else {
      for (int64_t j = 0; j < nk; j++) rows[i * ld + j] = mask_value(m[i * step_q + j * step_k]);
    }
  }
}

// rows[nq][nk] of the mask as additive fp32 in units of log2.
static inline void load_mask(const gc_attention_shape* s, const void* mask, int64_t offset, int64_t nq,
                      int64_t nk, float* rows, int64_t ld) {
  const int64_t sq = s->mask_q, sk = s->mask_k;
  if (s->mask_type == 1) mask_rows<float>(mask, offset, sq, sk, nq, nk, rows, ld);
  else if (s->mask_type == 2) mask_rows<bf16>(mask, offset, sq, sk, nq, nk, rows, ld);
  else if (s->mask_type == 3) mask_rows<f16>(mask, offset, sq, sk, nq, nk, rows, ld);
  else mask_rows<bool>(mask, offset, sq, sk, nq, nk, rows, ld);
}

}  // namespace gc
