// Weights of 8 or 4 bits with a scale for a group of neighbours in K, in panels of 32 columns.
//
//   [panels][records][codes of SPAN steps of K | 64 bytes of scales]
//
// 4 bits: blocks of 8 steps, [32 columns] words of 32 bits; the lower half of a word holds the codes of
// steps 0, 2, 4, 6, the upper half those of 1, 3, 5, 7, so that each shift by four bits gives all
// columns of a pair. 8 bits: [SPAN / 2][32][2].
// Scales are bf16 [32] for the record, or E8M0 bytes [2][32], one row for each 32 steps. K and N are
// zero-padded. 4-bit codes times their scales are exact in bf16: bf16 scales of theirs have five
// significant bits. One write of it: graphc/ops/weight_forms.py.
#pragma once
#include "isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gc {

constexpr int64_t SCALE_BYTES = 64;
constexpr int64_t CODE_UNIT = 128;  // steps: a multiple of every form's group

// Two's complement of 8 bits.
struct int8_form {
  static constexpr int bits = 8;
  static constexpr int64_t group = 128, span = 128;
};

// Two's complement of 4 bits.
template <int64_t Group>
struct int4_form {
  static constexpr int bits = 4;
  static constexpr bool powers = false;
  static constexpr int64_t group = Group, span = Group;
  static constexpr float values[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  // the code in the upper four bits of each lane
  GC_INLINE vf spelled(vi code) { return __builtin_convertvector(code >> 28, vf); }
};
typedef int4_form<32> int4_g32_form;
typedef int4_form<128> int4_g128_form;

// OCP MX: E2M1 elements.
struct mxfp4_form {
  static constexpr int bits = 4;
  static constexpr bool powers = true;
  static constexpr int64_t group = 32, span = 64;
  static constexpr float values[16] = {0,  0.5f,  1,  1.5f,  2,  3,  4,  6,
                                       -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  GC_INLINE vf spelled(vi code) {
    const vi sign = code & (int32_t)0x80000000, size = (vi)((vu)code >> 28) & 7;
#if defined(__AVX2__) && GC_VBYTES == 32
    const vf value = (vf)_mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6),
                                                  (__m256i)size);
#else
    // doubled, they are 0 1 2 3 4 6 8 12
    const vi twice = size + ((size - 4) & (size > 4)) + (((size - 6) & (size > 6)) << 1);
    const vf value = 0.5f * __builtin_convertvector(twice, vf);
#endif
    return (vf)((vi)value | sign);
  }
};

template <class Form>
constexpr int64_t record_bytes = Form::span * GC_NR * Form::bits / 8 + SCALE_BYTES;

// The codes of a panel from step `step` on; `step` is a multiple of 8.
struct Codes {
  const uint8_t* panel;
  int64_t step;
};

template <class Form>
GC_INLINE Codes codes_of(const void* weight, int64_t k, int64_t panel, int64_t step) {
  const int64_t records = (k + Form::span - 1) / Form::span;
  return {(const uint8_t*)weight + panel * records * record_bytes<Form>, step};
}

template <class Form>
GC_INLINE const uint8_t* block_at(const uint8_t* panel, int64_t step) {
  return panel + step / Form::span * record_bytes<Form> + step % Form::span * GC_NR * Form::bits / 8;
}

// Scales of the columns from `column` on at a step.
template <class Form>
GC_INLINE vf scales_at(const uint8_t* panel, int64_t step, int64_t column) {
  const uint8_t* const line = panel + (step / Form::span + 1) * record_bytes<Form> - SCALE_BYTES;
  if constexpr (Form::bits == 4 && Form::span != Form::group) {
    const uint8_t* const row = line + step % Form::span / Form::group * GC_NR + column;
    // 2^-127 has no exponent of its own
#if defined(__AVX512F__)
    const __m512i e = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)row));
    return (vf)(((vi)e << 23) | (((vi)e == 0) & 0x400000));
