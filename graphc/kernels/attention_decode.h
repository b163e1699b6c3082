// Attention of few queries over many keys, which lie in one or more segments (a cache, the new
// tokens): every key and value row is read once, in place, for all queries of all heads sharing it.
//
// Queries that see the same keys are the rows of one unit of work: `group` heads x tq positions.
// Keys are cut into `chunks` even pieces, by their number only, so that threads share long caches
// and results do not depend on how many threads there are; a second Step merges the pieces.
#pragma once
#include "attention_mix.h"
#include "gemm.h"

#define GC_DECODE_ROWS 64     // rows of a unit at most
#define GC_DECODE_SEGMENTS 8  // segments at most

struct gc_decode_segment {
  int64_t keys;
  int64_t k_t, k_z[GC_BATCH_DIMS];
  int64_t v_t, v_z[GC_BATCH_DIMS];
};

struct gc_decode_shape {
  int64_t tq, tk, d, dv, group, chunks;
  int64_t scale, soft_cap;  // bits of float64; soft_cap 0: none
  int64_t back, ahead;      // query i sees the keys i - back to i + ahead
  int64_t mask_type;        // 0 none, 1 fp32, 2 bf16, 3 fp16, 4 bool (true: keep)
  int64_t mask_t, mask_k, mask_g;
  int64_t sink_type;        // the same; a sink is one more score of a row, whose weight is dropped
  int64_t sink_g;
  int64_t q_t, q_d, q_g;
  int64_t out_t, out_d, out_g;
  int64_t size[GC_BATCH_DIMS], q_z[GC_BATCH_DIMS], out_z[GC_BATCH_DIMS], mask_z[GC_BATCH_DIMS],
      sink_z[GC_BATCH_DIMS];
  int64_t segments;
  gc_decode_segment segment[];
};
