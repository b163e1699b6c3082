// How bf16 products are packed and summed: vdpbf16ps where the CPU has it, else a panel chunk is
// widened to fp32 once and serves all rows of a block. Both read the same pair panels. See gemm.h.
#pragma once
#include "gemm_driver.h"
#include "gemm_pairs.h"

namespace {
using namespace gc;

constexpr int64_t pairs(int64_t k) { return (k + 1) / 2; }

#if defined(__AVX512BF16__)

typedef void (*twin_kernel)(const uint32_t*, const uint32_t*, int64_t, int64_t, float*, int64_t,
                            int64_t, bool);
const twin_kernel TWINS[TWIN_ROWS + 1] = {nullptr,
                                          micro_pair_panels<1, 2>,
                                               nullptr,
                                          micro_pair_panels<3, 2>,
                                          micro_pair_panels<4, 2>,
                                          micro_pair_panels<5, 2>};

struct Brain {
  typedef bf16 element;
  typedef uint32_t packed;  // two neighbours in K
  static constexpr bool direct = false;
  static constexpr bool twins(int64_t rows, int64_t) { return twinned(rows); }
  static constexpr int64_t chunk = 2048;
  static constexpr int64_t expand_bytes = 0;
  static int64_t packed_length(int64_t k) { return pairs(k); }
  static void pack(const bf16* src, int64_t row, int64_t step, int64_t mr, int64_t k,
                   uint32_t* dst) {
    int64_t i = 0;
    if (step == 1 && mr == 1) {
      i = k & -2;
      memcpy((void*)dst, src, (size_t)i * 2);
    } else if (step == 1 && mr >= 4) {
      // Pairs are 32-bit items: the fp32 transposition moves them, two rows of bytes at a time.
      const int64_t group = mr >= 8 ? 8 : 4;
      for (; i + 16 <= k; i += 16) {
        for (int64_t r = 0;;) {
          vf8 t[8];
          if (group == 8) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) t[j] = load<vf8>(src + (r + j) * row + i);
            transpose8(t);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) store(dst + (i / 2 + j) * mr + r, t[j]);
          } else {
            vf4 lo[4], hi[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
              lo[j] = load<vf4>(src + (r + j) * row + i);
              hi[j] = load<vf4>(src + (r + j) * row + i + 8);
            }
            transpose4(lo);
            transpose4(hi);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
              store(dst + (i / 2 + j) * mr + r, lo[j]);
              store(dst + (i / 2 + 4 + j) * mr + r, hi[j]);
            }
          }
          if (r + group >= mr) break;
          r = min64(r + group, mr - group);
        }
      }
    }
    for (; i < k; i += 2) {
      for (int64_t r = 0; r < mr; r++) {
        const uint32_t lo = src[r * row + i * step].u;
        const uint32_t hi = i + 1 < k ? src[r * row + (i + 1) * step].u : 0;
        dst[i / 2 * mr + r] = lo | hi << 16;
      }
    }
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t,
                           char*, int64_t* ldb) {
    *ldb = GC_NR;
    return (const bf16*)g->b + offset + (p * pairs(g->k) + kc / 2) * GC_NR * 2;
  }
  static void micro(int64_t mr, const uint32_t* a, const void* b, int64_t, int64_t k, float* c,
                    int64_t ldc, bool add) {
    PAIRS[mr](a, (const uint32_t*)b, pairs(k), c, ldc, add);
  }
  static void twin(int64_t mr, const uint32_t* a, const void* b, int64_t next, int64_t, int64_t k,
                   float* c, int64_t columns, int64_t ldc, bool add) {
    TWINS[mr](a, (const uint32_t*)b, next / 4, pairs(k), c, columns, ldc, add);
  }
};

#else

// dst[k][32] from the pairs of a panel.
inline void widen_pairs(const char* src, int64_t k, float* dst) {
  for (int64_t i = 0; i < k; i += 2, src += GC_NR * 4) {
#pragma GCC unroll 8
    for (int v = 0; v < GC_NR / VL; v++) {
      const vi pair = load<vi>(src + v * GC_VBYTES);
      store(dst + i * GC_NR + v * VL, (vf)(pair << 16));
      if (i + 1 < k) store(dst + (i + 1) * GC_NR + v * VL, (vf)(pair & (int32_t)0xffff0000));
    }
  }
}

struct Brain {
  typedef bf16 element;
  typedef float packed;
  static constexpr bool direct = false;
  static constexpr bool twins(int64_t, int64_t) { return false; }
  static constexpr int64_t chunk = GEMM_KC;
  static constexpr int64_t expand_bytes = GEMM_KC * GC_NR * 4;
  static int64_t packed_length(int64_t k) { return k; }
  static void pack(const bf16* src, int64_t row, int64_t step, int64_t mr, int64_t k, float* dst) {
    pack_rows(src, row, step, mr, k, dst, mr);
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t kl,
                           char* expand, int64_t* ldb) {
    *ldb = GC_NR;
    const bf16* src = (const bf16*)g->b + offset + (p * pairs(g->k) + kc / 2) * GC_NR * 2;
    widen_pairs((const char*)src, kl, (float*)expand);
    return expand;
  }
  static void micro(int64_t mr, const float* a, const void* b, int64_t ldb, int64_t k, float* c,
                    int64_t ldc, bool add) {
    MICRO[mr](a, mr, (const float*)b, ldb, k, c, ldc, add);
  }
};

#endif

}  // namespace
