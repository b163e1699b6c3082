// Records (records.h) read fast, and any columns of them: what attention over narrow caches does with
// each row before it multiplies.
//
// With byte permutations the numbers of 64 codes are looked up as low and high bytes of bf16, in
// tables that hold them times the tile's power of two, so that nothing is left to multiply; other
// scales multiply what the table of 1 gives. The results are those of decode_record, bit by bit.
#pragma once
#include "records.h"

namespace gc {

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define GC_RECORD_TABLES 1

// bf16 of the 128 magnitudes of E4M3 times a power of two.
struct alignas(64) E4m3Table { uint8_t low[128], high[128]; };

// The tables of the exponents met last.
class E4m3Tables {
  static constexpr int KEPT = 8;
  static constexpr uint32_t LEAST = 16, MOST = 240;  // exponents at which all products are normal
  uint32_t exponent_[KEPT] = {};
  E4m3Table table_[KEPT];

  __attribute__((noinline)) void fill(E4m3Table* t, uint32_t exponent) {
    const vf scale = splat(bits_to_f32(exponent << 23));
    for (int c = 0; c < 128; c += VL) {
      const vi bits = (vi)(e4m3_numbers(lane_numbers() + c) * scale);
      put_codes(t->low + c, bits >> 16 & 0xff);
      put_codes(t->high + c, bits >> 24 & 0xff);
    }
  }

 public:
  // Null where the scale is none of the powers of two that have tables.
  inline __attribute__((always_inline)) const E4m3Table* of(float scale) {
    const uint32_t bits = f32_to_bits(scale), exponent = bits >> 23;
    if ((bits & 0x807fffff) != 0 || exponent < LEAST || exponent > MOST) return nullptr;
    E4m3Table* const t = table_ + exponent % KEPT;
    if (__builtin_expect(exponent_[exponent % KEPT] != exponent, 0)) {
      fill(t, exponent);
      exponent_[exponent % KEPT] = exponent;
    }
    return t;
  }
};

struct NumberBytes { __m512i low, high; };
GC_INLINE NumberBytes bytes_of(const E4m3Table* t, __m512i codes) {
  const __m512i low = _mm512_permutex2var_epi8(load<__m512i>(t->low), codes, load<__m512i>(t->low + 64));
  const __m512i high =
      _mm512_permutex2var_epi8(load<__m512i>(t->high), codes, load<__m512i>(t->high + 64));
  return {low, _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8)};
}

// The numbers of 64 codes in order: two vectors of bf16, or four of floats.
GC_INLINE void numbers_of(const E4m3Table* t, __m512i codes, __m512i (&to)[2]) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const NumberBytes b = bytes_of(t, _mm512_permutexvar_epi64(order, codes));
  to[0] = _mm512_unpacklo_epi8(b.low, b.high);
  to[1] = _mm512_unpackhi_epi8(b.low, b.high);
}
GC_INLINE void numbers_of(const E4m3Table* t, __m512i codes, vf (&to)[4]) {
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const NumberBytes b = bytes_of(t, _mm512_permutexvar_epi32(order, codes));
  const __m512i none = _mm512_setzero_si512(), even = _mm512_unpacklo_epi8(b.low, b.high),
                odd = _mm512_unpackhi_epi8(b.low, b.high);
  to[0] = (vf)_mm512_unpacklo_epi16(none, even);
  to[1] = (vf)_mm512_unpackhi_epi16(none, even);
  to[2] = (vf)_mm512_unpacklo_epi16(none, odd);
  to[3] = (vf)_mm512_unpackhi_epi16(none, odd);
}

// n > 0 of 64 numbers.
GC_INLINE __mmask64 first_bits(int64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
GC_INLINE void put_numbers(const __m512i (&v)[2], int64_t n, bf16* to) {
  if (n >= 64) {
    _mm512_storeu_si512(to, v[0]);
    _mm512_storeu_si512(to + 32, v[1]);
    return;
  }
  _mm512_mask_storeu_epi16(to, (__mmask32)first_bits(n), v[0]);
  _mm512_mask_storeu_epi16(to + 32, (__mmask32)(first_bits(n) >> 32), v[1]);
}
GC_INLINE void put_numbers(const vf (&v)[4], int64_t n, float* to) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    _mm512_mask_storeu_ps(to + i * VL, (__mmask16)(first_bits(n) >> (i * VL)), (__m512)v[i]);
}
GC_INLINE void put_numbers(const vf (&v)[4], int64_t n, bf16* to) {
  const __m512i halves[2] = {(__m512i)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]),
                             (__m512i)_mm512_cvtne2ps_pbh((__m512)v[3], (__m512)v[2])};
  put_numbers(halves, n, to);
}
// What a table that holds whole numbers gives.
template <class T> struct Looked { typedef vf type[4]; };
template <> struct Looked<bf16> { typedef __m512i type[2]; };
#endif

