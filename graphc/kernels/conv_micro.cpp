// Micro-kernels of the convolution (gc_conv_tile in conv.h). Pixels are read where they lie: a value,
// or a pair of bf16, is broadcast from memory.
#include "conv.h"
#include "isa.h"
#include "num.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace gc {
namespace {

// One step: acc[MR][NV] += x[MR] x w[NV]; fp32 takes one channel, bf16 two. GCC must see constant
// bounds everywhere to keep the sums in registers.
template <class T> struct conv_step;

template <> struct conv_step<float> {
  static constexpr int channels = 1;
  template <int MR, int NV>
  static inline __attribute__((always_inline)) void run(const char* const (&x)[MR], int64_t at, const char* w, vf (&acc)[MR][NV]) {
    vf b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = load<vf>(w + v * GC_VBYTES);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const vf a = splat(load<float>(x[r] + at));
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] += a * b[v];
    }
  }
  template <int MR, int NV>
  static inline __attribute__((always_inline)) void last(const char* const (&)[MR], int64_t, const char*, vf (&)[MR][NV]) {}
};

template <> struct conv_step<bf16> {
  static constexpr int channels = 2;
  template <int MR, int NV>
  static inline __attribute__((always_inline)) void multiply(const uint32_t (&x)[MR], const char* w, vf (&acc)[MR][NV]) {
#if defined(__AVX512BF16__)
    __m512bh b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = (__m512bh)load<__m512i>(w + v * GC_VBYTES);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], a, b[v]);
    }
#else
    vf even[NV], odd[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const vi pair = load<vi>(w + v * GC_VBYTES);
      even[v] = (vf)(pair << 16);
      odd[v] = (vf)(pair & (int32_t)0xffff0000);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const vf lo = splat(bits_to_f32(x[r] << 16)), hi = splat(bits_to_f32(x[r] & 0xffff0000u));
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = acc[r][v] + lo * even[v] + hi * odd[v];
    }
#endif
  }
  template <int MR, int NV>
  static inline __attribute__((always_inline)) void run(const char* const (&x)[MR], int64_t at, const char* w, vf (&acc)[MR][NV]) {
    uint32_t pair[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) pair[r] = load<uint32_t>(x[r] + at);
    multiply<MR, NV>(pair, w, acc);
  }
  template <int MR, int NV>  // an odd number of channels: what follows is another pixel
  static inline __attribute__((always_inline)) void last(const char* const (&x)[MR], int64_t at, const char* w, vf (&acc)[MR][NV]) {
    uint32_t pair[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) pair[r] = load<uint16_t>(x[r] + at);
    multiply<MR, NV>(pair, w, acc);
  }
};

// W: columns of the packed panel. Few accumulators: U steps go to separate sums, which hides the
// latency of the multiply-add.
template <class T, int MR, int NV, int W, int U>
GC_INLINE void conv_columns(const gc_conv_tile& t, int64_t h) {
  typedef conv_step<T> S;
  constexpr int64_t row = (int64_t)W * S::channels * sizeof(T);  // bytes of weights of a step
  constexpr int64_t each = S::channels * sizeof(T);              // bytes of a pixel
  vf acc[U][MR][NV];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      acc[0][r][v] = load<vf>(t.init + r * t.ldi + h + v * VL);
#pragma GCC unroll 8
      for (int u = 1; u < U; u++) acc[u][r][v] = vf{};
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
        for (int u = 0; u < U; u++) S::template run<MR, NV>(x, at + u * each, w + u * row, acc[u]);
      }
    }
    for (; i < steps; i++, at += each, w += row) S::template run<MR, NV>(x, at, w, acc[0]);
    if (S::channels > 1 && t.c % S::channels) S::template last<MR, NV>(x, at, w, acc[0]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      vf sum = acc[0][r][v];
#pragma GCC unroll 8
      for (int u = 1; u < U; u++) sum += acc[u][r][v];
      store(t.sums + r * GC_NR + h + v * VL, sum);
    }
}

template <class T, int MR, int W>
static void conv_micro(const gc_conv_tile& t) {
#if defined(__AVX512BF16__)
  constexpr bool wide = true;
#else
  constexpr bool wide = conv_step<T>::channels == 1;
#endif
  constexpr int most = W / VL, usual = wide ? 2 : 1;
  constexpr int NV = usual < most ? usual : most;
  constexpr int U = GC_VBYTES < 64 ? 1 : MR == 1 ? 8 : MR == 2 ? 4 : MR <= (wide && NV == 2 ? 4 : 6) ? 2 : 1;
  for (int h = 0; h < W; h += NV * VL) conv_columns<T, MR, NV, W, U>(t, h);
}

template <class T, int W>
static void conv_tile_of(const gc_conv_tile& t, int64_t mr) {
  typedef void (*kernel)(const gc_conv_tile&);
#if GC_MR == 14
  static const kernel table[] = {
      nullptr,              conv_micro<T, 1, W>,  conv_micro<T, 2, W>,  conv_micro<T, 3, W>,
      conv_micro<T, 4, W>,  conv_micro<T, 5, W>,  conv_micro<T, 6, W>,  conv_micro<T, 7, W>,
      conv_micro<T, 8, W>,  conv_micro<T, 9, W>,  conv_micro<T, 10, W>, conv_micro<T, 11, W>,
      conv_micro<T, 12, W>, conv_micro<T, 13, W>, conv_micro<T, 14, W>};
#else
  static const kernel table[] = {nullptr,             conv_micro<T, 1, W>, conv_micro<T, 2, W>,
                                 conv_micro<T, 3, W>, conv_micro<T, 4, W>, conv_micro<T, 5, W>,
                                 conv_micro<T, 6, W>};
#endif
  table[mr](t);
}

static_assert(GC_MR <= GC_CONV_ROWS && GC_CONV_PANEL == GC_NR, "tiles are rows of GC_NR");

}  // namespace
}  // namespace gc

extern "C" void gc_conv_tile_f32(const gc_conv_tile* tile, int64_t mr, int64_t width) {
  if (width == GC_CONV_PANEL) gc::conv_tile_of<float, GC_CONV_PANEL>(*tile, mr);
  else gc::conv_tile_of<float, GC_CONV_NARROW>(*tile, mr);
}
extern "C" void gc_conv_tile_bf16(const gc_conv_tile* tile, int64_t mr, int64_t width) {
  if (width == GC_CONV_PANEL) gc::conv_tile_of<gc::bf16, GC_CONV_PANEL>(*tile, mr);
  else gc::conv_tile_of<gc::bf16, GC_CONV_NARROW>(*tile, mr);
}
