// Attention over rows [latent | rope] that all heads share, chosen by index or all up to the query
// (graphc/ops/sparse_attention.py: latent_attention). Scores are whole rows times queries; the values
// are the latent part of the same rows.
//
// Scores: the heads of a group are the lanes of a vector, each row is read where it lies by broadcasts,
// eight rows at a time; nothing is gathered, transposed or added across. With half a vector of heads,
// a lane is a head and every second item of the row, two of which are broadcast together.
// Softmax is vertical. Values: columns are lanes, up to eight heads a tile; over bf16 two rows are
// interleaved in registers, and the sums stay in that order until the end.
//
// Rows of types that are not multiplied as they are, and rows in records, are converted a few at a
// time just before they are scored (latent_rows.h), or between products (latent_codes.h). Rows may be in
// two parts, the second (rope) in a tensor of its own.
//
// ptr = {query, rows, table, start, indices, out, partial, rope}; imm = gc_latent_shape. The first Step runs
// over batch x queries x chunks x groups of heads. Where there is more than one chunk it leaves records
// [batch][queries][heads][chunks]{maximum, sum, ..}[latent] in `partial`, of which the second
// (attention_latent_merge_*, over batch x queries x heads) makes `out`. Chunks depend on lengths alone,
// so results don't depend on the number of threads.
#pragma once
#include "prelude.h"

#include "attention_pack.h"
#include "attention_tile.h"
#include "latent_rows.h"
#include "vec.h"

struct gc_latent_shape {
  int64_t queries, heads, width, latent, chunks;
  int64_t chosen;  // indices per query; 0: all rows
  int64_t scale;   // bits of a float64
  int64_t q_b, q_t, q_h, i_b, i_t;
  gc_row_source rows;
  int64_t split;  // items of the first part; width: there is no other
  int64_t tail_outer, tail_row;  // as those of `rows`
  gc_record_format form;         // of rows in records alone
};

namespace {
using namespace gc;

constexpr int PHASES = GC_VBYTES == 64 ? 2 : 1;     // chains of a score
constexpr int VALUE_HEADS = GC_VBYTES == 64 ? 8 : 4;
constexpr int64_t HEAD = 16;   // floats before the sums of a record
constexpr int64_t CHAIN = 256; // fp32 products in a row that are added up before they join others

GC_INLINE int64_t whole(int64_t n) { return (n + 31) & -32; }
GC_INLINE double float_of(int64_t bits) { double d; memcpy(&d, &bits, 8); return d; }

// The item at a place of a row, or two items side by side, in all lanes.
template <class A, int P> GC_INLINE typename A::vec spread(const typename A::item* row) {
  if constexpr (P == 1) {
    const vi all = load<int32_t>(row) - vi{};
    return (typename A::vec)all;
  } else {
    typedef int64_t vl __attribute__((vector_size(GC_VBYTES)));
    const vl all = load<int64_t>(row) - vl{};
    return (typename A::vec)all;
  }
}
GC_INLINE vf times(vf acc, vf a, vf b) { return acc + a * b; }
#if defined(__AVX512BF16__)
GC_INLINE vf times(vf acc, __m512i a, __m512i b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)a);
}
// With an item in all lanes, read by the same instruction: compilers make two of it.
GC_INLINE vf times_item(vf acc, const uint32_t* item, __m512i b) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(*item));
  return acc;
}
#endif
template <class A, int P>
GC_INLINE vf times_items(vf acc, const typename A::item* row, typename A::vec b) {
#if defined(__AVX512BF16__)
  if constexpr (P == 1 && std::is_same<A, Pairs>::value) return times_item(acc, row, b);
#endif
  return times(acc, spread<A, P>(row), b);
}

