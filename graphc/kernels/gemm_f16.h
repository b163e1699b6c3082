// How fp16 products are packed and summed: stored as half, computed in fp32. A chunk of a weight panel
// is widened once and serves all rows of a block. See gemm.h.
#pragma once
#include "gemm_driver.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {
using namespace gc;

GC_INLINE void widen(const f16* src, int64_t count, float* dst) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16)
    _mm512_storeu_ps(
        dst + i, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)(src + i))));
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + i))));
#endif
  for (; i < count; i++) dst[i] = (float)src[i];
}

struct Half {
  typedef f16 element;
  typedef float packed;
  static constexpr bool direct = false;
  static constexpr bool twins(int64_t, int64_t) { return false; }
  static constexpr int64_t chunk = GEMM_KC;
  static constexpr int64_t expand_bytes = GEMM_KC * GC_NR * 4;
  static int64_t packed_length(int64_t k) { return k; }
  static void pack(const f16* src, int64_t row, int64_t step, int64_t mr, int64_t k, float* dst) {
    if (step != 1) {
      pack_rows(src, row, step, mr, k, dst, mr);
      return;
    }
    float widened[GC_MR * 64];  // widen first: the transposition then reads floats
    for (int64_t i = 0; i < k; i += 64) {
      const int64_t length = min64(64, k - i);
      for (int64_t r = 0; r < mr; r++) widen(src + r * row + i, length, widened + r * 64);
      pack_rows(widened, 64, 1, mr, length, dst + i * mr, mr);
    }
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t kl,
                           char* expand, int64_t* ldb) {
    *ldb = GC_NR;
    widen((const f16*)g->b + offset + (p * g->k + kc) * GC_NR, kl * GC_NR, (float*)expand);
    return expand;
  }
  static void micro(int64_t mr, const float* a, const void* b, int64_t ldb, int64_t k, float* c,
                    int64_t ldc, bool add) {
    MICRO[mr](a, mr, (const float*)b, ldb, k, c, ldc, add);
  }
};

}  // namespace
