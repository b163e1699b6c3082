// Shared by the drivers of the convolution kernels.
#pragma once
#include "conv.h"
#include "isa.h"

namespace gc {

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// dst[n] = the biases of channels first .. first + n, zero without bias.
static inline void bias_values(const gc_conv_shape* s, const gc_args* args, int64_t first, int64_t n,
                               float* dst) {
  const void* bias = s->bias_type ? args->ptr[2] : nullptr;
  for (int64_t i = 0; i < n; i++) {
    const int64_t at = first + i;
    dst[i] = s->bias_type == 1   ? ((const float*)bias)[at]
             : s->bias_type == 2 ? (float)((const bf16*)bias)[at]
             : s->bias_type == 3 ? (float)((const f16*)bias)[at]
                                 : 0.0f;
  }
}

// The packed panels of one group (conv.h): all GC_CONV_PANEL wide but perhaps the last.
template <class T> struct Panels {
  static constexpr int64_t each = sizeof(T) == 2 ? 2 : 1;  // channels of one step
  int64_t count, rest, narrow, steps, column;
  explicit Panels(int64_t oc, int64_t c, int64_t taps) {
    count = (oc + GC_NR - 1) / GC_NR;
    rest = oc - (count - 1) * GC_NR;
    narrow = (rest + 7) / 8 * 8;
    steps = (c + each - 1) / each;
    column = taps * steps * each;  // elements of one output channel
  }
  int64_t width(int64_t p) const { return p == count - 1 ? narrow : GC_NR; }
  int64_t channels(int64_t p) const { return p == count - 1 ? rest : GC_NR; }
  int64_t tap_bytes(int64_t p) const { return steps * each * width(p) * (int64_t)sizeof(T); }
  int64_t start(int64_t group, int64_t p) const {  // in elements
    return (group * ((count - 1) * GC_NR + narrow) + p * GC_NR) * column;
  }
};

GC_INLINE void run_tile(const float*, const gc_conv_tile& t, int64_t mr, int64_t width) {
  gc_conv_tile_f32(&t, mr, width);
}
GC_INLINE void run_tile(const bf16*, const gc_conv_tile& t, int64_t mr, int64_t width) {
  gc_conv_tile_bf16(&t, mr, width);
}

constexpr int64_t CONV_SUM = 128;  // fp32 products between partial sums: keeps the error low

// sums[mr][width] = init + ..., over all taps and channels of a tile whose first tap and channel it
// describes.
template <class T>
static inline void conv_sum(gc_conv_tile t, int64_t mr, int64_t width) {
  const T* kind = nullptr;
  if (sizeof(T) == 2 || t.c * t.taps <= CONV_SUM) return run_tile(kind, t, mr, width);
  const int64_t taps = t.taps, channels = t.c, most = max64(1, CONV_SUM / channels);
  const char* const* pixels = t.pixels;
  const char* weights = t.weights;
  const gc_conv_finish* const finish = t.finish;
  for (int64_t k = 0; k < taps; k += most) {
    t.taps = min64(most, taps - k);
    t.pixels = pixels + k * t.ld;
    for (int64_t c = 0; c < channels; c += CONV_SUM) {
      t.offset = c * (int64_t)sizeof(T);
      t.c = min64(CONV_SUM, channels - c);
      t.weights = weights + k * t.tap_bytes + c * width * (int64_t)sizeof(T);
      t.finish = k + most >= taps && c + CONV_SUM >= channels ? finish : nullptr;
      run_tile(kind, t, mr, width);
      t.init = t.sums;
      t.ldi = GC_NR;
    }
  }
}

// Memory of one unit: sums, biases, the table of addresses and a pixel of zeros.
template <class T> struct Scratch {
  float *sums, *bias;
  const char** table;
  char* zeros;
  Scratch(const gc_args* args, int64_t entries, int64_t channels) {
    sums = (float*)args->scratch;
    bias = sums + GC_CONV_ROWS * GC_NR;
    table = (const char**)(bias + GC_CONV_GROUP * GC_NR);
    zeros = (char*)(table + entries);
    memset(zeros, 0, (size_t)channels * sizeof(T));
  }
};

}  // namespace gc
