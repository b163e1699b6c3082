// Arithmetic of windows that slide over a row or adapt to an output size.
#pragma once
#include "strided.h"

namespace gc {

// The output columns whose tap reads inside the row: 0 <= o * stride + shift < size.
static inline void inside(int64_t shift, int64_t stride, int64_t size, int64_t out, int64_t* from,
                          int64_t* to) {
  *from = shift >= 0 ? 0 : (-shift + stride - 1) / stride;
  const int64_t last = size - 1 - shift;
  *to = last < 0 ? 0 : min64(out, last / stride + 1);
  *from = min64(*from, *to);
}

// Window o of an adaptive pooling: [floor(o*in/out), ceil((o+1)*in/out)).
static inline int64_t first(int64_t o, int64_t in, int64_t out) { return o * in / out; }
static inline int64_t last(int64_t o, int64_t in, int64_t out) {
  return ((o + 1) * in + out - 1) / out;
}

}  // namespace gc