// sums[SCORE_ROWS] of vectors over the steps [0, n) of q [..][VL], P items of a row at a time.
template <class A, int P>
GC_INLINE void score_rows(const typename A::item* q, const typename A::item* const* rows, int64_t at,
                          int64_t n, vf (&sum)[SCORE_ROWS], Coming& coming) {
  vf acc[PHASES][SCORE_ROWS] = {};
  const typename A::item* r[SCORE_ROWS];
#pragma GCC unroll 8
  for (int j = 0; j < SCORE_ROWS; j++) r[j] = rows[j] + at * P;
  q += at * VL;
  int64_t i = 0;
  for (; i + PHASES <= n; i += PHASES) {
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) coming.line();
#pragma GCC unroll 2
    for (int p = 0; p < PHASES; p++) {
      const auto qv = load<typename A::vec>(q + (i + p) * VL);
#pragma GCC unroll 8
      for (int j = 0; j < SCORE_ROWS; j++)
        acc[p][j] = times_items<A, P>(acc[p][j], r[j] + (i + p) * P, qv);
    }
  }
  for (; i < n; i++) {
    const auto qv = load<typename A::vec>(q + i * VL);
#pragma GCC unroll 8
    for (int j = 0; j < SCORE_ROWS; j++) acc[0][j] = times_items<A, P>(acc[0][j], r[j] + i * P, qv);
  }
#pragma GCC unroll 8
  for (int j = 0; j < SCORE_ROWS; j++)
    sum[j] = PHASES == 2 ? acc[0][j] + acc[PHASES - 1][j] : acc[0][j];
}

// s[SCORE_ROWS][VL / P]: scores of all heads of the group.
template <class A, int P>
GC_INLINE void score_tile(const typename A::item* q, const typename A::item* const* rows, int64_t steps,
                          const typename A::item* const* tails, int64_t behind, float* s,
                          Coming coming) {
  vf sum[SCORE_ROWS];
  const int64_t first = std::is_same<A, Floats>::value ? min64(steps, CHAIN) : steps;
  score_rows<A, P>(q, rows, 0, first, sum, coming);
  for (int64_t at = first; at < steps; at += CHAIN) {
    vf more[SCORE_ROWS];
    score_rows<A, P>(q, rows, at, min64(CHAIN, steps - at), more, coming);
#pragma GCC unroll 8
    for (int j = 0; j < SCORE_ROWS; j++) sum[j] += more[j];
  }
  if (behind) {
    vf more[SCORE_ROWS];
    score_rows<A, P>(q + steps * VL, tails, 0, behind, more, coming);
#pragma GCC unroll 8
    for (int j = 0; j < SCORE_ROWS; j++) sum[j] += more[j];
  }
#pragma GCC unroll 8
  for (int j = 0; j < SCORE_ROWS; j++) {
    if constexpr (P == 1) {
      store(s + j * VL, sum[j]);
    } else {
#if GC_VBYTES == 64
      const vf8 even = __builtin_shufflevector(sum[j], sum[j], 0, 2, 4, 6, 8, 10, 12, 14),
                odd = __builtin_shufflevector(sum[j], sum[j], 1, 3, 5, 7, 9, 11, 13, 15);
      store(s + j * (VL / 2), even + odd);
#endif
    }
  }
}

// out[R heads][columns of a tile] = out * change + weights x rows: n columns from `c` on.
struct FloatColumns {
  static constexpr int64_t count = 2 * VL;
  template <int R, bool FULL>
  static inline __attribute__((always_inline)) void mix(const float* weights, int64_t lanes,
                                                        const float* const* rows, int64_t n_rows,
                                                        int64_t c, int64_t n, const float* change,
                                                        float* out, int64_t ldo) {
    vf acc[R][2] = {};
    for (int64_t j = 0; j < n_rows; j++, weights += lanes) {
      const float* row = rows[j] + c;
      vf v[2];
      if (FULL) {
        v[0] = load<vf>(row);
        v[1] = load<vf>(row + VL);
      } else {
        v[0] = n < VL ? vload(row, First{n}) : load<vf>(row);
        v[1] = n > VL ? vload(row + VL, First{n - VL}) : vf{};
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vf w = splat(weights[r]);
        acc[r][0] += w * v[0];
        acc[r][1] += w * v[1];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        float* o = out + r * ldo + v * VL;
        store(o, load<vf>(o) * change[r] + acc[r][v]);
      }
    }
  }
  // A tile of sums as they are, and in the order of columns.
  static void order(const float* o, vf (&v)[2]) { v[0] = load<vf>(o), v[1] = load<vf>(o + VL); }
};

