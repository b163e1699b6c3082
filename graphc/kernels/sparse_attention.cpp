// Attention of each query over keys of its own choice, for heads that have keys of their own
// (graphc/ops/sparse_attention.py: sparse_attention). Rows are read where they lie; sums are in fp32.
//
// ptr = {query, key, value, indices, start, out}; imm = gc_sparse_shape. Range: batch x queries x heads.
// scratch in 4-byte items: chosen + 4 positions, as many scores, d queries, dv sums, each rounded up
// to 16.
#include "prelude.h"

#include "attention_softmax.h"
#include "row_source.h"
#include "vec.h"

struct gc_sparse_shape {
  int64_t queries, heads, keys, d, dv, chosen;
  int64_t scale;   // bits of a float64
  int64_t starts;  // 0: every sequence begins at position 0
  int64_t q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, i_b, i_t;
};

namespace {
using namespace gc;

constexpr int KEYS = 4;         // keys whose scores are summed up side by side
constexpr int64_t CHAIN = 128;  // keys whose values are added up before they join the others

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t whole(int64_t n) { return (n + 15) & -16; }

// scores[KEYS] = q . rows
template <class T>
static void score_keys(const float* q, const T* const* rows, int64_t d, float scale, float* scores) {
  vf sum[KEYS] = {};
  sweep<1>(0, d, [&](int64_t i, auto lanes, auto) __attribute__((always_inline)) {
    const vf x = vload(q + i, lanes);
#pragma GCC unroll 4
    for (int j = 0; j < KEYS; j++) sum[j] += x * vload(rows[j] + i, lanes);
  });
  for (int j = 0; j < KEYS; j++) scores[j] = hsum(sum[j]) * scale;
}

// out[columns] += weights x rows, C vectors of columns in registers.
template <class T, int C, class W>
GC_INLINE void mix_columns(const float* weights, const int32_t* at, int64_t n, const T* v, int64_t step,
                           W lanes, float* out) {
  vf sum[C] = {};
  for (int64_t j = 0; j < n; j++) {
    const T* row = v + at[j] * step;
    const vf w = splat(weights[j]);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[c] += w * vload(row + c * VL, lanes);
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) vstore(out + c * VL, vload(out + c * VL, lanes) + sum[c], lanes);
}

template <class T>
static void mix(const float* weights, const int32_t* at, int64_t n, const T* v, int64_t step, int64_t dv,
                float* out) {
  int64_t c = 0;
  for (; c + 4 * VL <= dv; c += 4 * VL)
    mix_columns<T, 4>(weights, at, n, v + c, step, All{}, out + c);
  for (; c + VL <= dv; c += VL) mix_columns<T, 1>(weights, at, n, v + c, step, All{}, out + c);
  if (c < dv) mix_columns<T, 1>(weights, at, n, v + c, step, First{dv - c}, out + c);
}

// Scores to weights; gives their sum.
static float softmax(float* scores, int64_t n) {
  float most = NEGATIVE_INFINITY, total = 0.0f;
  for (int64_t j = 0; j < n; j++) most = scores[j] > most ? scores[j] : most;
  const float base = most == NEGATIVE_INFINITY ? 0.0f : most;
  sweep<1>(0, n, [&](int64_t j, auto lanes, auto) {
    const vf e = exp2_negative((vload(scores + j, lanes) - base) * LOG2E);
    total += hsum(only(e, 0.0f, lanes));
    vstore(scores + j, e, lanes);
  });
  return total;
}

template <class T> static void attend(const gc_args* args, int64_t begin, int64_t end) {
  const gc_sparse_shape* s = (const gc_sparse_shape*)args->imm;
  double exact;
  memcpy(&exact, &s->scale, 8);
  const float scale = (float)exact;
  int32_t* const at = (int32_t*)args->scratch;
  float* const scores = (float*)at + whole(s->chosen + KEYS);
  float* const query = scores + whole(s->chosen + KEYS);
  float* const out = query + whole(s->d);
  for (int64_t u = begin; u < end; u++) {
    const int64_t h = u % s->heads, t = u / s->heads % s->queries, b = u / s->heads / s->queries;
    const T* q = (const T*)args->ptr[0] + b * s->q_b + h * s->q_h + t * s->q_t;
    const T* k = (const T*)args->ptr[1] + b * s->k_b + h * s->k_h;
    const T* v = (const T*)args->ptr[2] + b * s->v_b + h * s->v_h;
    const int32_t* indices = (const int32_t*)args->ptr[3] + b * s->i_b + t * s->i_t;
    const int64_t seen =
        rows_seen(s->starts ? (const int32_t*)args->ptr[4] : nullptr, b, t, s->keys);
    int64_t n = 0;
    for (int64_t i = 0; i < s->chosen; i++)
      if (indices[i] >= 0 && indices[i] < seen) at[n++] = indices[i];
    for (int64_t i = 0; i < s->d; i++) query[i] = (float)q[i];
    for (int64_t j = 0; j < n; j += KEYS) {
      const T* rows[KEYS];
      for (int64_t i = 0; i < KEYS; i++) rows[i] = k + at[min64(j + i, n - 1)] * s->k_s;
      score_keys(query, rows, s->d, scale, scores + j);
    }
    const float total = softmax(scores, n);
    for (int64_t i = 0; i < s->dv; i++) out[i] = 0.0f;
    for (int64_t j = 0; j < n; j += CHAIN)
      mix(scores + j, at + j, min64(CHAIN, n - j), v, s->v_s, s->dv, out);
    const float inverse = n == 0 ? 0.0f : 1.0f / total;
    T* to = (T*)args->ptr[5] + ((b * s->queries + t) * s->heads + h) * s->dv;
    for (int64_t i = 0; i < s->dv; i++) to[i] = (T)(out[i] * inverse);
  }
}

}  // namespace

// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif

#ifdef GC_ONLY_f32
GC_EXPORT void gc_sparse_attention_f32(const gc_args* args, int64_t begin, int64_t end) {
  attend<float>(args, begin, end);
}
#endif
#ifdef GC_ONLY_f16
GC_EXPORT void gc_sparse_attention_f16(const gc_args* args, int64_t begin, int64_t end) {
  attend<gc::f16>(args, begin, end);
}
#endif
#ifdef GC_ONLY_bf16
GC_EXPORT void gc_sparse_attention_bf16(const gc_args* args, int64_t begin, int64_t end) {
  attend<gc::bf16>(args, begin, end);
}
#endif
