// Explicit vectors for generated loops: reading and writing any storage type, whole vectors or the
// first lanes only, choices between lanes, one register reduced to a number, and the loop that runs
// over a row. A mask is a vector of 0 and -1.
#pragma once
#include <math.h>

#include <type_traits>

#include "widen.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gc {

typedef uint8_t vb __attribute__((vector_size(GC_VBYTES / 4)));
typedef int16_t vhs __attribute__((vector_size(GC_VBYTES / 2)));
typedef int8_t vbs __attribute__((vector_size(GC_VBYTES / 4)));

// How many lanes an access takes: all of them, or the first n (0 < n < VL).
struct All { constexpr operator int64_t() const { return VL; } };
struct First { int64_t n; operator int64_t() const { return n; } };

GC_INLINE vi vmask(bool b) { return (b ? -1 : 0) - vi{}; }
GC_INLINE vi lane_numbers() {
  vi v;
  for (int i = 0; i < VL; i++) v[i] = i;
  return v;
}
GC_INLINE vi within(First w) { return lane_numbers() < (int32_t)w.n; }

// -- one text for floats and vectors ------------------------------------------------------------

GC_INLINE int32_t ibits(float x) { return (int32_t)f32_to_bits(x); }
GC_INLINE vi ibits(vf x) { return (vi)x; }
GC_INLINE float fbits(int32_t x) { return bits_to_f32((uint32_t)x); }
GC_INLINE vf fbits(vi x) { return (vf)x; }
GC_INLINE float to_f32(int32_t x) { return (float)x; }
GC_INLINE vf to_f32(vi x) { return __builtin_convertvector(x, vf); }

template <class T> GC_INLINE T sel(bool m, T a, T b) { return m ? a : b; }
GC_INLINE vf sel(vi m, vf a, vf b) { return m ? a : b; }
GC_INLINE vf sel(vi m, float a, vf b) { return m ? splat(a) : b; }
GC_INLINE vf sel(vi m, vf a, float b) { return m ? a : splat(b); }
GC_INLINE vi sel(vi m, vi a, vi b) { return m ? a : b; }
GC_INLINE vf one(vi m) { return (vf)(m & ibits(splat(1.0f))); }  // 1 where the mask is set

GC_INLINE float vabs(float x) { return fabsf(x); }
GC_INLINE double vabs(double x) { return fabs(x); }
GC_INLINE vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
GC_INLINE float vcopysign(float x, float y) { return copysignf(x, y); }
GC_INLINE vf vcopysign(vf x, vf y) {
  return (vf)(((vi)x & 0x7fffffff) | ((vi)y & (int32_t)0x80000000));
}
#if defined(__AVX512F__)
GC_INLINE vf vsqrt(vf x) { return (vf)_mm512_sqrt_ps((__m512)x); }
#elif defined(__AVX__)
GC_INLINE vf vsqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
#elif defined(__SSE2__)
GC_INLINE vf vsqrt(vf x) { return (vf)_mm_sqrt_ps((__m128)x); }
#else
GC_INLINE vf vsqrt(vf x) {
  for (int i = 0; i < VL; i++) x[i] = sqrtf(x[i]);
  return x;
}
#endif

