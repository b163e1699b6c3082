// float64 and integer matrix products: plain blocked loops that store the result themselves.
// Integers wrap around as in torch.
#pragma once
#include "abi.h"
#include "gemm.h"

// ptr = {a, b, c?, out}; imm = this struct. out is row-major [Z, M, N]; one unit is 8 rows of a batch.
struct gc_product_shape {
  int64_t m, n, k;
  int64_t size[GC_BATCH_DIMS];
  int64_t a_m, a_k, a_z[GC_BATCH_DIMS];
  int64_t b_k, b_n, b_z[GC_BATCH_DIMS];
  int64_t c_m, c_n, c_z[GC_BATCH_DIMS];
};

#define GC_PRODUCT(name)                                                                      \
  extern "C" void gc_product_##name(const gc_args* args, bool addend, double alpha, double beta, \
                                    int64_t begin, int64_t end)
GC_PRODUCT(f64);
GC_PRODUCT(i8);
GC_PRODUCT(u8);
GC_PRODUCT(i16);
GC_PRODUCT(i32);
GC_PRODUCT(i64);
