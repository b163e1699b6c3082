// What the kernels of attention of few queries share beside the products: a row of scores becomes
// weights, and pieces of the keys leave records [maximum, sum, ..][dv] that are merged in their order.
#pragma once
#include "attention_softmax.h"
#include "vmath.h"

namespace gc {

constexpr int64_t HEAD = 16;  // floats before the sums of a record

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
GC_INLINE int64_t whole(int64_t n) { return (n + 31) & -32; }
GC_INLINE int64_t record(int64_t dv) { return HEAD + whole(dv); }
GC_INLINE double float_of(int64_t bits) { double d; memcpy(&d, &bits, 8); return d; }

// Number i of a mask or of sinks in units of log2. Finite values stay finite: a row of finfo.min is
// a row of equal scores, not a masked one.
GC_INLINE float addend(const void* from, int64_t type, int64_t i) {
  if (type == 4) return ((const uint8_t*)from)[i] ? 0.0f : NEGATIVE_INFINITY;
  const float x = type == 1 ? ((const float*)from)[i]
      : type == 2 ? (float)((const bf16*)from)[i] : (float)((const f16*)from)[i];
  const float scaled = x * LOG2E;
  return scaled == NEGATIVE_INFINITY && x != NEGATIVE_INFINITY ? -__FLT_MAX__ : scaled;
}

// n dots to scores in units of log2, whole vectors of them; `scale` is in these units, `cap` natural.
GC_INLINE void scale_scores(float* row, int64_t n, float scale, float cap) {
  if (cap == 0.0f) {
    for (int64_t j = 0; j < n; j += VL) store(row + j, load<vf>(row + j) * scale);
  } else {
    const float inner = scale / (cap * LOG2E), outer = cap * LOG2E;
    for (int64_t j = 0; j < n; j++) row[j] = vtanh(row[j] * inner) * outer;
  }
}

// Scores of a row to weights 2^(score - maximum), zeros behind them up to whole vectors; the sums so
// far are to be multiplied by `factor`. between(i) is called before vector i. Not EXACT: for weights that
// become bf16.
template <bool EXACT, class F>
GC_INLINE void weigh_row(float* row, int64_t n, float* maximum, float* total, float* factor, F between) {
  for (int64_t j = n; j & (VL - 1); j++) row[j] = NEGATIVE_INFINITY;
  vf most = splat(*maximum);
  for (int64_t j = 0; j < n; j += VL) most = max_or_first(most, load<vf>(row + j));
  const float now = most_of(most);
  const float base = now == NEGATIVE_INFINITY ? 0.0f : now;
  *factor = exp2_negative1(*maximum - base);
  *maximum = now;
  vf sum = {};
  for (int64_t j = 0; j < n; j += VL) {
    between(j / VL);
    const vf e = exp2_weight<EXACT>(load<vf>(row + j) - base);
    store(row + j, e);
    sum += e;
  }
  *total = *total * *factor + sum_of(sum);
}

// The sum of `count` records.
static inline void merge_records(const float* p, int64_t count, int64_t dv, float* x, float* maximum,
                                 float* total) {
  const int64_t step = record(dv);
  float most = NEGATIVE_INFINITY, all = 0.0f;
  for (int64_t c = 0; c < count; c++) most = p[c * step] > most ? p[c * step] : most;
  const float base = most == NEGATIVE_INFINITY ? 0.0f : most;
  for (int64_t j = 0; j < dv; j++) x[j] = 0.0f;
  for (int64_t c = 0; c < count; c++) {
    const float* part = p + c * step;
    const float factor = exp2_negative1(part[0] - base);
    all += part[1] * factor;
    for (int64_t j = 0; j < dv; j++) x[j] += part[HEAD + j] * factor;
  }
  *maximum = most;
  *total = all;
}

// What a row is multiplied by whose weights sum up to `total` under `maximum`; a sink (-inf: none) is
// one more weight.
static inline float row_factor(float maximum, float total, float sink) {
  if (sink != NEGATIVE_INFINITY && maximum != NEGATIVE_INFINITY) {
    const float most = sink > maximum ? sink : maximum, part = exp2_negative1(maximum - most);
    return part / (total * part + exp2_negative1(sink - most));
  }
  return total == 0.0f ? 0.0f : 1.0f / total;
}

template <class T>
GC_INLINE void put_row(const float* x, int64_t n, float factor, T* out, int64_t step) {
  if (step == 1) {
    for (int64_t i = 0; i < n; i++) out[i] = (T)(x[i] * factor);
  } else {
    for (int64_t i = 0; i < n; i++) out[i * step] = (T)(x[i] * factor);
  }
}

}  // namespace gc
