// softmax(scale * q k^T + mask) v for many queries without the T x T matrix: blocked online softmax
// (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022).
//
// Heads that share keys (grouped queries) are one dimension of the batch, the last one: their
// queries stand side by side in the lanes of a panel, query by query, so that keys and values are
// read once for all of them. A row whose keys are all hidden gives zeros, as in torch.
//
// bf16 sums products of pairs in fp32 and rounds the weights to bf16; a CPU without such an
// instruction widens blocks of keys and values. fp32 and fp16 are computed in fp32.
#pragma once
#include "abi.h"
#include "gemm.h"

#define GC_ATTENTION_PANELS 4  // panels of 32 lanes in one unit of the range
#define GC_ATTENTION_KEYS 128  // keys of one block

struct gc_prefill_shape {
  int64_t tq, tk, d, dv;
  int64_t group;  // heads that share keys: size of the last batch dimension, or 1
  int64_t size[GC_BATCH_DIMS];
  int64_t q_t, q_d, q_z[GC_BATCH_DIMS];
  int64_t k_z[GC_BATCH_DIMS];                // of packed panels, as all of k
  int64_t v_t, v_panel, v_z[GC_BATCH_DIMS];  // step of a row (bf16: a pair), of 32 columns
  int64_t mask_type;                         // 0 none, 1 fp32, 2 bf16, 3 fp16, 4 bool (true: keep)
  int64_t mask_q, mask_k, mask_z[GC_BATCH_DIMS];
  int64_t sink_type, sink_z[GC_BATCH_DIMS];  // a logit beside the keys; types as of masks
  int64_t back, ahead;                       // query i sees the keys i - back .. i + ahead
};

// ptr = {q, k panels, v, mask?, sinks?}. The scores are capped to soft_cap * tanh(s / soft_cap)
// before masks (0: not). Range: (batch, GC_ATTENTION_PANELS panels of tq * group lanes).
//   f32, f16  k: fp32 panels [ceil(tk/32)][d][32]; v: fp32, 32 columns adjacent
//   bf16      k: pairs [ceil(tk/32)][ceil(d/2)][32][2]; v: pairs [ceil(dv/32)][ceil(tk/2)][32][2]
#define GC_PREFILL(name)                                                                           \
  extern "C" void gc_prefill_##name(const gc_args* args, gc_epilogue epilogue, float scale,        \
                                    float soft_cap, int64_t begin, int64_t end)
GC_PREFILL(f32);
GC_PREFILL(bf16);
GC_PREFILL(f16);
