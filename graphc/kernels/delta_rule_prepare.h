// What a chunk of sixteen tokens needs before it meets the state (delta_rule_chunk.h).
//
// No decay is ever divided by: all are products of exp(g) <= 1, or exp of a sum of g, so that any gate
// is safe. Per token i of the chunk, with G the sum of g up to and with it:
//
//   left    exp(G_i) k_i and scale exp(G_i) q_i, turned: lanes are tokens, first of k, then of q
//   tail    exp(G_last - G_i) k_i
//   total   exp(G_last)
//   told    beta_i k_i exp(G_i - G_j) k_j below the diagonal, as [j][i]
//   shown   scale q_i exp(G_i - G_j) k_j up to the diagonal, as [j][i]
//
// Where the decay is one number for a head, `left` is without exp(G_i): it becomes a factor of rows.
#pragma once
#include "chunk_tiles.h"
#include "delta_rule.h"

namespace {

// Memory of a chunk, out of the thread's scratch; ld is K rounded up to 16.
template <class A> struct Chunk {
  typedef typename A::item item;
  int64_t ld;
  float *k, *q, *decay;      // [16][ld]
  float* rows;               // [32][ld] floats, or as many halves
  item *left, *tail;         // [steps(ld)][32], [steps(16)][ld]
  float* total;              // [ld]
  float *parts, *told, *shown;  // [2][16][VL], [16][16], [16][16]
  item* shown_items;         // [steps(16)][16]
  float *beta, *factor_k, *factor_q, *prefix, *suffix;  // [16]

  Chunk(int64_t k, float*& scratch) : ld(whole(k)) {
    const auto take = [&scratch](int64_t n) { return (scratch += n) - n; };
    this->k = take(CHUNK * ld);
    q = take(CHUNK * ld);
    decay = take(CHUNK * ld);
    rows = take(2 * CHUNK * ld);
    left = (item*)take(2 * CHUNK * ld);
    tail = (item*)take(CHUNK * ld);
    total = take(ld);
    parts = take(2 * CHUNK * VL);
    told = take(CHUNK * CHUNK);
    shown = take(CHUNK * CHUNK);
    shown_items = (item*)take(CHUNK * CHUNK);
    beta = take(CHUNK);
    factor_k = take(CHUNK);
    factor_q = take(CHUNK);
    prefix = take(CHUNK);
    suffix = take(CHUNK);
  }
};

// -- scores under a decay of each channel ---------------------------------------------------------

// Of columns j and j + 1, told and shown; four partial sums in one register [told, told, shown, shown].
GC_INLINE vf partial_sums(vf told0, vf told1, vf shown0, vf shown1) {
  vf t[4] = {told0, told1, shown0, shown1};
  sum_segments<VL, 4>(t);
  return t[0];
}

// The scores of columns j and j + 1 over NB vectors of channels: what a column shows to token i fades by
// one factor with each token in between. parts is [16][VL].
template <int NB>
static void fading_scores(const float* k, const float* q, const float* decay, int64_t ld, int64_t j,
                          bool add, float* parts) {
  const auto put = [&](int64_t i, vf sums) __attribute__((always_inline)) {
    float* const p = parts + i * VL;
    store(p, add ? load<vf>(p) + sums : sums);
  };
  vf r0[NB], r1[NB], told = {}, shown[3] = {};
#pragma GCC unroll 8
  for (int n = 0; n < NB; n++) {
    const int64_t at = j * ld + n * VL;
    const vf x = load<vf>(q + at + ld);
    r0[n] = load<vf>(k + at);
    shown[0] += r0[n] * load<vf>(q + at);
    r0[n] *= load<vf>(decay + at + ld);
    r1[n] = load<vf>(k + at + ld);
    told += r0[n] * r1[n];
    shown[1] += r0[n] * x;
    shown[2] += r1[n] * x;
  }
  put(j, partial_sums(vf{}, vf{}, shown[0], vf{}));
  put(j + 1, partial_sums(told, vf{}, shown[1], shown[2]));
  for (int64_t i = j + 2; i < CHUNK; i++) {
    vf sum[4] = {};
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const int64_t at = i * ld + n * VL;
      const vf e = load<vf>(decay + at), x = load<vf>(k + at), y = load<vf>(q + at);
      r0[n] *= e;
      r1[n] *= e;
      sum[0] += r0[n] * x;
      sum[1] += r1[n] * x;
      sum[2] += r0[n] * y;
      sum[3] += r1[n] * y;
    }
    put(i, partial_sums(sum[0], sum[1], sum[2], sum[3]));
  }
}

