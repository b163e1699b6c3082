// Micro-kernels of blocked attention, and the weights of a block of scores, in fp32 and over pairs
// of bf16.
//
// An Arithmetic says what an item of a packed operand is:
//   item, vec            one item, and a vector of them
//   steps(k)             items that hold k neighbours
//   multiply(acc, a, b)  acc + a * b, lane by lane
//   weights(...)         2^((s - base) * factor) of one vector of lanes, in place, and their sum; the
//                        difference comes first, so that equal scores of any size weigh the same
#pragma once
#include "prelude.h"

#include "attention_softmax.h"

namespace gc {

// Rows of micro tiles: large ones, and small ones in the last eight rows of a panel. WHOLE rows are a
// number of whole tiles.
#if GC_VBYTES == 64
constexpr int LARGE = 8, SMALL = 8, WHOLE = 8;
#else
constexpr int LARGE = 6, SMALL = 4, WHOLE = GC_NR;
#endif

struct Floats {
  typedef float item;
  typedef vf vec;
  static int64_t steps(int64_t k) { return k; }
  __attribute__((always_inline)) static inline vf multiply(vf acc, float a, vf b) { return acc + splat(a) * b; }
  static void weights(float* s, int64_t keys, float factor, vf base, vf* total) {
    vf sum[4] = {};
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const vf e = exp2_weight<true>((load<vf>(s + (j + i) * GC_NR) - base) * factor);
        store(s + (j + i) * GC_NR, e);
        sum[i] += e;
      }
    }
    for (; j < keys; j++) {
      const vf e = exp2_weight<true>((load<vf>(s + j * GC_NR) - base) * factor);
      store(s + j * GC_NR, e);
      sum[0] += e;
    }
    *total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

#if defined(__AVX512BF16__)
// Lane i holds lo[i] and hi[i] as bf16.
GC_INLINE __m512i pair_lanes(vf lo, vf hi) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
  return _mm512_permutexvar_epi16(order, halves);
}

struct Pairs {
  typedef uint32_t item;
  typedef __m512i vec;
  static int64_t steps(int64_t k) { return (k + 1) / 2; }
  __attribute__((always_inline)) static inline vf multiply(vf acc, uint32_t a, __m512i b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
  // The weights of two keys become one row of pairs; the sum is that of the unrounded weights.
  static void weights(float* s, int64_t keys, float factor, vf base, vf* total) {
    vf sum[2] = {};
    for (int64_t j = 0; j < keys; j += 2) {
      const float* p = s + j * GC_NR;
      const vf lo = exp2_weight<false>((load<vf>(p) - base) * factor);
      vf hi = {};
      if (j + 1 < keys) hi = exp2_weight<false>((load<vf>(p + GC_NR) - base) * factor);
      sum[0] += lo;
      sum[1] += hi;
      _mm512_storeu_si512(s + j / 2 * GC_NR, pair_lanes(lo, hi));
    }
    *total = sum[0] + sum[1];
  }
};
#endif

// c[ROWS][NV vectors] (+)= a [k][32] x b [k][ldb] in items. `top`, if given, keeps the maximum
// of each column over all tiles that it sees.
template <class A, int ROWS, int NV>
GC_INLINE void multiply_tile(const typename A::item* a, const typename A::item* b, int64_t ldb,
                             int64_t k, float* c, int64_t ldc, bool add, float* top) {
  vf acc[ROWS][NV] = {};
  for (int64_t i = 0; i < k; i++, a += GC_NR, b += ldb) {
    typename A::vec bv[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) bv[v] = load<typename A::vec>(b + v * VL);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) acc[r][v] = A::multiply(acc[r][v], a[r], bv[v]);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < NV; v++) {
    if (top) {
      vf m[2] = {load<vf>(top + v * VL), acc[0][v]};
#pragma GCC unroll 16
      for (int r = 1; r < ROWS; r++) m[r % 2] = max_or_first(m[r % 2], acc[r][v]);
      store(top + v * VL, max_or_first(m[0], m[1]));
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      float* p = c + r * ldc + v * VL;
      store(p, add ? load<vf>(p) + acc[r][v] : acc[r][v]);
    }
  }
}

template <int N> struct Rows {
  static constexpr int count = N;
};

// The tiles of rows [0, rows) of a panel: f(first row, number of rows as a type).
template <class F> GC_INLINE void for_tiles(int64_t rows, F f) {
  for (int64_t r = 0; r < rows;) {
    if (LARGE != SMALL && r + 8 < GC_NR) {
      f(r, Rows<LARGE>());
      r += LARGE;
    } else {
      f(r, Rows<SMALL>());
      r += SMALL;
    }
  }
}

// s[key][lane] = k . q for `keys` keys of panels [keys/32][d][32] and `width` lanes of q [d][32];
// keys are rounded up to whole tiles.
template <class A>
static void score_block(const typename A::item* k, const typename A::item* q, int64_t steps,
                        int64_t keys, int64_t width, float* s, float* top) {
  for (; keys > 0; keys -= GC_NR, k += steps * GC_NR, s += GC_NR * GC_NR) {
    for_tiles(keys < GC_NR ? keys : GC_NR, [&](int64_t r, auto rows) {
      constexpr int R = decltype(rows)::count;
      for (int64_t h = 0; h < width; h += 2 * VL) {
        float* const maximum = top ? top + h : nullptr;
        if (width - h > VL)
          multiply_tile<A, R, 2>(k + r, q + h, GC_NR, steps, s + r * GC_NR + h, GC_NR, false, maximum);
        else
          multiply_tile<A, R, 1>(k + r, q + h, GC_NR, steps, s + r * GC_NR + h, GC_NR, false, maximum);
      }
    });
  }
}

// out[lane][32] (+)= weights [keys][32 lanes] x v [keys][ldv]; lanes are rounded up to whole tiles.
template <class A>
static void mix_block(const typename A::item* weights, const typename A::item* v, int64_t ldv,
                      int64_t steps, int64_t lanes, float* out, int64_t ld, bool add) {
  for_tiles(lanes, [&](int64_t r, auto rows) {
    constexpr int R = decltype(rows)::count;
    for (int h = 0; h < GC_NR; h += 2 * VL)
      multiply_tile<A, R, 2>(weights + r, v + h, ldv, steps, out + r * ld + h, ld, add, nullptr);
  });
}

}  // namespace gc
