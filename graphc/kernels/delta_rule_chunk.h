// The delta rule over many tokens, sixteen at a time. With the state S [K, V] before a chunk:
//
//   X, Y   = left^T S                                       one product, 32 rows
//   u_i    = beta_i (v_i - X_i) - sum_{j < i} told_ij u_j
//   o      = Y + shown u
//   S      = total S + tail^T u
//
// The state lies in panels of 32 columns [panel][K][32] while its head is walked over; all four lines
// are done panel by panel, so that a panel comes into the first level of the cache once for a chunk.
#pragma once
#include "delta_rule_prepare.h"

namespace {

// The rows of the next chunk, read and written, asked for one by one while this one is worked on: they
// lie apart, where no prefetcher of the hardware looks.
template <class T> struct Coming {
  const Head<T>& head;
  int64_t t0, n;
  int64_t each, next;  // rows at a time, and how many have been asked for

  template <int WRITTEN = 0, class S> GC_INLINE void row(const S* p, int64_t length) {
    for (const char *line = (const char*)p, *end = (const char*)(p + length); line < end; line += 64)
      __builtin_prefetch(line, WRITTEN, 2);
  }
  void ask() {
    const gc_delta_rule_shape* s = head.s;
    for (const int64_t end = min64(5 * n, next + each); next < end; next++) {
      const int64_t t = t0 + next / 5;
      if (next % 5 == 0) row(head.k + t * s->k_s[1], s->k);
      if (next % 5 == 1) row(head.q + t * s->q_s[1], s->k);
      if (next % 5 == 2) row(head.v + t * s->v_s[1], s->v);
      if (next % 5 == 3) row(head.decay + t * s->decay_s[1], s->by_head ? 1 : s->k);
      if (next % 5 == 4) row<1>(head.out + t * s->out_s[1], s->v);
    }
  }
};

// s [rows][32] = total s + tail^T u, and `items`, what the next product reads of it. Over fp32 that is
// s itself.
template <class A, class T>
static void update_panel(const Chunk<A>& c, const typename A::item* u, float* s,
                         typename A::item* items, Coming<T>* coming) {
  for (int64_t r0 = 0; r0 < c.ld; r0 += TILE) {
    coming->ask();
    for (int h = 0; h < GC_NR; h += 2 * VL) {
      vf acc[TILE][2];
      float* const to = s + r0 * GC_NR + h;
#pragma GCC unroll 8
      for (int r = 0; r < TILE; r++) {
        const vf total = splat(c.total[r0 + r]);
        acc[r][0] = load<vf>(to + r * GC_NR) * total;
        acc[r][1] = load<vf>(to + r * GC_NR + VL) * total;
      }
      accumulate<A>(acc, c.tail + r0, c.ld, u + h, A::steps(CHUNK));
#pragma GCC unroll 8
      for (int r = 0; r < TILE; r++) {
        store(to + r * GC_NR, acc[r][0]);
        store(to + r * GC_NR + VL, acc[r][1]);
      }
      if (!std::is_same<A, Floats>::value) {
#pragma GCC unroll 8
        for (int r = 0; r < TILE; r += 2) {
          store_steps<A>(items + A::steps(r0 + r) * GC_NR + h, GC_NR, acc[r][0], acc[r + 1][0]);
          store_steps<A>(items + A::steps(r0 + r) * GC_NR + h + VL, GC_NR, acc[r][1], acc[r + 1][1]);
        }
      }
    }
  }
}

// u [16][32], in place of beta (v - X): each row, once it is known, is taken from those behind it.
static void substitute(const float* told, float* u) {
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
            acc[r][v] -= splat(told[j * CHUNK + r0 + r]) * load<vf>(u + j * GC_NR + h + v * VL);
      }
#pragma GCC unroll 8
      for (int j = 0; j < R; j++) {
#pragma GCC unroll 8
        for (int r = j + 1; r < R; r++)
#pragma GCC unroll 2
          for (int v = 0; v < NV; v++) acc[r][v] -= splat(told[(r0 + j) * CHUNK + r0 + r]) * acc[j][v];
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) store(u + (r0 + r) * GC_NR + h + v * VL, acc[r][v]);
    }
  }
}

// y [16][32] += shown u: the first rows of a tile end where their own columns do.
template <class A>
static void show(const Chunk<A>& c, const typename A::item* u, float* y) {
  for (int64_t r0 = 0; r0 < CHUNK; r0 += TILE) {
    for (int h = 0; h < GC_NR; h += 2 * VL) {
      vf acc[TILE][2];
      float* const to = y + r0 * GC_NR + h;
#pragma GCC unroll 8
      for (int r = 0; r < TILE; r++) {
        acc[r][0] = load<vf>(to + r * GC_NR);
        acc[r][1] = load<vf>(to + r * GC_NR + VL);
      }
      accumulate<A>(acc, c.shown_items + r0, CHUNK, u + h, A::steps(r0 + TILE));
#pragma GCC unroll 8
      for (int r = 0; r < TILE; r++) {
        store(to + r * GC_NR, acc[r][0]);
        store(to + r * GC_NR + VL, acc[r][1]);
      }
    }
  }
}

