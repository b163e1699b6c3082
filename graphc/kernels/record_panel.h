// Sixteen keys in MXFP8 whose records share their bytes (records.h), as lanes of a panel of bf16 pairs,
// for the scores of lightning_indexer.h.
//
// A line holds two pairs of codes of each key. Both bytes of their bf16 are looked up, and the scale
// of each key and block is added to the exponents; zeros have none. Results are those of
// decode_record, bit by bit.
#pragma once
#include "records.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define GC_RECORD_PANEL 1

namespace gc {

struct RecordPanel {
  static constexpr int LEAST = 10, MOST = 246;  // scales at which all products are normal
  alignas(64) uint8_t low[128], high[128];      // the bytes of bf16 of all magnitudes

  RecordPanel() {
    for (int c = 0; c < 128; c += VL) {
      const vi bits = (vi)e4m3_numbers(lane_numbers() + c);
      put_codes(low + c, bits >> 16 & 0xff);
      put_codes(high + c, bits >> 24 & 0xff);
    }
  }

  // dst [d / 2][step] of sixteen keys; false where a scale is none that this can do.
  inline __attribute__((always_inline)) bool pack(const uint8_t* group, int64_t d, uint32_t* dst,
                                                  int64_t step) {
    const uint8_t* const scales = group + GROUPED * d;
    if (!ordinary(scales, d)) return false;
    const __m512i l0 = load<__m512i>(low), l1 = load<__m512i>(low + 64), h0 = load<__m512i>(high),
                  h1 = load<__m512i>(high + 64), sign = _mm512_set1_epi8((char)0x80);
    for (int64_t at = 0; at < d; at += MX_BLOCK, dst += MX_BLOCK / 2 * step) {
      const __m512i power = exponents(scales + at / 2);
      const uint8_t* const line = group + GROUPED * at;
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        const __m512i codes = _mm512_loadu_si512(line + 64 * i);
        const __m512i l = _mm512_permutex2var_epi8(l0, codes, l1);
        const __m512i magnitude = _mm512_permutex2var_epi8(h0, codes, h1);
        const __m512i h = _mm512_ternarylogic_epi32(magnitude, codes, sign, 0xf8);
        put(_mm512_unpacklo_epi8(l, h), power, dst + 2 * i * step);
        put(_mm512_unpackhi_epi8(l, h), power, dst + (2 * i + 1) * step);
      }
    }
    return true;
  }

 private:
  static inline __attribute__((always_inline)) bool ordinary(const uint8_t* scales, int64_t d) {
    const __m128i least = _mm_set1_epi8((char)LEAST), range = _mm_set1_epi8((char)(MOST - LEAST));
    __m128i most = _mm_setzero_si128();
    for (int64_t i = 0; i < d / 2; i += 16)
      most = _mm_max_epu8(most, _mm_sub_epi8(_mm_loadu_si128((const __m128i*)(scales + i)), least));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(most, range), range)) == 0xffff;
  }

  // (scale - 127) in the place of exponents, twice for each key.
  static inline __m512i exponents(const uint8_t* scales) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)scales));
    const __m512i both = _mm512_or_si512(e, _mm512_slli_epi32(e, 16));
    return _mm512_sub_epi16(_mm512_slli_epi16(both, 7), _mm512_set1_epi16(127 << 7));
  }
  static inline __attribute__((always_inline)) void put(__m512i numbers, __m512i power, uint32_t* to) {
    const __mmask32 some = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(0x7fff));
    _mm512_storeu_si512(to, _mm512_mask_add_epi16(numbers, some, numbers, power));
  }
};

}  // namespace gc
#endif
