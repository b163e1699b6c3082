// A panel of 32 queries on its way over the keys: scores become weights under a maximum that grows.
#pragma once
#include "attention_tile.h"

namespace gc {

template <class Item> struct Panel {
  int64_t first, lanes, width;  // lanes in use, and whole vectors of them
  int64_t t0, t1;               // queries t0 .. t1
  int64_t begin, end;           // keys that some lane sees; begin is a multiple of 32
  bool fresh;                   // nothing summed yet
  Item* q;                      // [steps(d)][32]
  float *out, *base, *total;    // [32][columns]; maximum and sum of weights: [32]
};

// Number i of sinks or masks of a type (gc_prefill_shape).
static inline float read(const void* p, int64_t type, int64_t i) {
  if (type == 1) return ((const float*)p)[i];
  return type == 2 ? to_float(((const bf16*)p)[i]) : to_float(((const f16*)p)[i]);
}

// Turns a block of scores into weights; updates maximum and total of the panel, and rescales what it
// has summed so far.
template <class A, class Item>
static void weigh(Panel<Item>* p, float* scores, int64_t keys, float factor, const float* top,
                  int64_t columns) {
  float rescale[GC_NR];
  for (int64_t h = 0; h < p->width; h += VL) {
    const vf before = load<vf>(p->base + h);
    const vf now = max_or_first(before, load<vf>(top + h));
    store(p->base + h, now);
    const vf base = now == NEGATIVE_INFINITY ? vf{} : now;  // nothing seen yet: all stay 0
    const vf change = exp2_weight<true>((before - base) * factor);
    store(rescale + h, change);
    vf sum;
    A::weights(scores + h, keys, factor, base, &sum);
    store(p->total + h, load<vf>(p->total + h) * change + sum);
  }
  if (p->fresh) return;
  for (int64_t i = 0; i < p->lanes; i++)
    if (rescale[i] != 1.0f)
      for (int64_t j = 0; j < columns; j++) p->out[i * columns + j] *= rescale[i];
}

static inline void maximum(const float* scores, int64_t keys, int64_t width, float* top) {
  for (int64_t h = 0; h < width; h += VL) {
    vf m[2] = {splat(NEGATIVE_INFINITY), splat(NEGATIVE_INFINITY)};
    for (int64_t j = 0; j < keys; j++)
      m[j % 2] = max_or_first(m[j % 2], load<vf>(scores + j * GC_NR + h));
    store(top + h, max_or_first(m[0], m[1]));
  }
}

// The sums of a panel's lanes over their weights; zeros for a lane that sees nothing.
template <class Item> static void finish(Panel<Item>* p, int64_t columns) {
  for (int64_t l = 0; l < p->lanes; l++) {
    const bool none = p->fresh || p->total[l] == 0.0f;
    const float inverse = none ? 0.0f : 1.0f / p->total[l];
    float* row = p->out + l * columns;
    for (int64_t c = 0; c < columns; c++) row[c] = none ? 0.0f : row[c] * inverse;
  }
}

}  // namespace gc