// Between rows of a state [K][V] and panels, `columns` of them at `column`; rows up to ld are zero.
static void load_panel(const float* state, int64_t k, int64_t v, int64_t column, int64_t ld,
                       float* s) {
  for (int64_t i = 0; i < ld; i++)
    for (int h = 0; h < GC_NR; h += VL)
      store(s + i * GC_NR + h, state && i < k ? load_row(state + i * v, column + h, v) : vf{});
}
// Panels first .. last of one head, tokens begin .. end of it. The state before is at `before`, if there
// is one, that after at head.after.
template <bool BY_HEAD, class T>
static void chunks(const Head<T>& head, int64_t first, int64_t last, int64_t begin, int64_t end,
                   const float* before, float* scratch) {
  typedef typename Product<T>::type A;
  typedef typename A::item item;
  const gc_delta_rule_shape* s = head.s;
  const auto take = [&scratch](int64_t n) { return (scratch += n) - n; };
  Chunk<A> c(s->k, scratch);
  float *const xy = take(34 * GC_NR), *const u = take(CHUNK * GC_NR);
  float *const state = take((last - first) * c.ld * GC_NR);
  constexpr bool FLOATS = std::is_same<A, Floats>::value;
  item* const u_items = FLOATS ? (item*)u : (item*)take(CHUNK / 2 * GC_NR);
  item* const items = FLOATS ? (item*)state : (item*)take((last - first) * c.ld / 2 * GC_NR);
  for (int64_t p = first; p < last; p++) {
    float* const panel = state + (p - first) * c.ld * GC_NR;
    load_panel(before, s->k, s->v, p * GC_NR, c.ld, panel);
    if (!FLOATS)
      for (int64_t i = 0; i < c.ld; i += 2)
        for (int h = 0; h < GC_NR; h += VL)
          store_steps<A>(items + (p - first) * A::steps(c.ld) * GC_NR + A::steps(i) * GC_NR + h, GC_NR,
                         load<vf>(panel + i * GC_NR + h), load<vf>(panel + (i + 1) * GC_NR + h));
  }

  for (int64_t t0 = begin; t0 < end; t0 += CHUNK) {
    const int64_t n = min64(CHUNK, end - t0), ahead = min64(CHUNK, end - t0 - n);
    const int64_t turns = (last - first) * c.ld / TILE;
    Coming<T> coming = {head, t0 + n, ahead, (5 * ahead + turns - 1) / turns, 0};
    prepare<BY_HEAD>(head, t0, n, &c);
    for (int64_t p = first; p < last; p++) {
      float* const panel = state + (p - first) * c.ld * GC_NR;
      item* const panel_items = items + (p - first) * A::steps(c.ld) * GC_NR;
      const int64_t column = p * GC_NR, columns = min64(GC_NR, s->v - column);
      mix_block<A>(c.left, panel_items, GC_NR, A::steps(c.ld), 2 * CHUNK, xy, GC_NR, false);
      for (int64_t i = 0; i < CHUNK; i++) {
        const T* const v = head.v + (t0 + i) * s->v_s[1] + column;
        const vf beta = splat(c.beta[i]), factor = splat(BY_HEAD ? c.prefix[i] : 1.0f);
        for (int h = 0; h < GC_NR; h += VL) {
          const vf x = load<vf>(xy + i * GC_NR + h) * factor;
          store(u + i * GC_NR + h, i < n ? beta * (load_row(v, h, columns) - x) : vf{});
          if (BY_HEAD) {
            float* const y = xy + (CHUNK + i) * GC_NR + h;
            store(y, load<vf>(y) * factor);
          }
        }
      }
      substitute(c.told, u);
      if (!FLOATS)
        for (int64_t i = 0; i < CHUNK; i += 2)
          for (int h = 0; h < GC_NR; h += VL)
            store_steps<A>(u_items + A::steps(i) * GC_NR + h, GC_NR, load<vf>(u + i * GC_NR + h),
                           load<vf>(u + (i + 1) * GC_NR + h));
      show(c, u_items, xy + CHUNK * GC_NR);
      for (int64_t i = 0; i < n; i++)
        store_row(xy + (CHUNK + i) * GC_NR, columns, head.out + (t0 + i) * s->out_s[1] + column);
      update_panel(c, u_items, panel, panel_items, &coming);
    }
  }
  for (int64_t p = first; p < last; p++)
    for (int64_t i = 0; i < s->k; i++)
      store_row(state + ((p - first) * c.ld + i) * GC_NR, min64(GC_NR, s->v - p * GC_NR),
                head.after + i * s->v + p * GC_NR);
}

}  // namespace