// Reads the records of one format, as float, bf16 or f16.
class RecordReader {
  const gc_record_format* form_;

#if GC_RECORD_TABLES
  E4m3Tables tables_;

  // n codes of 64; the first half has one scale, the other another.
  template <class T>
  inline __attribute__((always_inline)) void halves(const uint8_t* codes, int64_t n, float first, float second, T* to) {
    vf v[4];
    numbers_of(tables_.of(1.0f), _mm512_maskz_loadu_epi8(first_bits(n), codes), v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] *= splat(i < 2 ? first : second);
    put_numbers(v, n, to);
  }
  template <class T> inline __attribute__((always_inline)) void tile(const uint8_t* codes, int64_t n, float scale, T* to) {
    const E4m3Table* const t = tables_.of(scale);
    int64_t i = 0;
    if (!t) {
      for (; i < n; i += 64) halves(codes + i, n - i, scale, scale, to + i);
      return;
    }
    typename Looked<T>::type v;
    for (; i + 64 <= n; i += 64) {
      numbers_of(t, _mm512_loadu_si512(codes + i), v);
      put_numbers(v, 64, to + i);
    }
    if (i == n) return;
    numbers_of(t, _mm512_maskz_loadu_epi8(first_bits(n - i), codes + i), v);
    put_numbers(v, n - i, to + i);
  }
  void tile(const uint8_t* codes, int64_t n, float scale, f16* to) { decode_block(codes, n, scale, to); }
#else
  template <class T> static void tile(const uint8_t* codes, int64_t n, float scale, T* to) {
    decode_block(codes, n, scale, to);
  }
#endif

  // The place behind i where the columns end or the next `size` begin.
  static int64_t block_end(int64_t i, int64_t size, int64_t last) {
    const int64_t end = (i & -size) + size;
    return end < last ? end : last;
  }
  template <class T>
  inline __attribute__((always_inline)) void tiles(const uint8_t* codes, const uint8_t* scales, int64_t first, int64_t last,
                              T* to) {
    for (int64_t i = first, end; i < last; to += end - i, i = end) {
      end = block_end(i, FP8_TILE, last);
      float scale;
      memcpy(&scale, scales + i / FP8_TILE * 4, 4);
      tile(codes + i, end - i, scale, to);
    }
  }
  template <class T>
  void blocks(const uint8_t* codes, const uint8_t* scales, int64_t first, int64_t last, T* to) {
    for (int64_t i = first, end; i < last; to += end - i, i = end) {
#if GC_RECORD_TABLES
      if constexpr (!std::is_same<T, f16>::value) {
        if (i % MX_BLOCK == 0 && i + 2 * MX_BLOCK <= last) {
          end = i + 2 * MX_BLOCK;
          const uint8_t* const s = scales + i / MX_BLOCK;
          halves(codes + i, 2 * MX_BLOCK, mx_power(s[0]), mx_power(s[1]), to);
          continue;
        }
      }
#endif
      end = block_end(i, MX_BLOCK, last);
      decode_block(codes + i, end - i, mx_power(scales[i / MX_BLOCK]), to);
    }
  }
  template <class S, class T> static void plain(const uint8_t* from, int64_t first, int64_t n, T* to) {
    const uint8_t* const x = from + first * (int64_t)sizeof(S);
    if constexpr (std::is_same<S, T>::value) copy_bytes(x, n * (int64_t)sizeof(S), (uint8_t*)to);
    else convert((const S*)x, n, to);
  }
  static void copy_bytes(const uint8_t* from, int64_t n, uint8_t* to) {
    int64_t i = 0;
    for (; i + GC_VBYTES <= n; i += GC_VBYTES) store(to + i, load<vi>(from + i));
    if (i < n) memcpy(to + i, from + i, (size_t)(n - i));
  }

 public:
  explicit RecordReader(const gc_record_format* form) : form_(form) {}

  // Columns [first, first + n) of a record.
  template <class T> void columns(const uint8_t* from, int64_t first, int64_t n, T* to) {
    for (int64_t k = 0; n > 0; k++) {
      const gc_segment& s = form_->segment[k];
      if (first < s.width) {
        const int64_t last = first + n < s.width ? first + n : s.width;
        if (s.kind == PLAIN_F32) plain<float>(from, first, last - first, to);
        else if (s.kind == PLAIN_BF16) plain<bf16>(from, first, last - first, to);
        else if (s.kind == PLAIN_F16) plain<f16>(from, first, last - first, to);
        else if (is_mx(s.kind)) blocks(from, from + s.width, first, last, to);
        else tiles(from, from + s.width, first, last, to);
        to += last - first;
        n -= last - first;
        first = 0;
      } else {
        first -= s.width;
      }
      from += segment_bytes(s);
    }
  }
  template <class T> void row(const uint8_t* from, T* to) { columns(from, 0, form_->width, to); }
};

}  // namespace gc
