// softmax(scale * q k^T + mask) v for a few queries, fp32 arithmetic for every storage type. Many
// queries: attention_prefill.h.
//
// Batch dimensions are listed as in gemm.h; heads that share keys (grouped queries) have key and
// value stride 0 in their dimension. A row whose keys are all masked gives zeros, as in torch.
#pragma once
#include "abi.h"
#include "gemm.h"

struct gc_attention_shape {
  int64_t tq, tk, d, dv;
  int64_t size[GC_BATCH_DIMS];
  int64_t q_t, q_d, q_z[GC_BATCH_DIMS];
  int64_t k_t, k_z[GC_BATCH_DIMS];            // k_t is used without packing only
  int64_t v_t, v_panel, v_z[GC_BATCH_DIMS];   // row step; step between 32 columns
  int64_t mask_type;                          // 0 none, 1 fp32, 2 bf16, 3 fp16, 4 bool (true: keep)
  int64_t mask_q, mask_k, mask_z[GC_BATCH_DIMS];
  int64_t causal;                             // key j is seen by queries i >= j
};

// ptr = {q, k, v, mask?}; q of type float, gc::bf16 or gc::f16.
#define GC_ATTENTION(name)                                                                   \
  extern "C" void gc_attention_##name(const gc_args* args, gc_epilogue epilogue, float scale, \
                                      int64_t begin, int64_t end)

// A few queries, unit by unit of (batch, query): k and v in their own type, read once, in place.
GC_ATTENTION(decode_f32);
GC_ATTENTION(decode_bf16);
GC_ATTENTION(decode_f16);
