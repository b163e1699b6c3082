// Products of queries and weights with rows of FP8 codes as they lie, of one tile each: nothing is
// written and read again between a code and its product.
//
// The exponent and mantissa of a normal E4M3 become those of a bf16 that is 2^8 times too small; what
// is missing and the scale of the row, a power of two, are applied to its score or its weight, where
// they change no bit of the sum. Rows with other codes or scales are looked up before
// (records_decode.h), and there nothing is missing.
#pragma once
#include "attention_mix.h"
#include "records_decode.h"

namespace gc {

constexpr int64_t CODE_ROWS = 64;  // at a time

template <int N> struct CodeRows;
template <int R, int N, class Next>
static void dot_codes(const bf16* q, int64_t ldq, const CodeRows<N>& rows, float* s, int64_t lds,
                      int64_t bytes, Next& next);
template <int R, int PARTS, int N, class Next>
static void mix_codes(const bf16* p, int64_t ldp, const CodeRows<N>& rows, const float* change,
                      float* out, int64_t ldo, int64_t bytes, Next& next);

#if GC_RECORDS_AS_BF16
// Numbers 2^-8 times 32 of 64 normal codes.
template <bool HIGH> GC_INLINE __m512i small_numbers(__m512i codes) {
  const __m512i bits = _mm512_set1_epi16((short)0x87f0), power = _mm512_set1_epi16(112 << 7);
  return _mm512_ternarylogic_epi32(shifted<HIGH>(codes), bits, power, 0xea);  // x & bits | power
}

// Rows of N x 64 codes.
template <int N> struct CodeRows {
  static constexpr int SOME = 4;  // looked at together
  const uint8_t* codes;  // of the first
  int64_t step;
  const bf16* made;  // [CODE_ROWS][N * 64]: those that are looked up
  int64_t count;
  alignas(64) float factor[CODE_ROWS + VL];  // what makes its numbers those of a row
  uint8_t late[CODE_ROWS + 2];               // whether it is looked up

  // `scales` bytes behind its codes a row has its scale.
  void begin(const uint8_t* first, int64_t apart, int64_t n, int64_t scales, RecordReader& reader,
             bf16* room) {
    codes = first;
    step = apart;
    made = room;
    count = n;
    for (int64_t j = 0; j < n; j += SOME) {
      const int64_t some = n - j < SOME ? n - j : SOME;
      if (__builtin_expect(some == SOME && regular<SOME>(j, scales), 1)) continue;
      for (int64_t i = j; i < j + some; i++) {
        if (regular<1>(i, scales)) continue;
        late[i] = 1;
        factor[i] = 1.0f;
        const uint8_t* const row = codes + i * step;
        reader.look_up(row, N * 64, load<float>(row + scales), room + i * N * 64);
      }
    }
  }
  // Whether the rows [j, j + ROWS) have normal codes, and scales that are powers of two; sets what
  // belongs to such rows.
  template <int ROWS>
  inline __attribute__((always_inline)) bool regular(int64_t j, int64_t scales) {
    uint32_t other = 0;
    __m512i most = _mm512_setzero_si512();
    const uint8_t* row = codes + j * step;
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++, row += step) {
      const uint32_t scale = load<uint32_t>(row + scales), power = scale + (8u << 23);
      memcpy(factor + j + i, &power, 4);
      late[j + i] = 0;
      other |= bias_of(scale) == 0;
#pragma GCC unroll 2
      for (int c = 0; c < N; c++)
        most = _mm512_max_epu8(most, above_normal(_mm512_loadu_si512(row + c * 64)));
    }
    return (other | (uint32_t)beyond(most)) == 0;
  }
  // Numbers [64 * i, 64 * i + 64) of row j times 1 / factor[j].
  inline __attribute__((always_inline))
  void get(int64_t j, int i, __m512i& low, __m512i& high) const {
    if (__builtin_expect(late[j], 0)) {
      low = _mm512_loadu_si512(made + (j * N + i) * 64);
      high = _mm512_loadu_si512(made + (j * N + i) * 64 + 32);
    } else {
      const __m512i all = _mm512_loadu_si512(codes + j * step + i * 64);
      low = small_numbers<false>(all);
      high = small_numbers<true>(all);
    }
  }
};

