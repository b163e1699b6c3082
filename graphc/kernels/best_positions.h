// The positions of the best `count` of scores that arrive in ascending order of positions, exactly:
// by (score descending, position ascending), -0 being 0 and NaN above all.
//
// Candidates collect in a buffer, in the order they arrive. When it is full, a bound is searched for by
// bisection that leaves about `count` of them, and from then on only scores above it come in: as many
// as `count` of earlier positions are at least as good.
#pragma once
#include "vec.h"

namespace gc {

constexpr int64_t BEST_BLOCK = 480;  // scores that are offered at a time at most
// Candidates a buffer must have room for (two words each): those kept, a block, and a whole vector.
GC_INLINE int64_t best_room(int64_t count) { return 2 * count + BEST_BLOCK + 16; }

// Integers in the order of scores.
GC_INLINE vi order_of(vf score) {
  const vf s = score + 0.0f;  // -0 becomes +0
  const vi b = (vi)s;
  return sel(s != s, 0x7fffffff - vi{}, b ^ ((b >> 31) & 0x7fffffff));
}

GC_INLINE int64_t count_lanes(vi mask) {
#if defined(__AVX512F__)
  return __builtin_popcount(_mm512_test_epi32_mask((__m512i)mask, (__m512i)mask));
#elif defined(__AVX2__) && GC_VBYTES == 32
  return __builtin_popcount((unsigned)_mm256_movemask_ps((__m256)mask));
#else
  int64_t n = 0;
  for (int i = 0; i < VL; i++) n -= mask[i];
  return n;
#endif
}

struct BestPositions {
  int64_t count;
  int32_t *order, *position;  // best_room(count) each
  int64_t held;
  int32_t bound;              // what is not above it is not among the best

  void start(int64_t n, int32_t* memory) {
    count = n;
    order = memory;
    position = memory + best_room(n);
    held = 0;
    bound = INT32_MIN;  // below every score
  }

  // Scores of the positions from `first` on; whole vectors can be read.
  void offer(const float* scores, int64_t n, int64_t first) {
    const vi next = lane_numbers() + (int32_t)first;
    for (int64_t j = 0; j < n; j += VL) {
      const vi o = order_of(load<vf>(scores + j));
      vi keep = o > bound;
      if (j + VL > n) keep &= lane_numbers() < (int32_t)(n - j);
      add(keep, o, next + (int32_t)j);
    }
    if (held > 2 * count) shrink(count + count / 4);
  }

  // Candidates of another buffer.
  void offer(const int32_t* orders, const int32_t* positions, int64_t n) {
    for (int64_t j = 0; j < n;) {
      const int64_t end = j + BEST_BLOCK < n ? j + BEST_BLOCK : n;
      for (; j + VL <= end; j += VL) {
        const vi o = load<vi>(orders + j);
        add(o > bound, o, load<vi>(positions + j));
      }
      for (; j < end; j++) {
        if (orders[j] <= bound) continue;
        order[held] = orders[j];
        position[held++] = positions[j];
      }
      if (held > 2 * count) shrink(count + count / 4);
    }
  }

  // Leaves the best, in ascending order of positions.
  void finish() {
    if (held > count) shrink(count);
  }

 private:
  inline __attribute__((always_inline)) void add(vi keep, vi o, vi p) {
#if defined(__AVX512F__)
    const __mmask16 m = _mm512_test_epi32_mask((__m512i)keep, (__m512i)keep);
    if (m == 0) return;
    // to a register: the form that writes memory takes ten times as long
    store(order + held, _mm512_maskz_compress_epi32(m, (__m512i)o));
    store(position + held, _mm512_maskz_compress_epi32(m, (__m512i)p));
    held += __builtin_popcount(m);
#else
    if (!hany(keep)) return;
    for (int i = 0; i < VL; i++) {
      order[held] = o[i];
      position[held] = p[i];
      held -= keep[i];
    }
#endif
  }

  int64_t at_least(int32_t least) const {
    vi sum[4] = {};
    int64_t j = 0;
    for (; j + 4 * VL <= held; j += 4 * VL)
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) sum[u] += load<vi>(order + j + u * VL) >= least;
    const vi all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    int64_t n = 0;
    for (int i = 0; i < VL; i++) n -= all[i];
    for (; j < held; j++) n += order[j] >= least;
    return n;
  }

  // Leaves the best `count`, or up to `most` of the best where that is quicker to find.
  __attribute__((noinline)) void shrink(int64_t most) {
    int32_t low = order[0], high = order[0];
    for (int64_t j = 1; j < held; j++) {
      low = order[j] < low ? order[j] : low;
      high = order[j] > high ? order[j] : high;
    }
    // at least `count` are not below low, fewer are above high
    int64_t found = held;
    while (low < high && found > most) {
      const int32_t middle = (int32_t)(((int64_t)low + high + 1) >> 1);
      const int64_t n = at_least(middle);
      if (n >= count) {
        low = middle;
        found = n;
      } else {
        high = middle - 1;
      }
    }
    bound = low;
    // Of several at the bound the first ones stay, unless all do.
    int64_t equal = found <= most ? held : count - (low == INT32_MAX ? 0 : at_least(low + 1));
    const int64_t n = held;
    held = 0;
    int64_t j = 0;
    for (; j + VL <= n; j += VL) {
      const vi o = load<vi>(order + j), p = load<vi>(position + j);
      vi keep = o > low, same = o == low;
      const int64_t more = count_lanes(same);
      if (more > equal)
        for (int i = 0, left = (int)equal; i < VL; i++)
          if (same[i] && --left < 0) same[i] = 0;
      equal = more > equal ? 0 : equal - more;
      add(keep | same, o, p);
    }
    for (; j < n; j++) {
      if (order[j] < low || (order[j] == low && equal-- <= 0)) continue;
      order[held] = order[j];
      position[held++] = position[j];
    }
  }
};

}  // namespace gc
