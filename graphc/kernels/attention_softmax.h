// Parts of the attention kernels: 2^x.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"
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

// 2^x for x <= 0, as exp2_negative.
#if defined(__AVX512DQ__)
// Minimax polynomials of 2^r on [0, 1), relative errors 2e-9 and 7e-5.
template <bool EXACT> GC_INLINE vf exp2_weight(vf x) {
  const vf r = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
  vf p;
  if (EXACT) {
    p = splat(0.00021702256344724447f) * r + 0.001243968727067113f;
    p = p * r + 0.009678840637207031f;
    p = p * r + 0.055483341217041016f;
    p = p * r + 0.24022983014583588f;
    p = p * r + 0.6931470036506653f;
    p = p * r + 1.0f;
  } else {
    p = splat(0.07802452892065048f) * r + 0.22606715559959412f;
    p = p * r + 0.6958335638046265f;
    p = p * r + 0.9999251961708069f;
  }
  return (vf)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)p, (__m512)x);
}
#else
template <bool EXACT> GC_INLINE vf exp2_weight(vf x) { return exp2_negative(x); }
#endif

GC_INLINE vf max_or_first(vf a, vf b) { return b > a ? b : a; }

}  // namespace gc