template <class A> static void scores_by_channel(Chunk<A>* c) {
  constexpr int MOST = GC_VBYTES == 64 ? 8 : 4, TOKENS = VL / 4;  // tokens of a register of four sums
  for (int64_t j = 0; j < CHUNK; j += 2) {
    if (j > 0)  // tokens before a column are shown nothing
      for (int64_t i = j - 2; i < j; i++) store(c->parts + i * VL, vf{});
    int64_t n = 0;
    const auto each = [&](auto count) __attribute__((always_inline)) {
      constexpr int NB = decltype(count)::count;
      for (; n + NB * VL <= c->ld; n += NB * VL)
        fading_scores<NB>(c->k + n, c->q + n, c->decay + n, c->ld, j, n > 0, c->parts);
    };
    each(Rows<MOST>());
    each(Rows<MOST / 2>());
    if (MOST / 4 > 1) each(Rows<MOST / 4>());
    each(Rows<1>());
    for (int64_t h = 0; h < CHUNK; h += VL) {
      vf t[4];
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++) {
        vf one[TOKENS];
#pragma GCC unroll 4
        for (int i = 0; i < TOKENS; i++) one[i] = load<vf>(c->parts + (h + g * TOKENS + i) * VL);
        sum_segments<TOKENS, TOKENS>(one);
        t[g] = one[0];
      }
      const vf even[2] = {every_second<0>(t[0], t[1], ALL_LANES), every_second<0>(t[2], t[3], ALL_LANES)},
               odd[2] = {every_second<1>(t[0], t[1], ALL_LANES), every_second<1>(t[2], t[3], ALL_LANES)};
      float *const told = c->told + j * CHUNK + h, *const shown = c->shown + j * CHUNK + h;
      store(told, every_second<0>(even[0], even[1], ALL_LANES));
      store(told + CHUNK, every_second<0>(odd[0], odd[1], ALL_LANES));
      store(shown, every_second<1>(even[0], even[1], ALL_LANES));
      store(shown + CHUNK, every_second<1>(odd[0], odd[1], ALL_LANES));
    }
  }
}

// -- the chunk ------------------------------------------------------------------------------------

// Tokens t0 .. t0 + n of a head; those behind them, up to a chunk, are zero.
template <class T> struct Tokens {
  const Head<T>& head;
  int64_t t0, n;
  inline __attribute__((always_inline)) vf k(int64_t t, int64_t i) const {
    return t < n ? load_row(head.k + (t0 + t) * head.s->k_s[1], i, head.s->k) : vf{};
  }
  inline __attribute__((always_inline)) vf q(int64_t t, int64_t i) const {
    return t < n ? load_row(head.q + (t0 + t) * head.s->q_s[1], i, head.s->k) : vf{};
  }
  inline __attribute__((always_inline)) vf decay(int64_t t, int64_t i) const {
    return t < n ? load_row(head.decay + (t0 + t) * head.s->decay_s[1], i, head.s->k) : vf{};
  }
};

// beta, and what normalises and scales k and q.
template <class T, class A> static void read_factors(const Tokens<T>& tokens, Chunk<A>* c) {
  const Head<T>& head = tokens.head;
  for (int64_t t = 0; t < CHUNK; t++) {
    c->beta[t] = t < tokens.n ? head.beta_of(tokens.t0 + t) : 0.0f;
    c->factor_k[t] = 1.0f;
    c->factor_q[t] = head.scale;
  }
  if (!head.s->normalize) return;
  float* const squares = c->parts;  // of k, then of q
  for (int64_t t = 0; t < CHUNK; t++) {
    vf k2 = {}, q2 = {};
    for (int64_t i = 0; i < c->ld; i += VL) {
      const vf k = tokens.k(t, i), q = tokens.q(t, i);
      k2 += k * k;
      q2 += q * q;
    }
    store(squares + t * VL, k2);
    store(squares + (CHUNK + t) * VL, q2);
  }
  sum_lanes(squares, c->factor_k);
  sum_lanes(squares + CHUNK * VL, c->factor_q);
  for (int64_t h = 0; h < CHUNK; h += VL) {
    store(c->factor_k + h, 1.0f / vsqrt(load<vf>(c->factor_k + h) + NORM_EPS));
    store(c->factor_q + h, head.scale / vsqrt(load<vf>(c->factor_q + h) + NORM_EPS));
  }
}

