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
#include <utility>

#include "delta_rule.h"

namespace {

constexpr int64_t CHUNK = 16;

// Arithmetic of the products: fp32, or pairs of bf16.
template <class T> struct Product { typedef Floats type; };
#if defined(__AVX512BF16__)
template <> struct Product<bf16> { typedef Pairs type; };
#endif

#if defined(__AVX512BF16__)
// Lane i holds lo[i] and hi[i] as bf16.
GC_INLINE __m512i pair_lanes(vf lo, vf hi) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
  return _mm512_permutexvar_epi16(order, halves);
}
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

// Memory of a chunk, out of the thread's scratch; ld is K rounded up to 16.
template <class A> struct Chunk {
  typedef typename A::item item;
  int64_t ld;
  float *k, *q, *decay;      // [16][ld]
  float* rows;               // [32][ld] floats, or as many halves
  item *left, *tail;         // [steps(ld)][32], [steps(16)][ld]
  float* total;              // [ld]
  float *parts, *told, *shown;  // [4][16][VL], [16][16], [16][16]
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
    parts = take(4 * CHUNK * 16);
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

// -- sums of registers --------------------------------------------------------------------------

// Half H of each segment of S lanes, the segments of a before those of b.
template <int S, int H, int... L> GC_INLINE vf halves(vf a, vf b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(
      a, b, (L / (S / 2) % (VL / S) * S + H * (S / 2) + L % (S / 2) + (L / (S / 2)) / (VL / S) * VL)...);
}
template <int S> GC_INLINE void add_halves(vf* t) {
  if constexpr (S > 1) {
    constexpr std::make_integer_sequence<int, VL> lanes{};
#pragma GCC unroll 8
    for (int i = 0; i < S / 2; i++)
      t[i] = halves<S, 0>(t[2 * i], t[2 * i + 1], lanes) + halves<S, 1>(t[2 * i], t[2 * i + 1], lanes);
    add_halves<S / 2>(t);
  }
}
// to[i] = the sum of the lanes of parts[i], for a chunk of them.
static void sum_lanes(const float* parts, float* to) {
  for (int64_t h = 0; h < CHUNK; h += VL) {
    vf t[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) t[i] = load<vf>(parts + (h + i) * VL);
    add_halves<VL>(t);
    store(to + h, t[0]);
  }
}

// -- scores under a decay of each channel ---------------------------------------------------------

// Adds NB vectors of channels to the scores of columns j and j + 1, lane by lane: what column j shows to
// token i fades by one factor with each token in between.
template <int NB>
static void fading_scores(const float* k, const float* q, const float* decay, int64_t ld, int64_t j,
                          float* parts) {
  constexpr int64_t N = CHUNK * VL;
  float *const a0 = parts, *const b0 = parts + N, *const a1 = parts + 2 * N, *const b1 = parts + 3 * N;
  const auto add = [](float* p, vf x) __attribute__((always_inline)) { store(p, load<vf>(p) + x); };
  vf r0[NB], r1[NB], a = {}, b = {}, c = {};
#pragma GCC unroll 8
  for (int n = 0; n < NB; n++) {
    r0[n] = load<vf>(k + j * ld + n * VL);
    b += r0[n] * load<vf>(q + j * ld + n * VL);
  }
  add(b0 + j * VL, b);
  b = vf{};
#pragma GCC unroll 8
  for (int n = 0; n < NB; n++) {
    const int64_t at = (j + 1) * ld + n * VL;
    r0[n] *= load<vf>(decay + at);
    r1[n] = load<vf>(k + at);
    const vf x = load<vf>(q + at);
    a += r0[n] * r1[n];
    b += r0[n] * x;
    c += r1[n] * x;
  }
  add(a0 + (j + 1) * VL, a);
  add(b0 + (j + 1) * VL, b);
  add(b1 + (j + 1) * VL, c);
  for (int64_t i = j + 2; i < CHUNK; i++) {
    vf sum[4] = {};
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      const int64_t at = i * ld + n * VL;
      const vf e = load<vf>(decay + at), x = load<vf>(k + at), y = load<vf>(q + at);
      r0[n] *= e;
      r1[n] *= e;
      sum[0] += r0[n] * x;
      sum[1] += r0[n] * y;
      sum[2] += r1[n] * x;
      sum[3] += r1[n] * y;
    }
    add(a0 + i * VL, sum[0]);
    add(b0 + i * VL, sum[1]);
    add(a1 + i * VL, sum[2]);
    add(b1 + i * VL, sum[3]);
  }
}

template <class A> static void scores_by_channel(Chunk<A>* c) {
  constexpr int MOST = GC_VBYTES == 64 ? 8 : 4;
  for (int64_t j = 0; j < CHUNK; j += 2) {
    for (int64_t i = 0; i < 4 * CHUNK * VL; i += VL) store(c->parts + i, vf{});
    int64_t n = 0;
    const auto each = [&](auto count) __attribute__((always_inline)) {
      constexpr int NB = decltype(count)::count;
      for (; n + NB * VL <= c->ld; n += NB * VL)
        fading_scores<NB>(c->k + n, c->q + n, c->decay + n, c->ld, j, c->parts);
    };
    each(Rows<MOST>());
    each(Rows<MOST / 2>());
    if (MOST / 4 > 1) each(Rows<MOST / 4>());
    each(Rows<1>());
    for (int64_t m = 0; m < 2; m++) {
      sum_lanes(c->parts + 2 * m * CHUNK * VL, c->told + (j + m) * CHUNK);
      sum_lanes(c->parts + (2 * m + 1) * CHUNK * VL, c->shown + (j + m) * CHUNK);
    }
  }
}

