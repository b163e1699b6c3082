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

// Integers in the order of scores, and back.
GC_INLINE vi order_of(vf score) {
  const vf s = score + 0.0f;  // -0 becomes +0
  const vi b = (vi)s;
  return sel(s != s, 0x7fffffff - vi{}, b ^ ((b >> 31) & 0x7fffffff));
}
GC_INLINE float score_of(int32_t order) { return fbits(order ^ ((order >> 31) & 0x7fffffff)); }

// Where candidates are added: apart from BestPositions, so that a loop keeps it in registers.
struct Candidates {
  int32_t *order, *position;
  int64_t held;

  // The lanes of o and p that are to be kept.
  inline __attribute__((always_inline)) void add(vi keep, vi o, vi p) {
#if defined(__AVX512F__)
    const __mmask16 m = _mm512_movepi32_mask((__m512i)keep);
    // to a register: the form that writes memory takes ten times as long
    store(order + held, _mm512_maskz_compress_epi32(m, (__m512i)o));
    store(position + held, _mm512_maskz_compress_epi32(m, (__m512i)p));
    held += __builtin_popcount(m);
#else
    for (int i = 0; i < VL; i++) add(keep[i] != 0, o[i], p[i]);
#endif
  }
  inline __attribute__((always_inline)) void add(bool keep, int32_t o, int32_t p) {
    order[held] = o;
    position[held] = p;
    held += keep;
  }
};

struct BestPositions {
  int64_t count;
  int32_t *order, *position;  // best_room(count) each
  int64_t held;
  int32_t bound;              // what is not above it is not among the best

  static constexpr int64_t FEW = 512;  // orders that are searched in a copy

  void start(int64_t n, int32_t* memory) {
    count = n;
    order = memory;
    position = memory + best_room(n);
    held = 0;
    bound = INT32_MIN;  // below every score
  }

  // Scores of the positions from `first` on; whole vectors can be read.
  void offer(const float* scores, int64_t n, int64_t first) {
    Candidates to{order, position, held};
    const vi next = lane_numbers() + (int32_t)first;
    const vf least = splat(score_of(bound));  // at first NaN: above it is everything, as are NaN
    for (int64_t j = 0; j < n; j += VL) {
      const vf score = load<vf>(scores + j);
      vi keep = ~(score <= least);
      if (j + VL > n) keep &= lane_numbers() < (int32_t)(n - j);
      if (hany(keep)) to.add(keep, order_of(score), next + (int32_t)j);
    }
    held = to.held;
    if (held > 2 * count) shrink(count + count / 4);
  }

  // Candidates of another buffer.
  void offer(const int32_t* orders, const int32_t* positions, int64_t n) {
    for (int64_t j = 0; j < n;) {
      const int64_t end = j + BEST_BLOCK < n ? j + BEST_BLOCK : n;
      Candidates to{order, position, held};
      for (; j + VL <= end; j += VL) {
        const vi o = load<vi>(orders + j);
        const vi keep = o > bound;
        if (hany(keep)) to.add(keep, o, load<vi>(positions + j));
      }
      for (; j < end; j++) to.add(orders[j] > bound, orders[j], positions[j]);
      held = to.held;
      if (held > 2 * count) shrink(count + count / 4);
    }
  }

  // Leaves the best, in ascending order of positions.
  void finish() {
    if (held > count) shrink(count);
  }

 private:
  static int64_t at_least(const int32_t* orders, int64_t n, int32_t least) {
    vi sum[4] = {};
    int64_t j = 0;
    for (; j + 4 * VL <= n; j += 4 * VL)
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) sum[u] -= load<vi>(orders + j + u * VL) >= least;
    int64_t found = lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; j < n; j++) found += orders[j] >= least;
    return found;
  }

  static int64_t lane_sum(vi v) {
    int64_t n = 0;
    for (int i = 0; i < VL; i++) n += v[i];
    return n;
  }

  void find_range(int32_t* low, int32_t* high) const {
    vi least = order[0] - vi{}, most = least;
    int64_t j = 0;
    for (; j + VL <= held; j += VL) {
      const vi o = load<vi>(order + j);
      least = sel(o < least, o, least);
      most = sel(o > most, o, most);
    }
    *low = *high = order[0];
    for (int i = 0; i < VL; i++) {
      *low = least[i] < *low ? least[i] : *low;
      *high = most[i] > *high ? most[i] : *high;
    }
    for (; j < held; j++) {
      *low = order[j] < *low ? order[j] : *low;
      *high = order[j] > *high ? order[j] : *high;
    }
  }

  // Copies the orders from low to high, FEW at most.
  int64_t between(int32_t low, int32_t high, int32_t* out) const {
    int64_t n = 0, j = 0;
#if defined(__AVX512F__)
    for (; j + VL <= held; j += VL) {
      const vi o = load<vi>(order + j);
      const __mmask16 m = _mm512_movepi32_mask((__m512i)((o >= low) & (o <= high)));
      store(out + n, _mm512_maskz_compress_epi32(m, (__m512i)o));
      n += __builtin_popcount(m);
    }
#endif
    for (; j < held; j++) {
      out[n] = order[j];
      n += order[j] >= low && order[j] <= high;
    }
    return n;
  }

  // Leaves the best `count`, or up to `most` of the best where that is quicker to find.
  __attribute__((noinline)) void shrink(int64_t most) {
    int32_t low, high;
    find_range(&low, &high);
    // `found` are not below low, at least `count`; `above` are above high, which are fewer.
    int64_t found = held, above = 0;
    const int32_t* orders = order;  // those that are counted, besides `known` above them
    int64_t total = held, known = 0;
    int32_t few[FEW + 16];
    for (int turn = 1; low < high && found > most; turn++) {
      if (orders == order && found - above <= FEW) {
        total = between(low, high, few);
        known = above;
        orders = few;
      }
      // Where it would be if they were evenly spread; every third time the middle, for an end.
      const double share =
          turn % 3 == 0 ? 0.5 : (double)(found - (count + most) / 2) / (double)(found - above);
      const int64_t guess = low + (int64_t)(((double)high - low) * share);
      const int32_t middle = (int32_t)(guess <= low ? low + 1 : guess > high ? high : guess);
      const int64_t n = known + at_least(orders, total, middle);
      if (n >= count) {
        low = middle;
        found = n;
      } else {
        high = middle - 1;
        above = n;
      }
    }
    bound = low;
    // Of several at the bound the first ones stay, unless all do.
    keep_best(low, found <= most ? held : count - above);
  }

  // Leaves what is above `low` and the first `equal` at it.
  void keep_best(int32_t low, int64_t equal) {
    Candidates to{order, position, 0};
    const int64_t n = held;
    int64_t j = 0;
    for (; j + VL <= n; j += VL) {
      const vi o = load<vi>(order + j), p = load<vi>(position + j);
      vi keep = o >= low;
      if (equal < n) {
        const vi same = o == low;
        if (hany(same))
          for (int i = 0; i < VL; i++)
            if (same[i] && equal-- <= 0) keep[i] = 0;
      }
      to.add(keep, o, p);
    }
    for (; j < n; j++)
      to.add(order[j] > low || (order[j] == low && equal-- > 0), order[j], position[j]);
    held = to.held;
  }
};

}  // namespace gc
