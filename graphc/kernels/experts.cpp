// The two products of a mixture of experts, over the rows that experts_order.cpp sorted. Weights are
// panels (gemm.h), one expert's after the other's; those of an expert without rows are not touched.
//
// Range of both: as many (block, panel) units as there can be. How many there are is known from the
// table of blocks; they are spread over the range in order, so that each part of it has its share.
//
// gc_experts_gate_*  hidden[p] = act(gate x[t]) * (up x[t]) for row p of the order, t its token.
//   A panel holds 16 columns of the gate and the same 16 of up.
//   ptr: x [T, D], panels, order, blocks, hidden [pairs, I].
//   imm: range, panels, D, I, row stride of x, K, elements of an expert's weight,
//        caps of the gate and of up, limit of both (bits of float; 0: none).
//   scratch: GC_GEMM_ROWS rows of x, rounded up to 64 bytes, then that of a product of depth D.
// gc_experts_down_*  parts[order[p]] = down hidden[p].
//   ptr: hidden, panels, order, blocks, parts [T * K, D].
//   imm: range, panels, I, D, elements of an expert's weight.   scratch: that of a product.
#include "gemm.h"
#include "vmath.h"

#ifndef GC_EXPERTS
#define GC_EXPERTS f32, float
#endif
#ifndef GC_GATE
#define GC_GATE(g) vsigmoid(g)  // act(g) / g
#endif