#if defined(__AVX512F__)
template <int Mode> GC_INLINE vf round_by(vf x) {
  return (vf)_mm512_roundscale_ps((__m512)x, Mode | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX__)
template <int Mode> GC_INLINE vf round_by(vf x) {
  return (vf)_mm256_round_ps((__m256)x, Mode | _MM_FROUND_NO_EXC);
}
#else
template <int Mode> GC_INLINE vf round_by(vf x) {
  for (int i = 0; i < VL; i++)
    x[i] = Mode == 0 ? nearbyintf(x[i])
                     : Mode == 1 ? floorf(x[i]) : Mode == 2 ? ceilf(x[i]) : truncf(x[i]);
  return x;
}
#endif
GC_INLINE vf vnearest(vf x) { return round_by<0>(x); }
GC_INLINE vf vfloor(vf x) { return round_by<1>(x); }
GC_INLINE vf vceil(vf x) { return round_by<2>(x); }
GC_INLINE vf vtrunc(vf x) { return round_by<3>(x); }

// NaN-propagating minimum and maximum, as torch's
template <class T> GC_INLINE T vmax(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> GC_INLINE T vmin(T a, T b) { return (a < b || a != a) ? a : b; }
GC_INLINE vf vmax(vf a, vf b) { return sel((a > b) | (a != a), a, b); }
GC_INLINE vf vmin(vf a, vf b) { return sel((a < b) | (a != a), a, b); }
GC_INLINE vi vmax(vi a, vi b) { return a | b; }  // of masks
GC_INLINE vi vmin(vi a, vi b) { return a & b; }
#if defined(__AVX512F__)  // the second operand, if one is NaN or both are zeros
GC_INLINE vf vmax(vf a, float b) { return (vf)_mm512_max_ps((__m512)splat(b), (__m512)a); }
GC_INLINE vf vmin(vf a, float b) { return (vf)_mm512_min_ps((__m512)splat(b), (__m512)a); }
#else
GC_INLINE vf vmax(vf a, float b) { return a < b ? splat(b) : a; }
GC_INLINE vf vmin(vf a, float b) { return a > b ? splat(b) : a; }
#endif

// Any function of single numbers, lane by lane.
GC_INLINE float lane_of(vf v, int i) { return v[i]; }
GC_INLINE bool lane_of(vi v, int i) { return v[i] != 0; }
GC_INLINE void set_lane(vf& v, int i, float x) { v[i] = x; }
GC_INLINE void set_lane(vi& v, int i, bool x) { v[i] = x ? -1 : 0; }
template <class R, class F, class... V> GC_INLINE R each(F f, V... v) {
  R r;
  for (int i = 0; i < VL; i++) set_lane(r, i, f(lane_of(v, i)...));
  return r;
}

// Lane k of the result is f(i + k).
template <class F> GC_INLINE vf at_lanes(int64_t i, F f) {
  vf r;
  for (int k = 0; k < VL; k++) r[k] = f(i + k);
  return r;
}

// -- rounding to a storage type -----------------------------------------------------------------

GC_INLINE vh to_bf16(vf x) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu b = (vu)x;
  vu r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  r = (x != x) ? ((b >> 16) | 0x40u) : r;
  return narrow(r);
#endif
}

#if defined(__AVX512F__)
GC_INLINE vh to_f16(vf x) { return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
GC_INLINE vf from_f16(vh h) { return (vf)_mm512_cvtph_ps((__m256i)h); }
#elif defined(__AVX__) && defined(__F16C__)
GC_INLINE vh to_f16(vf x) { return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
GC_INLINE vf from_f16(vh h) { return (vf)_mm256_cvtph_ps((__m128i)h); }
#else
GC_INLINE vh to_f16(vf x) {
  f16 t[VL];
  for (int i = 0; i < VL; i++) t[i] = f16(x[i]);
  return load<vh>(t);
}
GC_INLINE vf from_f16(vh h) {
  f16 t[VL];
  memcpy(t, &h, sizeof t);
  vf v;
  for (int i = 0; i < VL; i++) v[i] = (float)t[i];
  return v;
}
#endif

// A float rounded to what T can hold.
template <class T> GC_INLINE float rounded(float x) { return (float)T(x); }
template <class T> GC_INLINE vf rounded(vf x) {
  if constexpr (std::is_same<T, bf16>::value) return from_bf16(to_bf16(x));
  if constexpr (std::is_same<T, f16>::value) return from_f16(to_f16(x));
  return x;
}

// -- short integers -----------------------------------------------------------------------------

// As 32-bit lanes, and back to their lowest bits; see widen.h.
#if defined(__AVX512BW__)
GC_INLINE vi widen(vb b) { return (vi)_mm512_cvtepu8_epi32((__m128i)b); }
GC_INLINE vi widen(vbs b) { return (vi)_mm512_cvtepi8_epi32((__m128i)b); }
GC_INLINE vi widen(vhs h) { return (vi)_mm512_cvtepi16_epi32((__m256i)h); }
template <class S> GC_INLINE S narrow_to(vi v) {
  if constexpr (sizeof(S) == sizeof(vb)) return (S)_mm512_cvtepi32_epi8((__m512i)v);
  else return (S)_mm512_cvtepi32_epi16((__m512i)v);
}
#else
#if defined(__AVX2__) && GC_VBYTES == 32
GC_INLINE vi widen(vb b) { return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)b)); }
GC_INLINE vi widen(vbs b) { return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)b)); }
GC_INLINE vi widen(vhs h) { return (vi)_mm256_cvtepi16_epi32((__m128i)h); }
#else
template <class S> GC_INLINE vi widen(S s) { return __builtin_convertvector(s, vi); }
#endif
template <class S> GC_INLINE S narrow_to(vi v) { return __builtin_convertvector(v, S); }
#endif

