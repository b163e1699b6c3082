// The positions of the best `count` of scores that arrive in ascending order of positions, exactly:
// by (score descending, position ascending), -0 being 0 and NaN above all.
//
// Candidates collect in a buffer, in the order they arrive. When it is full, a bound is searched for
// that leaves about `count` of them, guessed from a sample and then by bisection; from then on only
// scores above it come in: as many as `count` of earlier positions are at least as good.
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
#if defined(__AVX512F__)
  inline __attribute__((always_inline)) void add(__mmask16 keep, vi o, vi p) {
    // to a register: the form that writes memory takes ten times as long
    store(order + held, _mm512_maskz_compress_epi32(keep, (__m512i)o));
    store(position + held, _mm512_maskz_compress_epi32(keep, (__m512i)p));
    held += __builtin_popcount(keep);
  }
#endif
  inline __attribute__((always_inline)) void add(vi keep, vi o, vi p) {
#if defined(__AVX512F__)
    add(_mm512_movepi32_mask((__m512i)keep), o, p);
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
    int64_t j = 0;
#if defined(__AVX512F__)
    // Four at a time without a branch on each, which nobody could foresee.
    for (; j + 4 * VL <= n; j += 4 * VL) {
      __mmask16 keep[4];
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++)
        keep[u] = _mm512_cmp_ps_mask((__m512)load<vf>(scores + j + u * VL), (__m512)least, _CMP_NLE_UQ);
      if (!(keep[0] | keep[1] | keep[2] | keep[3])) continue;
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++)
        to.add(keep[u], order_of(load<vf>(scores + j + u * VL)), next + (int32_t)(j + u * VL));
    }
#endif
    for (; j < n; j += VL) {
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
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int64_t n = 0;
    for (int i = 0; i < VL; i++) n += v[i];
    return n;
#endif
  }
  static int32_t lane_max(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < VL; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
  }

  // Narrows low and high down to what lies between them.
  static void narrow(const int32_t* orders, int64_t n, int32_t* low, int32_t* high) {
    int32_t least = *high, most = *low;
    vi below = ~least - vi{}, above = most - vi{};  // of complements the most
    int64_t j = 0;
    for (; j + VL <= n; j += VL) {
      const vi o = load<vi>(orders + j);
      below = sel(~o > below, ~o, below);
      above = sel(o > above, o, above);
    }
    least = ~lane_max(below);
    most = lane_max(above);
    for (; j < n; j++) {
      least = orders[j] < least ? orders[j] : least;
      most = orders[j] > most ? orders[j] : most;
    }
    *low = least > *low ? least : *low;
    *high = most < *high ? most : *high;
  }

  // A few orders from all over, and of each how many of them are not below it.
  struct Sample {
    static constexpr int64_t SIZE = 32;
    int32_t order[SIZE], rank[SIZE];

    void take(const int32_t* orders, int64_t n) {
      vi o[SIZE / VL], r[SIZE / VL] = {};
      for (int64_t i = 0; i < SIZE / VL; i++) {
        o[i] = load<vi>(orders + i * (n - VL) / (SIZE / VL - 1));
        store(order + i * VL, o[i]);
      }
      for (int64_t k = 0; k < SIZE; k++)
        for (int64_t i = 0; i < SIZE / VL; i++) r[i] -= order[k] >= o[i];
      for (int64_t i = 0; i < SIZE / VL; i++) store(rank + i * VL, r[i]);
    }

    // The highest that `least` of them are not below.
    int32_t at(int64_t least) const {
      vi most = INT32_MIN - vi{};
      for (int64_t i = 0; i < SIZE; i += VL) {
        const vi o = load<vi>(order + i);
        most = sel((load<vi>(rank + i) >= (int32_t)least) & (o > most), o, most);
      }
      return lane_max(most);
    }
  };

  // A number in (low, high], where about `wanted` orders should be not below it if those between the
  // two, which `found` are not below and `above` above, are evenly spread.
  static int32_t inside(int32_t low, int32_t high, int64_t found, int64_t above, double wanted) {
    const double share = ((double)found - wanted) / (double)(found - above);
    const int64_t guess = low + (int64_t)(((double)high - low) * share);
    return (int32_t)(guess <= low ? low + 1 : guess > high ? high : guess);
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
    // `found` are not below low, at least `count`; `above` are above high, which are fewer.
    int32_t low = bound, high = INT32_MAX;
    int64_t found = held, above = 0;
    const int32_t* orders = order;  // those that are counted, besides `known` above them
    int64_t total = held, known = 0;
    int32_t few[FEW + 16];
    // The first guesses are those of a sample: at what is wanted or, if that is a single number, at
    // somewhat more and somewhat less, to have few between them.
    Sample sample;
    const int guesses = held >= 4 * Sample::SIZE ? 2 : 0;
    if (guesses) sample.take(order, held);
    const double wanted = 0.5 * (double)(count + most);
    double each = (double)held / Sample::SIZE, slack = most > count ? 0.0 : 2 * each;
    for (int turn = 0; found > most; turn++) {
      if (orders == order && found - above <= FEW) {
        total = between(low, high, few);
        known = above;
        orders = few;
      }
      int32_t middle;
      int64_t aim = 0;
      if (turn < guesses) {
        aim = (int64_t)((wanted + slack) / each + 0.5);
        aim = aim < 1 ? 1 : aim > Sample::SIZE ? Sample::SIZE : aim;
        middle = sample.at(aim);
        if (middle <= low || middle > high) continue;
      } else {
        if (turn == guesses) narrow(orders, total, &low, &high);
        if (low >= high) break;
        middle = inside(low, high, found, above, turn % 3 ? wanted : 0.5 * (double)(found + above));
      }
      const int64_t n = known + at_least(orders, total, middle);
      if (n >= count) {
        low = middle;
        found = n;
        slack = -slack;
      } else {
        high = middle - 1;
        above = n;
      }
      if (aim) each = (double)(n > 0 ? n : 1) / (double)aim;
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
