// See attention.h. Scores are kept as s[key][query]: queries are vector lanes, so the softmax needs
// no horizontal sums, and the block of scores is already the packed left operand of the product
// with v.
#include "attention_softmax.h"

namespace {
using namespace gc;

constexpr int64_t KEYS = 128;  // keys of one block: 16 KB of scores
GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// c[rows][32] (+)= a^T b with a [k][lda]; rows in even micro tiles.
static void columns_times(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                          float* c, int64_t ldc, int64_t rows, bool add) {
  const int64_t tiles = (rows + GC_MR - 1) / GC_MR;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t r = t * rows / tiles, mr = (t + 1) * rows / tiles - r;
    MICRO[mr](a + r, lda, b, ldb, k, c + r * ldc, ldc, add);
  }
}

// qt[d][32] = scale * q, queries beyond nq zero.
template <class T>
static void pack_queries(const T* q, const gc_attention_shape* s, int64_t nq, float scale,
                         float* qt) {
  pack_panel(q, s->q_t, s->q_d, nq, s->d, qt);
  for (int64_t i = 0; i < s->d * GC_NR; i++) qt[i] *= scale;
}

template <class T>
static void attention(const gc_args* args, gc_epilogue epilogue, float scale, int64_t begin,
                      int64_t end) {
  const gc_attention_shape* s = (const gc_attention_shape*)args->imm;
  const int64_t blocks = (s->tq + GC_NR - 1) / GC_NR;
  const int64_t columns = (s->dv + GC_NR - 1) / GC_NR * GC_NR;
  float* const qt = (float*)args->scratch;             // [d][32]
  float* const scores = qt + s->d * GC_NR;             // [KEYS][32]
  float* const mask_t = scores + KEYS * GC_NR;         // [KEYS][32]
  float* const mask = mask_t + KEYS * GC_NR;           // [32][KEYS]
  float* const maximum = mask + KEYS * GC_NR;          // [32] each
  float* const total = maximum + GC_NR;
  float* const rescale = total + GC_NR;
  float* const out = rescale + GC_NR;                  // [32][columns]
  for (int64_t u = begin; u < end; u++) {
    // Long blocks of causal work come first, so that threads end together.
    const int64_t z = u / blocks, block = s->causal ? blocks - 1 - u % blocks : u % blocks;
    const int64_t q0 = block * GC_NR, nq = min64(GC_NR, s->tq - q0);
    const T* q = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->q_z, z) + q0 * s->q_t;
    const float* k = (const float*)args->ptr[1] + gc_batch_offset(s->size, s->k_z, z);
    const float* v = (const float*)args->ptr[2] + gc_batch_offset(s->size, s->v_z, z);
    const int64_t mask_offset = gc_batch_offset(s->size, s->mask_z, z) + q0 * s->mask_q;
    pack_queries(q, s, nq, scale * LOG2E, qt);
    for (int64_t i = 0; i < GC_NR; i++) {
      maximum[i] = NEGATIVE_INFINITY;
      total[i] = 0.0f;
    }
    memset(out, 0, (size_t)(nq * columns) * sizeof(float));
    const int64_t keys = s->causal ? min64(s->tk, q0 + nq) : s->tk;
    for (int64_t k0 = 0; k0 < keys; k0 += KEYS) {
      const int64_t nk = min64(KEYS, keys - k0);
      for (int64_t j = 0; j < nk; j += GC_NR)
        columns_times(k + (k0 + j) * s->d, GC_NR, qt, GC_NR, s->d, scores + j * GC_NR, GC_NR,
                      min64(GC_NR, nk - j), false);
      if (s->mask_type) {
        const void* m = args->ptr[3];
        const int64_t offset = mask_offset + k0 * s->mask_k;
        if (s->mask_q == 0) {
          load_mask(s, m, offset, 1, nk, mask, KEYS);
          for (int64_t j = 0; j < nk; j++)
            for (int64_t i = 0; i < GC_NR; i++) scores[j * GC_NR + i] += mask[j];
        } else {
          if (nq < GC_NR) memset(mask + nq * KEYS, 0, (size_t)((GC_NR - nq) * KEYS) * sizeof(float));
          load_mask(s, m, offset, nq, nk, mask, KEYS);
          pack_rows(mask, KEYS, 1, GC_NR, nk, mask_t, GC_NR);
          for (int64_t i = 0; i < nk * GC_NR; i++) scores[i] += mask_t[i];
        }
      }
      if (s->causal && k0 + nk > q0) causal_block(scores, nk, k0, q0);
      softmax_block(scores, nk, maximum, total, rescale);
      if (k0 > 0) {
        for (int64_t i = 0; i < nq; i++)
          if (rescale[i] != 1.0f)
            for (int64_t j = 0; j < columns; j++) out[i * columns + j] *= rescale[i];
      }
      for (int64_t p = 0; p * GC_NR < s->dv; p++)
        columns_times(scores, GC_NR, v + p * s->v_panel + k0 * s->v_t, s->v_t, nk, out + p * GC_NR,
                      columns, nq, true);
    }
    for (int64_t i = 0; i < nq; i++) {
      const float factor = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
      for (int64_t j = 0; j < columns; j++) out[i * columns + j] *= factor;
    }
    epilogue(args, out, columns, z, q0, nq, 0, s->dv);
  }
}

}  // namespace

GC_ATTENTION(f32) { attention<float>(args, epilogue, scale, begin, end); }
GC_ATTENTION(bf16) { attention<bf16>(args, epilogue, scale, begin, end); }
GC_ATTENTION(f16) { attention<f16>(args, epilogue, scale, begin, end); }

// fp32 panels [ceil(n/32)][k][32] from strided rows of another type: ptr = {source, panels}.
#define GC_PACK(name, T)                                                              \
  GC_EXPORT void gc_attention_pack_##name(const gc_args* args, int64_t begin, int64_t end) { \
    pack_f32<T>(args, begin, end);                                                    \
  }
template <class T>
static void pack_f32(const gc_args* args, int64_t begin, int64_t end) {
  const gc_pack_shape* s = (const gc_pack_shape*)args->imm;
  const int64_t panels = (s->n + GC_NR - 1) / GC_NR;
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / panels, n0 = u % panels * GC_NR, nr = min64(GC_NR, s->n - n0);
    const T* b = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->b_z, z) + n0 * s->b_n;
    float* dst = (float*)args->ptr[1] + u * s->k * GC_NR;
    pack_panel(b, s->b_n, s->b_k, nr, s->k, dst);
  }
}
GC_PACK(f32, float)
GC_PACK(bf16, bf16)
GC_PACK(f16, f16)
