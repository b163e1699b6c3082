// Sums of rows of values, read in place, under the weights of few queries.
#pragma once
#include "attention_dots.h"

namespace gc {

template <int N> struct Count {
  static constexpr int count = N;
};

// out[r][c] = out[r][c] * factor[r] + sum over keys of p[r][j] * v[j][c], for R rows and C PAIRs of
// columns in registers, of the last of which there are n; out in lane order. Without `factor` it is 1.
template <class T, int R, int C, bool FULL, class Next>
GC_INLINE void mix_block(const float* p, int64_t ldp, const T* v, int64_t step, int64_t keys, int64_t n,
                         const float* factor, float* out, int64_t ldo, Next& next) {
  vf sum[R][2 * C] = {};
  for (int64_t j = 0; j < keys; j++) {
    const T* row = v + j * step;
    next.ask(C * PAIR * (int64_t)sizeof(T));
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      vf a, b;
      if (FULL) load_pair(row + c * PAIR, a, b);
      else load_some(row + c * PAIR, n, a, b);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vf w = splat(p[r * ldp + j]);
        sum[r][2 * c] += w * a;
        sum[r][2 * c + 1] += w * b;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const float by = factor ? factor[r] : 1.0f;
#pragma GCC unroll 16
    for (int c = 0; c < 2 * C; c++) {
      float* o = out + r * ldo + c * VL;
      store(o, load<vf>(o) * by + sum[r][c]);
    }
  }
}

#if defined(__AVX512BF16__)
// The same with weights in bf16, each the sum of PARTS numbers in as many rows of p. What is in `out`
// is added to: that is exact enough here, and an addition less.
template <int R, int C, bool FULL, int PARTS, class Next>
GC_INLINE void mix_pairs(const bf16* p, int64_t ldp, const bf16* v, int64_t step, int64_t keys, int64_t n,
                         const float* factor, float* out, int64_t ldo, Next& next) {
  __m512 sum[R][2 * C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < 2 * C; c++) sum[r][c] = _mm512_loadu_ps(out + r * ldo + c * VL);
  if (factor)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int c = 0; c < 2 * C; c++) sum[r][c] *= (__m512)splat(factor[r]);
  const __mmask32 lanes = first_lanes(n);
  const auto add = [&](int64_t j, auto two) __attribute__((always_inline)) {
    constexpr bool TWO = decltype(two)::count == 2;  // else the second of the pair is multiplied by zero
    const bf16 *row = v + j * step, *other = TWO ? row + step : row;
    next.ask(2 * C * PAIR * (int64_t)sizeof(bf16));
    __m512bh w[R][PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < PARTS; h++) {
        int32_t pair;
        memcpy(&pair, p + (PARTS * r + h) * ldp + j, 4);
        w[r][h] = (__m512bh)_mm512_set1_epi32(TWO ? pair : pair & 0xffff);
      }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      const __m512i x = FULL ? _mm512_loadu_si512(row + c * PAIR)
                             : _mm512_maskz_loadu_epi16(lanes, row + c * PAIR);
      const __m512i y = FULL ? _mm512_loadu_si512(other + c * PAIR)
                             : _mm512_maskz_loadu_epi16(lanes, other + c * PAIR);
      const __m512bh a = (__m512bh)_mm512_unpacklo_epi16(x, y);
      const __m512bh b = (__m512bh)_mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int h = 0; h < PARTS; h++) {
          sum[r][2 * c] = _mm512_dpbf16_ps(sum[r][2 * c], w[r][h], a);
          sum[r][2 * c + 1] = _mm512_dpbf16_ps(sum[r][2 * c + 1], w[r][h], b);
        }
    }
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) add(j, Count<2>());
  if (j < keys) add(j, Count<1>());
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int c = 0; c < 2 * C; c++) _mm512_storeu_ps(out + r * ldo + c * VL, sum[r][c]);
}
#endif

// Weights as they are multiplied: floats, or bf16, as torch's kernels round them. Up to EXACT rows of
// a unit a weight is two bf16, which hold 16 bits of it: there memory sets the pace anyway.
constexpr int EXACT = 1;
static inline void put_weights(const float* x, int64_t n, int, float* p, int64_t) {
  memcpy(p, x, (size_t)n * 4);
}
#if defined(__AVX512BF16__)
static inline void put_weights(const float* x, int64_t n, int parts, bf16* p, int64_t ldp) {
  for (int64_t j = 0; j < n; j += VL) {  // whole vectors, as in the row of scores
    const vf w = load<vf>(x + j);
    const __m256i most = (__m256i)_mm512_cvtneps_pbh((__m512)w);
    _mm256_storeu_si256((__m256i*)(p + j), most);
    if (parts == 1) continue;
    const vf rest = w - (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(most), 16);
    _mm256_storeu_si256((__m256i*)(p + ldp + j), (__m256i)_mm512_cvtneps_pbh((__m512)rest));
  }
}
#endif

template <class T, int R, int C, bool FULL, class W, class Next>
GC_INLINE void mix_any(int parts, const W* p, int64_t ldp, const T* v, int64_t step, int64_t keys,
                       int64_t n, const float* factor, float* out, int64_t ldo, Next& next) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(W) == 2) {
    if (parts == 2) mix_pairs<R, C, FULL, 2>(p, ldp, v, step, keys, n, factor, out, ldo, next);
    else mix_pairs<R, C, FULL, 1>(p, ldp, v, step, keys, n, factor, out, ldo, next);
    return;
  }
#endif
  if constexpr (sizeof(W) == 4)
    mix_block<T, R, C, FULL>(p, ldp, v, step, keys, n, factor, out, ldo, next);
}

// PAIRs of columns that registers hold the sums of R rows of: values of so many are read as a whole.
template <int R> constexpr int WIDE = GC_VBYTES == 64 ? 8 / R : R == 1 ? 4 : 2;
template <class T, int R, class Next = Quiet>
static void mix_keys(int parts, const typename Query<T>::type* p, int64_t ldp, const T* v, int64_t step,
                     int64_t dv, int64_t keys, const float* factor, float* out, int64_t ldo,
                     Next&& next = Next()) {
  int64_t c = 0;
  const auto columns = [&](auto count) __attribute__((always_inline)) {
    constexpr int C = decltype(count)::count;
    for (; c + C * PAIR <= dv; c += C * PAIR)
      mix_any<T, R, C, true>(parts, p, ldp, v + c, step, keys, PAIR, factor, out + c, ldo, next);
  };
  columns(Count<WIDE<R>>());
  if (WIDE<R> > 4) columns(Count<4>());
  if (WIDE<R> > 2) columns(Count<2>());
  columns(Count<1>());
  if (c < dv)
    mix_any<T, R, 1, false>(parts, p, ldp, v + c, step, keys, dv - c, factor, out + c, ldo, next);
}

}  // namespace gc
