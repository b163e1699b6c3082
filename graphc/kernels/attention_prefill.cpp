// See attention_prefill.h. Scores are kept as s[key][lane]: queries are vector lanes, so the softmax
// needs no horizontal sums, and the block of weights is the packed left operand of the product with
// v as it stands.
//
// A unit is a few panels of 32 lanes over the same keys. Blocks of keys and values come into L2 once
// for all its panels; the scores of one panel and block stay in L1.
//
// Scores are in units of q . k; `factor` turns them into units of log2. Its sign is moved into q.
#include "prelude.h"

#include "attention_mask.h"
#include "attention_pack.h"
#include "attention_panel.h"
#include "vmath.h"

namespace {
using namespace gc;

constexpr int64_t KEYS = GC_ATTENTION_KEYS;
GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// T: storage of q. WIDEN: k and v are pairs that become fp32 block by block.
template <class T, class A, bool WIDEN>
static void prefill(const gc_args* args, gc_epilogue epilogue, float scale, float soft_cap,
                    int64_t begin, int64_t end) {
  typedef typename A::item Item;
  const gc_prefill_shape* s = (const gc_prefill_shape*)args->imm;
  const int64_t lanes = s->tq * s->group, panels = (lanes + GC_NR - 1) / GC_NR;
  const int64_t units = (panels + GC_ATTENTION_PANELS - 1) / GC_ATTENTION_PANELS;
  const int64_t columns = (s->dv + GC_NR - 1) / GC_NR * GC_NR, d = A::steps(s->d);
  const float factor = scale == 0.0f ? 1.0f : fabsf(scale) * LOG2E;
  const float cap = soft_cap == 0.0f || scale == 0.0f ? 0.0f : fabsf(scale) / soft_cap;
  const void* mask = s->mask_type ? args->ptr[3] : nullptr;
  const void* sinks = s->sink_type ? args->ptr[s->mask_type ? 4 : 3] : nullptr;

  float* scratch = (float*)args->scratch;
  const auto take = [&scratch](int64_t n) { return (scratch += n) - n; };
  float *const scores = take(KEYS * GC_NR), *const top = take(GC_NR);
  Panel<Item> unit[GC_ATTENTION_PANELS];
  for (Panel<Item>& p : unit) {
    p.q = (Item*)take(s->d * GC_NR + GC_NR);
    p.out = take(GC_NR * columns);
    p.base = take(GC_NR);
    p.total = take(GC_NR);
  }
  float* const wide_k = WIDEN ? take(KEYS * s->d) : nullptr;
  float* const wide_v = WIDEN ? take(KEYS * columns) : nullptr;
  MaskBlock block = {};
  if (mask) {
    block.rows = take(KEYS * GC_NR);
    block.turned = take(KEYS * GC_NR);
  }

  for (int64_t u = begin; u < end; u++) {
    // The longest units of causal work come first, so that threads end together.
    const int64_t z = u / units * s->group, first_panel = (units - 1 - u % units) * GC_ATTENTION_PANELS;
    const int64_t count = min64(GC_ATTENTION_PANELS, panels - first_panel);
    const T* q = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->q_z, z);
    const int64_t k_offset = gc_batch_offset(s->size, s->k_z, z),
                  v_offset = gc_batch_offset(s->size, s->v_z, z),
                  mask_offset = gc_batch_offset(s->size, s->mask_z, z),
                  sink_offset = gc_batch_offset(s->size, s->sink_z, z);
    const int64_t q_head = s->group > 1 ? s->q_z[GC_BATCH_DIMS - 1] : 0,
                  sink_head = s->group > 1 ? s->sink_z[GC_BATCH_DIMS - 1] : 0;

    int64_t key_begin = s->tk, key_end = 0;
    for (int64_t i = 0; i < count; i++) {
      Panel<Item>& p = unit[i];
      p.first = (first_panel + i) * GC_NR;
      p.lanes = min64(GC_NR, lanes - p.first);
      p.width = (p.lanes + VL - 1) / VL * VL;
      p.t0 = p.first / s->group;
      p.t1 = (p.first + p.lanes - 1) / s->group;
      p.begin = max64(0, p.t0 - s->back) / GC_NR * GC_NR;
      p.end = min64(s->tk, p.t1 + s->ahead + 1);
      p.fresh = true;
      key_begin = min64(key_begin, p.begin);
      key_end = max64(key_end, p.end);
      const T* rows[GC_NR];
      for (int64_t l = 0; l < p.lanes; l++) {
        const int64_t t = (p.first + l) / s->group, h = (p.first + l) % s->group;
        rows[l] = q + t * s->q_t + h * q_head;
        const float sink = sinks ? read(sinks, s->sink_type, sink_offset + h * sink_head) : 0.0f;
        p.base[l] = sinks ? sink * LOG2E / factor : NEGATIVE_INFINITY;
        p.total[l] = sinks && sink != NEGATIVE_INFINITY ? 1.0f : 0.0f;
      }
      for (int64_t l = p.lanes; l < GC_NR; l++) p.base[l] = p.total[l] = 0.0f;
      pack_lanes(rows, p.lanes, s->q_d, s->d, p.q);
      if (scale <= 0.0f) scale_lanes(p.q, d, scale == 0.0f);
    }

    for (int64_t k0 = key_begin; k0 < key_end; k0 += KEYS) {
      const Item *k = (const Item*)args->ptr[1] + k_offset + k0 / GC_NR * d * GC_NR,
                 *v = (const Item*)args->ptr[2] + v_offset + A::steps(k0) * s->v_t;
      int64_t v_t = s->v_t, v_panel = s->v_panel;
      if (WIDEN) {
        const int64_t n = min64(KEYS, s->tk - k0), pairs = (s->d + 1) / 2;
        const uint32_t *ks = (const uint32_t*)args->ptr[1] + k_offset + k0 / GC_NR * pairs * GC_NR,
                       *vs = (const uint32_t*)args->ptr[2] + v_offset + k0 / 2 * s->v_t;
        for (int64_t j = 0; j < n; j += GC_NR)
          widen_pairs(ks + j * pairs, GC_NR, s->d, wide_k + j * s->d);
        for (int64_t c = 0; c < columns; c += GC_NR)
          widen_pairs(vs + c / GC_NR * s->v_panel, s->v_t, n, wide_v + c * KEYS);
        k = (const Item*)wide_k;
        v = (const Item*)wide_v;
        v_t = GC_NR;
        v_panel = KEYS * GC_NR;
      }
      for (int64_t i = 0; i < count; i++) {
        Panel<Item>& p = unit[i];
        const int64_t b0 = max64(k0, p.begin), b1 = min64(k0 + KEYS, p.end), keys = b1 - b0;
        if (keys <= 0) continue;
        Shown seen = EVERYTHING;
        if (mask) {
          seen = load_mask_block(s, mask, mask_offset, p.first, p.lanes, b0, keys, LOG2E / factor,
                                 &block);
          if (seen == NOTHING) continue;
        }
        const bool edge = b1 - 1 > p.t0 + s->ahead || b0 < p.t1 - s->back;
        const bool plain = seen == EVERYTHING && !edge && cap == 0.0f && keys % WHOLE == 0;
        for (int64_t l = 0; l < p.width; l++) top[l] = NEGATIVE_INFINITY;
        score_block<A>(k + (b0 - k0) * d, p.q, d, keys, p.width, scores, plain ? top : nullptr);
        if (!plain) {
          if (cap != 0.0f)
            for (int64_t j = 0; j < keys * GC_NR; j++) scores[j] = vtanh(scores[j] * cap) / cap;
          if (seen == SOMETHING) add_mask_block(&block, keys, scores);
          if (edge) hide_positions(s, p.first, b0, keys, scores);
          maximum(scores, keys, p.width, top);
        }
        weigh<A>(&p, scores, keys, factor, top, columns);
        for (int64_t c = 0; c < columns; c += GC_NR)
          mix_block<A>((const Item*)scores, v + c / GC_NR * v_panel + A::steps(b0 - k0) * v_t, v_t,
                       A::steps(keys), p.lanes, p.out + c, columns, !p.fresh);
        p.fresh = false;
      }
    }

    for (int64_t i = 0; i < count; i++) {
      Panel<Item>& p = unit[i];
      finish(&p, columns);
      for (int64_t h = 0; h < s->group; h++) {
        const int64_t from = (p.first - h + s->group - 1) / s->group,
                      to = (p.first + p.lanes - h + s->group - 1) / s->group;
        if (from < to)
          epilogue(args, p.out + (from * s->group + h - p.first) * columns, s->group * columns, z + h,
                   from, to - from, 0, s->dv);
      }
    }
  }
}

}  // namespace

// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif

#ifdef GC_ONLY_f32
GC_PREFILL(f32) { prefill<float, Floats, false>(args, epilogue, scale, soft_cap, begin, end); }
#endif
#ifdef GC_ONLY_f16
GC_PREFILL(f16) { prefill<f16, Floats, false>(args, epilogue, scale, soft_cap, begin, end); }
#endif
#ifdef GC_ONLY_bf16
GC_PREFILL(bf16) {
#if defined(__AVX512BF16__)
  prefill<bf16, Pairs, false>(args, epilogue, scale, soft_cap, begin, end);
#else
  prefill<bf16, Floats, true>(args, epilogue, scale, soft_cap, begin, end);
#endif
}
#endif
