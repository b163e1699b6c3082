// Walking strided tensors: odometers over run-time ranks, copies of runs, dtype fan-out.
// All strides and offsets count elements.
#pragma once
#include "abi.h"
#include "num.h"

namespace gc {

constexpr int kMaxRank = 16;

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline double bits_to_f64(int64_t u) { double d; memcpy(&d, &u, 8); return d; }

// The coordinates of item `linear` of a row-major box of `rank` sizes; size(d) gives each size.
template <class Size>
static inline void unravel(int64_t linear, int rank, Size size, int64_t* index) {
  for (int d = rank - 1; d >= 0; --d) {
    int64_t n = size(d);
    index[d] = linear % n;
    linear /= n;
  }
}

// Steps a row-major odometer and tells the outermost dimension that changed (-1 after the last).
template <class Size>
static inline int advance(int rank, Size size, int64_t* index) {
  for (int d = rank - 1; d >= 0; --d) {
    if (++index[d] < size(d)) return d;
    index[d] = 0;
  }
  return -1;
}

template <class T>
static inline void copy_run(T* dst, int64_t ds, const T* src, int64_t ss, int64_t n) {
  if (ds == 1 && ss == 1) {
    memcpy(dst, src, (size_t)n * sizeof(T));
  } else if (ds == 1 && ss == 0) {
    const T value = n > 0 ? *src : T();
    for (int64_t i = 0; i < n; ++i) dst[i] = value;
  } else if (ds == 1) {
    for (int64_t i = 0; i < n; ++i) dst[i] = src[i * ss];
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i * ds] = src[i * ss];
  }
}

// An index tensor of int32 or int64 items.
struct Indices {
  const void* data;
  bool wide;
  int64_t size;  // of the indexed dimension

  // Negative indices count from the end. What is still outside is clamped to a valid element:
  // torch raises there, a kernel only promises never to touch foreign memory.
  int64_t at(int64_t offset) const {
    int64_t i = wide ? ((const int64_t*)data)[offset] : (int64_t)((const int32_t*)data)[offset];
    i = i < 0 ? i + size : i;
    i = i < size ? i : size - 1;
    return i < 0 ? 0 : i;
  }
};

// Arithmetic type of a storage type, and the wider one torch's CPU kernels accumulate in.
template <class T> struct Arith { using type = T; };
template <> struct Arith<bf16> { using type = float; };
template <> struct Arith<f16> { using type = float; };
template <class T> struct Wide { using type = int64_t; };
template <> struct Wide<float> { using type = double; };
template <> struct Wide<double> { using type = double; };
template <> struct Wide<bf16> { using type = float; };
template <> struct Wide<f16> { using type = float; };
template <class T> struct IsFloat { static constexpr bool value = false; };
template <> struct IsFloat<float> { static constexpr bool value = true; };
template <> struct IsFloat<double> { static constexpr bool value = true; };
template <> struct IsFloat<bf16> { static constexpr bool value = true; };
template <> struct IsFloat<f16> { static constexpr bool value = true; };

template <class T> static inline bool is_nan(T v) { return v != v; }

}  // namespace gc

// The kernels of a file for each dtype it takes. A unit for one dtype alone (templates/strided.py)
// comes with lists of its own.
#ifndef GC_ONE_DTYPE
#define GC_FOR_FLOATS(M) M(f32, float) M(f64, double) M(bf16, gc::bf16) M(f16, gc::f16)
#define GC_FOR_INTS(M) \
  M(u8, uint8_t) M(i8, int8_t) M(i16, int16_t) M(i32, int32_t) M(i64, int64_t)
#define GC_FOR_ALL(M) GC_FOR_FLOATS(M) GC_FOR_INTS(M)
#define GC_FOR_BYTES(M) M(b1, uint8_t) M(b2, uint16_t) M(b4, uint32_t) M(b8, uint64_t)
#endif
