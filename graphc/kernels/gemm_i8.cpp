// See gemm_i8.h.
#include "gemm_i8.h"

#include "gemm_driver.h"
#include "gemm_i16_micro.h"

namespace {
using namespace gc;

constexpr int64_t quads(int64_t k) { return (k + 3) / 4; }

GC_INLINE uint32_t load_quad(const void* src, int64_t step, int64_t count) {
  uint32_t quad = 0;
  if (step == 1 && count >= 4) {
    memcpy(&quad, src, 4);
  } else {
    for (int64_t j = 0; j < count && j < 4; j++)
      quad |= (uint32_t)((const uint8_t*)src)[j * step] << 8 * j;
  }
  return quad;
}

#if defined(__AVX512VNNI__)

// sum[i] + a[4i] * b[4i] + ... over uint8 and int8 quads held in 32-bit lanes. The built-in keeps
// gcc's accumulators in registers, where the intrinsic on an array of __m512i spills them all.
GC_INLINE vi add_quads(vi sum, vi a, vi b) {
#if defined(__clang__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return (vi)__builtin_ia32_vpdpbusd_v16si((__v16si)sum, (__v16si)a, (__v16si)b);
#endif
}

// c[MR][32] (+)= a [k][MR] quads x b [k][32] quads.
template <int MR>
static void micro_i8(const uint32_t* a, const uint32_t* b, int64_t k, float* c, int64_t ldc,
                     bool add) {
  constexpr int U = MR == 1 ? 8 : MR <= 3 ? 4 : MR <= 6 ? 2 : 1;
  vi acc[U][MR][2] = {};
  int64_t i = 0;
  for (; i + U <= k; i += U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
      const vi b0 = load<vi>(b + (i + u) * GC_NR), b1 = load<vi>(b + (i + u) * GC_NR + VL);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const vi av = (int32_t)a[(i + u) * MR + r] - vi{};
        acc[u][r][0] = add_quads(acc[u][r][0], av, b0);
        acc[u][r][1] = add_quads(acc[u][r][1], av, b1);
      }
    }
  }
  if (U > 1) {
    for (; i < k; i++) {
      const vi b0 = load<vi>(b + i * GC_NR), b1 = load<vi>(b + i * GC_NR + VL);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const vi av = (int32_t)a[i * MR + r] - vi{};
        acc[0][r][0] = add_quads(acc[0][r][0], av, b0);
        acc[0][r][1] = add_quads(acc[0][r][1], av, b1);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      vi sum = acc[0][r][v];
#pragma GCC unroll 8
      for (int u = 1; u < U; u++) sum += acc[u][r][v];
      float* p = c + r * ldc + v * VL;  // integer bits in the tile of floats
      store(p, add ? load<vi>(p) + sum : sum);
    }
  }
}

typedef void (*kernel_i8)(const uint32_t*, const uint32_t*, int64_t, float*, int64_t, bool);
const kernel_i8 KERNELS_I8[GC_MR + 1] = {
    nullptr,     micro_i8<1>, micro_i8<2>,  micro_i8<3>,  micro_i8<4>,  micro_i8<5>,  micro_i8<6>, micro_i8<7>,
    micro_i8<8>, micro_i8<9>, micro_i8<10>, micro_i8<11>, micro_i8<12>, micro_i8<13>, micro_i8<14>};