#if defined(__AVX512BF16__)
struct PairColumns {
  static constexpr int64_t count = 32;
  template <int R, bool FULL>
  static inline __attribute__((always_inline)) void mix(const uint32_t* weights, int64_t lanes,
                                                        const uint32_t* const* rows, int64_t n_rows,
                                                        int64_t c, int64_t n, const float* change,
                                                        float* out, int64_t ldo) {
    __m512 acc[R][2] = {};
    const __mmask32 m = (__mmask32)((1ull << n) - 1);
    for (int64_t j = 0; j < n_rows; j += 2, weights += lanes) {
      const bf16 *x = (const bf16*)rows[j] + c, *y = (const bf16*)rows[j + 1] + c;
      const __m512i even = FULL ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(m, x);
      const __m512i odd = FULL ? _mm512_loadu_si512(y) : _mm512_maskz_loadu_epi16(m, y);
      const __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(even, odd);
      const __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512bh w = (__m512bh)_mm512_set1_epi32((int)weights[r]);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], lo, w);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], hi, w);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        float* o = out + r * ldo + v * VL;
        store(o, load<vf>(o) * change[r] + (vf)acc[r][v]);
      }
    }
  }
  static void order(const float* o, vf (&v)[2]) {
    const __m512 lo = _mm512_loadu_ps(o), hi = _mm512_loadu_ps(o + VL);
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    v[0] = (vf)_mm512_permutex2var_pd((__m512d)lo, first, (__m512d)hi);
    v[1] = (vf)_mm512_permutex2var_pd((__m512d)lo, second, (__m512d)hi);
  }
};
#endif

#if defined(__AVX512BF16__)
// Quarters of four vectors as four vectors, `step` apart.
GC_INLINE void put_quarters(__m512i a, __m512i b, __m512i c, __m512i d, uint32_t* to, int64_t step) {
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x88), ab1 = _mm512_shuffle_i32x4(a, b, 0xdd);
  const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x88), cd1 = _mm512_shuffle_i32x4(c, d, 0xdd);
  _mm512_storeu_si512(to, _mm512_shuffle_i32x4(ab, cd, 0x88));
  _mm512_storeu_si512(to + step, _mm512_shuffle_i32x4(ab1, cd1, 0x88));
  _mm512_storeu_si512(to + 2 * step, _mm512_shuffle_i32x4(ab, cd, 0xdd));
  _mm512_storeu_si512(to + 3 * step, _mm512_shuffle_i32x4(ab1, cd1, 0xdd));
}
// Sixteen items of each head as vectors of all heads: of one item, or of two of half as many heads.
GC_INLINE void items_to_lanes(__m512i (&r)[16], uint32_t* to) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) put_quarters(r[k], r[4 + k], r[8 + k], r[12 + k], to + k * VL, 4 * VL);
}
GC_INLINE void items_to_lanes(__m512i (&r)[8], uint32_t* to) {
  __m512i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi64(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) put_quarters(t[k], t[2 + k], t[4 + k], t[6 + k], to + k * VL, 2 * VL);
}
#endif

template <class A> struct Columns { typedef FloatColumns type; };
#if defined(__AVX512BF16__)
template <> struct Columns<Pairs> { typedef PairColumns type; };
#endif

// T: of queries and results; A: arithmetic; P: items of a row that lanes share out; S: what rows are
// stored as.
// V: the order of sums.
template <class T, class A, int P, class S, class V = typename Columns<A>::type>
struct LatentAttention {
  typedef T Query;
  typedef typename A::item Item;
  typedef V Values;
  static constexpr int64_t LANES = VL / P;
  static constexpr bool FLOATS = std::is_same<A, Floats>::value;

  const gc_args* args;
  const gc_latent_shape* s;
  int64_t steps, ldo;
  float factor;
  Item* q;  // [steps / P][VL]
  float *scores, *out;  // [ROWS][LANES], [LANES][ldo]
  alignas(64) float base[VL], total[VL], change[VL];
  LatentRows<S, Item> rows;

  explicit LatentAttention(const gc_args* a)
      : args(a), s((const gc_latent_shape*)a->imm), rows(&s->rows, s->split, s->width, &s->form) {
    steps = (A::steps(s->width) + P - 1) / P;
    ldo = whole(s->latent);
    const float scale = (float)float_of(s->scale);
    factor = scale == 0.0f ? 1.0f : fabsf(scale) * LOG2E;
    float* at = (float*)a->scratch;
    const auto take = [&at](int64_t n) { return (at += n) - n; };
    scores = take(ROWS * 16);
    out = take(16 * ldo);
    q = (Item*)take(16 * whole(s->width));
    rows.place(a, s->tail_outer, s->tail_row, at);
  }
  LatentAttention(const LatentAttention&) = delete;  // the sources of its rows point into it

