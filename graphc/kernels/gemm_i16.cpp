// See gemm_i16.h.
#include "gemm_i16.h"

#include "gemm_driver.h"
#include "gemm_i16_micro.h"

namespace {
using namespace gc;

constexpr int64_t pairs(int64_t k) { return (k + 1) / 2; }

template <class T>
struct Integer {
  typedef T element;
  typedef uint32_t packed;  // two neighbours in K
  static constexpr bool direct = false;
  static constexpr bool twins(int64_t, int64_t) { return false; }
  static constexpr int64_t chunk = 1024;
  static constexpr int64_t expand_bytes = 0;
  static int64_t packed_length(int64_t k) { return pairs(k); }
  static void pack(const T* src, int64_t row, int64_t step, int64_t mr, int64_t k, uint32_t* dst) {
    for (int64_t r = 0; r < mr; r++, src += row) {
      int64_t i = 0;
      for (; i + 2 <= k; i += 2)
        dst[i / 2 * mr + r] = (uint16_t)src[i * step] | (uint32_t)(uint16_t)src[(i + 1) * step] << 16;
      if (i < k) dst[i / 2 * mr + r] = (uint16_t)src[i * step];
    }
  }
  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t,
                           char*, int64_t* ldb) {
    *ldb = GC_NR;
    return (const int16_t*)g->b + offset + (p * pairs(g->k) + kc / 2) * GC_NR * 2;
  }
  static void micro(int64_t mr, const uint32_t* a, const void* b, int64_t, int64_t k, float* c,
                    int64_t ldc, bool add) {
    KERNELS_I16[mr](a, (const uint32_t*)b, pairs(k), c, ldc, add);
  }
};

template <class T>
static void store_result(const gc_args* args, const float* tile, int64_t ld, int64_t z, int64_t m0,
                         int64_t mr, int64_t n0, int64_t nr) {
  const gc_gemm_shape* s = (const gc_gemm_shape*)args->imm;
  for (int64_t r = 0; r < mr; r++) {
    T* out = (T*)args->ptr[2] + (z * s->m + m0 + r) * s->n + n0;
    const char* bits = (const char*)(tile + r * ld);
    for (int64_t i = 0; i < nr; i++) {
      int32_t value;
      memcpy(&value, bits + i * 4, 4);
      out[i] = value;
    }
  }
}

template <class T>
static void product(const gc_args* args, bool wide_result, int64_t begin, int64_t end) {
  gc_gemm g;
  static_cast<gc_gemm_shape&>(g) = *(const gc_gemm_shape*)args->imm;
  g.a = args->ptr[0];
  g.b = args->ptr[1];
  g.c = nullptr;
  g.alpha = 1.0f;
  g.rows = 0;
  gemm_run<Integer<T>>(&g, args, wide_result ? store_result<int64_t> : store_result<int32_t>, begin,
                       end);
}

template <class T>
static void pack_b(const gc_args* args, int64_t begin, int64_t end) {
  const gc_pack_shape* s = (const gc_pack_shape*)args->imm;
  const int64_t panels = (s->n + GC_NR - 1) / GC_NR, k = s->k;
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / panels, n0 = u % panels * GC_NR, nr = min64(GC_NR, s->n - n0);
    const T* b = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->b_z, z) + n0 * s->b_n;
    int16_t* dst = (int16_t*)args->ptr[1] + u * pairs(k) * 2 * GC_NR;
    for (int64_t i = 0; i < k + k % 2; i++)
      for (int64_t j = 0; j < GC_NR; j++)
        dst[i / 2 * 2 * GC_NR + 2 * j + i % 2] =
            j < nr && i < k ? (int16_t)b[i * s->b_k + j * s->b_n] : (int16_t)0;
  }
}

}  // namespace

extern "C" void gc_gemm_i16(const gc_args* args, int a_type, bool wide_result, int64_t begin,
                            int64_t end) {
  if (a_type == 0) product<int8_t>(args, wide_result, begin, end);
  else if (a_type == 1) product<uint8_t>(args, wide_result, begin, end);
  else if (a_type == 2) product<int16_t>(args, wide_result, begin, end);
  else if (a_type == 3) product<int32_t>(args, wide_result, begin, end);
  else product<int64_t>(args, wide_result, begin, end);
}

extern "C" void gc_gemm_i16_pack(const gc_args* args, int b_type, int64_t begin, int64_t end) {
  if (b_type == 0) pack_b<int8_t>(args, begin, end);
  else if (b_type == 1) pack_b<uint8_t>(args, begin, end);
  else if (b_type == 2) pack_b<int16_t>(args, begin, end);
  else if (b_type == 3) pack_b<int32_t>(args, begin, end);
  else pack_b<int64_t>(args, begin, end);
}
