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
#include "widen.h"

namespace gc {

constexpr int64_t SCALE_BYTES = 64;
constexpr int64_t CODE_UNIT = 128;  // steps: a multiple of every form's group

// Sign and magnitude of 8 bits: 128 magnitudes are what one look-up takes.
struct int8_form {
  static constexpr int bits = 8;
  static constexpr bool powers = false;
  static constexpr int64_t group = 128, span = 128;
  // the code in the upper eight bits of each lane
  GC_INLINE vf spelled(vi code) {
    const vf size = __builtin_convertvector((vi)((vu)code >> 24) & 127, vf);
    return (vf)((vi)size | (code & (int32_t)0x80000000));
  }
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
  if constexpr (Form::powers) {
    const uint8_t* const row = line + step % Form::span / Form::group * GC_NR + column;
#if defined(__AVX512F__)
    const vi e = (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)row));
#elif defined(__AVX2__)
    const vi e = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)row));
#else
    vi e;
    for (int i = 0; i < VL; i++) e[i] = row[i];
#endif
    return (vf)((e << 23) | ((e == 0) & 0x400000));  // 2^-127 has no exponent of its own
  } else {
    return from_bf16(load<vh>(line + 2 * column));
  }
}

// dst[count][32]: codes times scales, exactly, of steps from `at` on.
template <class Form>
static void spell_floats(Codes at, int64_t count, float* dst) {
  constexpr int vectors = GC_NR / VL;
#if defined(__AVX512F__)
  __m512 table = _mm512_setzero_ps();
  if constexpr (Form::bits == 4) table = _mm512_loadu_ps(Form::values);
#endif
  for (int64_t g = 0; g < count; g += Form::group) {
    const int64_t end = count - g < Form::group ? count : g + Form::group;
    const uint8_t* block = block_at<Form>(at.panel, at.step + g);
    float* out = dst + g * GC_NR;
    vf scale[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) scale[v] = scales_at<Form>(at.panel, at.step + g, v * VL);
    if constexpr (Form::bits == 8) {
      for (int64_t i = g; i < end; i += 2, block += 2 * GC_NR, out += 2 * GC_NR) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
          const vi both = (vi)from_bf16(load<vh>(block + 2 * v * VL));  // in the upper half of a lane
          store(out + v * VL, Form::spelled(both << 8) * scale[v]);
          if (i + 1 < end) store(out + GC_NR + v * VL, Form::spelled(both) * scale[v]);
        }
      }
    } else {
      for (int64_t i = g; i < end; i += 8, block += 4 * GC_NR, out += 8 * GC_NR) {
        const int64_t steps = end - i < 8 ? end - i : 8;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
          const vu word = load<vu>(block + v * GC_VBYTES);
          const auto value = [&](int s) __attribute__((always_inline)) {
            const int shift = s / 2 * 4 + s % 2 * 16;
#if defined(__AVX512F__)
            return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(word >> shift), table) * scale[v];
#else
            return Form::spelled((vi)(word << (28 - shift))) * scale[v];
#endif
          };
          if (steps == 8) {
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) store(out + s * GC_NR + v * VL, value(s));
          } else {
            for (int s = 0; s < steps; s++) store(out + s * GC_NR + v * VL, value(s));
          }
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

struct Pairs { __m512i first, second; };

#if defined(__AVX512VBMI__)
// The bytes of 0 to 127 as bf16, and the order in which lower and upper bytes interleave.
struct ByteTables {
  alignas(64) uint8_t low[128] = {}, high[128] = {}, order[128] = {};
  constexpr ByteTables() {
    for (int m = 0, exponent = 0; m < 128; m++) {
      if (m >= 2 << exponent) exponent++;
      const int bits = m ? (127 + exponent) << 7 | ((m << (7 - exponent)) & 127) : 0;
      low[m] = (uint8_t)bits;
      high[m] = (uint8_t)(bits >> 8);
      order[m] = (uint8_t)(m / 2 + m % 2 * 64);
    }
  }
};
static constexpr ByteTables BYTE_TABLES;
#endif

#if defined(__AVX512VBMI__)
// Bytes of the 128 in `low` and `high`, by the lower seven bits of each index. (The prelude leaves out
// the header of these instructions under GCC.)
GC_INLINE __m512i look_up(__m512i low, __m512i index, __m512i high) {
#if defined(__clang__)
  return _mm512_permutex2var_epi8(low, index, high);
#else
  typedef int8_t bytes __attribute__((vector_size(64)));
  return (__m512i)__builtin_shuffle((bytes)low, (bytes)high, (bytes)index);
#endif
}
#endif

// 64 bytes, 32 columns times two, as pairs of bf16.
struct Bytes {
#if defined(__AVX512VBMI__)
  __m512i low[2], high[2], first, second;
  GC_INLINE Bytes table() {
    const ByteTables& t = BYTE_TABLES;
    return {{_mm512_load_si512(t.low), _mm512_load_si512(t.low + 64)},
            {_mm512_load_si512(t.high), _mm512_load_si512(t.high + 64)},
            _mm512_load_si512(t.order), _mm512_load_si512(t.order + 64)};
  }
  inline __attribute__((always_inline)) Pairs at(const uint8_t* p) const {
    const __m512i code = _mm512_loadu_si512(p);
    const __m512i lower = look_up(low[0], code, low[1]);
    const __m512i upper = _mm512_ternarylogic_epi32(  // and the sign
        look_up(high[0], code, high[1]), code, _mm512_set1_epi8(-128), 0xf8);
    return {look_up(lower, first, upper), look_up(lower, second, upper)};
  }
#else
  GC_INLINE Bytes table() { return {}; }
  GC_INLINE vf value(const uint8_t* p) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)p);
    return int8_form::spelled((vi)_mm512_maskz_cvtepi8_epi32(0xffff, codes) << 24);
  }
  inline __attribute__((always_inline)) Pairs at(const uint8_t* p) const {
    return {(__m512i)_mm512_cvtne2ps_pbh((__m512)value(p + 16), (__m512)value(p)),
            (__m512i)_mm512_cvtne2ps_pbh((__m512)value(p + 48), (__m512)value(p + 32))};
  }
