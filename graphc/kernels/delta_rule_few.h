// The delta rule over few tokens, as a decoding step has them: the lines of delta_rule_chunk.h with the
// state in place. It is read once for what all tokens ask of it, then brought up to date while it is in
// the second level of the cache; meanwhile the next state is asked for.
#pragma once
#include "delta_rule_prepare.h"

namespace {

constexpr int64_t FEW = 8;          // most tokens
constexpr int SUMS = GC_VBYTES == 64 ? 16 : 8;  // registers of sums

// As in delta_rule_prepare.h, in rows [N][ld] of floats: `left` has those of k, then those of q.
struct FewTokens {
  int64_t ld;
  float *left, *tail, *total, *k, *q, *decay;
  float told[FEW][FEW], shown[FEW][FEW], beta[FEW];
};

template <class T> static void prepare_few(const Head<T>& head, int64_t n, FewTokens* f) {
  const gc_delta_rule_shape* s = head.s;
  const int64_t ld = f->ld;
  for (int64_t i = 0; i < ld; i += VL) store(f->total + i, vf{});
  for (int64_t t = 0; t < n; t++) {
    float *const k = f->k + t * ld, *const q = f->q + t * ld, *const e = f->decay + t * ld;
    const vf k2 = read_row(head.k + t * s->k_s[1], s->k, k), q2 = read_row(head.q + t * s->q_s[1], s->k, q);
    vf factor_k = splat(1.0f), factor_q = splat(head.scale);
    if (s->normalize) {
      factor_k = 1.0f / vsqrt(splat(hsum(k2) + NORM_EPS));
      factor_q = head.scale / vsqrt(splat(hsum(q2) + NORM_EPS));
    }
    f->beta[t] = head.beta_of(t);
    for (int64_t i = 0; i < ld; i += VL) {
      const vf g = s->by_head ? splat(head.decay[t * s->decay_s[1]])
                              : load_row(head.decay + t * s->decay_s[1], i, s->k);
      store(f->total + i, load<vf>(f->total + i) + g);
      store(e + i, vexp(g));
      store(k + i, load<vf>(k + i) * factor_k);
      store(q + i, load<vf>(q + i) * factor_q);
    }
  }
  for (int64_t i = 0; i < ld; i += VL) {
    store(f->total + i, vexp(load<vf>(f->total + i)));
    vf p = splat(1.0f);
    for (int64_t t = 0; t < n; t++) {
      p *= load<vf>(f->decay + t * ld + i);
      store(f->left + t * ld + i, load<vf>(f->k + t * ld + i) * p);
      store(f->left + (n + t) * ld + i, load<vf>(f->q + t * ld + i) * p);
    }
    p = splat(1.0f);
    for (int64_t t = n - 1; t >= 0; t--) {
      store(f->tail + t * ld + i, load<vf>(f->k + t * ld + i) * p);
      p *= load<vf>(f->decay + t * ld + i);
    }
  }
  for (int64_t j = 0; j < n; j++) {
    float* const r = f->k + j * ld;  // not needed otherwise any more: what remains of it
    for (int64_t t = j; t < n; t++) {
      vf a = {}, b = {};
      for (int64_t i = 0; i < ld; i += VL) {
        vf x = load<vf>(r + i);
        if (t > j) store(r + i, x *= load<vf>(f->decay + t * ld + i));
        a += x * load<vf>(f->k + t * ld + i);
        b += x * load<vf>(f->q + t * ld + i);
      }
      f->told[t][j] = hsum(a) * f->beta[t];
      f->shown[t][j] = hsum(b);
    }
  }
}

// xy [ROWS][NV vectors] = rows of `left` x S.
template <int ROWS, int NV>
GC_INLINE void ask_state(const float* left, int64_t ld, const float* s, int64_t v, int64_t k, float* xy,
                         int64_t ldxy) {
  vf acc[ROWS][NV] = {};
  for (int64_t c = 0; c < k; c++, s += v) {
    vf sv[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) sv[i] = load<vf>(s + i * VL);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const vf a = splat(left[r * ld + c]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) acc[r][i] += a * sv[i];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) store(xy + r * ldxy + i * VL, acc[r][i]);
}

// The same for NV vectors of columns and 2 N rows, as many at a time as there are registers.
template <int N, int NV>
static void ask_columns(const FewTokens& f, const float* s, int64_t v, int64_t k, float* xy, int64_t ldxy) {
  constexpr int ROWS = 2 * N * NV <= SUMS ? 2 * N : N;
  for (int64_t r = 0; r < 2 * N; r += ROWS)
    ask_state<ROWS, NV>(f.left + r * f.ld, f.ld, s, v, k, xy + r * ldxy, ldxy);
}

// N tokens, columns [begin, end) in whole vectors; `next` is a state that will be needed.
template <int N, class T>
static void few_tokens(const Head<T>& head, int64_t begin, int64_t end, const float* next, float* scratch) {
  const gc_delta_rule_shape* s = head.s;
  const auto take = [&scratch](int64_t n) { return (scratch += n) - n; };
  FewTokens f;
  f.ld = whole(s->k);
  f.left = take(2 * N * f.ld);
  f.tail = take(N * f.ld);
  f.k = take(N * f.ld);
  f.q = take(N * f.ld);
  f.decay = take(N * f.ld);
  f.total = take(f.ld);
  const int64_t width = end - begin;
  float *const xy = take(2 * N * width), *const u = take(N * width);
  prepare_few(head, N, &f);

  if (head.before) {
    constexpr int NV = SUMS / (2 * N) > 0 ? SUMS / (2 * N) : 1;
    const float* const state = head.before + begin;
    int64_t h = 0;
    for (; h + NV * VL <= width; h += NV * VL)
      ask_columns<N, NV>(f, state + h, s->v, s->k, xy + h, width);
    if (NV > 1)
      for (; h < width; h += VL) ask_columns<N, 1>(f, state + h, s->v, s->k, xy + h, width);
  } else {
    memset(xy, 0, (size_t)(2 * N * width) * sizeof(float));
  }

  for (int64_t h = 0; h < width; h += VL) {
#pragma GCC unroll 1
    for (int t = 0; t < N; t++) {
      vf sum = splat(f.beta[t]) *
          (vload(head.v + t * s->v_s[1] + begin + h, All{}) - load<vf>(xy + t * width + h));
      vf out = load<vf>(xy + (N + t) * width + h);
      for (int j = 0; j < t; j++) {
        const vf x = load<vf>(u + j * width + h);
        sum -= splat(f.told[t][j]) * x;
        out += splat(f.shown[t][j]) * x;
      }
      store(u + t * width + h, sum);
      vstore(head.out + t * s->out_s[1] + begin + h, out + splat(f.shown[t][t]) * sum, All{});
    }
  }

  for (int64_t c = 0; c < s->k; c++) {
    const float* const from = head.before + c * s->v + begin;
    float* const to = head.after + c * s->v + begin;
    const vf total = splat(f.total[c]);
    vf tail[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; t++) tail[t] = splat(f.tail[t * f.ld + c]);
    for (int64_t h = 0; h < width; h += VL) {
      if (next && h % 16 == 0) __builtin_prefetch(next + c * s->v + h, 0, 2);
      vf x = head.before ? load<vf>(from + h) * total : vf{};
#pragma GCC unroll 8
      for (int t = 0; t < N; t++) x += tail[t] * load<vf>(u + t * width + h);
      store(to + h, x);
    }
  }
}

template <class T>
static void few(const Head<T>& head, int64_t begin, int64_t end, const float* next, float* scratch) {
  switch (head.s->tokens) {
    case 1: return few_tokens<1>(head, begin, end, next, scratch);
    case 2: return few_tokens<2>(head, begin, end, next, scratch);
    case 3: return few_tokens<3>(head, begin, end, next, scratch);
    case 4: return few_tokens<4>(head, begin, end, next, scratch);
    case 5: return few_tokens<5>(head, begin, end, next, scratch);
    case 6: return few_tokens<6>(head, begin, end, next, scratch);
    case 7: return few_tokens<7>(head, begin, end, next, scratch);
    default: return few_tokens<8>(head, begin, end, next, scratch);
  }
}

}  // namespace
