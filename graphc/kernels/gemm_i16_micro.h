// Micro-kernels over pairs of int16 with int32 sums (vpdpwssd, pmaddwd).
#pragma once
#include "isa.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gc {

// sum[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1] over int16 pairs held in 32-bit lanes.
GC_INLINE vi add_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// c[MR][32] (+)= a [k][MR] pairs x b [k][32] pairs.
template <int MR>
static void micro_i16(const uint32_t* a, const uint32_t* b, int64_t k, float* c, int64_t ldc,
                      bool add) {
  constexpr int NV = 2;
  for (int h = 0; h < GC_NR; h += NV * VL) {
    vi acc[MR][NV] = {};
    for (int64_t i = 0; i < k; i++) {
      vi bv[NV];
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) bv[v] = load<vi>(b + i * GC_NR + h + v * VL);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const vi av = (int32_t)a[i * MR + r] - vi{};
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) acc[r][v] = add_pairs(acc[r][v], av, bv[v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        float* p = c + r * ldc + h + v * VL;  // integer bits in the tile of floats
        store(p, add ? load<vi>(p) + acc[r][v] : acc[r][v]);
      }
    }
  }
}

typedef void (*kernel_i16)(const uint32_t*, const uint32_t*, int64_t, float*, int64_t, bool);
#if GC_MR == 14
static const kernel_i16 KERNELS_I16[GC_MR + 1] = {
    nullptr,       micro_i16<1>,  micro_i16<2>,  micro_i16<3>,  micro_i16<4>,
    micro_i16<5>,  micro_i16<6>,  micro_i16<7>,  micro_i16<8>,  micro_i16<9>,
    micro_i16<10>, micro_i16<11>, micro_i16<12>, micro_i16<13>, micro_i16<14>};
#else
static const kernel_i16 KERNELS_I16[GC_MR + 1] = {nullptr,      micro_i16<1>, micro_i16<2>, micro_i16<3>,
                                       micro_i16<4>, micro_i16<5>, micro_i16<6>};
#endif

}  // namespace gc
