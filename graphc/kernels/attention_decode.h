// Attention of few queries over many keys, which lie in one or more segments (a cache, the new
// tokens): every key and value row is read once, in place, for all queries of all heads sharing it.
//
// Queries that see the same keys are the rows of one unit of work: `group` heads x tq positions.
// Keys are cut into `chunks` even pieces, by their number only, so that threads share long caches
// and results do not depend on how many threads there are; a second Step merges the pieces.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"
#include "attention_softmax.h"
#include "gemm.h"

#define GC_DECODE_ROWS 64     // rows of a unit at most
#define GC_DECODE_SEGMENTS 8  // segments at most

struct gc_decode_segment {
  int64_t keys;
  int64_t k_t, k_z[GC_BATCH_DIMS];
  int64_t v_t, v_z[GC_BATCH_DIMS];
};

struct gc_decode_shape {
  int64_t tq, tk, d, dv, group, chunks;
  int64_t scale, soft_cap;  // bits of float64; soft_cap 0: none
  int64_t back, ahead;      // query i sees the keys i - back to i + ahead
  int64_t mask_type;        // 0 none, 1 fp32, 2 bf16, 3 fp16, 4 bool (true: keep)
  int64_t mask_t, mask_k, mask_g;
  int64_t sink_type;        // the same; a sink is one more score of a row, whose weight is dropped
  int64_t sink_g;
  int64_t q_t, q_d, q_g;
  int64_t out_t, out_d, out_g;
  int64_t size[GC_BATCH_DIMS], q_z[GC_BATCH_DIMS], out_z[GC_BATCH_DIMS], mask_z[GC_BATCH_DIMS],
      sink_z[GC_BATCH_DIMS];
  int64_t segments;
  gc_decode_segment segment[];
};

namespace gc {

constexpr int PAIR = 2 * VL;  // elements loaded together: lanes of two native vectors

// PAIR elements as two vectors of floats in "lane order" (lane_of below): bf16 comes as even and odd
// elements, for one operation each. load_some takes the first n of them and zeros behind: nothing
// beyond them is touched.
GC_INLINE void load_pair(const float* p, vf& a, vf& b) {
  a = load<vf>(p);
  b = load<vf>(p + VL);
}
GC_INLINE void load_pair(const bf16* p, vf& a, vf& b) {
  const vi x = load<vi>(p);
  a = (vf)(x << 16);
  b = (vf)(x & (int32_t)0xffff0000);
}
GC_INLINE void load_pair(const f16* p, vf& a, vf& b) {
#if defined(__AVX512F__)
  a = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  b = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + VL)));
#elif defined(__F16C__)
  a = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  b = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + VL)));
#else
  for (int i = 0; i < VL; i++) a[i] = (float)p[i], b[i] = (float)p[VL + i];
#endif
}
#if defined(__AVX512F__)
GC_INLINE __mmask32 first_lanes(int64_t n) { return (__mmask32)((1ull << n) - 1); }
GC_INLINE void load_some(const float* p, int64_t n, vf& a, vf& b) {
  const __mmask32 m = first_lanes(n);
  a = (vf)_mm512_maskz_loadu_ps((__mmask16)m, p);
  b = (vf)_mm512_maskz_loadu_ps((__mmask16)(m >> 16), p + VL);
}
GC_INLINE void load_some(const bf16* p, int64_t n, vf& a, vf& b) {
  const vi x = (vi)_mm512_maskz_loadu_epi16(first_lanes(n), p);
  a = (vf)(x << 16);
  b = (vf)(x & (int32_t)0xffff0000);
}
GC_INLINE void load_some(const f16* p, int64_t n, vf& a, vf& b) {
  const __mmask32 m = first_lanes(n);
  a = (vf)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)m, p));
  b = (vf)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)(m >> 16), p + VL));
}
#else
template <class T> __attribute__((noinline)) static void copy_some(const T* p, int64_t n, T* whole) {
  for (int64_t i = 0; i < PAIR; i++) whole[i] = i < n ? p[i] : T(0.0f);
}
template <class T> GC_INLINE void load_some(const T* p, int64_t n, vf& a, vf& b) {
  T whole[PAIR];
  copy_some(p, n, whole);
  load_pair(whole, a, b);
}
#endif

