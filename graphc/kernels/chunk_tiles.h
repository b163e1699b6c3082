// Chunks of sixteen tokens of operators over sequence state: operands as items of products, tiles of
// these with panels of 32 columns, sums over the lanes of registers.
#pragma once
#include <utility>

#include "attention_tile.h"
#include "vec.h"

namespace gc {

constexpr int64_t CHUNK = 16;

// Arithmetic of the products: fp32, or pairs of bf16.
template <class T> struct Product { typedef Floats type; };
#if defined(__AVX512BF16__)
template <> struct Product<bf16> { typedef Pairs type; };
#endif

// Rows of floats i and i + 1 as items of steps: two steps, or one of pairs.
template <class A> GC_INLINE void store_steps(typename A::item* to, int64_t ld, vf lo, vf hi) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same<A, Pairs>::value) {
    _mm512_storeu_si512(to, pair_lanes(lo, hi));
    return;
  }
#endif
  if constexpr (std::is_same<A, Floats>::value) {
    store(to, lo);
    store(to + ld, hi);
  }
}
// A vector of a row whose neighbours are what one step holds.
GC_INLINE void put_row(float* rows, int64_t at, vf x, Floats) { store(rows + at, x); }
#if defined(__AVX512BF16__)
GC_INLINE void put_row(float* rows, int64_t at, vf x, Pairs) { store((uint16_t*)rows + at, to_bf16(x)); }
#endif

constexpr int TILE = GC_VBYTES == 64 ? 8 : 4;  // rows of a tile of two vectors

// acc += a [steps][lda] x b [steps][32]
template <class A>
GC_INLINE void accumulate(vf (&acc)[TILE][2], const typename A::item* a, int64_t lda,
                          const typename A::item* b, int64_t steps) {
  for (int64_t i = 0; i < steps; i++, a += lda, b += GC_NR) {
    typename A::vec bv[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) bv[v] = load<typename A::vec>(b + v * VL);
#pragma GCC unroll 8
    for (int r = 0; r < TILE; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) acc[r][v] = A::multiply(acc[r][v], a[r], bv[v]);
    }
  }
}

constexpr std::make_integer_sequence<int, VL> ALL_LANES{};

// Half H of each segment of S lanes, the segments of a before those of b.
template <int S, int H, int... L> GC_INLINE vf halves(vf a, vf b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(
      a, b, (L / (S / 2) % (VL / S) * S + H * (S / 2) + L % (S / 2) + (L / (S / 2)) / (VL / S) * VL)...);
}
// Every second lane of a, then of b, from H on.
template <int H, int... L> GC_INLINE vf every_second(vf a, vf b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(a, b, (2 * L + H)...);
}

// Pairs of registers of sums over S lanes become one each, of sums over S / 2 lanes; and so on until one
// register is left of COUNT, or sums are over one lane.
template <int S, int COUNT> GC_INLINE void sum_segments(vf* t) {
  if constexpr (S > 1 && COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; i++)
      t[i] = halves<S, 0>(t[2 * i], t[2 * i + 1], ALL_LANES) + halves<S, 1>(t[2 * i], t[2 * i + 1], ALL_LANES);
    sum_segments<S / 2, COUNT / 2>(t);
  }
}
// to[i] = the sum of the lanes of parts[i], for a chunk of them.
static void sum_lanes(const float* parts, float* to) {
  for (int64_t h = 0; h < CHUNK; h += VL) {
    vf t[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) t[i] = load<vf>(parts + (h + i) * VL);
    sum_segments<VL, VL>(t);
    store(to + h, t[0]);
  }
}

GC_INLINE vf lanes_from(int64_t h) { return to_f32(lane_numbers()) + (float)h; }

}  // namespace gc
