// Transposed convolution. Output pixels that are a stride apart read through the same taps; each such
// phase is an implicit GEMM over the taps that reach it, so that no product with an inserted zero is
// made. See conv.h.
#include "conv_common.h"

namespace {
using namespace gc;

template <class T>
static void convolve(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  int64_t grid[3];  // pixels of the largest phase
  for (int i = 0; i < 3; i++) grid[i] = (s->out[i] + s->stride[i] - 1) / s->stride[i];
  const int64_t area = grid[0] * grid[1] * grid[2], pixels = s->images * area;
  const int64_t taps = s->kernel[0] * s->kernel[1] * s->kernel[2];
  const int64_t phases = s->stride[0] * s->stride[1] * s->stride[2];
  const int64_t blocks = (pixels + s->block - 1) / s->block;
  const Panels<T> panels(s->oc, s->c, taps);
  const Scratch<T> scratch(args, taps * s->block, panels.steps * panels.each);
  int64_t* const place = (int64_t*)(scratch.zeros + (panels.steps * panels.each * sizeof(T) + 7) / 8 * 8);
  int64_t loaded = -1, count = 0;
  for (int64_t u = begin; u < end; u++) {
    const int64_t p = u % panels.count, block = u / panels.count % blocks,
                  phase = u / panels.count / blocks % phases, g = u / panels.count / blocks / phases,
                  first = block * s->block;
    const int64_t shift[3] = {phase / s->stride[2] / s->stride[1], phase / s->stride[2] % s->stride[1],
                              phase % s->stride[2]};
    auto reached = [&](int i, int64_t tap) {  // whether the tap reads an item for this phase
      const int64_t at = shift[i] + s->pad[i] - tap * s->dilation[i];
      return at % s->stride[i] == 0;
    };
    auto used = [&](int64_t tap) {
      return reached(0, tap / s->kernel[2] / s->kernel[1]) &&
             reached(1, tap / s->kernel[2] % s->kernel[1]) && reached(2, tap % s->kernel[2]);
    };
    if (u / panels.count != loaded) {
      loaded = u / panels.count;
      count = min64(s->block, pixels - first);
      for (int64_t j = 0; j < count; j++) {
        const int64_t at = first + j, image = at / area;
        const int64_t o[3] = {at / grid[2] / grid[1] % grid[0] * s->stride[0] + shift[0],
                              at / grid[2] % grid[1] * s->stride[1] + shift[1],
                              at % grid[2] * s->stride[2] + shift[2]};
        const bool exists = o[0] < s->out[0] && o[1] < s->out[1] && o[2] < s->out[2];
        place[j] = exists ? ((image * s->out[0] + o[0]) * s->out[1] + o[1]) * s->out[2] + o[2] : -1;
        const T* x = (const T*)args->ptr[0] + image * s->x_n + g * s->c;
        for (int64_t tap = 0; tap < taps; tap++) {
          if (!used(tap)) continue;
          const int64_t k[3] = {tap / s->kernel[2] / s->kernel[1], tap / s->kernel[2] % s->kernel[1],
                                tap % s->kernel[2]};
          bool inside = exists;
          int64_t offset = 0;
          for (int i = 0; i < 3; i++) {
            const int64_t v = o[i] + s->pad[i] - k[i] * s->dilation[i];
            inside = inside && v >= 0 && v / s->stride[i] < s->in[i];
            offset += v / s->stride[i] * s->x_s[i];
          }
          scratch.table[tap * s->block + j] = inside ? (const char*)(x + offset) : scratch.zeros;
        }
      }
    }
    const int64_t width = panels.width(p), nr = panels.channels(p), n0 = g * s->oc + p * GC_NR;
    for (int64_t i = nr; i < GC_NR; i++) scratch.bias[i] = 0.0f;
    bias_values(s, args, n0, nr, scratch.bias);
    const char* weights = (const char*)((const T*)args->ptr[1] + panels.start(g, p));
    const int64_t tiles = (count + GC_MR - 1) / GC_MR, whole = s->out[0] * s->out[1] * s->out[2];
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t r0 = t * count / tiles, mr = (t + 1) * count / tiles - r0;
      gc_conv_tile tile = {nullptr, s->block, 1, 0, s->c, nullptr, panels.tap_bytes(p),
                           scratch.bias, 0, scratch.sums, nullptr, nullptr, nullptr};
      for (int64_t tap = 0; tap < taps; tap++) {
        if (!used(tap)) continue;
        tile.pixels = scratch.table + tap * s->block + r0;
        tile.weights = weights + tap * tile.tap_bytes;
        conv_sum<T>(tile, mr, width);
        tile.init = scratch.sums;
        tile.ldi = GC_NR;
      }
      if (tile.ldi == 0)  // no tap reaches this phase
        for (int64_t r = 0; r < mr; r++)
          memcpy(scratch.sums + r * GC_NR, scratch.bias, GC_NR * sizeof(float));
      for (int64_t r = 0; r < mr; r++) {
        const int64_t at = place[r0 + r];
        if (at >= 0) epilogue(args, scratch.sums + r * GC_NR, GC_NR, at / whole, at % whole, 1, n0, nr);
      }
    }
  }
}

}  // namespace

#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_f32)
GC_CONV(transposed_f32) { convolve<float>(args, epilogue, begin, end); }
#endif
#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_bf16)
GC_CONV(transposed_bf16) { convolve<bf16>(args, epilogue, begin, end); }
#endif
