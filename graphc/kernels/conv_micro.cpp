// Micro-kernels of the convolution (gc_conv_tile in conv.h). Pixels are read where they lie: a value,
// or a pair of bf16, is broadcast from memory.
#include <type_traits>

#include "conv.h"
#include "isa.h"
#include "num.h"
#include "vec.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define GC_MEMBER static inline __attribute__((always_inline))

namespace gc {
namespace {

// One step: acc[MR][NV] += x[MR] x w[NV], vectors of type V; fp32 takes one channel, bf16 two. GCC must see constant
// bounds everywhere to keep the sums in registers.
template <class T> struct conv_step;

template <> struct conv_step<float> {
  static constexpr int channels = 1;
  template <class V, int MR, int NV>
  GC_MEMBER void run(const char* const (&x)[MR], int64_t at, const char* w, V (&acc)[MR][NV]) {
    V b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = load<V>(w + v * sizeof(V));
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const V a = load<float>(x[r] + at) - V{};
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] += a * b[v];
    }
  }
  template <class V, int MR, int NV>
  GC_MEMBER void last(const char* const (&)[MR], int64_t, const char*, V (&)[MR][NV]) {}
};

#if defined(__AVX512BF16__)
GC_INLINE void pair_sum(__m512& acc, uint32_t x, const char* w) {
  acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)load<__m512i>(w));
}
GC_INLINE void pair_sum(__m256& acc, uint32_t x, const char* w) {
  acc = _mm256_dpbf16_ps(acc, (__m256bh)_mm256_set1_epi32((int)x), (__m256bh)load<__m256i>(w));
}
#endif

template <> struct conv_step<bf16> {
  static constexpr int channels = 2;
  template <class V, int MR, int NV>
  GC_MEMBER void multiply(const uint32_t (&x)[MR], const char* w, V (&acc)[MR][NV]) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) pair_sum(acc[r][v], x[r], w + v * sizeof(V));
#else
    typedef decltype(V{} == V{}) I;  // int32 lanes
    V even[NV], odd[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const I pair = load<I>(w + v * sizeof(V));
      even[v] = (V)(pair << 16);
      odd[v] = (V)(pair & (int32_t)0xffff0000);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const V lo = bits_to_f32(x[r] << 16) - V{}, hi = bits_to_f32(x[r] & 0xffff0000u) - V{};
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = acc[r][v] + lo * even[v] + hi * odd[v];
    }
#endif
  }
  template <class V, int MR, int NV>
  GC_MEMBER void run(const char* const (&x)[MR], int64_t at, const char* w, V (&acc)[MR][NV]) {
    uint32_t pair[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) pair[r] = load<uint32_t>(x[r] + at);
    multiply<V, MR, NV>(pair, w, acc);
  }
  template <class V, int MR, int NV>  // an odd number of channels: what follows is another pixel
  GC_MEMBER void last(const char* const (&x)[MR], int64_t at, const char* w, V (&acc)[MR][NV]) {
    uint32_t pair[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) pair[r] = load<uint16_t>(x[r] + at);
    multiply<V, MR, NV>(pair, w, acc);
  }
};

// Asks for what a tile reads and writes when its products are there.
template <class T, int MR>
GC_INLINE void fetch_finish(const gc_conv_tile& t) {
  for (int r = 0; r < MR; r++)
    for (int64_t i = 0; i < GC_NR * (int64_t)sizeof(T); i += 64) {
      __builtin_prefetch(t.out + r * t.finish->out_m + i, 1);
      if (t.add) __builtin_prefetch(t.add + r * t.finish->add_m + i, 0);
    }
}

GC_INLINE void store_row(float* out, const vf* row, int count) {
  for (int v = 0; v < count; v++) store(out + v * VL, row[v]);
}
GC_INLINE void store_row(bf16* out, const vf* row, int count) {
#if defined(__AVX512BF16__) && GC_VBYTES == 64
  if (count == 2)  // one store costs the products less than two
    return store(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)row[1], (__m512)row[0]));
#endif
  for (int v = 0; v < count; v++) store(out + v * VL, to_bf16(row[v]));
}

