// Records (records.h) read fast, and any columns of them: what attention over narrow caches does with
// rows before it multiplies.
//
// The exponent and mantissa of a normal E4M3 are those of bf16 but for a bias, to which that of a power
// of two is added: such tiles are shifted into place. Others are looked up, by permutations of 16
// bits, in a table of the 128 magnitudes times the tile's scale. The results are those of
// decode_record, bit by bit.
#pragma once
#include "records.h"

namespace gc {

#if defined(__AVX512BF16__)
#define GC_RECORDS_AS_BF16 1
#if defined(__AVX512VBMI__)
#define GC_CODES_AS_BF16 1  // codes, by permutations of bytes
#endif

// The 128 magnitudes of E4M3.
struct alignas(64) E4m3Magnitudes {
  float number[128];
  E4m3Magnitudes() {
    for (int c = 0; c < 128; c += VL) store(number + c, e4m3_numbers(lane_numbers() + c));
  }
};

// All codes times a scale, as bf16, in registers.
struct E4m3Table {
  __m512i part[4];
  inline __attribute__((always_inline)) E4m3Table(const E4m3Magnitudes& all, float scale) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const vf low = load<vf>(all.number + 32 * i), high = load<vf>(all.number + 32 * i + VL);
      part[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)(high * splat(scale)), (__m512)(low * splat(scale)));
    }
  }
  inline __attribute__((always_inline)) __m512i operator()(__m256i codes) const {
    return (*this)(_mm512_cvtepi8_epi16(codes));
  }
  // Codes as words, extended by their signs.
  inline __attribute__((always_inline)) __m512i operator()(__m512i c) const {
    const __mmask32 above = _mm512_test_epi16_mask(c, _mm512_set1_epi16(0x40));
    const __m512i low = _mm512_permutex2var_epi16(part[0], c, part[1]);
    const __m512i high = _mm512_permutex2var_epi16(part[2], c, part[3]);
    const __m512i v = _mm512_mask_mov_epi16(low, above, high);
    return _mm512_ternarylogic_epi32(v, c, _mm512_set1_epi16((short)0x8000), 0xf8);
  }
};

// The bytes of the 128 magnitudes as bf16.
struct alignas(64) E4m3Bytes {
  uint8_t high[128] = {}, low[128] = {};
  constexpr E4m3Bytes() {
    for (int c = 0; c < 128; c++) {
      int bits = (c << 4) + (120 << 7);  // of normal numbers
      if (c == 0x7f) bits = 0x7fc0;
      if (c == 0) bits = 0;
      if (c > 0 && c < 8) {
        const int top = c >= 4 ? 2 : c >= 2 ? 1 : 0;
        bits = (118 + top) << 7 | ((c << (7 - top)) & 0x7f);
      }
      high[c] = (uint8_t)(bits >> 8);
      low[c] = (uint8_t)(bits & 0xff);
    }
  }
};
inline constexpr E4m3Bytes E4M3_BYTES;

// Any codes as bf16, but for their scale: two permutations of bytes, which cost nothing beside some
// products. In registers.
struct CodeLookup {
  __m512i high[2], low[2], sign;
  inline __attribute__((always_inline)) CodeLookup() {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      high[i] = _mm512_load_si512(E4M3_BYTES.high + 64 * i);
      low[i] = _mm512_load_si512(E4M3_BYTES.low + 64 * i);
    }
    sign = _mm512_set1_epi8((char)0x80);
    asm("" : "+v"(high[0]), "+v"(high[1]), "+v"(low[0]), "+v"(low[1]), "+v"(sign));
  }
  inline __attribute__((always_inline)) __m512i high_bytes(__m512i codes) const {
    return _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], codes, high[1]), codes, sign, 0xf8);
  }
  inline __attribute__((always_inline)) __m512i low_bytes(__m512i codes) const {
    return _mm512_permutex2var_epi8(low[0], codes, low[1]);
  }
  // Of each sixteen codes the first eight, and the others.
  inline __attribute__((always_inline)) void operator()(__m512i codes, __m512i* to) const {
    const __m512i h = high_bytes(codes), l = low_bytes(codes);
    to[0] = _mm512_unpacklo_epi8(l, h);
    to[1] = _mm512_unpackhi_epi8(l, h);
  }
};

// How far doubled codes, without their signs, are above those of the first normal number; those that
// are no normal numbers (zeros, subnormal, NaN) come out above 236.
GC_INLINE __m512i above_normal(__m512i codes) {
  return _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(16));
}
// Whether some are.
GC_INLINE bool beyond(__m512i above) {
  return _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8((char)236)) != 0;
}
// Whether some codes are no normal numbers.
GC_INLINE bool irregular(__m512i codes) { return beyond(above_normal(codes)); }
GC_INLINE bool irregular(__m512i a, __m512i b) {
  return beyond(_mm512_max_epu8(above_normal(a), above_normal(b)));
}
// 32 of 64 codes, extended by their signs and shifted to where bf16 has exponent and mantissa.
template <bool HIGH> GC_INLINE __m512i shifted(__m512i codes) {
  const __m256i half = HIGH ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes);
  return _mm512_slli_epi16(_mm512_cvtepi8_epi16(half), 4);
}
// What is added to the bits of normal numbers for a scale that is a power of two, if all products are
// normal: 0 if not.
GC_INLINE uint32_t bias_of(uint32_t scale) {
  return (scale & 0x807fffff) == 0 && scale - (16u << 23) < 224u << 23 ? (scale >> 16) - (7 << 7) : 0;
}
#endif

// Reads the records of one format, as float, bf16 or f16.
class RecordReader {
  const gc_record_format* form_;

#if GC_RECORDS_AS_BF16
  E4m3Magnitudes all_;