// -- memory -------------------------------------------------------------------------------------

// Elements as floats (integers exactly up to 2^24), bools as masks.
GC_INLINE vf vload(const float* p, All) { return load<vf>(p); }
GC_INLINE vf vload(const bf16* p, All) { return from_bf16(load<vh>(p)); }
GC_INLINE vf vload(const f16* p, All) { return from_f16(load<vh>(p)); }
GC_INLINE vf vload(const uint8_t* p, All) { return to_f32(widen(load<vb>(p))); }
GC_INLINE vf vload(const int8_t* p, All) { return to_f32(widen(load<vbs>(p))); }
GC_INLINE vf vload(const int16_t* p, All) { return to_f32(widen(load<vhs>(p))); }
GC_INLINE vf vload(const int32_t* p, All) { return to_f32(load<vi>(p)); }
GC_INLINE vi vtest(const uint8_t* p, All) { return widen(load<vb>(p)) != 0; }
GC_INLINE void vstore(float* p, vf v, All) { store(p, v); }
GC_INLINE void vstore(bf16* p, vf v, All) { store(p, to_bf16(v)); }
GC_INLINE void vstore(f16* p, vf v, All) { store(p, to_f16(v)); }
GC_INLINE void vstore(uint8_t* p, vi m, All) { store(p, narrow_to<vb>(m & 1)); }
// Floats to integers, out of range as the CPU's conversion to 32 bits gives them.
GC_INLINE vi vtrunc_i32(vf v) { return __builtin_convertvector(v, vi); }
GC_INLINE void vstore_int(uint8_t* p, vf v, All) { store(p, narrow_to<vb>(vtrunc_i32(v))); }
GC_INLINE void vstore_int(int8_t* p, vf v, All) { store(p, narrow_to<vbs>(vtrunc_i32(v))); }
GC_INLINE void vstore_int(int16_t* p, vf v, All) { store(p, narrow_to<vhs>(vtrunc_i32(v))); }
GC_INLINE void vstore_int(int32_t* p, vf v, All) { store(p, vtrunc_i32(v)); }