template <bool SIGNED>
struct Bytes {
  typedef uint8_t element;
  typedef uint32_t packed;  // four neighbours in K
  static constexpr bool direct = false;
  static constexpr bool twins(int64_t, int64_t) { return false; }
  static constexpr int64_t chunk = 4096;
  static constexpr int64_t expand_bytes = 0;
  static constexpr uint32_t flip = SIGNED ? 0x80808080u : 0;  // int8 + 128 as uint8
  static int64_t packed_length(int64_t k) { return quads(k); }
  static void pack(const uint8_t* src, int64_t row, int64_t step, int64_t mr, int64_t k,
                   uint32_t* dst) {
    int64_t i = 0;
    if (step == 1 && mr >= 8) {
      const vu8 mask = vu8{} + flip;
      for (; i + 32 <= k; i += 32) {
        for (int64_t r = 0;;) {  // the last group of eight rows overlaps the one before
          vf8 t[8];  // moved, never computed with: bits stay as they are
#pragma GCC unroll 8
          for (int j = 0; j < 8; j++)
            t[j] = (vf8)(load<vu8>(src + (r + j) * row + i) ^ mask);
          transpose8(t);
#pragma GCC unroll 8
          for (int j = 0; j < 8; j++) store(dst + (i / 4 + j) * mr + r, t[j]);
          if (r + 8 >= mr) break;
          r = min64(r + 8, mr - 8);
        }
      }
    }
    for (; i < k; i += 4)
      for (int64_t r = 0; r < mr; r++)
        dst[i / 4 * mr + r] = load_quad(src + r * row + i * step, step, k - i) ^ flip;
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t,
                           char*, int64_t* ldb) {
    *ldb = GC_NR;
    return (const int8_t*)g->b + offset + (p * quads(g->k) + kc / 4) * GC_NR * 4;
  }
  static void micro(int64_t mr, const uint32_t* a, const void* b, int64_t, int64_t k, float* c,
                    int64_t ldc, bool add) {
    KERNELS_I8[mr](a, (const uint32_t*)b, quads(k), c, ldc, add);
  }
};

#else

template <bool SIGNED>
struct Bytes {
  typedef uint8_t element;
  typedef uint32_t packed;  // two neighbours in K as int16
  static constexpr bool direct = false;
  static constexpr bool twins(int64_t, int64_t) { return false; }
  static constexpr int64_t chunk = GEMM_KC * 2;
  static constexpr int64_t expand_bytes = chunk * GC_NR * 2;
  static int64_t packed_length(int64_t k) { return 2 * quads(k); }
  static void pack(const uint8_t* src, int64_t row, int64_t step, int64_t mr, int64_t k,
                   uint32_t* dst) {
    for (int64_t i = 0; i < k; i += 4) {
      for (int64_t r = 0; r < mr; r++) {
        const uint32_t quad = load_quad(src + r * row + i * step, step, k - i);
        for (int64_t h = 0; h < 2; h++) {
          uint32_t lo = quad >> 16 * h & 0xff, hi = quad >> (16 * h + 8) & 0xff;
          if (SIGNED) {  // int8 + 128, as the kernel for CPUs with byte products has it
            lo ^= 0x80;
            hi ^= 0x80;
          }
          dst[(i / 2 + h) * mr + r] = lo | hi << 16;
        }
      }
    }
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t kl,
                           char* expand, int64_t* ldb) {
    *ldb = GC_NR;
    const int8_t* src = (const int8_t*)g->b + offset + (p * quads(g->k) + kc / 4) * GC_NR * 4;
    int16_t* dst = (int16_t*)expand;
    for (int64_t q = 0; q < quads(kl); q++, src += GC_NR * 4, dst += GC_NR * 4) {
      for (int64_t j = 0; j < GC_NR; j++) {
        for (int64_t h = 0; h < 2; h++) {
          dst[(h * GC_NR + j) * 2] = src[j * 4 + 2 * h];
          dst[(h * GC_NR + j) * 2 + 1] = src[j * 4 + 2 * h + 1];
        }
      }
    }
    return expand;
  }
  static void micro(int64_t mr, const uint32_t* a, const void* b, int64_t, int64_t k, float* c,
                    int64_t ldc, bool add) {
    KERNELS_I16[mr](a, (const uint32_t*)b, 2 * quads(k), c, ldc, add);
  }
};

#endif

}  // namespace

extern "C" void gc_gemm_i8(const gc_args* args, bool is_signed, gc_epilogue epilogue, int64_t begin,
                           int64_t end, int64_t rows) {
  gc_gemm g;
  static_cast<gc_gemm_shape&>(g) = *(const gc_gemm_shape*)args->imm;
  g.a = args->ptr[0];
  g.b = args->ptr[1];
  g.c = nullptr;
  g.alpha = g.beta = 1.0f;
  g.rows = rows;
  if (is_signed) gemm_run<Bytes<true>>(&g, args, epilogue, begin, end);
  else gemm_run<Bytes<false>>(&g, args, epilogue, begin, end);
}