namespace gc {
namespace {

constexpr int64_t HALF = 16;  // columns of the gate in a panel
constexpr float SQRT1_2 = 0.70710678118654752f;

GC_INLINE vf phi(vf g) { return 0.5f + 0.5f * verf(g * SQRT1_2); }
GC_INLINE vf phi_tanh(vf g) {
  return vsigmoid(1.5957691216057308f * (g + 0.044715f * (g * g * g)));
}
GC_INLINE vf capped(vf x, float cap) { return cap > 0 ? cap * vtanh(x / cap) : x; }

// f(block, first panel, its end) for the units of [begin, end).
template <class F>
GC_INLINE void each_block(const gc_args* args, int64_t begin, int64_t end, F f) {
  const int32_t* const blocks = (const int32_t*)args->ptr[3];
  const int64_t range = args->imm[0], panels = args->imm[1], units = blocks[0] * panels;
  const int64_t stop = end * units / range;
  for (int64_t u = begin * units / range; u < stop;) {
    const int64_t first = u % panels, some = panels - first < stop - u ? panels - first : stop - u;
    f(blocks + 3 + u / panels * 3, first, first + some);
    u += some;
  }
}

gc_gemm product_of(int64_t n, int64_t k) {
  gc_gemm g = {};
  g.n = n;
  g.k = k;
  for (int d = 0; d < GC_BATCH_DIMS; ++d) g.size[d] = 1;
  g.a_k = 1;
  g.alpha = 1.0f;
  return g;
}

// ptr: hidden of the block; imm: I, caps, limit.
template <class T>
void store_gated(const gc_args* args, const float* acc, int64_t ld, int64_t, int64_t m0, int64_t mr,
                 int64_t n0, int64_t nr) {
  const int64_t width = args->imm[0];
  const float gate_cap = bits_to_f32((uint32_t)args->imm[1]),
              up_cap = bits_to_f32((uint32_t)args->imm[2]),
              limit = args->imm[3] ? bits_to_f32((uint32_t)args->imm[3]) : INFINITY;
  T* out = (T*)args->ptr[0] + m0 * width;
  for (int64_t r = 0; r < mr; ++r, out += width, acc += ld) {
    for (int64_t n = 0; n < nr; n += GC_NR) {
      const int64_t column = (n0 + n) / 2;
      const float* const gate = acc + n;
      sweep<1>(0, width - column < HALF ? width - column : HALF,
               [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
        const vf g = vmin(load<vf>(gate + i), limit);
        const vf u = vmax(vmin(load<vf>(gate + HALF + i), limit), -limit);
        vstore(out + column + i, capped(g, gate_cap) * GC_GATE(g) * capped(u, up_cap), w);
      });
    }
  }
}

// ptr: parts, order of the block; imm: D.
template <class T>
void store_part(const gc_args* args, const float* acc, int64_t ld, int64_t, int64_t m0, int64_t mr,
                int64_t n0, int64_t nr) {
  const int64_t width = args->imm[0];
  const int32_t* const order = (const int32_t*)args->ptr[1] + m0;
  for (int64_t r = 0; r < mr; ++r, acc += ld) {
    T* const out = (T*)args->ptr[0] + order[r] * width + n0;
    sweep<1>(0, nr, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
      vstore(out + i, vload(acc + i, w), w);
    });
  }
}

template <class T>
void gate(const gc_args* args, gc_gemm_function run, int64_t begin, int64_t end) {
  const int64_t panels = args->imm[1], depth = args->imm[2], step = args->imm[4],
                slots = args->imm[5];
  const int32_t* const order = (const int32_t*)args->ptr[2];
  T* const rows = (T*)args->scratch;
  char* const scratch =
      (char*)args->scratch + (GC_GEMM_ROWS * depth * (int64_t)sizeof(T) + 63) / 64 * 64;
  each_block(args, begin, end, [&](const int32_t* block, int64_t first, int64_t last) {
    gc_gemm g = product_of(panels * GC_NR, depth);
    g.m = block[2];
    g.b = (const T*)args->ptr[1] + block[0] * args->imm[6];
    // A single row is read where it is; more are brought together, which costs far less than
    // packing them does.
    const T* const x = (const T*)args->ptr[0];
    const int32_t* const pairs = order + block[1];
    g.a = x + pairs[0] / slots * step;
    if (g.m > 1) {
      for (int64_t r = 0; r < g.m; ++r)
        memcpy((void*)(rows + r * depth), x + pairs[r] / slots * step, (size_t)depth * sizeof(T));
      g.a = rows;
      g.a_m = depth;
    }
    void* const pointers[1] = {(T*)args->ptr[4] + block[1] * args->imm[3]};
    const int64_t numbers[4] = {args->imm[3], args->imm[7], args->imm[8], args->imm[9]};
    const gc_args inner = {pointers, numbers, scratch};
    run(&g, &inner, store_gated<T>, first, last);
  });
}

template <class T>
void down(const gc_args* args, gc_gemm_function run, int64_t begin, int64_t end) {
  const int64_t depth = args->imm[2], width = args->imm[3];
  each_block(args, begin, end, [&](const int32_t* block, int64_t first, int64_t last) {
    gc_gemm g = product_of(width, depth);
    g.m = block[2];
    g.a = (const T*)args->ptr[0] + block[1] * depth;
    g.a_m = depth;
    g.b = (const T*)args->ptr[1] + block[0] * args->imm[4];
    void* const pointers[2] = {args->ptr[4], (int32_t*)args->ptr[2] + block[1]};
    const gc_args inner = {pointers, &width, args->scratch};
    run(&g, &inner, store_part<T>, first, last);
  });
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(TAG, TYPE)                                                                   \
  extern "C" gc_gemm_function_type gc_gemm_##TAG;                                              \
  GC_EXPORT void gc_experts_gate_##TAG(const gc_args* args, int64_t begin, int64_t end) {      \
    gc::gate<TYPE>(args, gc_gemm_##TAG, begin, end);                                           \
  }                                                                                            \
  GC_EXPORT void gc_experts_down_##TAG(const gc_args* args, int64_t begin, int64_t end) {      \
    gc::down<TYPE>(args, gc_gemm_##TAG, begin, end);                                           \
  }
#define GC_EXPAND(...) GC_DEFINE(__VA_ARGS__)
GC_EXPAND(GC_EXPERTS)