// Place in lane order of element i of a PAIR.
template <class T> GC_INLINE int64_t lane_of(int64_t i) { return i; }
#if defined(__AVX512BF16__)  // as unpacked with the next key: see mix_block
template <> inline int64_t lane_of<bf16>(int64_t i) { return (i >> 2 & 1) * VL + (i >> 3) * 4 + (i & 3); }
#else
template <> inline int64_t lane_of<bf16>(int64_t i) { return (i & 1) * VL + (i >> 1); }
#endif
template <class T>
static void from_lane_order(const float* lanes, int64_t n, float* x) {
  if (sizeof(T) == 4 || lane_of<T>(4) == 4) {
    memcpy(x, lanes, (size_t)n * 4);
    return;
  }
  int64_t i = 0;
  if (lane_of<T>(4) == VL)  // runs of four
    for (; i + PAIR <= n; i += PAIR)
      for (int64_t j = 0; j < PAIR; j += 4) memcpy(x + i + j, lanes + i + lane_of<T>(j), 16);
  for (; i < n; i++) x[i] = lanes[(i & -PAIR) + lane_of<T>(i & (PAIR - 1))];
}

GC_INLINE float most_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < VL; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}
GC_INLINE float sum_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = x[0];
  for (int i = 1; i < VL; i++) sum += x[i];
  return sum;
#endif
}

// The sums of VL vectors as one vector: lane i is the sum of x[i]. Destroys x.
GC_INLINE vf sum_each(vf (&x)[VL]) {
#if defined(__AVX512F__)
  __m512 v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) v[i] = (__m512)x[i];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // halves of i and i + 4, i + 8 and i + 12
    v[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88) + _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
    v[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88) +
        _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)  // quarters of i, i + 4, i + 8, i + 12
    v[i] = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x88) + _mm512_shuffle_f32x4(v[i], v[i + 8], 0xdd);
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2)
    v[i] = _mm512_shuffle_ps(v[i], v[i + 1], 0x44) + _mm512_shuffle_ps(v[i], v[i + 1], 0xee);
  return (vf)(_mm512_shuffle_ps(v[0], v[2], 0x88) + _mm512_shuffle_ps(v[0], v[2], 0xdd));
#elif defined(__AVX__)
  transpose8(x);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#else
  transpose4(x);
  return (x[0] + x[1]) + (x[2] + x[3]);
#endif
}

// Queries as dot_block wants them: floats in lane order, or pairs of bf16 where those are multiplied.
// ld elements per row, zeros behind the d.
#if defined(__AVX512BF16__)
template <class T> struct Query { using type = float; };
template <> struct Query<bf16> { using type = bf16; };
#else
template <class T> struct Query { using type = float; };
#endif
template <class T>
static void load_query(const T* x, int64_t step, int64_t d, float* lanes, int64_t ld) {
  for (int64_t i = d & -PAIR; i < ld; i++) lanes[i] = 0.0f;
  for (int64_t i = 0; i < d; i++)
    lanes[(i & -PAIR) + lane_of<T>(i & (PAIR - 1))] = to_float(x[i * step]);
}
static inline void load_query(const bf16* x, int64_t step, int64_t d, bf16* row, int64_t ld) {
  if (step == 1) memcpy((void*)row, x, (size_t)d * 2);
  else
    for (int64_t i = 0; i < d; i++) row[i] = x[i * step];
  for (int64_t i = d; i < ld; i++) row[i] = bf16(0.0f);
}

// What is called with each row of keys or values that is read, to ask memory for others meanwhile.
struct Quiet {
  void ask(int64_t) {}
};