#endif
};

template <class Form>
GC_INLINE auto code_table() {
  if constexpr (Form::bits == 8) return Bytes::table();
  else return pair_table<Form>();
}

// dst[ceil(count/2)][32] pairs of bf16. 4-bit codes come with their scales, exactly; of 8-bit codes
// the scales remain to be applied.
template <class Form>
static void spell_pairs(Codes at, int64_t count, uint32_t* dst) {
  if constexpr (Form::bits == 8) {
    const Bytes table = Bytes::table();
    for (int64_t i = 0; i < count; i += 2, dst += GC_NR) {
      const Pairs pairs = table.at(block_at<Form>(at.panel, at.step + i));
      _mm512_storeu_si512(dst, pairs.first);
      _mm512_storeu_si512(dst + 16, pairs.second);
    }
  } else {
    const __m512i table = pair_table<Form>();
    for (int64_t g = 0; g < count; g += Form::group) {
      const int64_t end = count - g < Form::group ? count : g + Form::group;
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const vf scale = scales_at<Form>(at.panel, at.step + g, 16 * v);
        const uint8_t* block = block_at<Form>(at.panel, at.step + g) + 64 * v;
        uint32_t* out = dst + g / 2 * GC_NR + 16 * v;
        for (int64_t i = g; i < end; i += 8, block += 4 * GC_NR, out += 4 * GC_NR) {
          __m512i word = _mm512_loadu_si512(block);
          const int64_t steps = end - i < 8 ? (end - i + 1) / 2 : 4;
#pragma GCC unroll 4
          for (int s = 0; s < 4; s++, word = _mm512_srli_epi16(word, 4)) {
            if (s >= steps) break;
            const vu pair = (vu)_mm512_permutexvar_epi16(word, table);
            const vf low = (vf)(pair << 16) * scale, high = (vf)(pair & 0xffff0000u) * scale;
            store(out + s * GC_NR, (vu)low >> 16 | (vu)high);
          }
        }
      }
    }
  }
}

// c[MR][32] (+)= a [k/2][lda] pairs x codes of 2 k steps: values in registers, sums of a group scaled
// and added up in c.
template <class Form, int MR>
static void micro_codes(const uint32_t* a, int64_t lda, Codes at, int64_t k, float* c, int64_t ldc,
                        bool add) {
  constexpr int U = MR == 1 ? 4 : MR <= 3 ? 2 : 1;
  constexpr int64_t group = Form::group / 2;
  const auto table = code_table<Form>();
  for (int64_t i = 0; i < k; i += group, add = true) {
    const int64_t n = k - i < group ? k - i : group, step = at.step + 2 * i;
    const uint8_t* block = block_at<Form>(at.panel, step);
    __m512 acc[U][MR][2] = {};
    const auto dots = [&](int s, Pairs w) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const __m512bh av = (__m512bh)_mm512_set1_epi32((int)a[r]);
        acc[s % U][r][0] = _mm512_dpbf16_ps(acc[s % U][r][0], av, (__m512bh)w.first);
        acc[s % U][r][1] = _mm512_dpbf16_ps(acc[s % U][r][1], av, (__m512bh)w.second);
      }
      a += lda;
    };
    int64_t j = 0;
    for (; j + 4 <= n; j += 4, block += GC_NR * Form::bits) {
      if constexpr (Form::bits == 8) {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) dots(s, table.at(block + 64 * s));
      } else {
        const __m512i c0 = _mm512_loadu_si512(block), c1 = _mm512_loadu_si512(block + 64);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
          dots(s, {_mm512_permutexvar_epi16(_mm512_srli_epi16(c0, 4 * s), table),
                   _mm512_permutexvar_epi16(_mm512_srli_epi16(c1, 4 * s), table)});
      }
    }
    for (int s = 0; j < n; j++, s++) {
      if constexpr (Form::bits == 8) {
        dots(0, table.at(block + 64 * s));
      } else {
        const __m128i shift = _mm_cvtsi32_si128(4 * s);
        const __m512i c0 = _mm512_srl_epi16(_mm512_loadu_si512(block), shift),
                      c1 = _mm512_srl_epi16(_mm512_loadu_si512(block + 64), shift);
        dots(0, {_mm512_permutexvar_epi16(c0, table), _mm512_permutexvar_epi16(c1, table)});
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const __m512 scale = (__m512)scales_at<Form>(at.panel, step, 16 * v);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        __m512 sum = acc[0][r][v];
#pragma GCC unroll 4
        for (int u = 1; u < U; u++) sum += acc[u][r][v];
        float* const o = c + r * ldc + v * 16;
        _mm512_storeu_ps(o, add ? _mm512_loadu_ps(o) + sum * scale : sum * scale);
      }
    }
  }
}

#endif

}  // namespace gc
