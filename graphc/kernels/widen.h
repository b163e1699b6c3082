// Short storage types as 32-bit lanes. Apart from isa.h, since the header of the instructions takes a
// quarter of a second to compile.
#pragma once
#include "isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gc {

// bfloat16 as floats, the lower halves of the bits of integers, and eight bytes as integers. Where one
// instruction does it, it is asked for: compilers make several of __builtin_convertvector between
// widths.
#if defined(__AVX512BW__)
GC_INLINE vf from_bf16(vh h) {
  const __m512i upper = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0,
                                         6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  const __m512i wide = _mm512_castsi256_si512((__m256i)h);
  return (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, wide);
}
#elif defined(__AVX2__) && GC_VBYTES == 32
GC_INLINE vf from_bf16(vh h) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
}
#else
GC_INLINE vf from_bf16(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
#endif
GC_INLINE vh narrow(vu bits) {
#if defined(__AVX512BW__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)bits);
#else
  return __builtin_convertvector(bits, vh);
#endif
}
GC_INLINE vu8 widen8(vb8 b) {
#if defined(__AVX2__)
  return (vu8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)b));
#else
  return __builtin_convertvector(b, vu8);
#endif
}

}  // namespace gc
