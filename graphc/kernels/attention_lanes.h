// Rows of keys and values as vectors of floats in an order of their own, sums over lanes, and what is
// asked of memory while rows are read: the parts of attention of few queries.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"
#include "attention_softmax.h"

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

// What is called with the bytes of keys or values as they are read, to ask memory for others
// meanwhile. Where rows are read TILED, some of each of several in turn, memory itself delivers half
// as much: they should be near, or have been asked for.
struct Quiet {
  static constexpr bool TILED = false;
  void ask(int64_t) {}
};
struct Near {
  static constexpr bool TILED = true;
  void ask(int64_t) {}
};
// Asks for the rows of `bytes` from p on, one after the other, `gap` bytes between them.
struct Later {
  static constexpr bool TILED = true;
  const char* p;
  int64_t bytes, gap, at = 0;
  inline __attribute__((always_inline)) void ask(int64_t n) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(p + i, 0, 2);
    p += n;
    at += n;
    if (at < bytes) return;
    p += gap;
    at = 0;
  }
};
// Two places of a walk: what a core asks for faster than memory delivers seems to be dropped in part, so
// it is asked for again when it is nearer.
struct Twice {
  static constexpr bool TILED = true;
  Later first, again;
  inline __attribute__((always_inline)) void ask(int64_t n) {
    first.ask(n);
    again.ask(n);
  }
};
// The rows of `width` elements from p on, `step` elements apart.
template <class T> GC_INLINE Later later(const T* p, int64_t width, int64_t step) {
  const int64_t size = sizeof(T);
  return {(const char*)p, width * size, (step - width) * size};
}

// The most queries of a head of keys that memory sets the pace of where rows are read in turns, and what
// comes is asked for twice; and how many rows of so many bytes such a turn has: a page of them.
constexpr int64_t MANY = GC_VBYTES == 64 ? 16 : 3;
GC_INLINE int64_t turn_rows(int64_t bytes) {
  const int64_t n = 4096 / bytes;
  return n < 8 ? 8 : n > 32 ? 32 : n;
}

}  // namespace gc