  // Queries of `heads` heads as lanes; lane h * P + p holds the items i * P + p.
  void load_query(const T* x, int64_t heads) {
    if constexpr (FLOATS) {
      const float scale = (float)float_of(s->scale);
      memset((void*)q, 0, (size_t)(steps * VL) * sizeof(Item));
      for (int64_t h = 0; h < heads; h++, x += s->q_h)
        for (int64_t i = 0; i < s->width; i++)
          q[i / P * VL + h * P + i % P] =
              scale == 0.0f ? 0.0f : scale < 0.0f ? -to_float(x[i]) : to_float(x[i]);
#if defined(__AVX512BF16__)
    } else {
      const int64_t items = A::steps(s->width);
      for (int64_t i = 0; i < items; i += VL) {
        const __mmask16 some = (__mmask16)((1u << min64(VL, items - i)) - 1);
        put_items(i, heads, [&](int64_t h) __attribute__((always_inline)) {
          return _mm512_maskz_loadu_epi32(some, x + h * s->q_h + 2 * i);
        });
      }
#endif
    }
  }
#if defined(__AVX512BF16__)
  // Items with the sign of the scale.
  inline __attribute__((always_inline)) __m512i with_sign(__m512i items) const {
    const float scale = (float)float_of(s->scale);
    if (scale == 0.0f) return _mm512_setzero_si512();
    return _mm512_xor_si512(items, _mm512_set1_epi32(scale < 0.0f ? (int)0x80008000 : 0));
  }
  // The items [i, i + VL) of all heads, those of one from get(head).
  template <class F>
  inline __attribute__((always_inline)) void put_items(int64_t i, int64_t heads, F get) {
    __m512i r[LANES];
#pragma GCC unroll 16
    for (int64_t h = 0; h < LANES; h++) {
      r[h] = _mm512_setzero_si512();
      if (h < heads) r[h] = with_sign(get(h));
    }
    items_to_lanes(r, (uint32_t*)q + i / P * VL);
  }
#endif