// NV vectors of type V, columns from h on of panels `wide` columns wide. Few accumulators: U steps go
// to separate sums, which hides the latency of the multiply-add.
template <class T, class V, int MR, int NV, int U>
GC_INLINE void conv_columns(const gc_conv_tile& t, int64_t wide, int64_t h) {
  typedef conv_step<T> S;
  constexpr int64_t L = sizeof(V) / 4, each = S::channels * sizeof(T);  // bytes of a pixel
  const int64_t row = wide * each;                                     // of weights of a step
  // Sums of bf16 start from `init`, so that less waits for the last products. In fp32 it comes last:
  // earlier sums are added to as a whole, and short chains keep the error low.
  constexpr bool ahead = sizeof(T) == 2;
  const float* const init = t.init + h;
  V acc[U][MR][NV] = {};
  if (ahead && t.ldi == 0) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const V first = load<V>(init + v * L);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) acc[0][r][v] = first;
    }
  } else if (ahead) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[0][r][v] = load<V>(init + r * t.ldi + v * L);
  }
  const int64_t steps = t.c / S::channels;
  for (int64_t tap = 0; tap < t.taps; tap++) {
    const char* x[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) x[r] = t.pixels[tap * t.ld + r] + t.offset;
    const char* w = t.weights + tap * t.tap_bytes + h * each;
    int64_t i = 0, at = 0;
    if (U > 1) {
      for (; i + U <= steps; i += U, at += U * each, w += U * row) {
#pragma GCC unroll 8
        for (int u = 0; u < U; u++)
          S::template run<V, MR, NV>(x, at + u * each, w + u * row, acc[u]);
      }
    }
    if (MR > 13) {  // not all addresses fit into registers: fetch them every second step
      for (; i + 2 <= steps; i += 2, at += 2 * each, w += 2 * row) {
        S::template run<V, MR, NV>(x, at, w, acc[0]);
        S::template run<V, MR, NV>(x, at + each, w + row, acc[0]);
      }
    }
    for (; i < steps; i++, at += each, w += row) S::template run<V, MR, NV>(x, at, w, acc[0]);
    if (S::channels > 1 && t.c % S::channels) S::template last<V, MR, NV>(x, at, w, acc[0]);
  }
  auto sum_of = [&](int r, int v) __attribute__((always_inline)) {
    V sum = acc[0][r][v];
#pragma GCC unroll 8
    for (int u = 1; u < U; u++) sum += acc[u][r][v];
    if (!ahead) sum += load<V>(init + r * t.ldi + v * L);
    return sum;
  };
  if constexpr (sizeof(V) == sizeof(vf) && (GC_VBYTES < 64 || NV == 2)) {
    if (t.finish) {  // stores of sums would take the place of products: none are made
      const float low = t.finish->low;
      const int64_t out_m = t.finish->out_m, add_m = t.finish->add_m;
      char* const out = t.out + h * sizeof(T);
      const char* const add = t.add + h * sizeof(T);
      auto rows = [&](auto adds) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          vf values[NV];
#pragma GCC unroll 4
          for (int v = 0; v < NV; v++) {
            values[v] = sum_of(r, v);
            if (adds) values[v] += vload((const T*)(add + r * add_m) + v * L, All{});
            values[v] = vmax(values[v], low);
          }
          store_row((T*)(out + r * out_m), values, NV);
        }
      };
      return t.add ? rows(std::true_type{}) : rows(std::false_type{});
    }
  }
  float* const sums = t.sums + h;
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(sums + r * GC_NR + v * L, sum_of(r, v));
}

template <class T, class V, int MR, int NV>
static void conv_part(const gc_conv_tile& t, int64_t wide, int64_t h) {
  constexpr int U = GC_VBYTES < 64 ? 1 : MR == 1 ? 8 : MR == 2 ? 4 : MR <= (NV == 2 ? 4 : 6) ? 2 : 1;
  conv_columns<T, V, MR, NV, U>(t, wide, h);
}

// A panel of 8, 16, 24 or 32 columns. Eight of them are half a vector where vectors hold 16, and
// cost half of one on CPUs that split their 512-bit units.
template <class T, int MR>
static void conv_micro(const gc_conv_tile& t, int64_t wide) {
  if (t.finish) fetch_finish<T, MR>(t);
#if GC_VBYTES == 64
  if (wide == 32) return conv_part<T, vf, MR, 2>(t, wide, 0);
  if (wide >= 16) conv_part<T, vf, MR, 1>(t, wide, 0);
  if (wide != 16) conv_part<T, vf8, MR, 1>(t, wide, wide - 8);
#else
  constexpr int NV = conv_step<T>::channels == 1 ? 2 : 1;  // of bf16 both halves are in registers
  int64_t h = 0;
  for (; h + NV * VL <= wide; h += NV * VL) conv_part<T, vf, MR, NV>(t, wide, h);
  for (; h < wide; h += VL) conv_part<T, vf, MR, 1>(t, wide, h);
#endif
}

template <class T>
static void conv_tile_of(const gc_conv_tile& t, int64_t mr, int64_t wide) {
  typedef void (*kernel)(const gc_conv_tile&, int64_t);
#if GC_MR == 14
  static const kernel table[] = {
      nullptr,           conv_micro<T, 1>,  conv_micro<T, 2>,  conv_micro<T, 3>,
      conv_micro<T, 4>,  conv_micro<T, 5>,  conv_micro<T, 6>,  conv_micro<T, 7>,
      conv_micro<T, 8>,  conv_micro<T, 9>,  conv_micro<T, 10>, conv_micro<T, 11>,
      conv_micro<T, 12>, conv_micro<T, 13>, conv_micro<T, 14>};
#else
  static const kernel table[] = {nullptr,          conv_micro<T, 1>, conv_micro<T, 2>,
                                 conv_micro<T, 3>, conv_micro<T, 4>, conv_micro<T, 5>,
                                 conv_micro<T, 6>};
#endif
  table[mr](t, wide);
}

static_assert(GC_MR <= GC_CONV_ROWS && GC_CONV_PANEL == GC_NR, "tiles are rows of GC_NR");

}  // namespace
}  // namespace gc

#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_f32)
extern "C" void gc_conv_tile_f32(const gc_conv_tile* tile, int64_t mr, int64_t width) {
  gc::conv_tile_of<float>(*tile, mr, width);
}
#endif
#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_bf16)
extern "C" void gc_conv_tile_bf16(const gc_conv_tile* tile, int64_t mr, int64_t width) {
  gc::conv_tile_of<gc::bf16>(*tile, mr, width);
}
#endif
