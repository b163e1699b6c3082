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

#include <utility>

#include "attention_tile.h"
#include "gemm_micro.h"
#include "vmath.h"

namespace {
using namespace gc;

constexpr int64_t CHUNK = 16;
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

// The vector at `i` of a row of n, zero behind its end.
template <class T> GC_INLINE vf load_row(const T* p, int64_t i, int64_t n) {
  if (i + VL <= n) return vload(p + i, All{});
  return i < n ? vload(p + i, First{n - i}) : vf{};
}
template <class T> GC_INLINE void store_row(const float* row, int64_t columns, T* to) {
  int64_t h = 0;
  for (; h + VL <= columns; h += VL) vstore(to + h, load<vf>(row + h), All{});
  if (h < columns) vstore(to + h, load<vf>(row + h), First{columns - h});
}

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

// -- sums of registers --------------------------------------------------------------------------

constexpr std::make_integer_sequence<int, VL> ALL_LANES{};

// Half H of each segment of S lanes, the segments of a before those of b.
template <int S, int H, int... L> GC_INLINE vf halves(vf a, vf b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(
      a, b, (L / (S / 2) % (VL / S) * S + H * (S / 2) + L % (S / 2) + (L / (S / 2)) / (VL / S) * VL)...);
}
// Every second lane of a, then of b, from H on.
template <int H, int... L> GC_INLINE vf every_second(vf a, vf b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(a, b, (2 * L + H)...);
}

// Pairs of registers of sums over S lanes become one each, of sums over S / 2 lanes; and so on until one
// register is left of COUNT, or sums are over one lane.
template <int S, int COUNT> GC_INLINE void sum_segments(vf* t) {
  if constexpr (S > 1 && COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; i++)
      t[i] = halves<S, 0>(t[2 * i], t[2 * i + 1], ALL_LANES) + halves<S, 1>(t[2 * i], t[2 * i + 1], ALL_LANES);
    sum_segments<S / 2, COUNT / 2>(t);
  }
}
// to[i] = the sum of the lanes of parts[i], for a chunk of them.
static void sum_lanes(const float* parts, float* to) {
  for (int64_t h = 0; h < CHUNK; h += VL) {
    vf t[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) t[i] = load<vf>(parts + (h + i) * VL);
    sum_segments<VL, VL>(t);
    store(to + h, t[0]);
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

// A product that is rounded whatever it is added to: of a b + c d a compiler may round either, and not
// the same one for one and for many vectors.
GC_INLINE vf rounded_product(vf a, vf b) {
  vf x = a * b;
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}

}  // namespace
