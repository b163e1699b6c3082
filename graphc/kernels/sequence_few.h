// Operators over sequence state, few tokens, as a decoding step has them: the same lines as in
// sequence_many.h with the state in place. It is read once for what all tokens ask of it, then brought up
// to date while it is in the second level of the cache; meanwhile the next state is asked for.
#pragma once
#include "sequence.h"

namespace {

constexpr int64_t MOST_FEW = 8;                 // tokens
template <class T, int N> struct Few {
  typedef float item;
  static constexpr bool FEW = true, FLOATS = true;
  static constexpr int64_t ROWS = N;

  struct Pack {
    float* rows;
    Pack(Scratch& scratch, int64_t ld) : rows(scratch.take(2 * N * ld)) {}
  };
  // All columns that the call works on.
  struct Panel {
    int64_t column, columns, width;
  };

  const Sequence& s;
  const int64_t first, last, ld;
  Next to_come;

  Few(const Sequence& s, int64_t first, int64_t last, const float* next, Scratch&)
      : s(s), first(first), last(last), ld(whole(s.k)), to_come{next, next ? next + s.k * s.v : nullptr} {}
  static float* buffer(Scratch& scratch, int64_t tiles, int64_t width) { return scratch.take(tiles * N * width); }
  int64_t last_panel() const { return first + 1; }
  Panel panel(int64_t) const {
    const int64_t column = first * GC_NR, columns = min64(s.v, last * GC_NR) - column;
    return {column, columns, columns};
  }
  void begin() {}
  void end() {}

  // -- before the state ---------------------------------------------------------------------------

  static void put_left(const Pack& p, int64_t tile, int64_t t, int64_t ld, int64_t i, vf x) {
    store(p.rows + (tile * N + t) * ld + i, x);
  }
  static void turn(const Pack&, int64_t, int64_t) {}
  static void put_tail(item* tail, int64_t part, int64_t t, int64_t ld, int64_t i, vf x) {
    store(tail + (part * N + t) * ld + i, x);
  }
  static void sum_squares(const float* squares, float* to) {
    for (int64_t t = 0; t < CHUNK; t++) to[t] = t < N ? hsum(load<vf>(squares + t * VL)) : 0.0f;
  }
  // [j][i] as in sequence_many.h; `run` is a row of scratch for what remains of a row of b.
  template <int NA>
  static void scores_by_channel(const float* b, const float* const (&a)[NA], const bool (&strict)[NA],
                                const float* fade, int64_t ld, float* const (&to)[NA], float* run) {
    for (int64_t j = 0; j < N; j++) {
      for (int64_t t = j; t < N; t++) {
        vf sums[NA] = {};
        for (int64_t i = 0; i < ld; i += VL) {
          vf x = load<vf>((t == j ? b + j * ld : run) + i);
          if (t > j) x *= load<vf>(fade + t * ld + i);
          if (N > 1) store(run + i, x);
          for (int m = 0; m < NA; m++) sums[m] += x * load<vf>(a[m] + t * ld + i);
        }
        for (int m = 0; m < NA; m++) to[m][j * CHUNK + t] = t == j && strict[m] ? 0.0f : hsum(sums[m]);
      }
    }
  }
  template <int NA>
  static void scores_by_head(const Pack& b, int64_t b_tile, const Pack& a, int64_t a_tile,
                             const bool (&strict)[NA], const float* g, int64_t ld, float* const (&to)[NA]) {
    for (int64_t j = 0; j < N; j++) {
      float between = 0.0f;
      for (int64_t t = j; t < N; t++) {
        if (t > j) between += g[t];
        const float fade = t > j ? lane_of(vexp(splat(between)), 0) : 1.0f;
        for (int m = 0; m < NA; m++) {
          vf sum = {};
          for (int64_t i = 0; i < ld; i += VL)
            sum += load<vf>(b.rows + (b_tile * N + j) * ld + i) * load<vf>(a.rows + ((a_tile + m) * N + t) * ld + i);
          to[m][j * CHUNK + t] = t == j && strict[m] ? 0.0f : hsum(sum) * fade;
        }
      }
    }
  }
  static const item* weights(const float* m, item*) { return m; }

  // -- at the state -------------------------------------------------------------------------------

  static void as_items(const float*, item*, int64_t) {}
  template <class U> static vf value(const U* row, bool, int64_t h, const Panel& p) {
    return vload(row + p.column + h, All{});
  }
  template <class U> void output(const float* y, const Panel& p, U* out, int64_t step, int64_t) const {
    for (int64_t t = 0; t < N; t++) store_row(y + t * p.width, p.width, out + t * step + p.column);
  }
  static void only_tokens(float*, int64_t, const Panel&) {}

  template <int64_t TILES> void product(const Pack& p, const Panel& panel, float* xy) {
    constexpr int ALL = TILES * N, NV = SUMS / ALL > 0 ? (SUMS / ALL > 8 ? 8 : SUMS / ALL) : 1;
    if (!s.before) {
      memset(xy, 0, (size_t)(ALL * panel.width) * sizeof(float));
      return;
    }
    for_columns<NV>(panel.width, [&](int64_t h, auto vectors) __attribute__((always_inline)) {
      constexpr int C = decltype(vectors)::count, ROWS = ALL * C <= SUMS ? ALL : N;
      const float* const state = s.before + panel.column + h;
#pragma GCC unroll 1
      for (int64_t r = 0; r < ALL; r += ROWS)
        ask_state<ROWS, C>(p.rows + r * ld, ld, state, s.v, s.k, xy + r * panel.width + h, panel.width,
                           r == 0 ? READ_LINES<N, C> : 0, &to_come);
    });
  }

  static void solve(const float* m, float* u, const Panel& p) {
    for (int64_t t = 1; t < N; t++)
      for (int64_t h = 0; h < p.width; h += VL) {
        vf sum = load<vf>(u + t * p.width + h);
        for (int64_t j = 0; j < t; j++) sum -= splat(m[j * CHUNK + t]) * load<vf>(u + j * p.width + h);
        store(u + t * p.width + h, sum);
      }
  }
  static void add_product(const item* m, const item* u, float* y, const Panel& p) {
    for (int64_t t = 0; t < N; t++)
      for (int64_t h = 0; h < p.width; h += VL) {
        vf sum = load<vf>(y + t * p.width + h);
        for (int64_t j = 0; j <= t; j++) sum += splat(m[j * CHUNK + t]) * load<vf>(u + j * p.width + h);
        store(y + t * p.width + h, sum);
      }
  }
  template <int64_t PARTS>
  void update(const float* total, const item* tail, const item* u, const Panel& p) {
    constexpr int ALL = PARTS * N, NV = SUMS / ALL > 8 ? 8 : SUMS / ALL > 0 ? SUMS / ALL : 1;
    for_columns<NV>(p.width, [&](int64_t h, auto vectors) __attribute__((always_inline)) {
      constexpr int C = decltype(vectors)::count;
      update_columns<ALL, C>(total, tail, ld, u + h, p.width, s.before ? s.before + p.column + h : nullptr,
                             s.after + p.column + h, s.v, s.k, WRITE_LINES<N, C>, &to_come);
    });
  }
  template <class U> void ask(const U*, int64_t, int64_t, int64_t, int64_t) const {}
};

}  // namespace
