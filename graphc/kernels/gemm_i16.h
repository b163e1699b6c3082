// Integer products of factors known to fit 16 bits (8-bit values minus their zero points), int32
// sums: pairs of K in one multiply-add (vpdpwssd, pmaddwd).
//
// ptr = {a, b, out}; imm = gc_gemm_shape without addend. a and b are int8, uint8, int16, int32 or
// int64 in memory; b is packed as int16 [panels][ceil(K/2)][32][2]. out is row-major int32 or int64.
#pragma once
#include "gemm.h"

// Storage types: 0 int8, 1 uint8, 2 int16, 3 int32, 4 int64.
extern "C" void gc_gemm_i16(const gc_args* args, int a_type, bool wide_result, int64_t begin,
                            int64_t end);
// Packs a run-time b: ptr = {b, panels}; imm = gc_pack_shape, one unit a panel.
extern "C" void gc_gemm_i16_pack(const gc_args* args, int b_type, int64_t begin, int64_t end);
