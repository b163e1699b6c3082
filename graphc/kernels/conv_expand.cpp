// Transposed convolution whose windows do not overlap (kernel = stride, no padding): each input pixel
// becomes a block of output pixels, one row of it at a time. For a row of the kernel the products of
// a pixel, [KW][OC], are neighbouring output pixels as they stand. See conv.h.
//
// Weights are packed as those of KD * KH groups with KW * OC output channels and one tap. One unit is
// (image, row of the input, segment of s->block pixels, row of the kernel). With one output channel
// the epilogue sees a row of pixels (m = 0, n = pixel), else m = pixel and n = channel.
#include "conv_common.h"

namespace {
using namespace gc;

template <class T>
static void expand(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t KW = s->kernel[2], KH = s->kernel[1], rows = s->kernel[0] * KH, width = s->in[2];
  const int64_t columns = KW * s->oc, segments = (width + s->block - 1) / s->block;
  const Panels<T> panels(columns, s->c, 1);
  const Scratch<T> scratch(args, s->block, panels.steps * panels.each);
  float* const bias = (float*)(scratch.zeros + (panels.steps * panels.each * sizeof(T) + 63) / 64 * 64);
  float* const tile = bias + panels.count * GC_NR;  // [block][columns]
  memset(bias, 0, (size_t)(panels.count * GC_NR) * sizeof(float));
  for (int64_t k = 0; k < KW; k++) bias_values(s, args, 0, s->oc, bias + k * s->oc);
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u % rows, segment = u / rows % segments, at = u / rows / segments;
    const int64_t h = at % s->in[1], d = at / s->in[1] % s->in[0], image = at / s->in[1] / s->in[0];
    const int64_t w = segment * s->block, n = min64(s->block, width - w);
    const T* x = (const T*)args->ptr[0] + image * s->x_n + d * s->x_s[0] + h * s->x_s[1];
    for (int64_t i = 0; i < n; i++) scratch.table[i] = (const char*)(x + (w + i) * s->x_s[2]);
    for (int64_t p = 0; p < panels.count; p++) {
      const int64_t wide = panels.width(p), nr = panels.channels(p);
      const char* weights = (const char*)((const T*)args->ptr[1] + panels.start(row, p));
      const int64_t tiles = (n + GC_MR - 1) / GC_MR;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t r0 = t * n / tiles, mr = (t + 1) * n / tiles - r0;
        conv_sum<T>({scratch.table + r0, s->block, 1, 0, s->c, weights, panels.tap_bytes(p),
                     bias + p * GC_NR, 0, scratch.sums, nullptr, nullptr, nullptr}, mr, wide);
        for (int64_t r = 0; r < mr; r++)
          memcpy(tile + (r0 + r) * columns + p * GC_NR, scratch.sums + r * GC_NR,
                 (size_t)nr * sizeof(float));
      }
    }
    const int64_t od = d * s->kernel[0] + row / KH, oh = h * KH + row % KH;
    const int64_t first = (od * s->out[1] + oh) * s->out[2] + w * KW;
    if (s->oc == 1) epilogue(args, tile, n * KW, image, 0, 1, first, n * KW);
    else epilogue(args, tile, s->oc, image, first, n * KW, 0, s->oc);
  }
}

}  // namespace

#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_f32)
GC_CONV(expand_f32) { expand<float>(args, epilogue, begin, end); }
#endif
#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_bf16)
GC_CONV(expand_bf16) { expand<bf16>(args, epilogue, begin, end); }
#endif
