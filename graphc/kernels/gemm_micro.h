// fp32 micro-kernels: c[MR][32] (+)= a [k][MR] x b [k][32], and the packing of rows of `a`.
#pragma once
#include "isa.h"

namespace gc {

// Steps that a tile of at least GEMM_AHEAD_ROWS rows looks ahead in b. Such a tile takes as long as
// its lines take to come from memory, and sees too few of them at once to keep memory busy; a
// smaller one is ahead of memory by itself, where asking for lines as well slows it down.
constexpr int64_t GEMM_AHEAD = 64;
constexpr int GEMM_AHEAD_ROWS = GC_VBYTES == 64 ? 6 : 4;

// Sums K steps into MR x 32 columns of c. `a` holds MR values per step (step stride `lda`), `b` 32
// values per step (step stride `ldb`). Accumulators stay in registers; a tile with few of them
// unrolls K with separate sums to cover the latency of the multiply-add.
template <int MR, int NV, int U>
GC_INLINE void micro_columns(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                             float* c, int64_t ldc, bool add) {
  vf acc[U][MR][NV] = {};
  int64_t i = 0;
  for (; i + U <= k; i += U) {
#pragma GCC unroll 16
    for (int u = 0; u < U; u++) {
      vf bv[NV];
      if (MR >= GEMM_AHEAD_ROWS) {
#pragma GCC unroll 4
        for (int v = 0; v < NV * VL; v += 16)  // a line each, into the second level
          __builtin_prefetch(b + (u + GEMM_AHEAD) * ldb + v, 0, 2);
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) bv[v] = load<vf>(b + u * ldb + v * VL);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const vf av = splat(a[u * lda + r]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) acc[u][r][v] += av * bv[v];
      }
    }
    a += U * lda;
    b += U * ldb;
  }
  if (U > 1) {
    for (; i < k; i++) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        const vf bv = load<vf>(b + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) acc[0][r][v] += splat(a[r]) * bv;
      }
      a += lda;
      b += ldb;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      vf sum = acc[0][r][v];
#pragma GCC unroll 16
      for (int u = 1; u < U; u++) sum += acc[u][r][v];
      float* p = c + r * ldc + v * VL;
      store(p, add ? load<vf>(p) + sum : sum);
    }
  }
}

template <int MR>
static void micro(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, float* c,
                  int64_t ldc, bool add) {
#if GC_VBYTES == 64
  constexpr int NV = 2, U = MR == 1 ? 8 : MR == 2 ? 4 : 1;
#else
  constexpr int NV = MR == 1 ? (VL == 8 ? 4 : 8) : MR <= 3 ? 4 : 2, U = (MR == 1 && VL == 8) ? 2 : 1;
#endif
  for (int h = 0; h < GC_NR; h += NV * VL)
    micro_columns<MR, NV, U>(a, lda, b + h, ldb, k, c + h, ldc, add);
}

typedef void (*micro_kernel)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t,
                             bool);
#if GC_MR == 14
static const micro_kernel MICRO[GC_MR + 1] = {
    nullptr,  micro<1>, micro<2>, micro<3>,  micro<4>,  micro<5>,  micro<6>, micro<7>,
    micro<8>, micro<9>, micro<10>, micro<11>, micro<12>, micro<13>, micro<14>};
#else
static const micro_kernel MICRO[GC_MR + 1] = {nullptr,  micro<1>, micro<2>, micro<3>,
                                              micro<4>, micro<5>, micro<6>};
#endif

// dst[k][ld] = src[r * row + k * step] for r < mr, as floats; lanes from mr on stay as they are.
template <class T>
static void pack_rows(const T* src, int64_t row, int64_t step, int64_t mr, int64_t k, float* dst,
                      int64_t ld) {
  int64_t i = 0;
  if (step == 1 && mr >= 8) {
    for (; i + 8 <= k; i += 8) {
      for (int64_t r = 0;;) {  // the last group of eight rows overlaps the one before
        vf8 t[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) t[j] = load8(src + (r + j) * row + i);
        transpose8(t);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) store(dst + (i + j) * ld + r, t[j]);
        if (r + 8 >= mr) break;
        r = r + 16 <= mr ? r + 8 : mr - 8;
      }
    }
  } else if (step == 1 && mr >= 4) {
    for (; i + 8 <= k; i += 8) {
      for (int64_t r = 0;;) {
        vf8 w[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) w[j] = load8(src + (r + j) * row + i);
        vf4 lo[4], hi[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          lo[j] = __builtin_shufflevector(w[j], w[j], 0, 1, 2, 3);
          hi[j] = __builtin_shufflevector(w[j], w[j], 4, 5, 6, 7);
        }
        transpose4(lo);
        transpose4(hi);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          store(dst + (i + j) * ld + r, lo[j]);
          store(dst + (i + 4 + j) * ld + r, hi[j]);
        }
        if (r + 4 >= mr) break;
        r = mr - 4;
      }
    }
  }
  if (row == 1) {
    for (; i < k; i++) {
      int64_t r = 0;
      for (; r + 8 <= mr; r += 8) store(dst + i * ld + r, load8(src + r + i * step));
      for (; r < mr; r++) dst[i * ld + r] = to_float(src[r + i * step]);
    }
  }
  for (; i < k; i++)
    for (int64_t r = 0; r < mr; r++) dst[i * ld + r] = to_float(src[r * row + i * step]);
}

// The same into a panel: dst[k][32], lanes from mr on zero.
template <class T>
static void pack_panel(const T* src, int64_t row, int64_t step, int64_t mr, int64_t k, float* dst) {
  if (mr < GC_NR)
    for (int64_t i = 0; i < k; i++)
      for (int64_t r = mr; r < GC_NR; r++) dst[i * GC_NR + r] = 0.0f;
  pack_rows(src, row, step, mr, k, dst, GC_NR);
}

}  // namespace gc
