// Operators over sequence state, many tokens: sixteen at a time, with the state in panels of 32 columns
// [panel][K][32] while its head is walked over, so that a panel comes into the first level of the cache
// once for a chunk. Products are of fp32, or of pairs of bf16 where operands are bf16 and the machine
// has them.
#pragma once
#include "sequence.h"

namespace {

// At most two tiles [16, K] that are multiplied with the state: rows, then turned to [steps(K)][32].
template <class A> struct Pack {
  float* rows;
  typename A::item* items;
  Pack(Scratch& scratch, int64_t ld)
      : rows(scratch.take(2 * CHUNK * ld)), items((typename A::item*)scratch.take(2 * CHUNK * ld + 16)) {}
};

// -- scores -----------------------------------------------------------------------------------------

// The scores of NA tiles a with columns j and j + 1 of b, over NB vectors of channels: what a column shows
// to token i fades by one factor with each token in between. parts is [16][VL], of segments of lanes.
template <int NA, int NB>
static void fading_scores(const float* b, const float* const (&a)[NA], const float* fade, int64_t at,
                          int64_t ld, int64_t j, bool add, float* parts) {
  const auto put = [&](int64_t i, vf (&sums)[2 * NA]) __attribute__((always_inline)) {
    float* const p = parts + i * VL;
    sum_segments<VL, 2 * NA>(sums);
    store(p, add ? load<vf>(p) + sums[0] : sums[0]);
  };
  vf r0[NB], r1[NB];
  {
    vf first[2 * NA] = {}, second[2 * NA] = {};
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const int64_t x = j * ld + at + n * VL;
      r0[n] = load<vf>(b + x);
      r1[n] = load<vf>(b + x + ld);
#pragma GCC unroll 2
      for (int m = 0; m < NA; m++) first[2 * m] += r0[n] * load<vf>(a[m] + x);
      r0[n] *= load<vf>(fade + x + ld);
#pragma GCC unroll 2
      for (int m = 0; m < NA; m++) {
        const vf y = load<vf>(a[m] + x + ld);
        second[2 * m] += r0[n] * y;
        second[2 * m + 1] += r1[n] * y;
      }
    }
    put(j, first);
    put(j + 1, second);
  }
  for (int64_t i = j + 2; i < CHUNK; i++) {
    vf sums[2 * NA] = {};
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const int64_t x = i * ld + at + n * VL;
      const vf e = load<vf>(fade + x);
      r0[n] *= e;
      r1[n] *= e;
#pragma GCC unroll 2
      for (int m = 0; m < NA; m++) {
        const vf y = load<vf>(a[m] + x);
        sums[2 * m] += r0[n] * y;
        sums[2 * m + 1] += r1[n] * y;
      }
    }
    put(i, sums);
  }
}

// to[m][j][i] = sum_c a[m]_ic b_jc times the fade [16][ld] of channel c from j to i, for j <= i, without
// the diagonal if strict; else 0.
template <int NA>
static void faded_scores(const float* b, const float* const (&a)[NA], const bool (&strict)[NA],
                              const float* fade, int64_t ld, float* const (&to)[NA]) {
  constexpr int MOST = GC_VBYTES == 64 ? 8 : 4, NP = 2 * NA, COUNT = CHUNK * NP / VL;
  float parts[CHUNK * VL] __attribute__((aligned(64))) = {};
  for (int64_t j = 0; j < CHUNK; j += 2) {
    int64_t n = 0;
    const auto each = [&](auto count) __attribute__((always_inline)) {
      constexpr int NB = decltype(count)::count;
      for (; n + NB * VL <= ld; n += NB * VL) fading_scores<NA, NB>(b, a, fade, n, ld, j, n > 0, parts);
    };
    each(Rows<MOST>());
    each(Rows<MOST / 2>());
    if (MOST / 4 > 1) each(Rows<MOST / 4>());
    each(Rows<1>());
    vf t[CHUNK];
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++) t[i] = load<vf>(parts + i * VL);
    constexpr int S = VL / NP;  // lanes of a segment; each sum of two registers halves them
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) {
      vf some[S];
#pragma GCC unroll 8
      for (int m = 0; m < S; m++) some[m] = t[i * S + m];
      sum_segments<S, S>(some);
      t[i] = some[0];
    }
    take_apart<NP, COUNT>(t);
    constexpr int EACH = CHUNK / VL;
    constexpr int ORDER[2][4] = {{0, 1}, {0, 2, 1, 3}};  // bits of the number turned round
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++) {
      const int number = ORDER[NA - 1][p], m = number / 2, column = number % 2;
#pragma GCC unroll 4
      for (int h = 0; h < EACH; h++) store(to[m] + (j + column) * CHUNK + h * VL, t[p * EACH + h]);
      if (strict[m]) to[m][(j + column) * (CHUNK + 1)] = 0.0f;
    }
    memset(parts + j * VL, 0, 2 * VL * sizeof(float));
  }
}

