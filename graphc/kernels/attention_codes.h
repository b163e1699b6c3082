// Products of queries and weights with tiles of rows of FP8 codes as they lie: nothing is written and
// read again between a code and its product. The scale of a row is applied to its score or its weight.
#pragma once
#include "attention_mix.h"
#include "attention_record.h"
#include "records_decode.h"

namespace gc {

constexpr int64_t CODE_ROWS = 64;  // at a time

// Queries as they meet codes, and sums as codes leave them, which the places of their columns change.
static inline void load_code_query(const bf16* x, int64_t step, int64_t d, bf16* row) {
  for (int64_t i = 0; i < d; i += 8) {
    bf16* const to = row + ((i & -64) | (i & 8) << 2 | (i >> 1 & 24));
    for (int64_t j = 0; j < 8; j++) to[j] = x[(i + j) * step];
  }
}
static inline void from_code_lanes(const float* lanes, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += 4)
    memcpy(x + i, lanes + ((i & -64) | (i & 12) << 2 | (i >> 2 & 12)), 16);
}

// Rows that come some turns later, asked for as those before them are read; twice, as in
// attention_lanes.h.
struct LaterRows {
  const uint8_t *first, *again;
  int64_t step;
  inline __attribute__((always_inline)) void ask(int64_t j, int64_t line) const {
    __builtin_prefetch(first + j * step + line * 64, 0, 2);
    __builtin_prefetch(again + j * step + line * 64, 0, 3);
  }
};
struct NoRows {
  void ask(int64_t, int64_t) const {}
};

template <int N> struct CodeRows;
template <int R, int N, class Next>
static void dot_codes(const bf16* q, int64_t r0, const CodeRows<N>& rows, float* s, int64_t lds, bool add,
                      const Next& next);
template <int R, int PARTS, int N, class Next>
static void mix_codes(const float* p, int64_t ldp, const CodeRows<N>& rows, const float* change,
                      float* out, int64_t ldo, const Next& next);

#if GC_CODES_AS_BF16
constexpr bool AS_CODES = true;

// Rows of N x 64 codes.
template <int N> struct CodeRows {
  const uint8_t* codes;  // of the first
  int64_t step, count;
  alignas(64) float factor[CODE_ROWS + VL];  // scales

  // `scales` bytes behind its codes a row has its scale.
  void begin(const uint8_t* first, int64_t apart, int64_t n, int64_t scales) {
    codes = first;
    step = apart;
    count = n;
    for (int64_t j = 0; j < n; j++) memcpy(factor + j, first + j * apart + scales, 4);
  }
};

// N numbers, again and again.
template <int N> GC_INLINE vf repeated(const float* x) {
  if constexpr (N == 16) return load<vf>(x);
  else if constexpr (N == 8) return (vf)_mm512_broadcast_f32x8(_mm256_loadu_ps(x));
  else return (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(x));
}