  // Weights of n rows, of which those up to whole tiles are scored; updates maximum and total.
  void softmax(int64_t n) {
    const int64_t full = (n + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    for (int64_t j = n * LANES; j < full * LANES; j++) scores[j] = NEGATIVE_INFINITY;
    const int64_t vectors = full / P;
    const vf before = load<vf>(base);
    vf top = before, other = before;
    for (int64_t j = 0; j < vectors; j += 2) {  // an even number, as SCORE_ROWS / P is
      top = max_or_first(top, load<vf>(scores + j * VL));
      other = max_or_first(other, load<vf>(scores + (j + 1) * VL));
    }
    const vf now = shared(max_or_first(top, other));
    const vf from = now == NEGATIVE_INFINITY ? vf{} : now;
    const vf rescale = exp2_weight<true>((before - from) * factor);
    vf sum[2] = {};
    if constexpr (P == 1 && !FLOATS) {
#if defined(__AVX512BF16__)
      for (int64_t j = 0; j < full; j += 2) {
        const vf lo = exp2_weight<false>((load<vf>(scores + j * VL) - from) * factor);
        const vf hi = exp2_weight<false>((load<vf>(scores + (j + 1) * VL) - from) * factor);
        sum[0] += lo;
        sum[1] += hi;
        store(scores + j / 2 * VL, pair_lanes(lo, hi));
      }
#endif
    } else {
      const auto weigh = [&](int64_t j) __attribute__((always_inline)) {
        const vf e = exp2_weight<FLOATS>((load<vf>(scores + j * VL) - from) * factor);
#if defined(__AVX512BF16__)
        if constexpr (!FLOATS) {
          _mm256_storeu_si256((__m256i*)(scores + j * LANES), interleaved(e));
          return e;
        }
#endif
        store(scores + j * VL, e);
        return e;
      };
      for (int64_t j = 0; j < vectors; j += 2) {
        sum[0] += weigh(j);
        sum[1] += weigh(j + 1);
      }
    }
    store(base, now);
    store(change, rescale);
    store(total, load<vf>(total) * rescale + (sum[0] + sum[1]));
  }

  // The maximum of both halves in both.
  static vf shared(vf x) {
#if defined(__AVX512F__)
    if (P == 2) return max_or_first(x, (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e));
#endif
    return x;
  }
#if defined(__AVX512BF16__)
  static __m256i interleaved(vf both) {
    const __m256i order = _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    return _mm256_permutexvar_epi16(order, (__m256i)_mm512_cvtneps_pbh((__m512)both));
  }
#endif

  void mix(const Item* const* rows, int64_t n, int64_t heads) {
    const int64_t full = (n + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    const Item* weights = (const Item*)scores;
    for (int64_t c = 0; c < s->latent; c += Values::count) {
      const int64_t columns = min64(Values::count, s->latent - c);
      int64_t h = 0;
      const auto tiles = [&](auto size) __attribute__((always_inline)) {
        constexpr int R = decltype(size)::count;
        for (; h + R <= heads; h += R) {
          float* o = out + h * ldo + c;
          if (columns == Values::count)
            Values::template mix<R, true>(weights + h, LANES, rows, full, c, columns, change + h, o, ldo);
          else
            Values::template mix<R, false>(weights + h, LANES, rows, full, c, columns, change + h, o, ldo);
        }
      };
      tiles(Rows<VALUE_HEADS>());
      tiles(Rows<2>());
      tiles(Rows<1>());
    }
  }

  // Heads [h0, h0 + heads) of query t of sequence b over chunk `chunk` of its rows.
  void run(int64_t b, int64_t t, int64_t h0, int64_t heads, int64_t chunk) {
    load_query(query(b, t, h0), heads);
    const int64_t split = A::steps(rows.in_place()) / P;
    start(b, t, chunk);
    for (int64_t n; (n = rows.next()) > 0;) {
      for (int64_t j = 0; j < n; j += SCORE_ROWS) {
        rows.stage(j);
        score_tile<A, P>(q, rows.items + j, rows.parted() ? split : steps, rows.tails + j,
                         rows.parted() ? steps - split : 0, scores + j * LANES, rows.ahead(j));
      }
      softmax(n);
      mix(rows.items, n, heads);
    }
    finish(b, t, h0, heads, chunk);
  }
  const T* query(int64_t b, int64_t t, int64_t h0) const {
    return (const T*)args->ptr[0] + b * s->q_b + t * s->q_t + h0 * s->q_h;
  }
  void start(int64_t b, int64_t t, int64_t chunk) {
    for (int i = 0; i < VL; i++) base[i] = NEGATIVE_INFINITY, total[i] = 0.0f;
    memset(out, 0, (size_t)(LANES * ldo) * sizeof(float));
    const int64_t seen = rows_seen((const int32_t*)args->ptr[3], b, t, s->rows.capacity);
    const int32_t* indices =
        s->chosen ? (const int32_t*)args->ptr[4] + b * s->i_b + t * s->i_t : nullptr;
    int64_t count = seen;
    if (indices) {
      count = 0;
      for (int64_t i = 0; i < s->chosen; i++) count += indices[i] >= 0 && indices[i] < seen;
    }
    const int64_t piece = ((count + s->chunks - 1) / s->chunks + SCORE_ROWS - 1) & -SCORE_ROWS;
    const int64_t first = min64(count, chunk * piece), last = min64(count, first + piece);
    rows.start(b, indices, seen, first, last - first);
  }

  void finish(int64_t b, int64_t t, int64_t h0, int64_t heads, int64_t chunk) {
    for (int64_t h = 0; h < heads; h++) {
      float sum = 0.0f;
      for (int p = 0; p < P; p++) sum += total[p * LANES + h];
      const int64_t row = (b * s->queries + t) * s->heads + h0 + h;
      const float* const o = out + h * ldo;
      if (s->chunks == 1) {
        T* const to = (T*)args->ptr[5] + row * s->latent;
        const vf inverse = splat(sum == 0.0f ? 0.0f : 1.0f / sum);
        each_column(o, [&](int64_t i, int64_t n, vf v) __attribute__((always_inline)) {
          if (n >= VL) vstore(to + i, v * inverse, All{});
          else vstore(to + i, v * inverse, First{n});
        });
      } else {
        float* const to = (float*)args->ptr[6] + (row * s->chunks + chunk) * (HEAD + ldo);
        to[0] = base[h];
        to[1] = sum;
        each_column(o, [&](int64_t i, int64_t, vf v) __attribute__((always_inline)) {
          store(to + HEAD + i, v);
        });
      }
    }
  }
  // f(column, how many are left, the sums of VL columns)
  template <class F>
  inline __attribute__((always_inline)) void each_column(const float* o, F f) {
    constexpr int64_t N = Values::count / VL;
    for (int64_t c = 0; c < s->latent; c += Values::count) {
      vf v[N];
      Values::order(o + c, v);
#pragma GCC unroll 4
      for (int64_t i = 0; i < N; i++)
        if (c + i * VL < s->latent) f(c + i * VL, s->latent - c - i * VL, v[i]);
    }
  }
};

template <class Unit> static void attend_units(const gc_args* args, int64_t begin, int64_t end) {
  Unit unit(args);
  const gc_latent_shape* s = unit.s;
  constexpr int64_t LANES = Unit::LANES;
  const int64_t groups = (s->heads + LANES - 1) / LANES;
  for (int64_t u = begin; u < end; u++) {
    const int64_t h0 = u % groups * LANES, chunk = u / groups % s->chunks;
    const int64_t row = u / groups / s->chunks;
    unit.run(row / s->queries, row % s->queries, h0, min64(LANES, s->heads - h0), chunk);
  }
}

// scratch: a row of fp32
template <class T>
static void merge_chunks(const gc_args* args, int64_t begin, int64_t end) {
  const gc_latent_shape* s = (const gc_latent_shape*)args->imm;
  if (s->chunks == 1) return;
  const float scale = (float)float_of(s->scale);
  const float factor = scale == 0.0f ? 1.0f : fabsf(scale) * LOG2E;
  const int64_t step = HEAD + whole(s->latent);
  float* const x = (float*)args->scratch;
  for (int64_t i = begin; i < end; i++) {
    const float* p = (const float*)args->ptr[6] + i * s->chunks * step;
    float most = NEGATIVE_INFINITY, total = 0.0f;
    for (int64_t c = 0; c < s->chunks; c++) most = p[c * step] > most ? p[c * step] : most;
    const float base = most == NEGATIVE_INFINITY ? 0.0f : most;
    for (int64_t j = 0; j < s->latent; j++) x[j] = 0.0f;
    for (int64_t c = 0; c < s->chunks; c++) {
      const float* part = p + c * step;
      const float change = exp2_negative1((part[0] - base) * factor);
      total += part[1] * change;
      for (int64_t j = 0; j < s->latent; j++) x[j] += part[HEAD + j] * change;
    }
    T* o = (T*)args->ptr[5] + i * s->latent;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t j = 0; j < s->latent; j++) o[j] = (T)(x[j] * inverse);
  }
}

// Two items of a row share the lanes where the heads take half of them at most.
template <class T, class A, class S>
static void attend(const gc_args* args, int64_t begin, int64_t end) {
#if GC_VBYTES == 64
  const gc_latent_shape* s = (const gc_latent_shape*)args->imm;
  if (s->heads <= VL / 2 && A::steps(s->width) % 2 == 0)
    return attend_units<LatentAttention<T, A, 2, S>>(args, begin, end);
#endif
  attend_units<LatentAttention<T, A, 1, S>>(args, begin, end);
}

}  // namespace