// sum[r * KB + j] = lanes to be added up to q[r] . k[j]. Rows are read one after the other: memory
// delivers half as much to a walk that takes a line of each in turn.
template <class T, int R, int KB, class Next>
GC_INLINE void dot_block(const float* q, int64_t ldq, const T* k, int64_t step, int64_t d,
                         vf (&sum)[R * KB], Next& next) {
#pragma GCC unroll 16
  for (int c = 0; c < R * KB; c++) sum[c] = vf{};
#pragma GCC unroll 16
  for (int j = 0; j < KB; j++) {
    const T* row = k + j * step;
    next.ask(d * (int64_t)sizeof(T));
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + PAIR <= d; i += PAIR) {
      vf a, b;
      load_pair(row + i, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        sum[r * KB + j] += load<vf>(q + r * ldq + i) * a;
        sum[r * KB + j] += load<vf>(q + r * ldq + i + VL) * b;
      }
    }
    if (i == d) continue;
    vf a, b;
    load_some(row + i, d - i, a, b);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      sum[r * KB + j] += load<vf>(q + r * ldq + i) * a;
      sum[r * KB + j] += load<vf>(q + r * ldq + i + VL) * b;
    }
  }
}
#if defined(__AVX512BF16__)
template <class T, int R, int KB, class Next>
GC_INLINE void dot_block(const bf16* q, int64_t ldq, const bf16* k, int64_t step, int64_t d,
                         vf (&sum)[R * KB], Next& next) {
  auto dot = [](vf s, const bf16* x, __m512i y) {
    return (vf)_mm512_dpbf16_ps((__m512)s, (__m512bh)_mm512_loadu_si512(x), (__m512bh)y);
  };
#pragma GCC unroll 16
  for (int c = 0; c < R * KB; c++) sum[c] = vf{};
#pragma GCC unroll 16
  for (int j = 0; j < KB; j++) {
    const bf16* row = k + j * step;
    next.ask(d * (int64_t)sizeof(T));
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + PAIR <= d; i += PAIR) {
      const __m512i x = _mm512_loadu_si512(row + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[r * KB + j] = dot(sum[r * KB + j], q + r * ldq + i, x);
    }
    if (i < d) {
      const __m512i x = _mm512_maskz_loadu_epi16(first_lanes(d - i), row + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[r * KB + j] = dot(sum[r * KB + j], q + r * ldq + i, x);
    }
  }
}
#endif

template <class T, int R, class Next>
GC_INLINE void dot_walk(const typename Query<T>::type* q, int64_t ldq, const T* k, int64_t step,
                        int64_t d, int64_t keys, float* s, int64_t lds, Next& next) {
  constexpr int KB = VL / R;
  if (keys < KB) {
    for (int64_t j = 0; j < keys; j++) {
      vf sum[R];
      dot_block<T, R, 1>(q, ldq, k + j * step, step, d, sum, next);
      for (int r = 0; r < R; r++) s[r * lds + j] = sum_of(sum[r]);
    }
    return;
  }
  for (int64_t j = 0;;) {  // the last block overlaps the one before
    vf sum[VL];
    dot_block<T, R, KB>(q, ldq, k + j * step, step, d, sum, next);
    const vf dots = sum_each(sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) memcpy(s + r * lds + j, (const float*)&dots + r * KB, KB * 4);
    if (j + KB >= keys) break;
    j = j + 2 * KB <= keys ? j + KB : keys - KB;
  }
}

// s[r][j] = q[r] . k[j] for R rows, VL / R keys at a time.
template <class T, int R, class Next = Quiet>
static void dot_keys(const typename Query<T>::type* q, int64_t ldq, const T* k, int64_t step, int64_t d,
                     int64_t keys, float* s, int64_t lds, Next next = Next()) {
  if (d == 4 * PAIR) dot_walk<T, R>(q, ldq, k, step, 4 * PAIR, keys, s, lds, next);  // no inner loop
  else dot_walk<T, R>(q, ldq, k, step, d, keys, s, lds, next);
}

// out[r][c] = out[r][c] * factor[r] + sum over keys of p[r][j] * v[j][c], for R rows and C PAIRs of
// columns in registers, of the last of which there are n; out in lane order.
template <class T, int R, int C, bool FULL, class Next>
GC_INLINE void mix_block(const float* p, int64_t ldp, const T* v, int64_t step, int64_t keys, int64_t n,
                         const float* factor, float* out, int64_t ldo, Next& next) {
  vf sum[R][2 * C] = {};
  for (int64_t j = 0; j < keys; j++) {
    const T* row = v + j * step;
    next.ask(C * PAIR * (int64_t)sizeof(T));
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      vf a, b;
      if (FULL) load_pair(row + c * PAIR, a, b);
      else load_some(row + c * PAIR, n, a, b);
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) {
        const vf w = splat(p[r * ldp + j]);
        sum[r][2 * c] += w * a;
        sum[r][2 * c + 1] += w * b;
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++) {
      float* o = out + r * ldo + c * VL;
      store(o, load<vf>(o) * factor[r] + sum[r][c]);
    }
}

#if defined(__AVX512BF16__)
// The same with weights in bf16, each the sum of PARTS numbers in as many rows of p.
template <int R, int C, bool FULL, int PARTS, class Next>
GC_INLINE void mix_pairs(const bf16* p, int64_t ldp, const bf16* v, int64_t step, int64_t keys, int64_t n,
                         const float* factor, float* out, int64_t ldo, Next& next) {
  __m512 sum[R][2 * C] = {};
  const __mmask32 lanes = first_lanes(n);
  for (int64_t j = 0; j < keys; j += 2) {
    const bool two = j + 1 < keys;  // else the second of the pair is multiplied by zero
    const bf16 *row = v + j * step, *other = two ? row + step : row;
    next.ask(2 * C * PAIR * (int64_t)sizeof(bf16));
    __m512bh w[R][PARTS];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < PARTS; h++) {
        int32_t pair;
        memcpy(&pair, p + (PARTS * r + h) * ldp + j, 4);
        w[r][h] = (__m512bh)_mm512_set1_epi32(two ? pair : pair & 0xffff);
      }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const __m512i x = FULL ? _mm512_loadu_si512(row + c * PAIR)
                             : _mm512_maskz_loadu_epi16(lanes, row + c * PAIR);
      const __m512i y = FULL ? _mm512_loadu_si512(other + c * PAIR)
                             : _mm512_maskz_loadu_epi16(lanes, other + c * PAIR);
      const __m512bh a = (__m512bh)_mm512_unpacklo_epi16(x, y);
      const __m512bh b = (__m512bh)_mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 2
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int h = 0; h < PARTS; h++) {
          sum[r][2 * c] = _mm512_dpbf16_ps(sum[r][2 * c], w[r][h], a);
          sum[r][2 * c + 1] = _mm512_dpbf16_ps(sum[r][2 * c + 1], w[r][h], b);
        }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++) {
      float* o = out + r * ldo + c * VL;
      store(o, load<vf>(o) * factor[r] + (vf)sum[r][c]);
    }
}
#endif

