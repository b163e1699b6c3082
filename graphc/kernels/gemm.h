// Matrix products: out[z] = alpha * a[z] [M, K] x b[z] [K, N] + beta * c[z], fp32 accumulation, the
// result handed to an epilogue tile by tile.
//
// b is either packed in panels of 32 columns (layouts below; the last panel zero-padded) or, with
// ldb > 0 (fp32 only), plain rows whose columns are adjacent. One unit of the range is (batch z,
// block of at most GC_GEMM_ROWS rows, panel). z counts through up to four batch dimensions, the
// last fastest, each with a stride per operand (0 broadcasts). All strides count elements.
//
//   fp32, fp16  [panels][K][32]
//   bf16        [panels][ceil(K/2)][32][2]   (odd K: a zero closes the last pair)
//   coded bf16  gemm_coded.h; a weight without batches
//   8 or 4 bits quantized_panels.h; likewise
//
// Range, scratch bytes and immediates are computed by graphc/lowering/templates/matmul.py.
#pragma once
#include "abi.h"

#define GC_GEMM_ROWS 84  // a multiple of the micro tile's rows at every ISA level (14 and 6)
#define GC_BATCH_DIMS 4

struct gc_gemm_shape {
  int64_t m, n, k;
  int64_t size[GC_BATCH_DIMS];
  int64_t a_m, a_k, a_z[GC_BATCH_DIMS];
  int64_t ldb, b_z[GC_BATCH_DIMS];  // ldb 0: packed panels
  int64_t c_type, c_m, c_n, c_z[GC_BATCH_DIMS];  // c_type 0 fp32, 1 bf16, 2 fp16
};

struct gc_gemm : gc_gemm_shape {
  const void *a, *b, *c;  // c: addend or null
  float alpha, beta;
  // The epilogue counts rows on through all batches and splits them by this length, which may
  // differ from m where batches were merged into rows or the reverse. 0: as computed.
  int64_t rows;
};

// Offset of batch z for one operand's batch strides.
static inline int64_t gc_batch_offset(const int64_t* size, const int64_t* stride, int64_t z) {
  int64_t offset = 0;
  for (int d = GC_BATCH_DIMS - 1; d > 0; d--) {
    offset += z % size[d] * stride[d];
    z /= size[d];
  }
  return offset + z * stride[0];
}

extern "C" void gc_gemm_f32(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                            int64_t begin, int64_t end);
extern "C" void gc_gemm_f16(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                            int64_t begin, int64_t end);
extern "C" void gc_gemm_bf16(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                             int64_t begin, int64_t end);

// What has an encoding of its own is declared where it is called.
typedef void gc_gemm_function_type(const gc_gemm*, const gc_args*, gc_epilogue, int64_t, int64_t);
typedef gc_gemm_function_type* gc_gemm_function;

// The usual entry: ptr = {a, b, c?}; imm = the fields of gc_gemm_shape in order.
static inline void gc_gemm_entry(gc_gemm_function run, const gc_args* args, gc_epilogue epilogue,
                                 bool addend, float alpha, float beta, int64_t begin, int64_t end,
                                 int64_t rows = 0) {
  gc_gemm g;
  static_cast<gc_gemm_shape&>(g) = *(const gc_gemm_shape*)args->imm;
  g.a = args->ptr[0];
  g.b = args->ptr[1];
  g.c = addend ? args->ptr[2] : nullptr;
  g.alpha = alpha;
  g.beta = beta;
  g.rows = rows;
  run(&g, args, epilogue, begin, end);
}

// What packing a run-time b needs; its batches are packed one after the other.
struct gc_pack_shape {
  int64_t n, k, b_n, b_k;
  int64_t size[GC_BATCH_DIMS], b_z[GC_BATCH_DIMS];
};
