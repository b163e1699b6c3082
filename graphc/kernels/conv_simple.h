// float64 and integer convolution: plain loops that store the result themselves; integers wrap.
#pragma once
#include "conv.h"

// ptr = {x, weights, bias?, out}; imm = gc_conv_shape, then w_g, w_oc, w_c, w_tap. out is row-major;
// one unit is (image, output channel, output row).
#define GC_CONV_SIMPLE(name) \
  GC_EXPORT void gc_conv_simple_##name(const gc_args* args, int64_t begin, int64_t end)
GC_CONV_SIMPLE(f64);
GC_CONV_SIMPLE(i8);
GC_CONV_SIMPLE(u8);
GC_CONV_SIMPLE(i16);
GC_CONV_SIMPLE(i32);
GC_CONV_SIMPLE(i64);
