// Products of 8-bit rows with constant 8-bit weights: out = (a - zero) x b, int32 sums handed to the
// epilogue as floats. The zero point is one value of the whole of `a`; its part, zero * the sum of
// each column of b, is taken off at the end, so that the inner loop sees the bytes as they are.
//
//   b        int8 [ceil(N/32)][ceil(K/4)][32][4], zero-padded: four neighbours in K side by side,
//            as vpdpbusd reads them; without that instruction a chunk is widened to int16 pairs
//   columns  int32 [32 * ceil(N/32)]: sums of the columns of b
#pragma once
#include <string.h>

#include "gemm.h"

// ptr = {a, b}; imm = gc_gemm_shape without addend. a is uint8, or int8 if `is_signed`.
extern "C" void gc_gemm_i8(const gc_args* args, bool is_signed, gc_epilogue epilogue, int64_t begin,
                           int64_t end, int64_t rows);

// What the epilogue does first: the tile holds int32 bits, and floats afterwards.
static inline void gc_gemm_i8_finish(float* tile, int64_t ld, int64_t mr, int64_t n0, int64_t nr,
                                     const int32_t* columns, int32_t zero) {
  for (int64_t r = 0; r < mr; r++, tile += ld) {
    for (int64_t i = 0; i < nr; i++) {
      int32_t sum;
      memcpy(&sum, tile + i, 4);
      // unsigned: sums that leave int32 wrap, as they do in the model's own arithmetic
      tile[i] = (float)(int32_t)((uint32_t)sum - (uint32_t)zero * (uint32_t)columns[n0 + i]);
    }
  }
}