// -- the chunk ------------------------------------------------------------------------------------

GC_INLINE vf lanes_from(int64_t h) { return to_f32(lane_numbers()) + (float)h; }

// Tokens t0 .. t0 + n as rows of floats, and the factors that normalise them; rows from n on are zero.
template <class T, class A>
static void read_tokens(const Head<T>& head, int64_t t0, int64_t n, Chunk<A>* c) {
  const gc_delta_rule_shape* s = head.s;
  float* const squares = c->parts;
  for (int64_t i = 0; i < CHUNK; i++) {
    float *const k = c->k + i * c->ld, *const q = c->q + i * c->ld;
    vf k2 = {}, q2 = {};
    if (i < n) {
      k2 = read_row(head.k + (t0 + i) * s->k_s[1], s->k, k);
      q2 = read_row(head.q + (t0 + i) * s->q_s[1], s->k, q);
    } else {
      memset(k, 0, (size_t)c->ld * sizeof(float));
      memset(q, 0, (size_t)c->ld * sizeof(float));
    }
    store(squares + i * VL, k2);
    store(squares + (CHUNK + i) * VL, q2);
    c->beta[i] = i < n ? head.beta_of(t0 + i) : 0.0f;
  }
  for (int64_t i = 0; i < CHUNK; i++) {
    c->factor_k[i] = 1.0f;
    c->factor_q[i] = head.scale;
  }
  if (s->normalize) {
    sum_lanes(squares, c->factor_k);
    sum_lanes(squares + CHUNK * VL, c->factor_q);
    for (int64_t h = 0; h < CHUNK; h += VL) {
      store(c->factor_k + h, 1.0f / vsqrt(load<vf>(c->factor_k + h) + NORM_EPS));
      store(c->factor_q + h, head.scale / vsqrt(load<vf>(c->factor_q + h) + NORM_EPS));
    }
  }
}

// The rows of `rows`, k before q, become `left`.
template <class A> static void turn_rows(Chunk<A>* c) {
  const int64_t steps = A::steps(c->ld);
  pack_rows(c->rows, steps, 1, 2 * CHUNK, steps, (float*)c->left, GC_NR);
}
GC_INLINE void put_row(float* rows, int64_t at, vf x, Floats) { store(rows + at, x); }
#if defined(__AVX512BF16__)
GC_INLINE void put_row(float* rows, int64_t at, vf x, Pairs) {
  store((uint16_t*)rows + at, to_bf16(x));
}
#endif

template <class T, class A>
static void decay_by_channel(const Head<T>& head, int64_t t0, int64_t n, Chunk<A>* c) {
  const gc_delta_rule_shape* s = head.s;
  const int64_t ld = c->ld;
  for (int64_t i = 0; i < ld; i += VL) {  // inside, the loops go over tokens with a vector of channels
    vf sum = {}, e[CHUNK], p = splat(1.0f);
#pragma GCC unroll 1
    for (int64_t t = 0; t < CHUNK; t++) {
      const vf g = t < n ? load_row(head.decay + (t0 + t) * s->decay_s[1], i, s->k) : vf{};
      sum += g;
      e[t] = vexp(g);
      store(c->decay + t * ld + i, e[t]);
    }
    store(c->total + i, vexp(sum));
#pragma GCC unroll 1
    for (int64_t t = 0; t < CHUNK; t++) {
      const int64_t at = t * ld + i;
      p *= e[t];
      const vf k = load<vf>(c->k + at) * splat(c->factor_k[t]),
               q = load<vf>(c->q + at) * splat(c->factor_q[t]);
      store(c->k + at, k);
      store(c->q + at, q);
      put_row(c->rows, at, k * p, A());
      put_row(c->rows, CHUNK * ld + at, q * p, A());
    }
    p = splat(1.0f);
#pragma GCC unroll 1
    for (int64_t t = CHUNK - 2; t >= 0; t -= 2) {
      const vf hi = load<vf>(c->k + (t + 1) * ld + i) * p;
      p *= e[t + 1];
      const vf lo = load<vf>(c->k + t * ld + i) * p;
      p *= e[t];
      store_steps<A>(c->tail + A::steps(t) * ld + i, ld, lo, hi);
    }
  }
}

template <class T, class A>
static void decay_by_head(const Head<T>& head, int64_t t0, int64_t n, Chunk<A>* c) {
  const int64_t ld = c->ld;
  float g[CHUNK], sum = 0.0f;
  for (int64_t t = 0; t < CHUNK; t++) {
    g[t] = t < n ? head.decay[(t0 + t) * head.s->decay_s[1]] : 0.0f;
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
        k[m] = load<vf>(c->k + at) * splat(c->factor_k[t + m]);
        put_row(c->rows, at, k[m], A());
        put_row(c->rows, CHUNK * ld + at, load<vf>(c->q + at) * splat(c->factor_q[t + m]), A());
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
  read_tokens(head, t0, n, c);
  if (BY_HEAD) {
    decay_by_head(head, t0, n, c);
  } else {
    decay_by_channel(head, t0, n, c);
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
