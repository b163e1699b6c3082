// Columns and rows of small square matrices normalised in turn (graphc/ops/sinkhorn.py): lanes are
// matrices, all of whose items stay in registers.
//
// ptr = {x [matrices][N][N], out}; imm = {rounds, eps as bits of a double}. Range: matrices.
#include "abi.h"
#include "vec.h"

#ifndef GC_SIDE
#define GC_SIDE 4
#endif

namespace gc {
namespace {

constexpr int N = GC_SIDE;

// Divides N items, `step` apart, by their sum + eps.
GC_INLINE void normalise(vf* m, int step, float eps) {
  vf sum[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) sum[i] = m[i * step];
#pragma GCC unroll 3
  for (int half = 1; half < N; half *= 2) {
#pragma GCC unroll 4
    for (int i = 0; i + half < N; i += 2 * half) sum[i] += sum[i + half];
  }
  sum[0] += eps;
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) m[i * step] /= sum[0];
}

void balance(const float* x, float* out, int64_t lanes, int64_t rounds, float eps) {
  float items[N * N][VL];
  for (int64_t l = 0; l < VL; l++)
    for (int i = 0; i < N * N; i++) items[i][l] = l < lanes ? x[l * N * N + i] : 1.0f;
  vf m[N * N];
  for (int i = 0; i < N * N; i++) m[i] = load<vf>(items[i]);
  for (int64_t r = 0; r < rounds; r++) {
    if (r > 0) {
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) normalise(m + i * N, 1, eps);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) normalise(m + j, N, eps);
  }
  for (int i = 0; i < N * N; i++) store(items[i], m[i]);
  for (int64_t l = 0; l < lanes; l++)
    for (int i = 0; i < N * N; i++) out[l * N * N + i] = items[i][l];
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(SIDE)                                                                        \
  GC_EXPORT void gc_sinkhorn_##SIDE(const gc_args* args, int64_t begin, int64_t end) {         \
    const float* x = (const float*)args->ptr[0];                                               \
    float* out = (float*)args->ptr[1];                                                         \
    double eps;                                                                                \
    memcpy(&eps, &args->imm[1], 8);                                                            \
    for (int64_t t = begin, n = SIDE * SIDE; t < end; t += gc::VL)                             \
      gc::balance(x + t * n, out + t * n, end - t < gc::VL ? end - t : gc::VL, args->imm[0],   \
                  (float)eps);                                                                 \
  }
#define GC_EXPAND(SIDE) GC_DEFINE(SIDE)
GC_EXPAND(GC_SIDE)
