// Micro-kernels over pairs of bf16 (vdpbf16ps), for CPUs that have them.
#pragma once
#include "gemm_micro.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace gc {

// c[MR][32] (+)= a [k/2][MR] pairs x b [k/2][32] pairs, or the same for P panels `next` pairs
// apart, `columns` apart in c.
template <int MR, int P>
static void micro_pair_panels(const uint32_t* a, const uint32_t* b, int64_t next, int64_t k, float* c,
                              int64_t columns, int64_t ldc, bool add) {
  constexpr int U = MR == 1 ? 2 : MR == 2 ? 4 : 1;
  __m512 acc[U][P][MR][2] = {};
  auto scout = Scout<MR, P>::at(b, GC_NR);
  int64_t i = 0;
  for (; i + U <= k; i += U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const uint32_t* const row = b + p * next + u * GC_NR;
        scout.ask(p * next + u * GC_NR, GC_NR);
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(row);
        const __m512bh b1 = (__m512bh)_mm512_loadu_si512(row + 16);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          const __m512bh av = (__m512bh)_mm512_set1_epi32((int)a[u * MR + r]);
          acc[u][p][r][0] = _mm512_dpbf16_ps(acc[u][p][r][0], av, b0);
          acc[u][p][r][1] = _mm512_dpbf16_ps(acc[u][p][r][1], av, b1);
        }
      }
    }
    a += U * MR;
    b += U * GC_NR;
    scout.step(U * GC_NR);
  }
  if (U > 1) {
    for (; i < k; i++) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b + p * next);
        const __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + p * next + 16);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          const __m512bh av = (__m512bh)_mm512_set1_epi32((int)a[r]);
          acc[0][p][r][0] = _mm512_dpbf16_ps(acc[0][p][r][0], av, b0);
          acc[0][p][r][1] = _mm512_dpbf16_ps(acc[0][p][r][1], av, b1);
        }
      }
      a += MR;
      b += GC_NR;
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < P; p++) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        __m512 sum = acc[0][p][r][v];
#pragma GCC unroll 8
        for (int u = 1; u < U; u++) sum = _mm512_add_ps(sum, acc[u][p][r][v]);
        float* o = c + p * columns + r * ldc + v * 16;
        _mm512_storeu_ps(o, add ? _mm512_add_ps(_mm512_loadu_ps(o), sum) : sum);
      }
    }
  }
}

template <int MR>
static void micro_pairs(const uint32_t* a, const uint32_t* b, int64_t k, float* c, int64_t ldc,
                        bool add) {
  micro_pair_panels<MR, 1>(a, b, 0, k, c, 0, ldc, add);
}

typedef void (*pair_kernel)(const uint32_t*, const uint32_t*, int64_t, float*, int64_t, bool);
static const pair_kernel PAIRS[GC_MR + 1] = {
    nullptr,        micro_pairs<1>,  micro_pairs<2>,  micro_pairs<3>,  micro_pairs<4>,
    micro_pairs<5>, micro_pairs<6>,  micro_pairs<7>,  micro_pairs<8>,  micro_pairs<9>,
    micro_pairs<10>, micro_pairs<11>, micro_pairs<12>, micro_pairs<13>, micro_pairs<14>};

typedef uint32_t vu __attribute__((vector_size(64)));

// dst[ceil(k/2)][width] pairs from src[k][width] fp32 values that are exact in bf16; may be in place.
static inline void pair_steps(const float* src, int64_t width, int64_t k, uint32_t* dst) {
  for (int64_t i = 0; i < k; i += 2, src += 2 * width, dst += width) {
    for (int64_t r = 0; r < width; r += 16) {
      const __mmask16 lanes = width - r >= 16 ? 0xffff : (__mmask16)((1u << (width - r)) - 1);
      const __mmask16 second = i + 1 < k ? lanes : 0;
      const vu lo = (vu)_mm512_maskz_loadu_epi32(lanes, src + r),
               hi = (vu)_mm512_maskz_loadu_epi32(second, src + width + r);
      const __m512i pair = (__m512i)(lo >> 16 | (hi & 0xffff0000u));
      _mm512_mask_storeu_epi32(dst + r, lanes, pair);
    }
  }
}

}  // namespace gc

#endif