#else
    vi bits;
    for (int i = 0; i < VL; i++) bits[i] = row[i] ? (int32_t)row[i] << 23 : 0x400000;
    return (vf)bits;
#endif
  } else {
    const uint8_t* const row = line + 2 * column;
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)row)) << 16);
#else
    return (vf)(__builtin_convertvector(load<vh>(row), vu) << 16);
#endif
  }
}

// dst[count][32]: codes times scales, exactly, of steps from `at` on.
template <class Form>
static void spell_floats(Codes at, int64_t count, float* dst) {
  constexpr int64_t vectors = GC_NR / VL;
  if constexpr (Form::bits == 8) {
    for (int64_t i = 0; i < count; i += 2) {
      const uint8_t* const pairs = block_at<Form>(at.panel, at.step + i);
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; v++) {
        const vf scale = scales_at<Form>(at.panel, at.step + i, v * VL);
        const vi both = (vi)__builtin_convertvector(load<vh>(pairs + 2 * v * VL), vu) << 16;
        store(dst + i * GC_NR + v * VL, __builtin_convertvector((both << 8) >> 24, vf) * scale);
        if (i + 1 < count)
          store(dst + (i + 1) * GC_NR + v * VL, __builtin_convertvector(both >> 24, vf) * scale);
      }
    }
  } else {
#if defined(__AVX512F__)
    const __m512 table = _mm512_loadu_ps(Form::values);
#endif
    for (int64_t i = 0; i < count; i += 8) {
      const uint8_t* const block = block_at<Form>(at.panel, at.step + i);
      const int64_t steps = count - i < 8 ? count - i : 8;
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; v++) {
        const vf scale = scales_at<Form>(at.panel, at.step + i, v * VL);
        const vu word = load<vu>(block + v * GC_VBYTES);
        const auto value = [&](int s) __attribute__((always_inline)) {
          const int shift = s / 2 * 4 + s % 2 * 16;
#if defined(__AVX512F__)
          return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(word >> shift), table) * scale;
#else
          return Form::spelled((vi)(word << (28 - shift))) * scale;
#endif
        };
        float* const out = dst + i * GC_NR + v * VL;
        if (steps == 8) {
#pragma GCC unroll 8
          for (int s = 0; s < 8; s++) store(out + s * GC_NR, value(s));
        } else {
          for (int s = 0; s < steps; s++) store(out + s * GC_NR, value(s));
        }
      }
    }
  }
}

#if defined(__AVX512BF16__)

// The 16 values as bf16, for codes of which only the lower four of five bits are looked at.
template <class Form>
GC_INLINE __m512i pair_table() {
  const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(Form::values));
  return _mm512_maskz_broadcast_i64x4(0xff, low);
}

// 32 bytes, eight columns times two pairs of them, as bf16.
GC_INLINE __m512i pairs_of_bytes(const uint8_t* p) {
  const __m512i low = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
  const __m512i high = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)(p + 16)));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_cvtepi32_ps(0xffff, high),
                                      _mm512_maskz_cvtepi32_ps(0xffff, low));
}

// dst[ceil(count/2)][32] pairs of bf16. 4-bit codes come with their scales, exactly; of 8-bit codes
// the scales remain to be applied.
template <class Form>
static void spell_pairs(Codes at, int64_t count, uint32_t* dst) {
  if constexpr (Form::bits == 8) {
    for (int64_t i = 0; i < count; i += 2, dst += GC_NR) {
      const uint8_t* const p = block_at<Form>(at.panel, at.step + i);
      _mm512_storeu_si512(dst, pairs_of_bytes(p));
      _mm512_storeu_si512(dst + 16, pairs_of_bytes(p + 32));
    }
  } else {
    const __m512i table = pair_table<Form>();
    for (int64_t i = 0; i < count; i += 8, dst += 4 * GC_NR) {
      const uint8_t* const block = block_at<Form>(at.panel, at.step + i);
      const int64_t steps = count - i < 8 ? (count - i + 1) / 2 : 4;
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const vf scale = scales_at<Form>(at.panel, at.step + i, 16 * v);
        __m512i word = _mm512_loadu_si512(block + 64 * v);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++, word = _mm512_srli_epi16(word, 4)) {
          if (s >= steps) break;
          const vu pair = (vu)_mm512_permutexvar_epi16(word, table);
          const vf low = (vf)(pair << 16) * scale, high = (vf)(pair & 0xffff0000u) * scale;
          store(dst + s * GC_NR + 16 * v, (vu)low >> 16 | (vu)high);
        }
      }
    }
  }
}