// The rows of `rows`, k before q, become `left`.
template <class A> static void turn_rows(Chunk<A>* c) {
  const int64_t steps = A::steps(c->ld);
  pack_rows(c->rows, steps, 1, 2 * CHUNK, steps, (float*)c->left, GC_NR);
}
template <class T, class A>
static void decay_by_channel(const Tokens<T>& tokens, Chunk<A>* c) {
  const int64_t ld = c->ld;
  for (int64_t i = 0; i < ld; i += VL) {  // inside, the loops go over tokens with a vector of channels
    vf sum = {}, p = splat(1.0f);
#pragma GCC unroll 1
    for (int64_t t = 0; t < CHUNK; t++) {
      const int64_t at = t * ld + i;
      const vf g = tokens.decay(t, i), e = vexp(g), k = tokens.k(t, i) * splat(c->factor_k[t]),
               q = tokens.q(t, i) * splat(c->factor_q[t]);
      sum += g;
      p *= e;
      store(c->decay + at, e);
      store(c->k + at, k);
      store(c->q + at, q);
      put_row(c->rows, at, k * p, A());
      put_row(c->rows, CHUNK * ld + at, q * p, A());
    }
    store(c->total + i, vexp(sum));
    p = splat(1.0f);
#pragma GCC unroll 1
    for (int64_t t = CHUNK - 2; t >= 0; t -= 2) {
      const vf hi = load<vf>(c->k + (t + 1) * ld + i) * p;
      p *= load<vf>(c->decay + (t + 1) * ld + i);
      const vf lo = load<vf>(c->k + t * ld + i) * p;
      p *= load<vf>(c->decay + t * ld + i);
      store_steps<A>(c->tail + A::steps(t) * ld + i, ld, lo, hi);
    }
  }
}

template <class T, class A>
static void decay_by_head(const Tokens<T>& tokens, Chunk<A>* c) {
  const Head<T>& head = tokens.head;
  const int64_t ld = c->ld;
  float g[CHUNK], sum = 0.0f;
  for (int64_t t = 0; t < CHUNK; t++) {
    g[t] = t < tokens.n ? head.decay[(tokens.t0 + t) * head.s->decay_s[1]] : 0.0f;
    c->prefix[t] = sum += g[t];
  }
  for (int64_t t = CHUNK - 1, rest = 0; t >= 0; t--) {
    c->suffix[t] = rest == 0 ? 0.0f : c->suffix[t + 1] + g[t + 1];
    rest = 1;
  }
  for (int64_t h = 0; h < CHUNK; h += VL) {
    store(c->prefix + h, vexp(load<vf>(c->prefix + h)));
    store(c->suffix + h, vexp(load<vf>(c->suffix + h)));
  }
  for (int64_t i = 0; i < ld; i += VL) {
    store(c->total + i, splat(c->prefix[CHUNK - 1]));
    for (int64_t t = 0; t < CHUNK; t += 2) {
      vf k[2];
      for (int64_t m = 0; m < 2; m++) {
        const int64_t at = (t + m) * ld + i;
        k[m] = tokens.k(t + m, i) * splat(c->factor_k[t + m]);
        put_row(c->rows, at, k[m], A());
        put_row(c->rows, CHUNK * ld + at, tokens.q(t + m, i) * splat(c->factor_q[t + m]), A());
        k[m] *= splat(c->suffix[t + m]);
      }
      store_steps<A>(c->tail + A::steps(t) * ld + i, ld, k[0], k[1]);
    }
  }
  turn_rows(c);
  // products of all pairs, then their decay: no difference of long sums is taken
  float* const products = c->k;  // [j][k_i before q_i]; a tile may write some rows more
  mix_block<A>(c->left, c->left, GC_NR, A::steps(ld), CHUNK, products, GC_NR, false);
  for (int64_t h = 0; h < CHUNK; h += VL) {
    vf between = {};
    for (int64_t j = CHUNK - 1; j >= 0; j--) {
      if (j + 1 < CHUNK) between += splat(g[j + 1]);
      const vf at = lanes_from(h);
      between = sel(at > splat((float)j), between, vf{});
      const vf fade = vexp(between);
      const float* row = products + j * GC_NR + h;
      store(c->told + j * CHUNK + h, sel(at > splat((float)j), load<vf>(row) * fade, vf{}));
      store(c->shown + j * CHUNK + h, sel(at >= splat((float)j), load<vf>(row + CHUNK) * fade, vf{}));
    }
  }
}

template <bool BY_HEAD, class T, class A>
static void prepare(const Head<T>& head, int64_t t0, int64_t n, Chunk<A>* c) {
  const Tokens<T> tokens = {head, t0, n};
  read_factors(tokens, c);
  if (BY_HEAD) {
    decay_by_head(tokens, c);
  } else {
    decay_by_channel(tokens, c);
    turn_rows(c);
    scores_by_channel(c);
  }
  for (int64_t j = 0; j < CHUNK; j += 2) {
    for (int64_t h = 0; h < CHUNK; h += VL) {
      const vf beta = load<vf>(c->beta + h);
      for (int64_t m = 0; m < 2; m++) {
        float* const told = c->told + (j + m) * CHUNK + h;
        store(told, load<vf>(told) * beta);
      }
      store_steps<A>(c->shown_items + A::steps(j) * CHUNK + h, CHUNK,
                     load<vf>(c->shown + j * CHUNK + h), load<vf>(c->shown + (j + 1) * CHUNK + h));
    }
  }
}

}  // namespace
