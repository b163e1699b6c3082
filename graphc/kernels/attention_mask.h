// What hides keys from queries, for a block of scores s[key][32 lanes]: masks in memory and
// positions. Lane i of a panel is head (first + i) % group of query (first + i) / group.
#pragma once
#include "attention_prefill.h"
#include "attention_softmax.h"
#include "widen.h"

namespace gc {

enum Shown { NOTHING, SOMETHING, EVERYTHING };

// Scratch of masks: rows [32][KEYS], and turned [KEYS][32].
struct MaskBlock {
  float *rows, *turned;
  bool shared;  // one row for all lanes, in rows[0..keys)
};

// An additive mask in units of the scores. Finite values stay finite: a row of finfo.min is a row
// of equal scores, not a masked one.
template <class T> GC_INLINE float additive(T x, float unit) {
  const float natural = to_float(x), scaled = natural * unit;
  return scaled == NEGATIVE_INFINITY && natural != NEGATIVE_INFINITY ? -__FLT_MAX__ : scaled;
}
// 0 or -inf, without a branch.
template <> inline float additive<bool>(bool x, float) {
  return bits_to_f32(((uint32_t)x - 1u) & 0xff800000u);
}

template <class T>
static void mask_row(const T* m, int64_t step, int64_t keys, float unit, float* row) {
  if (step == 1) {
    for (int64_t j = 0; j < keys; j++) row[j] = additive(m[j], unit);
  } else {
    for (int64_t j = 0; j < keys; j++) row[j] = additive(m[j * step], unit);
  }
}

template <>
inline void mask_row<bool>(const bool* m, int64_t step, int64_t keys, float, float* row) {
  int64_t j = 0;
  if (step == 1) {
    for (; j + 8 <= keys; j += 8) {  // 0 or all ones above the mantissa: 0.0f or -inf
      const vu8 kept = widen8(load<vb8>(m + j));
      store(row + j, (kept - 1u) & 0xff800000u);
    }
  }
  for (; j < keys; j++) row[j] = additive(m[j * step], 0.0f);
}

// What a boolean row shows.
static inline Shown shown(const bool* m, int64_t step, int64_t keys) {
  if (step == 1) {
    if (!memchr(m, 0, (size_t)keys)) return EVERYTHING;
    return memchr(m, 1, (size_t)keys) ? SOMETHING : NOTHING;
  }
  int64_t kept = 0;
  for (int64_t j = 0; j < keys; j++) kept += m[j * step];
  return kept == 0 ? NOTHING : kept == keys ? EVERYTHING : SOMETHING;
}

template <class T>
static Shown load_rows(const gc_prefill_shape* s, const T* mask, int64_t first, int64_t lanes,
                       int64_t key, int64_t keys, float unit, MaskBlock* block) {
  const int64_t head = s->group > 1 ? s->mask_z[GC_BATCH_DIMS - 1] : 0;
  mask += key * s->mask_k;
  block->shared = s->mask_q == 0 && head == 0;
  if (block->shared) lanes = 1;
  if (sizeof(T) == 1) {
    bool any = false, all = true;
    for (int64_t i = 0; i < lanes; i++) {
      const int64_t t = (first + i) / s->group, h = (first + i) % s->group;
      const Shown row = shown((const bool*)(mask + t * s->mask_q + h * head), s->mask_k, keys);
      any |= row != NOTHING;
      all &= row == EVERYTHING;
    }
    if (all) return EVERYTHING;
    if (!any) return NOTHING;
  }
  if (!block->shared && lanes < GC_NR)
    memset(block->rows + lanes * GC_ATTENTION_KEYS, 0,
           (size_t)((GC_NR - lanes) * GC_ATTENTION_KEYS) * sizeof(float));
  for (int64_t i = 0; i < lanes; i++) {
    const int64_t t = (first + i) / s->group, h = (first + i) % s->group;
    mask_row(mask + t * s->mask_q + h * head, s->mask_k, keys, unit,
             block->rows + i * GC_ATTENTION_KEYS);
  }
  if (!block->shared)
    pack_rows(block->rows, GC_ATTENTION_KEYS, 1, GC_NR, keys, block->turned, GC_NR);
  return SOMETHING;
}

// Reads the mask of `lanes` lanes and `keys` keys; `offset` is that of the batch.
static inline Shown load_mask_block(const gc_prefill_shape* s, const void* mask, int64_t offset,
                             int64_t first, int64_t lanes, int64_t key, int64_t keys, float unit,
                             MaskBlock* block) {
  switch (s->mask_type) {
    case 1: return load_rows(s, (const float*)mask + offset, first, lanes, key, keys, unit, block);
    case 2: return load_rows(s, (const bf16*)mask + offset, first, lanes, key, keys, unit, block);
    case 3: return load_rows(s, (const f16*)mask + offset, first, lanes, key, keys, unit, block);
    default: return load_rows(s, (const bool*)mask + offset, first, lanes, key, keys, unit, block);
  }
}

static inline void add_mask_block(const MaskBlock* block, int64_t keys, float* scores) {
  if (block->shared) {
    for (int64_t j = 0; j < keys; j++)
      for (int64_t i = 0; i < GC_NR; i++) scores[j * GC_NR + i] += block->rows[j];
  } else {
    for (int64_t i = 0; i < keys * GC_NR; i++) scores[i] += block->turned[i];
  }
}

// Hides the keys outside i - back .. i + ahead from query i.
static inline void hide_positions(const gc_prefill_shape* s, int64_t first, int64_t key, int64_t keys,
                           float* scores) {
  int32_t lane[GC_NR];
  for (int32_t i = 0; i < GC_NR; i++) lane[i] = i;
  for (int64_t j = 0; j < keys; j++, scores += GC_NR) {
    // The lanes from `begin` up to `end` see this key.
    const int64_t begin = (key + j - s->ahead) * s->group - first;
    const int64_t end = (key + j + s->back + 1) * s->group - first;
    if (begin <= 0 && end >= GC_NR) continue;
    const int32_t from = (int32_t)(begin < 0 ? 0 : begin > GC_NR ? GC_NR : begin);
    const int32_t to = (int32_t)(end < 0 ? 0 : end > GC_NR ? GC_NR : end);
    for (int32_t i = 0; i < GC_NR; i++)
      scores[i] = lane[i] >= from && lane[i] < to ? scores[i] : NEGATIVE_INFINITY;
  }
}

}  // namespace gc