  // n numbers of one scale, whatever the codes and the scale.
  __attribute__((noinline)) void look_up(const uint8_t* codes, int64_t n, float scale, bf16* to) {
    const E4m3Table table(all_, scale);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
      _mm512_storeu_si512(to + i, table(_mm256_loadu_si256((const __m256i*)(codes + i))));
    if (i == n) return;
    const __mmask32 some = (1u << (n - i)) - 1;
    _mm512_mask_storeu_epi16(to + i, some, table(_mm256_maskz_loadu_epi8(some, codes + i)));
  }

  // n numbers of one scale.
  inline __attribute__((always_inline))
  void tile(const uint8_t* codes, int64_t n, float scale, bf16* to) {
    const uint32_t bias = bias_of(f32_to_bits(scale));
    int64_t i = 0;
    if (bias != 0) {
      for (; i + 128 <= n; i += 128) {
        const __m512i low = _mm512_loadu_si512(codes + i), high = _mm512_loadu_si512(codes + i + 64);
        if (__builtin_expect(irregular(low, high), 0)) {
          look_up(codes + i, 128, scale, to + i);
        } else {
          shift(low, bias, to + i);
          shift(high, bias, to + i + 64);
        }
      }
      for (; i + 64 <= n; i += 64) {
        const __m512i all = _mm512_loadu_si512(codes + i);
        if (__builtin_expect(irregular(all), 0)) look_up(codes + i, 64, scale, to + i);
        else shift(all, bias, to + i);
      }
    }
    if (i < n) look_up(codes + i, n - i, scale, to + i);
  }
  GC_INLINE void shift(__m512i codes, uint32_t bias, bf16* to) {
    const __m512i mask = _mm512_set1_epi16((short)0x87f0), add = _mm512_set1_epi16((short)bias);
    _mm512_storeu_si512(to, _mm512_add_epi16(_mm512_and_si512(shifted<false>(codes), mask), add));
    _mm512_storeu_si512(to + 32, _mm512_add_epi16(_mm512_and_si512(shifted<true>(codes), mask), add));
  }
#endif
  template <class T> GC_INLINE void tile(const uint8_t* codes, int64_t n, float scale, T* to) {
    decode_block(codes, n, scale, to);
  }

  // Columns [first, last) of the codes of a segment.
  template <class T>
  inline __attribute__((always_inline))
  void tiles(const uint8_t* codes, const uint8_t* scales, int64_t first, int64_t last, T* to) {
    const auto scale = [scales](int64_t i) __attribute__((always_inline)) {
      return load<float>(scales + (i >> 7) * 4);
    };
    int64_t i = first;
    if (i % FP8_TILE == 0)
      for (; i + FP8_TILE <= last; i += FP8_TILE, to += FP8_TILE)
        tile(codes + i, FP8_TILE, scale(i), to);
    for (int64_t end; i < last; to += end - i, i = end) {
      end = (i & -FP8_TILE) + FP8_TILE;
      end = end < last ? end : last;
      tile(codes + i, end - i, scale(i), to);
    }
  }
  template <class T>
  inline __attribute__((always_inline))
  void blocks(const uint8_t* codes, const uint8_t* scales, int64_t first, int64_t last, T* to) {
    for (int64_t i = first, end; i < last; to += end - i, i = end) {
      end = (i & -MX_BLOCK) + MX_BLOCK;
      end = end < last ? end : last;
      tile(codes + i, end - i, mx_power(scales[i / MX_BLOCK]), to);
    }
  }
  template <class S, class T> GC_INLINE void plain(const S* from, int64_t n, T* to) {
    if constexpr (std::is_same<S, T>::value) {
      const uint8_t* const x = (const uint8_t*)from;
      const int64_t bytes = n * (int64_t)sizeof(S);
      int64_t i = 0;
      for (; i + GC_VBYTES <= bytes; i += GC_VBYTES) store((uint8_t*)to + i, load<vi>(x + i));
      if (i < bytes) memcpy((uint8_t*)to + i, x + i, (size_t)(bytes - i));
    } else {
      convert(from, n, to);
    }
  }

 public:
  explicit RecordReader(const gc_record_format* form) : form_(form) {}

  // Columns [first, first + n) of some records, as rows of `to` that are `step` apart.
  template <class T>
  void columns(const uint8_t* const* from, int64_t count, int64_t first, int64_t n, T* to, int64_t step) {
    int64_t at = 0;
    for (int64_t k = 0; n > 0; k++) {
      const gc_segment& s = form_->segment[k];
      if (first < s.width) {
        const int64_t last = first + n < s.width ? first + n : s.width, width = last - first;
        const auto each = [&](auto&& read) __attribute__((always_inline)) {
          T* row = to;
          for (int64_t j = 0; j < count; j++, row += step) read(from[j] + at, row);
        };
        if (s.kind == PLAIN_F32)
          each([&](const uint8_t* x, T* row) { plain((const float*)x + first, width, row); });
        else if (s.kind == PLAIN_BF16)
          each([&](const uint8_t* x, T* row) { plain((const bf16*)x + first, width, row); });
        else if (s.kind == PLAIN_F16)
          each([&](const uint8_t* x, T* row) { plain((const f16*)x + first, width, row); });
        else if (is_mx(s.kind))
          each([&](const uint8_t* x, T* row) { blocks(x, x + s.width, first, last, row); });
        else
          each([&](const uint8_t* x, T* row) { tiles(x, x + s.width, first, last, row); });
        to += width;
        n -= width;
        first = 0;
      } else {
        first -= s.width;
      }
      at += segment_bytes(s);
    }
  }
  template <class T> void rows(const uint8_t* const* from, int64_t count, T* to) {
    columns(from, count, 0, form_->width, to, form_->width);
  }
};

}  // namespace gc