// s[r][j] = q[r] . row j for R queries; asks for `bytes` per row of what comes next.
template <int R, int N, class Next>
static void dot_codes(const bf16* q, int64_t ldq, const CodeRows<N>& rows, float* s, int64_t lds,
                      int64_t bytes, Next& next) {
  constexpr int KB = VL / R;
  const auto dot = [](vf sum, const bf16* x, __m512i y) __attribute__((always_inline)) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)y);
  };
  for (int64_t j = 0; j < rows.count; j += KB) {
    vf sum[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) sum[i] = vf{};
#pragma GCC unroll 16
    for (int k = 0; k < KB; k++) {
      const int64_t row = j + k < rows.count ? j + k : rows.count - 1;
      if (k % 4 == 0) next.ask(4 * bytes);
#pragma GCC unroll 2
      for (int i = 0; i < N; i++) {
        __m512i low, high;
        rows.get(row, i, low, high);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          sum[r * KB + k] = dot(sum[r * KB + k], q + r * ldq + i * 64, low);
          sum[r * KB + k] = dot(sum[r * KB + k], q + r * ldq + i * 64 + 32, high);
        }
      }
    }
    const vf dots = sum_each(sum);
    float factor[VL];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) memcpy(factor + r * KB, rows.factor + j, KB * 4);
    const vf scores = dots * load<vf>(factor);
    if (__builtin_expect(j + KB <= rows.count, 1)) {
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) memcpy(s + r * lds + j, (const float*)&scores + r * KB, KB * 4);
    } else {
      for (int r = 0; r < R; r++)
        memcpy(s + r * lds + j, (const float*)&scores + r * KB, (size_t)(rows.count - j) * 4);
    }
  }
}

// out[r] = out[r] * change[r] + weights x the numbers [64 * FIRST, 64 * (FIRST + M)) of all rows; w:
// [R][PARTS][CODE_ROWS], those of rows times their factors.
template <int R, int N, int FIRST, int M, int PARTS, class Next>
GC_INLINE void mix_code_columns(const bf16* w, const CodeRows<N>& rows, const float* change, float* out,
                                int64_t ldo, int64_t bytes, Next& next) {
  __m512 sum[R][4 * M] = {};
  for (int64_t j = 0; j < rows.count; j += 2) {
    const int64_t other = j + 1 < rows.count ? j + 1 : j;  // whose weight is 0
    next.ask(2 * bytes);
    __m512bh both[R][PARTS];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < PARTS; h++)
        both[r][h] = (__m512bh)_mm512_set1_epi32(load<int32_t>(w + (r * PARTS + h) * CODE_ROWS + j));
#pragma GCC unroll 2
    for (int i = 0; i < M; i++) {
      __m512i x[2], y[2];
      rows.get(j, FIRST + i, x[0], x[1]);
      rows.get(other, FIRST + i, y[0], y[1]);
#pragma GCC unroll 2
      for (int c = 0; c < 2; c++) {
        const __m512bh a = (__m512bh)_mm512_unpacklo_epi16(x[c], y[c]);
        const __m512bh b = (__m512bh)_mm512_unpackhi_epi16(x[c], y[c]);
        const int at = 4 * i + 2 * c;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int h = 0; h < PARTS; h++) {
            sum[r][at] = _mm512_dpbf16_ps(sum[r][at], both[r][h], a);
            sum[r][at + 1] = _mm512_dpbf16_ps(sum[r][at + 1], both[r][h], b);
          }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 4 * M; c++) {
      float* o = out + r * ldo + 64 * FIRST + c * VL;
      store(o, load<vf>(o) * change[r] + (vf)sum[r][c]);
    }
}

// The same for all numbers and weights as they are, rows of them ldp apart; out in lane order.
template <int R, int PARTS, int N, class Next>
static void mix_codes(const bf16* p, int64_t ldp, const CodeRows<N>& rows, const float* change,
                      float* out, int64_t ldo, int64_t bytes, Next& next) {
  alignas(64) bf16 w[R * PARTS * CODE_ROWS];
  for (int64_t j = 0; j < rows.count; j += VL) {
    const __mmask16 some = rows.count - j < VL ? (__mmask16)((1u << (rows.count - j)) - 1) : 0xffff;
#pragma GCC unroll 4
    for (int i = 0; i < R * PARTS; i++) {
      const __m256i x = _mm256_maskz_loadu_epi16(some, p + i * ldp + j);
      const __m512 wide = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
      const __m512 all = _mm512_maskz_mul_ps(some, wide, (__m512)load<vf>(rows.factor + j));
      _mm256_store_si256((__m256i*)(w + i * CODE_ROWS + j), (__m256i)_mm512_cvtneps_pbh(all));
    }
  }
  if constexpr (R * N * 4 <= 16) {
    mix_code_columns<R, N, 0, N, PARTS>(w, rows, change, out, ldo, bytes, next);
  } else {
    mix_code_columns<R, N, 0, 1, PARTS>(w, rows, change, out, ldo, bytes / 2, next);
    mix_code_columns<R, N, 1, 1, PARTS>(w, rows, change, out, ldo, bytes / 2, next);
  }
}
#endif

// Whether the columns [first, first + width) of records are codes of one scale, a power of two as a
// rule, that are multiplied as they lie.
static inline bool in_codes(const gc_record_format* form, int64_t first, int64_t width) {
#if GC_RECORDS_AS_BF16
  const gc_segment& s = form->segment[0];
  return form->group == 1 && s.kind == FP8_POW2 && (width == 64 || width == 128) &&
      first % width == 0 && first + width <= s.width;
#else
  return false;
#endif
}

}  // namespace gc
