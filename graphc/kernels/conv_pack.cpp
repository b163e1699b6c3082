// Weights that are known at run time only, as the convolution kernels read them; see conv.h.
#include "conv_common.h"

namespace {
using namespace gc;

// Packs run-time weights: ptr = {weights, packed}; see gc_conv_pack_shape.
template <class T, class P>
static void pack_weights(const gc_args* args, int64_t begin, int64_t end) {
  const gc_conv_pack_shape* s = (const gc_conv_pack_shape*)args->imm;
  const Panels<P> panels(s->oc, s->c, s->taps);
  for (int64_t u = begin; u < end; u++) {
    const int64_t g = u / panels.count, p = u % panels.count;
    const int64_t width = panels.width(p), nr = panels.channels(p);
    const T* w = (const T*)args->ptr[0] + g * s->w_g + p * GC_NR * s->w_oc;
    P* dst = (P*)args->ptr[1] + panels.start(g, p);
    for (int64_t tap = 0; tap < s->taps; tap++)
      for (int64_t c = 0; c < s->c; c += panels.each)
        for (int64_t i = 0; i < width; i++)
          for (int64_t e = 0; e < panels.each; e++)
            *dst++ = i < nr && c + e < s->c
                         ? (P)to_float(w[i * s->w_oc + (c + e) * s->w_c + tap * s->w_tap])
                         : (P)0.0f;
  }
}

}  // namespace

GC_EXPORT void gc_conv_pack_f32(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<float, float>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_bf16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<bf16, bf16>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_f16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<f16, float>(args, begin, end);
}
