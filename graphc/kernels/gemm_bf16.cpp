// bf16 products, fp32 accumulation. See gemm.h.
#include "gemm_bf16.h"

extern "C" void gc_gemm_bf16(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                             int64_t begin, int64_t end) {
  gemm_run<Brain>(g, args, epilogue, begin, end);
}

// Pair panels from a strided b: ptr = {b, panels}; see gc_pack_shape.
GC_EXPORT void gc_pack_panels_bf16(const gc_args* args, int64_t begin, int64_t end) {
  const gc_pack_shape* s = (const gc_pack_shape*)args->imm;
  const int64_t panels = (s->n + GC_NR - 1) / GC_NR, k = s->k;
  const bf16 zero(0.0f);
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / panels, n0 = u % panels * GC_NR, nr = min64(GC_NR, s->n - n0);
    const bf16* b = (const bf16*)args->ptr[0] + gc_batch_offset(s->size, s->b_z, z) + n0 * s->b_n;
    bf16* dst = (bf16*)args->ptr[1] + u * pairs(k) * 2 * GC_NR;
    for (int64_t i = 0; i < k; i += 2, dst += 2 * GC_NR) {
      const bf16 *lo = b + i * s->b_k, *hi = lo + s->b_k;
      if (nr == GC_NR && s->b_n == 1 && i + 1 < k) {
        for (int64_t j = 0; j < GC_NR; j++) {
          dst[2 * j] = lo[j];
          dst[2 * j + 1] = hi[j];
        }
      } else {
        for (int64_t j = 0; j < GC_NR; j++) {
          dst[2 * j] = j < nr ? lo[j * s->b_n] : zero;
          dst[2 * j + 1] = j < nr && i + 1 < k ? hi[j * s->b_n] : zero;
        }
      }
    }
  }
}
