// Scores of few queries: their products with rows of keys, read in place.
#pragma once
#include "attention_lanes.h"

namespace gc {

// Queries as dot_block wants them: floats in lane order, or pairs of bf16 where those are multiplied.
// ld elements per row, zeros behind the d.
#if defined(__AVX512BF16__)
template <class T> struct Query { using type = float; };
template <> struct Query<bf16> { using type = bf16; };
#else
template <class T> struct Query { using type = float; };
#endif
template <class T>
static void load_query(const T* x, int64_t step, int64_t d, float* lanes, int64_t ld) {
  for (int64_t i = d & -PAIR; i < ld; i++) lanes[i] = 0.0f;
  for (int64_t i = 0; i < d; i++)
    lanes[(i & -PAIR) + lane_of<T>(i & (PAIR - 1))] = to_float(x[i * step]);
}
static inline void load_query(const bf16* x, int64_t step, int64_t d, bf16* row, int64_t ld) {
  if (step == 1) memcpy((void*)row, x, (size_t)d * 2);
  else
    for (int64_t i = 0; i < d; i++) row[i] = x[i * step];
  for (int64_t i = d; i < ld; i++) row[i] = bf16(0.0f);
}

// sum[r * KB + j] = lanes to be added up to q[r] . k[j]. Rows are read one after the other: memory
// delivers half as much to a walk that takes a line of each in turn.
template <class T, int R, int KB, class Next>
GC_INLINE void dot_block(const float* q, int64_t ldq, const T* k, int64_t step, int64_t d,
                         vf (&sum)[R * KB], Next& next) {
#pragma GCC unroll 16
  for (int c = 0; c < R * KB; c++) sum[c] = vf{};
#pragma GCC unroll 16
  for (int j = 0; j < KB; j++) {
    const T* row = k + j * step;
    next.ask(d * (int64_t)sizeof(T));
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + PAIR <= d; i += PAIR) {
      vf a, b;
      load_pair(row + i, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        sum[r * KB + j] += load<vf>(q + r * ldq + i) * a;
        sum[r * KB + j] += load<vf>(q + r * ldq + i + VL) * b;
      }
    }
    if (i == d) continue;
    vf a, b;
    load_some(row + i, d - i, a, b);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      sum[r * KB + j] += load<vf>(q + r * ldq + i) * a;
      sum[r * KB + j] += load<vf>(q + r * ldq + i + VL) * b;
    }
  }
}
#if defined(__AVX512BF16__)
template <class T, int R, int KB, class Next>
GC_INLINE void dot_block(const bf16* q, int64_t ldq, const bf16* k, int64_t step, int64_t d,
                         vf (&sum)[R * KB], Next& next) {
  auto dot = [](vf s, const bf16* x, __m512i y) {
    return (vf)_mm512_dpbf16_ps((__m512)s, (__m512bh)_mm512_loadu_si512(x), (__m512bh)y);
  };
#pragma GCC unroll 16
  for (int c = 0; c < R * KB; c++) sum[c] = vf{};
#pragma GCC unroll 16
  for (int j = 0; j < KB; j++) {
    const bf16* row = k + j * step;
    next.ask(d * (int64_t)sizeof(T));
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + PAIR <= d; i += PAIR) {
      const __m512i x = _mm512_loadu_si512(row + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[r * KB + j] = dot(sum[r * KB + j], q + r * ldq + i, x);
    }
    if (i < d) {
      const __m512i x = _mm512_maskz_loadu_epi16(first_lanes(d - i), row + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[r * KB + j] = dot(sum[r * KB + j], q + r * ldq + i, x);
    }
  }
}
#endif

// The same for four rows, whose vectors are loaded once for all keys.
template <class T, int KB, class Next>
GC_INLINE void dot_tile(const float* q, int64_t ldq, const T* k, int64_t step, int64_t d,
                        vf (&sum)[4 * KB], Next& next) {
#pragma GCC unroll 16
  for (int c = 0; c < 4 * KB; c++) sum[c] = vf{};
  const auto add = [&](int64_t i, auto get) __attribute__((always_inline)) {
    next.ask(KB * PAIR * (int64_t)sizeof(T));
    vf x[4], y[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      x[r] = load<vf>(q + r * ldq + i);
      y[r] = load<vf>(q + r * ldq + i + VL);
    }
#pragma GCC unroll 16
    for (int j = 0; j < KB; j++) {
      vf a, b;
      get(k + j * step + i, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        sum[r * KB + j] += x[r] * a;
        sum[r * KB + j] += y[r] * b;
      }
    }
  };
  int64_t i = 0;
  for (; i + PAIR <= d; i += PAIR)
    add(i, [](const T* p, vf& a, vf& b) __attribute__((always_inline)) { load_pair(p, a, b); });
  if (i < d)
    add(i, [&](const T* p, vf& a, vf& b) __attribute__((always_inline)) { load_some(p, d - i, a, b); });
}
#if defined(__AVX512BF16__)
template <class T, int KB, class Next>
GC_INLINE void dot_tile(const bf16* q, int64_t ldq, const bf16* k, int64_t step, int64_t d,
                        vf (&sum)[4 * KB], Next& next) {
#pragma GCC unroll 16
  for (int c = 0; c < 4 * KB; c++) sum[c] = vf{};
  const auto add = [&](int64_t i, auto get) __attribute__((always_inline)) {
    next.ask(KB * PAIR * (int64_t)sizeof(T));
    __m512bh x[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) x[r] = (__m512bh)_mm512_loadu_si512(q + r * ldq + i);
#pragma GCC unroll 16
    for (int j = 0; j < KB; j++) {
      const __m512bh y = (__m512bh)get(k + j * step + i);
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++)
        sum[r * KB + j] = (vf)_mm512_dpbf16_ps((__m512)sum[r * KB + j], x[r], y);
    }
  };
  int64_t i = 0;
  for (; i + PAIR <= d; i += PAIR)
    add(i, [](const bf16* p) __attribute__((always_inline)) { return _mm512_loadu_si512(p); });
  if (i < d)
    add(i, [&](const bf16* p) __attribute__((always_inline)) {
      return _mm512_maskz_loadu_epi16(first_lanes(d - i), p);
    });
}
#endif

