// The delta rule over few tokens, as a decoding step has them: the lines of delta_rule_chunk.h with the
// state in place. It is read once for what all tokens ask of it, then brought up to date while it is in
// the second level of the cache; meanwhile the next state is asked for.
#pragma once
#include "delta_rule_prepare.h"

namespace {

constexpr int64_t FEW = 8;          // most tokens

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

// xy = rows of `left` x S, for NV vectors of columns and 2 N rows, as many at a time as there are registers.
template <int N, int NV>
GC_INLINE void ask_columns(const FewTokens& f, const float* s, int64_t v, int64_t k, float* xy, int64_t ldxy,
                            Next* next) {
  constexpr int ROWS = 2 * N * NV <= SUMS ? 2 * N : N;
#pragma GCC unroll 1
  for (int64_t r = 0; r < 2 * N; r += ROWS)
    ask_state<ROWS, NV>(f.left + r * f.ld, f.ld, s, v, k, xy + r * ldxy, ldxy, r == 0 ? READ_LINES<N, NV> : 0, next);
}

// N tokens, columns [begin, end) in whole vectors; `next` is a state that will be needed, or null.
template <int N, class T>
static void few_tokens(const Head<T>& head, int64_t begin, int64_t end, const float* next, float* scratch) {
  constexpr int COLUMNS = SUMS / (2 * N) > 0 ? SUMS / (2 * N) : 1;
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
  Next to_come = {next, next ? next + s->k * s->v : nullptr};

  if (head.before) {
    for_columns<COLUMNS>(width, [&](int64_t h, auto vectors) __attribute__((always_inline)) {
      ask_columns<N, decltype(vectors)::count>(f, head.before + begin + h, s->v, s->k, xy + h, width,
                                               &to_come);
    });
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

  for_columns<2 * COLUMNS <= 8 ? 2 * COLUMNS : 8>(width, [&](int64_t h, auto vectors)
                                                      __attribute__((always_inline)) {
    constexpr int NV = decltype(vectors)::count;
    update_columns<N, NV>(f.total, f.tail, f.ld, u + h, width,
                          head.before ? head.before + begin + h : nullptr, head.after + begin + h, s->v,
                          s->k, WRITE_LINES<N, NV>, &to_come);
  });
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
