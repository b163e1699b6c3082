// Packing of queries, keys and values for blocked attention.
#pragma once
#include "gemm_micro.h"

namespace gc {

// dst[d][32] from rows of d values with step `step`; lanes beyond `lanes` are zero.
template <class T>
static void pack_lanes(const T* const* rows, int64_t lanes, int64_t step, int64_t d, float* dst) {
  if (lanes < GC_NR) memset(dst, 0, (size_t)(d * GC_NR) * sizeof(float));
  int64_t i = 0;
  if (step == 1 && lanes >= 8) {
    for (; i + 8 <= d; i += 8) {
      for (int64_t r = 0;;) {  // the last group of eight rows overlaps the one before
        vf8 t[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) t[j] = load8(rows[r + j] + i);
        transpose8(t);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) store(dst + (i + j) * GC_NR + r, t[j]);
        if (r + 8 >= lanes) break;
        r = r + 16 <= lanes ? r + 8 : lanes - 8;
      }
    }
  }
  for (; i < d; i++)
    for (int64_t r = 0; r < lanes; r++) dst[i * GC_NR + r] = to_float(rows[r][i * step]);
}

// dst[ceil(d/2)][32] pairs of neighbours, likewise.
static inline void pack_lanes(const bf16* const* rows, int64_t lanes, int64_t step, int64_t d,
                              uint32_t* dst) {
  if (lanes < GC_NR) memset(dst, 0, (size_t)((d + 1) / 2 * GC_NR) * sizeof(uint32_t));
  int64_t i = 0;
  if (step == 1 && lanes >= 8) {
    for (; i + 16 <= d; i += 16) {  // a pair moves as one 32-bit item
      for (int64_t r = 0;;) {
        vf8 t[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) t[j] = load<vf8>(rows[r + j] + i);
        transpose8(t);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) store(dst + (i / 2 + j) * GC_NR + r, t[j]);
        if (r + 8 >= lanes) break;
        r = r + 16 <= lanes ? r + 8 : lanes - 8;
      }
    }
  }
  for (; i < d; i += 2) {
    for (int64_t r = 0; r < lanes; r++) {
      const uint32_t lo = rows[r][i * step].u, hi = i + 1 < d ? rows[r][(i + 1) * step].u : 0;
      dst[i / 2 * GC_NR + r] = lo | hi << 16;
    }
  }
}

// The other sign, or zeros.
static inline void scale_lanes(float* q, int64_t steps, bool zero) {
  for (int64_t i = 0; i < steps * GC_NR; i++) q[i] = zero ? 0.0f : -q[i];
}
static inline void scale_lanes(uint32_t* q, int64_t steps, bool zero) {
  for (int64_t i = 0; i < steps * GC_NR; i++) q[i] = zero ? 0 : q[i] ^ 0x80008000u;
}

// dst[n][32] floats from rows of 32 pairs, `ld` apart.
static inline void widen_pairs(const uint32_t* src, int64_t ld, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; i += 2, src += ld, dst += 2 * GC_NR) {
    for (int64_t v = 0; v < GC_NR; v += VL) {
      const vi pair = load<vi>(src + v);
      store(dst + v, (vf)(pair << 16));
      if (i + 1 < n) store(dst + GC_NR + v, (vf)(pair & (int32_t)0xffff0000));
    }
  }
}

// dst[ceil(k/2)][32] pairs of two rows of `columns` adjacent values; `row` steps apart.
static inline void pair_rows(const bf16* src, int64_t row, int64_t k, int64_t columns,
                             uint32_t* dst) {
  for (int64_t i = 0; i < k; i += 2, src += 2 * row, dst += GC_NR) {
    if (columns == GC_NR && i + 1 < k) {
#pragma GCC unroll 4
      for (int v = 0; v < GC_NR; v += 8) {
        const vh8 lo = load<vh8>(src + v), hi = load<vh8>(src + row + v);
        store(dst + v, __builtin_shufflevector(lo, hi, 0, 8, 1, 9, 2, 10, 3, 11));
        store(dst + v + 4, __builtin_shufflevector(lo, hi, 4, 12, 5, 13, 6, 14, 7, 15));
      }
    } else {
      for (int64_t r = 0; r < GC_NR; r++) {
        const uint32_t lo = r < columns ? src[r].u : 0,
                       hi = r < columns && i + 1 < k ? src[row + r].u : 0;
        dst[r] = lo | hi << 16;
      }
    }
  }
}

}  // namespace gc