// The same for packed tiles under a decay g [16] of the head: products of all pairs, then how they fade; no
// difference of long sums is taken. b and a, NA neighbours, are lanes of packs.
template <class A, int NA>
static void packed_scores(const typename A::item* b, const typename A::item* a, const bool (&strict)[NA],
                          const float* g, int64_t ld, float* const (&to)[NA]) {
  constexpr int WIDTH = NA * CHUNK, NV = WIDTH > VL ? 2 : 1;
  float products[(CHUNK + 2) * WIDTH] __attribute__((aligned(64)));
  for_tiles(CHUNK, [&](int64_t r, auto rows) {
    constexpr int R = decltype(rows)::count;
    for (int h = 0; h < WIDTH; h += NV * VL)
      multiply_tile<A, R, NV>(b + r, a + h, GC_NR, A::steps(ld), products + r * WIDTH + h, WIDTH, false, nullptr);
  });
  for (int64_t h = 0; h < CHUNK; h += VL) {
    const vf at = lanes_from(h);
    vf between = {};
    for (int64_t j = CHUNK - 1; j >= 0; j--) {
      if (j + 1 < CHUNK) between += splat(g[j + 1]);
      const vi behind = at > splat((float)j);
      between = sel(behind, between, vf{});
      const vf fade = vexp(between);
#pragma GCC unroll 2
      for (int m = 0; m < NA; m++) {
        const vf x = load<vf>(products + j * WIDTH + m * CHUNK + h) * fade;
        store(to[m] + j * CHUNK + h, sel(strict[m] ? behind : at >= splat((float)j), x, vf{}));
      }
    }
  }
}

// -- the walk -------------------------------------------------------------------------------------------

