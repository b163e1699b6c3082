// Vector types and the few operations on them that product kernels need, for three ISA levels
// (avx512, avx2, portable) from one text: compiler vector extensions of the native width.
#pragma once
#include <stdint.h>
#include <string.h>

#include "num.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors only pass between inlined functions
#endif

#if defined(__AVX512F__)
#define GC_VBYTES 64
#define GC_MR 14  // rows of the largest micro tile: 28 accumulators of 32 registers
#elif defined(__AVX__)
#define GC_VBYTES 32
#define GC_MR 6  // 12 accumulators of 16 registers
#else
#define GC_VBYTES 16
#define GC_MR 6
#endif
#define GC_NR 32  // columns of a packed panel, the same at every level
#define GC_INLINE static inline __attribute__((always_inline))

namespace gc {

constexpr int VL = GC_VBYTES / 4;  // 32-bit lanes of a native vector

typedef float vf __attribute__((vector_size(GC_VBYTES)));
typedef int32_t vi __attribute__((vector_size(GC_VBYTES)));
typedef float vf8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(GC_VBYTES)));
typedef uint16_t vh __attribute__((vector_size(GC_VBYTES / 2)));
typedef uint32_t vu8 __attribute__((vector_size(32)));
typedef uint16_t vh8 __attribute__((vector_size(16)));
typedef uint8_t vb8 __attribute__((vector_size(8)));

template <class V> GC_INLINE V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> GC_INLINE void store(void* p, const V& v) { memcpy(p, &v, sizeof v); }
GC_INLINE vf splat(float x) { return x - vf{}; }

GC_INLINE float to_float(float x) { return x; }
GC_INLINE float to_float(bf16 x) { return (float)x; }
GC_INLINE float to_float(f16 x) { return (float)x; }

// Eight elements of any storage type as floats.
GC_INLINE vf8 load8(const float* p) { return load<vf8>(p); }
GC_INLINE vf8 load8(const bf16* p) {
  return (vf8)(__builtin_convertvector(load<vh8>(p), vu8) << 16);
}
GC_INLINE vf8 load8(const f16* p) {
  vf8 v;
  for (int i = 0; i < 8; i++) v[i] = (float)p[i];
  return v;
}

// Transposes eight vectors of eight lanes in place.
GC_INLINE void transpose8(vf8 r[8]) {
  vf8 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    u[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    u[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    u[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = __builtin_shufflevector(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

GC_INLINE void transpose4(vf4 r[4]) {
  vf4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  vf4 b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  vf4 c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  vf4 d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

}  // namespace gc