// The first lanes: what lies behind them in memory is neither read nor written.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
GC_INLINE uint16_t lane_bits(First w) { return (uint16_t)((1u << w.n) - 1); }
GC_INLINE vf vload(const float* p, First w) {
  return (vf)_mm512_maskz_loadu_ps(lane_bits(w), p);
}
GC_INLINE vf vload(const bf16* p, First w) {
  return from_bf16((vh)_mm256_maskz_loadu_epi16(lane_bits(w), p));
}
GC_INLINE vf vload(const f16* p, First w) {
  return from_f16((vh)_mm256_maskz_loadu_epi16(lane_bits(w), p));
}
GC_INLINE void vstore(float* p, vf v, First w) {
  _mm512_mask_storeu_ps(p, lane_bits(w), (__m512)v);
}
GC_INLINE void vstore(bf16* p, vf v, First w) {
  _mm256_mask_storeu_epi16(p, lane_bits(w), (__m256i)to_bf16(v));
}
GC_INLINE void vstore(f16* p, vf v, First w) {
  _mm256_mask_storeu_epi16(p, lane_bits(w), (__m256i)to_f16(v));
}
#else
template <class T> GC_INLINE auto vload_first(const T* p, First w) {
  T t[VL];
  memset(t, 0, sizeof t);
  for (int64_t i = 0; i < w.n; i++) t[i] = p[i];
  return vload(t, All{});
}
GC_INLINE vf vload(const float* p, First w) { return vload_first(p, w); }
GC_INLINE vf vload(const bf16* p, First w) { return vload_first(p, w); }
GC_INLINE vf vload(const f16* p, First w) { return vload_first(p, w); }
template <class T> GC_INLINE void vstore_first(T* p, vf v, First w) {
  T t[VL];
  vstore(t, v, All{});
  for (int64_t i = 0; i < w.n; i++) p[i] = t[i];
}
GC_INLINE void vstore(float* p, vf v, First w) { vstore_first(p, v, w); }
GC_INLINE void vstore(bf16* p, vf v, First w) { vstore_first(p, v, w); }
GC_INLINE void vstore(f16* p, vf v, First w) { vstore_first(p, v, w); }
#endif
template <class T> GC_INLINE vf vload(const T* p, First w) {
  T t[VL] = {};
  for (int64_t i = 0; i < w.n; i++) t[i] = p[i];
  return vload(t, All{});
}
GC_INLINE vi vtest(const uint8_t* p, First w) {
  uint8_t t[VL] = {};
  for (int64_t i = 0; i < w.n; i++) t[i] = p[i];
  return vtest(t, All{});
}
GC_INLINE void vstore(uint8_t* p, vi m, First w) {
  uint8_t t[VL];
  vstore(t, m, All{});
  for (int64_t i = 0; i < w.n; i++) p[i] = t[i];
}
template <class T> GC_INLINE void vstore_int(T* p, vf v, First w) {
  T t[VL];
  vstore_int(t, v, All{});
  for (int64_t i = 0; i < w.n; i++) p[i] = t[i];
}

// The same with a step between elements.
template <class T, class W> GC_INLINE vf vload(const T* p, int64_t step, W w) {
  vf v = {};
  for (int64_t i = 0; i < (int64_t)w; i++) v[i] = (float)p[i * step];
  return v;
}
template <class W> GC_INLINE vi vtest(const uint8_t* p, int64_t step, W w) {
  vi v = {};
  for (int64_t i = 0; i < (int64_t)w; i++) v[i] = p[i * step] ? -1 : 0;
  return v;
}
template <class T, class W> GC_INLINE void vstore(T* p, int64_t step, vf v, W w) {
  T t[VL];
  vstore(t, v, All{});
  for (int64_t i = 0; i < (int64_t)w; i++) p[i * step] = t[i];
}
template <class W> GC_INLINE void vstore(uint8_t* p, int64_t step, vi v, W w) {
  for (int64_t i = 0; i < (int64_t)w; i++) p[i * step] = v[i] ? 1 : 0;
}
template <class T, class W> GC_INLINE void vstore_int(T* p, int64_t step, vf v, W w) {
  vi t = vtrunc_i32(v);
  for (int64_t i = 0; i < (int64_t)w; i++) p[i * step] = (T)t[i];
}

// -- reductions of a register -------------------------------------------------------------------

// v where w has lanes, else the neutral element
GC_INLINE vf only(vf v, float, All) { return v; }
GC_INLINE vf only(vf v, float unit, First w) { return sel(within(w), v, unit); }
GC_INLINE vi only(vi v, int32_t, All) { return v; }
GC_INLINE vi only(vi v, int32_t unit, First w) { return sel(within(w), v, unit - vi{}); }

