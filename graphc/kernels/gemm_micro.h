// fp32 micro-kernels: c[MR][32] (+)= a [k][MR] x b [k][32], and the packing of rows of `a`.
#pragma once
#include "isa.h"

namespace gc {

// How many steps a tile looks ahead in b for lines to come into the second level and into the first.
// A core alone keeps memory less than busy: it stops asking where its loads stall, and the hardware
// asks for nothing beyond a page. Tiles of few rows may take two panels in turn, two streams of
// which each has less to wait for; from GEMM_AHEAD_ROWS rows on arithmetic takes about as long as
// the lines, and only what is asked for long before is there in time. Distances are measured. Those
// in between hinder: then the core has asked for every line before its prefetchers see one, and
// alone it has too few requests on their way.
constexpr int64_t TWIN_ROWS = 5;
constexpr bool twinned(int64_t rows) { return rows <= TWIN_ROWS && rows != 2; }  // two: one is better
constexpr int GEMM_AHEAD_ROWS = GC_VBYTES == 64 ? 6 : 4;
struct Ahead { int64_t far, near; };
constexpr Ahead look_ahead(int rows, int panels) {
  if (panels > 1) return {12, 2};
  if (rows < GEMM_AHEAD_ROWS) return {0, 0};
  return GC_VBYTES != 64 ? Ahead{64, 0} : rows < 8 ? Ahead{68, 0} : Ahead{76, 4};
}

// The places ahead of a row of b, in registers of their own: as displacements that take four bytes
// in each instruction they cost 6 % of a tile's speed.
template <int MR, int P>
struct Scout {
  static constexpr Ahead ahead = look_ahead(MR, P);
  const float *far, *near;
  GC_INLINE Scout at(const void* b, int64_t ld) {
    Scout scout{(const float*)b + ahead.far * ld, (const float*)b + ahead.near * ld};
    __asm__("" : "+r"(scout.far), "+r"(scout.near));  // not derived from b any more
    return scout;
  }
  // Asks for the lines of `columns` 32-bit columns.
  inline __attribute__((always_inline)) void ask(int64_t offset, int columns) const {
    if (ahead.far)
#pragma GCC unroll 4
      for (int v = 0; v < columns; v += 16) __builtin_prefetch(far + offset + v, 0, 2);
    if (ahead.near)
#pragma GCC unroll 4
      for (int v = 0; v < columns; v += 16) __builtin_prefetch(near + offset + v, 0, 3);
  }
  inline __attribute__((always_inline)) void step(int64_t distance) {
    far += distance;
    near += distance;
  }
};

// Sums K steps into MR x 32 columns of c, or as many of each of P panels, which lie `next` apart in b
// and `columns` in c.
// `a` holds MR values per step (step stride `lda`), `b` 32 values per step (step stride `ldb`).
// Accumulators stay in registers; a tile with few of them unrolls K with separate sums to cover the
// latency of the multiply-add. A column is summed up the same way in one panel and in two.
template <int MR, int P, int NV, int U>
GC_INLINE void micro_columns(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t next,
                             int64_t k, float* c, int64_t columns, int64_t ldc, bool add) {
  vf acc[U][P][MR][NV] = {};
  auto scout = Scout<MR, P>::at(b, ldb);
  int64_t i = 0;
  for (; i + U <= k; i += U) {
#pragma GCC unroll 16
    for (int u = 0; u < U; u++) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const float* const row = b + p * next + u * ldb;
        scout.ask(p * next + u * ldb, NV * VL);
        vf bv[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) bv[v] = load<vf>(row + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          const vf av = splat(a[u * lda + r]);
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) acc[u][p][r][v] += av * bv[v];
        }
      }
    }
    a += U * lda;
    b += U * ldb;
    scout.step(U * ldb);
  }
  if (U > 1) {
    for (; i < k; i++) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
          const vf bv = load<vf>(b + p * next + v * VL);
#pragma GCC unroll 16
          for (int r = 0; r < MR; r++) acc[0][p][r][v] += splat(a[r]) * bv;
        }
      }
      a += lda;
      b += ldb;
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < P; p++) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        vf sum = acc[0][p][r][v];
#pragma GCC unroll 16
        for (int u = 1; u < U; u++) sum += acc[u][p][r][v];
        float* o = c + p * columns + r * ldc + v * VL;
        store(o, add ? load<vf>(o) + sum : sum);
      }
    }
  }
}

template <int MR, int P>
static void micro_panels(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t next,
                         int64_t k, float* c, int64_t columns, int64_t ldc, bool add) {
#if GC_VBYTES == 64
  constexpr int NV = 2, U = MR == 1 ? 2 : MR == 2 ? 4 : 1;
#else
  constexpr int NV = MR == 1 ? (VL == 8 ? 4 : 8) : MR <= 3 ? 4 : 2, U = (MR == 1 && VL == 8) ? 2 : 1;
#endif
  for (int h = 0; h < GC_NR; h += NV * VL)
    micro_columns<MR, P, NV, U>(a, lda, b + h, ldb, next, k, c + h, columns, ldc, add);
}

template <int MR>
static void micro(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, float* c,
                  int64_t ldc, bool add) {
  micro_panels<MR, 1>(a, lda, b, ldb, 0, k, c, 0, ldc, add);
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
