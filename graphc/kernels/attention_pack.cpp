// Panels of 32 keys or 32 columns of values for attention_prefill.cpp: ptr = {source, panels},
// immediates gc_pack_shape: n items across panels, k along them.
#include "attention_pack.h"
#include "gemm.h"

namespace {
using namespace gc;
GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// dst = one panel of nr columns, b_n apart, of k values, b_k apart.
template <class T>
static void pack_one(const T* b, int64_t b_n, int64_t b_k, int64_t nr, int64_t k, float* dst) {
  pack_panel(b, b_n, b_k, nr, k, dst);
}
static void pack_one(const bf16* b, int64_t b_n, int64_t b_k, int64_t nr, int64_t k,
                     uint32_t* dst) {
  if (b_n == 1) return pair_rows(b, b_k, k, nr, dst);
  const bf16* rows[GC_NR];
  for (int64_t r = 0; r < nr; r++) rows[r] = b + r * b_n;
  pack_lanes(rows, nr, b_k, k, dst);
}

template <class T, class Item>
static void pack(const gc_args* args, int64_t steps, int64_t begin, int64_t end) {
  const gc_pack_shape* s = (const gc_pack_shape*)args->imm;
  const int64_t panels = (s->n + GC_NR - 1) / GC_NR;
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / panels, n0 = u % panels * GC_NR, nr = min64(GC_NR, s->n - n0);
    const T* b = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->b_z, z) + n0 * s->b_n;
    pack_one(b, s->b_n, s->b_k, nr, s->k, (Item*)args->ptr[1] + u * steps * GC_NR);
  }
}

}  // namespace

// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif

#define GC_K(args) ((const gc_pack_shape*)(args)->imm)->k
#ifdef GC_ONLY_f32
GC_EXPORT void gc_attention_pack_f32(const gc_args* args, int64_t begin, int64_t end) {
  pack<float, float>(args, GC_K(args), begin, end);
}
#endif
#ifdef GC_ONLY_f16
GC_EXPORT void gc_attention_pack_f16(const gc_args* args, int64_t begin, int64_t end) {
  pack<f16, float>(args, GC_K(args), begin, end);
}
#endif
#ifdef GC_ONLY_bf16
GC_EXPORT void gc_attention_pack_bf16(const gc_args* args, int64_t begin, int64_t end) {
  pack<bf16, uint32_t>(args, (GC_K(args) + 1) / 2, begin, end);
}
#endif