// c[MR][32] (+)= a [k/2][lda] pairs x codes of 2 k steps: values in registers, sums of a group scaled.
template <class Form, int MR>
static void micro_codes(const uint32_t* a, int64_t lda, Codes at, int64_t k, float* c, int64_t ldc,
                        bool add) {
  constexpr int U = MR == 1 ? 4 : MR <= 3 ? 2 : 1;
  constexpr int64_t group = Form::group / 2;
  constexpr int64_t ahead = MR >= 4 ? 4096 : 0;
  __m512 total[MR][2] = {};
  __m512i table = _mm512_setzero_si512();
  if constexpr (Form::bits == 4) table = pair_table<Form>();
  for (int64_t i = 0; i < k; i += group) {
    const int64_t n = k - i < group ? k - i : group, step = at.step + 2 * i;
    const uint8_t* block = block_at<Form>(at.panel, step);
    __m512 acc[U][MR][2] = {};
    const auto dots = [&](int s, __m512i w0, __m512i w1) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const __m512bh av = (__m512bh)_mm512_set1_epi32((int)a[r]);
        acc[s % U][r][0] = _mm512_dpbf16_ps(acc[s % U][r][0], av, (__m512bh)w0);
        acc[s % U][r][1] = _mm512_dpbf16_ps(acc[s % U][r][1], av, (__m512bh)w1);
      }
      a += lda;
    };
    int64_t j = 0;
    for (; j + 4 <= n; j += 4, block += GC_NR * Form::bits) {
      if (ahead)
#pragma GCC unroll 4
        for (int line = 0; line < GC_NR * Form::bits; line += 64)
          __builtin_prefetch(block + ahead + line, 0, 2);
      if constexpr (Form::bits == 8) {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
          dots(s, pairs_of_bytes(block + 64 * s), pairs_of_bytes(block + 64 * s + 32));
      } else {
        const __m512i c0 = _mm512_loadu_si512(block), c1 = _mm512_loadu_si512(block + 64);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
          dots(s, _mm512_permutexvar_epi16(_mm512_srli_epi16(c0, 4 * s), table),
               _mm512_permutexvar_epi16(_mm512_srli_epi16(c1, 4 * s), table));
      }
    }
    for (int s = 0; j < n; j++, s++) {
      if constexpr (Form::bits == 8) {
        dots(0, pairs_of_bytes(block + 64 * s), pairs_of_bytes(block + 64 * s + 32));
      } else {
        const __m128i shift = _mm_cvtsi32_si128(4 * s);
        dots(0, _mm512_permutexvar_epi16(_mm512_srl_epi16(_mm512_loadu_si512(block), shift), table),
             _mm512_permutexvar_epi16(_mm512_srl_epi16(_mm512_loadu_si512(block + 64), shift), table));
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const __m512 scale = (__m512)scales_at<Form>(at.panel, step, 16 * v);
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        __m512 sum = acc[0][r][v];
#pragma GCC unroll 4
        for (int u = 1; u < U; u++) sum += acc[u][r][v];
        total[r][v] += sum * scale;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      float* const o = c + r * ldc + v * 16;
      _mm512_storeu_ps(o, add ? _mm512_loadu_ps(o) + total[r][v] : total[r][v]);
    }
  }
}

#endif

}  // namespace gc