// The kernels of one dtype, over rows of that or in records.
#define GC_LATENT(TAG, TYPE, ARITHMETIC)                                                         \
  GC_EXPORT void attention_latent_##TAG(const gc_args* args, int64_t begin, int64_t end) {       \
    attend<TYPE, ARITHMETIC, TYPE>(args, begin, end);                                            \
  }                                                                                              \
  GC_EXPORT void attention_latent_merge_##TAG(const gc_args* args, int64_t begin, int64_t end) { \
    merge_chunks<TYPE>(args, begin, end);                                                        \
  }
#define GC_LATENT_RECORDS(TAG, TYPE, ARITHMETIC)                                                  \
  GC_EXPORT void attention_latent_records_##TAG(const gc_args* args, int64_t begin, int64_t end) { \
    attend<TYPE, ARITHMETIC, uint8_t>(args, begin, end);                                          \
  }                                                                                               \
  GC_LATENT_RECORDS_MERGE(TAG, TYPE)
#define GC_LATENT_RECORDS_MERGE(TAG, TYPE)                                                        \
  GC_EXPORT void attention_latent_records_merge_##TAG(const gc_args* args, int64_t begin,         \
                                                      int64_t end) {                              \
    merge_chunks<TYPE>(args, begin, end);                                                         \
  }