template <class T, int R, class Next>
GC_INLINE void dot_walk(const typename Query<T>::type* q, int64_t ldq, const T* k, int64_t step,
                        int64_t d, int64_t keys, float* s, int64_t lds, Next& next) {
  constexpr int KB = VL / R;
  if (keys < KB) {
    for (int64_t j = 0; j < keys; j++) {
      vf sum[R];
      dot_block<T, R, 1>(q, ldq, k + j * step, step, d, sum, next);
      for (int r = 0; r < R; r++) s[r * lds + j] = sum_of(sum[r]);
    }
    return;
  }
  for (int64_t j = 0;;) {  // the last block overlaps the one before
    vf sum[VL];
    if constexpr (R == 4 && KB == 4 && Next::TILED)
      dot_tile<T, KB>(q, ldq, k + j * step, step, d, sum, next);
    else
      dot_block<T, R, KB>(q, ldq, k + j * step, step, d, sum, next);
    const vf dots = sum_each(sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) memcpy(s + r * lds + j, (const float*)&dots + r * KB, KB * 4);
    if (j + KB >= keys) break;
    j = j + 2 * KB <= keys ? j + KB : keys - KB;
  }
}

// s[r][j] = q[r] . k[j] for R rows, VL / R keys at a time.
template <class T, int R, class Next = Quiet>
static void dot_keys(const typename Query<T>::type* q, int64_t ldq, const T* k, int64_t step, int64_t d,
                     int64_t keys, float* s, int64_t lds, Next&& next = Next()) {
  if (d == 4 * PAIR) dot_walk<T, R>(q, ldq, k, step, 4 * PAIR, keys, s, lds, next);  // no inner loop
  else dot_walk<T, R>(q, ldq, k, step, d, keys, s, lds, next);
}

}  // namespace gc