template <class T> struct Many {
  typedef typename Product<T>::type A;
  typedef typename A::item item;
  typedef ::Pack<A> Pack;
  static constexpr bool FEW = false, FLOATS = std::is_same<A, Floats>::value;
  static constexpr int64_t ROWS = CHUNK;

  // A panel of the state, and its columns of V.
  struct Panel {
    int64_t column, columns;
    float* state;
    item* items;
    static constexpr int64_t width = GC_NR;
  };

  const Sequence& s;
  const int64_t first, last, ld;
  float* state;
  item* items;

  Many(const Sequence& s, int64_t first, int64_t last, const float*, Scratch& scratch)
      : s(s), first(first), last(last), ld(whole(s.k)) {
    state = scratch.take((last - first) * ld * GC_NR);
    items = FLOATS ? (item*)state : (item*)scratch.take((last - first) * ld / 2 * GC_NR);
  }
  static float* buffer(Scratch& scratch, int64_t tiles, int64_t) {
    return scratch.take((tiles * CHUNK + 2) * GC_NR);
  }
  int64_t last_panel() const { return last; }
  Panel panel(int64_t p) const {
    const int64_t column = p * GC_NR;
    return {column, min64(GC_NR, s.v - column), state + (p - first) * ld * GC_NR,
            items + (p - first) * A::steps(ld) * GC_NR};
  }
  void begin() {
    for (int64_t p = first; p < last; p++) {
      const Panel to = panel(p);
      for (int64_t i = 0; i < ld; i++)
        for (int h = 0; h < GC_NR; h += VL)
          store(to.state + i * GC_NR + h,
                s.before && i < s.k ? load_row(s.before + i * s.v, to.column + h, s.v) : vf{});
      as_items(to.state, to.items, ld);
    }
  }
  void end() {
    for (int64_t p = first; p < last; p++) {
      const Panel from = panel(p);
      for (int64_t i = 0; i < s.k; i++)
        store_row(from.state + i * GC_NR, from.columns, s.after + i * s.v + from.column);
    }
  }

  // -- before the state ---------------------------------------------------------------------------

  static void put_left(const Pack& p, int64_t tile, int64_t t, int64_t ld, int64_t i, vf x) {
    put_row(p.rows, (tile * CHUNK + t) * ld + i, x, A());
  }
  static void turn(const Pack& p, int64_t tiles, int64_t ld) {
    pack_rows(p.rows, A::steps(ld), 1, tiles * CHUNK, A::steps(ld), (float*)p.items, GC_NR);
  }
  // Rows t and t + 1 of part `part` of the tails [steps(16 parts)][ld].
  static void put_tail(item* tail, int64_t part, int64_t t, int64_t ld, int64_t i, vf lo, vf hi) {
    store_steps<A>(tail + A::steps(part * CHUNK + t) * ld + i, ld, lo, hi);
  }
  static void sum_squares(const float* squares, float* to) { sum_lanes(squares, to); }
  template <int NA>
  static void scores_by_channel(const float* b, const float* const (&a)[NA], const bool (&strict)[NA],
                                const float* fade, int64_t ld, float* const (&to)[NA], float*) {
    faded_scores(b, a, strict, fade, ld, to);
  }
  template <int NA>
  static void scores_by_head(const Pack& b, int64_t b_tile, const Pack& a, int64_t a_tile,
                             const bool (&strict)[NA], const float* g, int64_t ld, float* const (&to)[NA]) {
    packed_scores<A, NA>(b.items + b_tile * CHUNK, a.items + a_tile * CHUNK, strict, g, ld, to);
  }
  // A matrix [j][i] as the items of weights.
  static const item* weights(const float* m, item* to) {
    if constexpr (FLOATS) return (const item*)m;
    for (int64_t j = 0; j < CHUNK; j += 2)
      for (int64_t h = 0; h < CHUNK; h += VL)
        store_steps<A>(to + A::steps(j) * CHUNK + h, CHUNK, load<vf>(m + j * CHUNK + h),
                       load<vf>(m + (j + 1) * CHUNK + h));
    return to;
  }

  // -- at the state -------------------------------------------------------------------------------

  static void as_items(const float* rows, item* to, int64_t count) {
    if (FLOATS) return;
    for (int64_t i = 0; i < count; i += 2)
      for (int h = 0; h < GC_NR; h += VL)
        store_steps<A>(to + A::steps(i) * GC_NR + h, GC_NR, load<vf>(rows + i * GC_NR + h),
                       load<vf>(rows + (i + 1) * GC_NR + h));
  }
  template <class U> static vf value(const U* row, bool there, int64_t h, const Panel& p) {
    return there ? load_row(row + p.column, h, p.columns) : vf{};
  }
  template <class U> void output(const float* y, const Panel& p, U* out, int64_t step, int64_t n) const {
    for (int64_t t = 0; t < n; t++) store_row(y + t * GC_NR, p.columns, out + t * step + p.column);
  }
  // Rows that are no tokens write nothing.
  static void only_tokens(float* u, int64_t n, const Panel&) {
    if (n < CHUNK) memset(u + n * GC_NR, 0, (size_t)((CHUNK - n) * GC_NR) * sizeof(float));
  }
  template <int64_t TILES> void product(const Pack& p, const Panel& panel, float* xy) const {
    mix_block<A>(p.items, panel.items, GC_NR, A::steps(ld), TILES * CHUNK, xy, GC_NR, false);
  }

  // u [16][32] becomes (I + N)^-1 u: each row, once it is known, is taken from those behind it.
  static void solve(const float* m, float* u, const Panel&) {
    constexpr int NV = GC_VBYTES == 64 ? 2 : 1, R = 8;
    for (int h = 0; h < GC_NR; h += NV * VL) {
#pragma GCC unroll 1
      for (int64_t r0 = 0; r0 < CHUNK; r0 += R) {
        vf acc[R][NV];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int v = 0; v < NV; v++) acc[r][v] = load<vf>(u + (r0 + r) * GC_NR + h + v * VL);
        for (int64_t j = 0; j < r0; j++) {
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++)
              acc[r][v] -= splat(m[j * CHUNK + r0 + r]) * load<vf>(u + j * GC_NR + h + v * VL);
        }
#pragma GCC unroll 8
        for (int j = 0; j < R; j++) {
#pragma GCC unroll 8
          for (int r = j + 1; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++) acc[r][v] -= splat(m[(r0 + j) * CHUNK + r0 + r]) * acc[j][v];
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int v = 0; v < NV; v++) store(u + (r0 + r) * GC_NR + h + v * VL, acc[r][v]);
      }
    }
  }

  // y [16][32] += m u: the first rows of a tile end where their own columns do.
  static void add_product(const item* m, const item* u, float* y, const Panel&) {
    for (int64_t r0 = 0; r0 < CHUNK; r0 += TILE) {
      for (int h = 0; h < GC_NR; h += 2 * VL) {
        vf acc[TILE][2];
        float* const to = y + r0 * GC_NR + h;
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++) {
          acc[r][0] = load<vf>(to + r * GC_NR);
          acc[r][1] = load<vf>(to + r * GC_NR + VL);
        }
        accumulate<A>(acc, m + r0, CHUNK, u + h, A::steps(r0 + TILE));
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++) {
          store(to + r * GC_NR, acc[r][0]);
          store(to + r * GC_NR + VL, acc[r][1]);
        }
      }
    }
  }

  // The panel = total panel + tail^T u, and its items. Over fp32 those are the panel itself.
  template <int64_t PARTS>
  void update(const float* total, const item* tail, const item* u, const Panel& p) const {
    for (int64_t r0 = 0; r0 < ld; r0 += TILE) {
      for (int h = 0; h < GC_NR; h += 2 * VL) {
        vf acc[TILE][2];
        float* const to = p.state + r0 * GC_NR + h;
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++) {
          const vf kept = splat(total[r0 + r]);
          acc[r][0] = load<vf>(to + r * GC_NR) * kept;
          acc[r][1] = load<vf>(to + r * GC_NR + VL) * kept;
        }
        accumulate<A>(acc, tail + r0, ld, u + h, A::steps(PARTS * CHUNK));
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r++) {
          store(to + r * GC_NR, acc[r][0]);
          store(to + r * GC_NR + VL, acc[r][1]);
        }
        if (!FLOATS) {
#pragma GCC unroll 8
          for (int r = 0; r < TILE; r += 2) {
            item* const items = p.items + A::steps(r0 + r) * GC_NR + h;
            store_steps<A>(items, GC_NR, acc[r][0], acc[r + 1][0]);
            store_steps<A>(items + VL, GC_NR, acc[r][1], acc[r + 1][1]);
          }
        }
      }
    }
  }

  // Asks for a panel's share of the rows [n, from tokens t0 on] that the next chunk needs.
  template <class U> void ask(const U* row, int64_t step, int64_t tokens, int64_t n, int64_t p) const {
    const int64_t parts = last - first, part = p - first;
    for (int64_t t = 0; t < tokens; t++, row += step) {
      const char *at = (const char*)(row + n * part / parts), *end = (const char*)(row + n * (part + 1) / parts);
      for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
    }
  }
};

}  // namespace
