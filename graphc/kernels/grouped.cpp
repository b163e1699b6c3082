// Grouped product: rows of x that belong to group e, times the weight of that group. The rows of
// a group follow one another; offs holds the end of each group. Work follows the rows.
//
// ptr: x [S, K], weight panels of each group (gemm.h), offs, out [S, N].
// imm: S, N, K, groups, bytes of an item of offs, row stride of x, elements of one packed weight.
// Range: (ceil(S / GC_GEMM_ROWS) + groups) * panels, an upper bound of the units there can be.
// Rows after the last group are zero. Scratch: that of a product of depth K.
#include "gemm.h"
#include "num.h"

namespace gc {
namespace {

template <class T>
void store(const gc_args* args, const float* acc, int64_t ld, int64_t, int64_t m0, int64_t mr,
           int64_t n0, int64_t nr) {
  const int64_t n = args->imm[1];
  T* out = (T*)args->ptr[3] + m0 * n + n0;
  for (int64_t r = 0; r < mr; ++r, out += n, acc += ld)
    for (int64_t i = 0; i < nr; ++i) out[i] = (T)acc[i];
}

template <class T>
void grouped(const gc_args* args, gc_gemm_function run, int64_t begin, int64_t end) {
  const int64_t rows = args->imm[0], n = args->imm[1], k = args->imm[2], groups = args->imm[3];
  const bool wide = args->imm[4] == 8;
  const int64_t panels = (n + 31) / 32;
  T* out = (T*)args->ptr[3];
  gc_gemm g = {};
  g.n = n;
  g.k = k;
  for (int d = 0; d < GC_BATCH_DIMS; ++d) g.size[d] = 1;
  g.a_m = args->imm[5];
  g.a_k = 1;
  g.alpha = 1.0f;
  int64_t start = 0, base = 0;
  for (int64_t e = 0; e < groups; ++e) {
    int64_t stop = wide ? ((const int64_t*)args->ptr[2])[e] : ((const int32_t*)args->ptr[2])[e];
    stop = stop < start ? start : stop > rows ? rows : stop;
    const int64_t units = (stop - start + GC_GEMM_ROWS - 1) / GC_GEMM_ROWS * panels;
    const int64_t from = begin > base ? begin - base : 0;
    const int64_t to = end - base < units ? end - base : units;
    if (from < to) {
      g.m = stop - start;
      g.a = (const T*)args->ptr[0] + start * g.a_m;
      g.b = (const T*)args->ptr[1] + e * args->imm[6];
      void* const pointers[4] = {nullptr, nullptr, nullptr, out + start * n};
      const gc_args inner = {pointers, &g.m, args->scratch};
      run(&g, &inner, store<T>, from, to);
    }
    start = stop;
    base += units;
  }
  if (begin == 0 && end > 0)
    for (int64_t i = start * n; i < rows * n; ++i) out[i] = T(0.0f);
}

}  // namespace
}  // namespace gc

#ifndef GC_GROUPED
#define GC_GROUPED f32, float
#endif
#define GC_DEFINE(TAG, TYPE)                                                                \
  extern "C" gc_gemm_function_type gc_gemm_##TAG;                                           \
  GC_EXPORT void gc_grouped_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::grouped<TYPE>(args, gc_gemm_##TAG, begin, end);                                     \
  }
#define GC_EXPAND(...) GC_DEFINE(__VA_ARGS__)
GC_EXPAND(GC_GROUPED)