// s[r][j] = q[r] . row j, or that is added, for R queries from r0 on, one after the other as
// load_code_query leaves them.
template <int R, int N, class Next>
__attribute__((noinline))
static void dot_codes(const bf16* q, int64_t r0, const CodeRows<N>& rows, float* s, int64_t lds, bool add,
                      const Next& next) {
  constexpr int KB = VL / R;
  q += r0 * N * 64;
  s += r0 * lds;
  const CodeLookup made;
  for (int64_t j = 0; j < rows.count; j += KB) {
    vf sum[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) sum[i] = vf{};
#pragma GCC unroll 8
    for (int k = 0; k < KB; k += 2) {  // two rows for each query that is loaded
      const uint8_t* row[2];
#pragma GCC unroll 2
      for (int y = 0; y < 2; y++) {
        row[y] = rows.codes + (j + k + y < rows.count ? j + k + y : rows.count - 1) * rows.step;
#pragma GCC unroll 2
        for (int i = 0; i < N; i++) next.ask(j + k + y, i);
      }
      asm("" : "+r"(q));  // else the compiler keeps queries in registers, and sums elsewhere
#pragma GCC unroll 2
      for (int i = 0; i < N; i++) {
        __m512i x[2][2];
#pragma GCC unroll 2
        for (int y = 0; y < 2; y++) made(_mm512_loadu_si512(row[y] + i * 64), x[y]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const __m512bh query = (__m512bh)_mm512_loadu_si512(q + (r * N + i) * 64 + h * 32);
#pragma GCC unroll 2
            for (int y = 0; y < 2; y++) {
              vf& to = sum[r * KB + k + y];
              to = (vf)_mm512_dpbf16_ps((__m512)to, (__m512bh)x[y][h], query);
            }
          }
      }
    }
    vf scores = sum_each(sum) * repeated<KB>(rows.factor + j);
    if (add) {
      vf before = {};  // beyond the rows, too: a row of scores ends with a whole vector
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) memcpy((float*)&before + r * KB, s + r * lds + j, KB * 4);
      scores += before;
    }
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
// [R][PARTS][CODE_ROWS], those of rows times their scales.
template <int R, int N, int FIRST, int M, int PARTS, class Next>
__attribute__((noinline))
static void mix_code_columns(const bf16* w, const CodeRows<N>& rows, const float* change, float* out,
                             int64_t ldo, const Next& next) {
  const CodeLookup made;
  __m512 sum[R][4 * M] = {};
  for (int64_t j = 0; j < rows.count; j += 2) {
    const uint8_t* const row = rows.codes + j * rows.step + 64 * FIRST;
    const uint8_t* const other = j + 1 < rows.count ? row + rows.step : row;  // whose weight is 0
#pragma GCC unroll 2
    for (int i = 0; i < M; i++) {
      next.ask(j, FIRST + i);
      next.ask(j + 1, FIRST + i);
      const __m512i x = _mm512_loadu_si512(row + 64 * i), y = _mm512_loadu_si512(other + 64 * i);
      __m512i pair[4];  // of both rows, side by side
      made(_mm512_unpacklo_epi8(x, y), pair);
      made(_mm512_unpackhi_epi8(x, y), pair + 2);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int h = 0; h < PARTS; h++) {
          const __m512bh both =
              (__m512bh)_mm512_set1_epi32(load<int32_t>(w + (r * PARTS + h) * CODE_ROWS + j));
#pragma GCC unroll 4
          for (int c = 0; c < 4; c++)
            sum[r][4 * i + c] = _mm512_dpbf16_ps(sum[r][4 * i + c], both, (__m512bh)pair[c]);
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

// The same for all numbers and weights as they are, rows of them ldp apart. A weight is PARTS numbers,
// as in put_weights; `out` is in the order of from_code_lanes.
template <int R, int PARTS, int N, class Next>
__attribute__((noinline))
static void mix_codes(const float* p, int64_t ldp, const CodeRows<N>& rows, const float* change,
                      float* out, int64_t ldo, const Next& next) {
  alignas(64) bf16 w[R * PARTS * CODE_ROWS];
  for (int64_t j = 0; j < rows.count; j += VL) {
    const __mmask16 some = rows.count - j < VL ? (__mmask16)((1u << (rows.count - j)) - 1) : 0xffff;
    const __m512 factor = (__m512)load<vf>(rows.factor + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const vf all = (vf)_mm512_maskz_mul_ps(some, _mm512_maskz_loadu_ps(some, p + r * ldp + j), factor);
      put_weights((const float*)&all, VL, PARTS, w + r * PARTS * CODE_ROWS + j, CODE_ROWS);
    }
  }
  if constexpr (R * N <= 4) {
    mix_code_columns<R, N, 0, N, PARTS>(w, rows, change, out, ldo, next);
  } else {
    mix_code_columns<R, N, 0, 1, PARTS>(w, rows, change, out, ldo, next);
    mix_code_columns<R, N, 1, 1, PARTS>(w, rows, change, out, ldo, next);
  }
}
#else
constexpr bool AS_CODES = false;
#endif

// Whether the columns [first, first + width) of records are codes.
static inline bool in_codes(const gc_record_format* form, int64_t first, int64_t width) {
  const gc_segment& s = form->segment[0];
  return form->group == 1 && (s.kind == FP8_POW2 || s.kind == FP8) && width % 64 == 0 &&
      first % 64 == 0 && first + width <= s.width;
}

}  // namespace gc
