// Shared by the convolution kernels.
#pragma once
#include "conv.h"
#include "isa.h"

namespace gc {

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline float bias_value(const gc_conv_shape* s, const void* bias, int64_t channel) {
  if (s->bias_type == 1) return ((const float*)bias)[channel];
  if (s->bias_type == 2) return (float)((const bf16*)bias)[channel];
  if (s->bias_type == 3) return (float)((const f16*)bias)[channel];
  return 0.0f;
}

}  // namespace gc