// Weights as they are multiplied: floats, or bf16, as torch's kernels round them. Up to EXACT rows of
// a unit a weight is two bf16, which hold 16 bits of it: there memory sets the pace anyway.
constexpr int EXACT = 1;
static inline void put_weights(const float* x, int64_t n, int, float* p, int64_t) {
  memcpy(p, x, (size_t)n * 4);
}
static inline void put_weights(const float* x, int64_t n, int parts, bf16* p, int64_t ldp) {
  for (int64_t j = 0; j < n; j++) p[j] = bf16(x[j]);
  if (parts == 2)
    for (int64_t j = 0; j < n; j++) p[ldp + j] = bf16(x[j] - (float)p[j]);
}

template <class T, int R, int C, bool FULL, class W, class Next>
GC_INLINE void mix_any(int parts, const W* p, int64_t ldp, const T* v, int64_t step, int64_t keys,
                       int64_t n, const float* factor, float* out, int64_t ldo, Next& next) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(W) == 2) {
    if (parts == 2) mix_pairs<R, C, FULL, 2>(p, ldp, v, step, keys, n, factor, out, ldo, next);
    else mix_pairs<R, C, FULL, 1>(p, ldp, v, step, keys, n, factor, out, ldo, next);
    return;
  }
#endif
  if constexpr (sizeof(W) == 4)
    mix_block<T, R, C, FULL>(p, ldp, v, step, keys, n, factor, out, ldo, next);
}

template <class T, int R, class Next = Quiet>
static void mix_keys(int parts, const typename Query<T>::type* p, int64_t ldp, const T* v, int64_t step,
                     int64_t dv, int64_t keys, const float* factor, float* out, int64_t ldo,
                     Next next = Next()) {
  constexpr int C = GC_VBYTES == 64 || R == 1 ? 4 : 2;
  for (int64_t c = 0; c < dv;) {
    if (c + C * PAIR <= dv) {
      mix_any<T, R, C, true>(parts, p, ldp, v + c, step, keys, PAIR, factor, out + c, ldo, next);
      c += C * PAIR;
    } else if (c + PAIR <= dv) {
      mix_any<T, R, 1, true>(parts, p, ldp, v + c, step, keys, PAIR, factor, out + c, ldo, next);
      c += PAIR;
    } else {
      mix_any<T, R, 1, false>(parts, p, ldp, v + c, step, keys, dv - c, factor, out + c, ldo, next);
      c += PAIR;
    }
  }
}

}  // namespace gc
