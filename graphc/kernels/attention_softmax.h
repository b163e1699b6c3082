// Parts of the attention kernels: 2^x, masks, and the online softmax over a block of scores.
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

// Online softmax where lanes are queries: s[key][32] becomes exp2(s - new maximum) in place;
// `maximum` and `total` are updated, `rescale` receives 2^(old - new maximum) per query.
static inline void softmax_block(float* s, int64_t keys, float* maximum, float* total, float* rescale) {
  for (int v = 0; v < GC_NR; v += VL) {
    const vf before = load<vf>(maximum + v);
    vf m[2] = {before, before};
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      m[0] = max_or_first(m[0], load<vf>(s + j * GC_NR + v));
      m[1] = max_or_first(m[1], load<vf>(s + (j + 1) * GC_NR + v));
    }
    if (j < keys) m[0] = max_or_first(m[0], load<vf>(s + j * GC_NR + v));
    const vf now = max_or_first(m[0], m[1]);
    store(maximum + v, now);
    const vf base = now == NEGATIVE_INFINITY ? vf{} : now;  // nothing seen yet: all stay 0
    const vf factor = exp2_negative(before - base);
    store(rescale + v, factor);
    vf sum[4] = {};
    for (j = 0; j + 4 <= keys; j += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        float* p = s + (j + i) * GC_NR + v;
        const vf e = exp2_negative(load<vf>(p) - base);
        store(p, e);
        sum[i] += e;
      }
    }
    for (; j < keys; j++) {
      float* p = s + j * GC_NR + v;
      const vf e = exp2_negative(load<vf>(p) - base);
      store(p, e);
      sum[0] += e;
    }
    store(total + v, load<vf>(total + v) * factor + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
  }
}

// Query lanes below the diagonal: s[key][lane] = -inf where key > q0 + lane.
static inline void causal_block(float* s, int64_t keys, int64_t key0, int64_t q0) {
  for (int64_t j = 0; j < keys; j++) {
    const int64_t hidden = key0 + j - q0;  // lanes before this one do not see the key
    for (int64_t i = 0; i < GC_NR && i < hidden; i++) s[j * GC_NR + i] = NEGATIVE_INFINITY;
  }
}

}  // namespace gc
