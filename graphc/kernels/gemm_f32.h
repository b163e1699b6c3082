// How fp32 products are packed and summed: 14 x 2 vectors a micro tile on AVX-512, 6 x 2 elsewhere.
// See gemm.h.
#pragma once
#include "gemm_driver.h"

namespace {
using namespace gc;

constexpr int64_t NEAR_BYTES = 16 << 10;
#if GC_VBYTES == 64
typedef void (*twin_kernel)(const float*, int64_t, const float*, int64_t, int64_t, int64_t, float*,
                            int64_t, int64_t, bool);
const twin_kernel TWINS[TWIN_ROWS + 1] = {nullptr,
                                          micro_panels<1, 2>,
                                          nullptr,
                                          micro_panels<3, 2>,
                                          micro_panels<4, 2>,
                                          micro_panels<5, 2>};
#endif

struct Float {
  typedef float element;
  typedef float packed;
  static constexpr bool direct = true;
  // several rows only where those do not stay in the first level beside a panel
  static constexpr bool twins(int64_t rows, int64_t k) {
    return GC_VBYTES == 64 && twinned(rows) && (rows == 1 || rows * k * 4 > NEAR_BYTES);
  }
  static constexpr int64_t chunk = GEMM_KC;
  static constexpr int64_t expand_bytes = GEMM_KC * GC_NR * 4;  // a last panel cut off by N
  static int64_t packed_length(int64_t k) { return k; }
  static void pack(const float* src, int64_t row, int64_t step, int64_t mr, int64_t k, float* dst) {
    pack_rows(src, row, step, mr, k, dst, mr);
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t kl,
                           char* expand, int64_t* ldb) {
    const float* b = (const float*)g->b + offset;
    *ldb = GC_NR;
    if (g->ldb == 0) return b + (p * g->k + kc) * GC_NR;
    b += kc * g->ldb + p * GC_NR;
    const int64_t nr = g->n - p * GC_NR;
    if (nr >= GC_NR) {
      *ldb = g->ldb;
      return b;
    }
    float* copy = (float*)expand;
    for (int64_t i = 0; i < kl; i++)
      for (int64_t j = 0; j < GC_NR; j++) copy[i * GC_NR + j] = j < nr ? b[i * g->ldb + j] : 0.0f;
    return copy;
  }
  static void micro(int64_t mr, const float* a, const void* b, int64_t ldb, int64_t k, float* c,
                    int64_t ldc, bool add) {
    MICRO[mr](a, mr, (const float*)b, ldb, k, c, ldc, add);
  }
#if GC_VBYTES == 64
  static void twin(int64_t mr, const float* a, const void* b, int64_t next, int64_t ldb, int64_t k,
                   float* c, int64_t columns, int64_t ldc, bool add) {
    TWINS[mr](a, mr, (const float*)b, ldb, next / 4, k, c, columns, ldc, add);
  }
#endif
};

}  // namespace
