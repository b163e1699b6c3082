// Few tokens of operators over sequence state, which stays in place: rows of it read for all of them,
// brought up to date while they are in the second level of the cache, and the next state asked for.
#pragma once
#include "attention_tile.h"
#include "vec.h"

namespace gc {

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

constexpr int SUMS = GC_VBYTES == 64 ? 16 : 8;  // registers of sums

// The lines of a state that is needed soon, asked for a few at a time: memory would else be idle while
// this one is worked on.
struct Next {
  const float *at, *end;
  inline __attribute__((always_inline)) void ask(int lines) {
    for (int i = 0; i < lines; i++, at += 16)
      if (at < end) __builtin_prefetch(at, 0, 2);
  }
};

// How many of them go with each row of NV vectors that is read, and that is written, for N tokens. One
// token reads a state as fast as memory delivers it in order, and asks for the first quarter of the next
// while it writes: what is asked for comes at half that pace. More tokens have enough to do before; all
// of it is asked for in time. Measured.
template <int N, int NV> constexpr int READ_LINES = (N == 1 ? 0 : N == 2 ? NV / 2 : NV) * VL / 16;
template <int N, int NV> constexpr int WRITE_LINES = (N == 1 ? NV / 4 : N == 2 ? NV / 2 : 0) * VL / 16;

// f(h, vectors as a type) for all columns, NV vectors at a time.
template <int NV, class F> GC_INLINE void for_columns(int64_t width, F f) {
  int64_t h = 0;
  for (; h + NV * VL <= width; h += NV * VL) f(h, Rows<NV>());
  if (NV > 1)
    for (; h < width; h += VL) f(h, Rows<1>());
}

// xy [ROWS][NV vectors] = rows [ROWS][ld] x state.
template <int ROWS, int NV>
GC_INLINE void ask_state(const float* rows, int64_t ld, const float* state, int64_t v, int64_t k, float* xy,
                         int64_t ldxy, int lines, Next* next) {
  vf acc[ROWS][NV] = {};
  Next to_come = *next;
  for (int64_t c = 0; c < k; c++) {
    vf sv[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) sv[i] = load<vf>(state + c * v + i * VL);
    to_come.ask(lines);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const vf a = splat(rows[r * ld + c]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) acc[r][i] += a * sv[i];
    }
  }
  *next = to_come;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) store(xy + r * ldxy + i * VL, acc[r][i]);
}

// NV vectors of columns of the state behind ROWS rows of tails and of what is written.
template <int ROWS, int NV>
GC_INLINE void update_columns(const float* total, const float* tail, int64_t ld, const float* u, int64_t ldu,
                              const float* from, float* to, int64_t v, int64_t k, int lines, Next* next) {
  vf rows[ROWS][NV];
#pragma GCC unroll 16
  for (int t = 0; t < ROWS; t++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) rows[t][i] = load<vf>(u + t * ldu + i * VL);
  Next to_come = *next;
  for (int64_t c = 0; c < k; c++) {
    const vf kept = splat(total[c]);
    vf x[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) x[i] = from ? rounded_product(load<vf>(from + c * v + i * VL), kept) : vf{};
    to_come.ask(lines);
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; t++) {
      const vf a = splat(tail[t * ld + c]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) x[i] += a * rows[t][i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) store(to + c * v + i * VL, x[i]);
  }
  *next = to_come;
}

}  // namespace gc