template <class V, class F> GC_INLINE auto fold(V v, F f) {
  typename std::remove_reference<decltype(v[0])>::type t[VL];
  memcpy(t, &v, sizeof t);
#pragma GCC unroll 4
  for (int n = VL / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) t[i] = f(t[i], t[i + n]);
  return t[0];
}
#if defined(__AVX512F__)
GC_INLINE float hsum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
GC_INLINE float hmax(vf v) { return _mm512_reduce_max_ps((__m512)v); }
GC_INLINE float hmin(vf v) { return _mm512_reduce_min_ps((__m512)v); }
#else
GC_INLINE float hsum(vf v) { return fold(v, [](float a, float b) { return a + b; }); }
GC_INLINE float hmax(vf v) { return fold(v, [](float a, float b) { return a > b ? a : b; }); }
GC_INLINE float hmin(vf v) { return fold(v, [](float a, float b) { return a < b ? a : b; }); }
#endif
GC_INLINE float hprod(vf v) { return fold(v, [](float a, float b) { return a * b; }); }
#if defined(__AVX512F__)
GC_INLINE bool hany(vi v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
#else
GC_INLINE bool hany(vi v) {
  uint64_t t[GC_VBYTES / 8], all = 0;
  memcpy(t, &v, sizeof t);
  for (uint64_t part : t) all |= part;
  return all != 0;
}
#endif
GC_INLINE bool hall(vi v) { return !hany(~v); }

// Several registers as one
template <class V, int N, class F> GC_INLINE V fold_registers(const V (&a)[N], F f) {
  V t[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) t[i] = a[i];
#pragma GCC unroll 2
  for (int n = N / 2; n > 0; n /= 2)
#pragma GCC unroll 2
    for (int i = 0; i < n; i++) t[i] = f(t[i], t[i + n]);
  return t[0];
}
template <int N> GC_INLINE vf sum_of(const vf (&a)[N]) {
  return fold_registers(a, [](vf x, vf y) __attribute__((always_inline)) { return x + y; });
}
template <int N> GC_INLINE vf prod_of(const vf (&a)[N]) {
  return fold_registers(a, [](vf x, vf y) __attribute__((always_inline)) { return x * y; });
}
template <int N> GC_INLINE vf max_of(const vf (&a)[N]) {
  return fold_registers(a, [](vf x, vf y) __attribute__((always_inline)) {
    return sel(x > y, x, y);
  });
}
template <int N> GC_INLINE vf min_of(const vf (&a)[N]) {
  return fold_registers(a, [](vf x, vf y) __attribute__((always_inline)) {
    return sel(x < y, x, y);
  });
}
template <int N> GC_INLINE vi any_of(const vi (&a)[N]) {
  return fold_registers(a, [](vi x, vi y) __attribute__((always_inline)) { return x | y; });
}
template <int N> GC_INLINE vi all_of(const vi (&a)[N]) {
  return fold_registers(a, [](vi x, vi y) __attribute__((always_inline)) { return x & y; });
}

// VL doubles divided and rounded to floats.
GC_INLINE vf narrowed(const double* p, double divisor) {
  vf v;
  for (int i = 0; i < VL; i++) v[i] = (float)(p[i] / divisor);
  return v;
}

// -- the loop -----------------------------------------------------------------------------------

// body(i, lanes, u) for all of [begin, end), `U` vectors at a time with u = 0 .. U-1, so that each
// has accumulators of its own.
template <int U, class Body> GC_INLINE void sweep(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  if constexpr (U >= 4) {
    for (; i + 4 * VL <= end; i += 4 * VL) {
      body(i, All{}, std::integral_constant<int, 0>{});
      body(i + VL, All{}, std::integral_constant<int, 1>{});
      body(i + 2 * VL, All{}, std::integral_constant<int, 2>{});
      body(i + 3 * VL, All{}, std::integral_constant<int, 3>{});
    }
  } else if constexpr (U >= 2) {
    for (; i + 2 * VL <= end; i += 2 * VL) {
      body(i, All{}, std::integral_constant<int, 0>{});
      body(i + VL, All{}, std::integral_constant<int, 1>{});
    }
  }
  for (; i + VL <= end; i += VL) body(i, All{}, std::integral_constant<int, 0>{});
  if (i < end) body(i, First{end - i}, std::integral_constant<int, 0>{});
}

}  // namespace gc
