// The delta rule with decay (graphc/ops/delta_rule.py): operands, and what both ways of computing it
// share. Many tokens go in chunks of sixteen (delta_rule_chunk.h), few in one walk over the state
// (delta_rule_few.h).
//
// ptr = {q, k, v, decay, beta, out, state before, state after, slots}; imm = gc_delta_rule_shape. The
// range is batch x value heads x panels of 32 columns of V, which do not depend on each other; the
// panels of a head that one call gets are computed together. States may be the same memory: each unit
// reads and writes its own part.
#pragma once
#include "prelude.h"

#include "state_rows.h"
#include "vmath.h"

struct gc_delta_rule_shape {
  int64_t tokens, heads, group, k, v;  // value heads; value heads per key head; channels
  int64_t states;                      // how many there are, if slots choose among them; else 0
  int64_t fresh;                       // the state before is zeros, and not read
  int64_t by_head;                     // one decay for a head, not one for a key channel
  int64_t normalize, beta_type;        // 0 fp32, 1 bf16, 2 fp16
  int64_t scale;                       // a double
  int64_t strength;                    // a double: of the sigmoid of beta; 0: beta as it is
  int64_t q_s[3], k_s[3], v_s[3], decay_s[3], beta_s[3], out_s[3];  // over batch, tokens, heads
};

namespace {
using namespace gc;

constexpr float NORM_EPS = 1e-6f;  // as in graphc/ops/delta_rule.py

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t whole(int64_t n) { return (n + 15) & -16; }

// One value head of one sequence.
template <class T> struct Head {
  const gc_delta_rule_shape* s;
  const T *q, *k, *v;
  const float* decay;
  const void* beta;
  int64_t beta_offset;
  T* out;
  const float* before;  // null: zeros
  float* after;
  float scale, strength;

  float beta_of(int64_t t) const {
    const int64_t i = beta_offset + t * s->beta_s[1];
    const float x = s->beta_type == 0   ? ((const float*)beta)[i]
                    : s->beta_type == 1 ? to_float(((const bf16*)beta)[i])
                                        : to_float(((const f16*)beta)[i]);
    return strength == 0.0f ? x : strength * vsigmoid(x);
  }
};

template <class T> static Head<T> head_of(const gc_args* args, int64_t z) {
  const gc_delta_rule_shape* s = (const gc_delta_rule_shape*)args->imm;
  const int64_t b = z / s->heads, h = z % s->heads;
  const auto at = [b](const int64_t (&step)[3], int64_t head) { return b * step[0] + head * step[2]; };
  double scale, strength;
  memcpy(&scale, &s->scale, sizeof scale);
  memcpy(&strength, &s->strength, sizeof strength);
  int64_t state = z;
  if (s->states) {  // what lies outside is never touched, whatever a slot says
    const int64_t slot = ((const int32_t*)args->ptr[8])[b];
    state = (slot < 0 ? 0 : min64(slot, s->states - 1)) * s->heads + h;
  }
  state *= s->k * s->v;
  return {s,
          (const T*)args->ptr[0] + at(s->q_s, h / s->group),
          (const T*)args->ptr[1] + at(s->k_s, h / s->group),
          (const T*)args->ptr[2] + at(s->v_s, h),
          (const float*)args->ptr[3] + at(s->decay_s, h),
          args->ptr[4],
          at(s->beta_s, h),
          (T*)args->ptr[5] + at(s->out_s, h),
          s->fresh ? nullptr : (const float*)args->ptr[6] + state,
          (float*)args->ptr[7] + state,
          (float)scale,
          (float)strength};
}

// A row as floats, zero up to a multiple of 16, and the partial sums of its squares.
template <class T> GC_INLINE vf read_row(const T* p, int64_t n, float* row) {
  vf square = {};
  for (int64_t i = 0; i < whole(n); i += VL) {
    const vf x = load_row(p, i, n);
    store(row + i, x);
    square += x * x;
  }
  return square;
}

}  // namespace
