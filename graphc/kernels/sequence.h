// Operators over sequence state, as graphc/lowering/sequence writes them out of the definitions of
// graphc/dsl: operands, and what many tokens (sequence_many.h) and few (sequence_few.h) share.
//
// ptr = {operands ..., out, state before, state after, slots}; imm = {tokens, heads, k, v, states,
// fresh, out strides[3], then per operand strides[3], group, type, then the numbers as doubles}.
// Strides are over batch, tokens and heads; `states` counts them if slots choose among them, else 0;
// `fresh`: the state before is zeros, and not read. The range is batch x heads x panels of 32 columns of
// V, which do not depend on each other. States may be the same memory: each unit reads and writes its
// own part.
#pragma once
#include "prelude.h"

#include "chunk_tiles.h"
#include "gemm_micro.h"
#include "state_rows.h"
#include "vmath.h"

namespace {
using namespace gc;

constexpr float NORM_EPS = 1e-6f;  // as in graphc/dsl/interpret.py

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t whole(int64_t n) { return (n + 15) & -16; }

// The scratch of a thread, taken piece by piece.
struct Scratch {
  float* at;
  float* take(int64_t n) { return (at += n) - n; }
};

// One head of one sequence; `operands` is how many there are.
struct Sequence {
  const gc_args* args;
  int64_t operands, b, h, tokens, k, v;
  const float* before;  // null: zeros
  float* after;

  Sequence(const gc_args* args, int64_t operands, int64_t z) : args(args), operands(operands) {
    const int64_t* imm = args->imm;
    b = z / imm[1];
    h = z % imm[1];
    tokens = imm[0];
    k = imm[2];
    v = imm[3];
    int64_t state = z;
    if (imm[4]) {  // what lies outside is never touched, whatever a slot says
      const int64_t slot = ((const int32_t*)args->ptr[operands + 3])[b];
      state = (slot < 0 ? 0 : min64(slot, imm[4] - 1)) * imm[1] + h;
    }
    state *= k * v;
    before = imm[5] ? nullptr : (const float*)args->ptr[operands + 1] + state;
    after = (float*)args->ptr[operands + 2] + state;
  }
  const int64_t* about(int64_t i) const { return args->imm + 9 + 5 * i; }
  int64_t step(int64_t i) const { return about(i)[1]; }
  template <class T> const T* rows(int64_t i) const {
    const int64_t* a = about(i);
    return (const T*)args->ptr[i] + b * a[0] + h / a[3] * a[2];
  }
  template <class T> T* out() const { return (T*)args->ptr[operands] + b * args->imm[6] + h * args->imm[8]; }
  int64_t out_step() const { return args->imm[7]; }
  float number(int64_t i) const {
    double x;
    memcpy(&x, args->imm + 9 + 5 * operands + i, sizeof x);
    return (float)x;
  }
  // Tokens t0 .. t0 + n of a column; zeros up to a chunk.
  void column(int64_t i, int64_t t0, int64_t n, float* to) const {
    const int64_t* a = about(i);
    const int64_t at = b * a[0] + h / a[3] * a[2];
    for (int64_t t = 0; t < CHUNK; t++) {
      const int64_t from = at + (t0 + t) * a[1];
      to[t] = t >= n          ? 0.0f
              : a[4] == 0 ? ((const float*)args->ptr[i])[from]
              : a[4] == 1 ? to_float(((const bf16*)args->ptr[i])[from])
                          : to_float(((const f16*)args->ptr[i])[from]);
    }
  }
};

// Tokens of rows of n floats, zero up to a multiple of 16 and from `tokens` to ROWS; and partial sums of
// their squares [ROWS][VL], if `squares` is given.
template <int64_t ROWS, class T>
static void read_rows(const T* from, int64_t step, int64_t tokens, int64_t n, float* to, float* squares) {
  const int64_t ld = whole(n);
  for (int64_t t = 0; t < ROWS; t++) {
    vf sum = {};
    if (t >= tokens) {
      memset(to + t * ld, 0, (size_t)ld * sizeof(float));
    } else {
      for (int64_t i = 0; i < ld; i += VL) {
        const vf x = load_row(from + t * step, i, n);
        store(to + t * ld + i, x);
        sum += x * x;
      }
    }
    if (squares) store(squares + t * VL, sum);
  }
}

// Of a log-decay g [16] of tokens: exp of its sums up to and with each, and from behind each to the end.
static void fade_by_head(const float* g, int64_t rows, float* prefix, float* suffix) {
  float sum = 0.0f;
  for (int64_t t = 0; t < CHUNK; t++) prefix[t] = sum += g[t];
  sum = 0.0f;
  for (int64_t t = CHUNK - 1; t >= 0; t--) {
    suffix[t] = sum;
    if (t < rows) sum += g[t];
  }
  for (int64_t h = 0; h < CHUNK; h += VL) {
    store(prefix + h, vexp(load<vf>(prefix + h)));
    store(suffix + h, vexp(load<vf>(suffix + h)));
  }
}

// COUNT registers of NP numbers by turns become those of the first, then of the second, ... in the order
// of their numbers' bits turned round.
template <int NP, int COUNT> GC_INLINE void take_apart(vf* t) {
  if constexpr (NP > 1) {
    vf u[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT / 2; i++) {
      u[i] = every_second<0>(t[2 * i], t[2 * i + 1], ALL_LANES);
      u[COUNT / 2 + i] = every_second<1>(t[2 * i], t[2 * i + 1], ALL_LANES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) t[i] = u[i];
    take_apart<NP / 2, COUNT / 2>(t);
    take_apart<NP / 2, COUNT / 2>(t + COUNT / 2);
  }
}

}  // namespace
