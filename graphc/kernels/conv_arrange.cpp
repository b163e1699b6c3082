// Images as the convolution kernels read them: channels become neighbours, and rows may get zeros on
// both sides; fp16 is widened to fp32 (there are no products of fp16). One unit is one row of an image.
// ptr = {x, out [N, D, H, width, channels]}; see gc_conv_arrange_shape.
#include "conv_common.h"

namespace {
using namespace gc;

struct gc_conv_arrange_shape {
  int64_t c, depth, height, width;  // of x
  int64_t x_n, x_c, x_d, x_h, x_w;
  int64_t left, out_width;          // zeros in front, pixels of a row of the result
};

template <class T, class D>
static void arrange(const gc_args* args, int64_t begin, int64_t end) {
  const gc_conv_arrange_shape* s = (const gc_conv_arrange_shape*)args->imm;
  for (int64_t u = begin; u < end; u++) {
    const int64_t h = u % s->height, d = u / s->height % s->depth, n = u / s->height / s->depth;
    const T* x = (const T*)args->ptr[0] + n * s->x_n + d * s->x_d + h * s->x_h;
    D* out = (D*)args->ptr[1] + u * s->out_width * s->c;
    const int64_t count = max64(0, min64(s->width, s->out_width - s->left));
    const int64_t filled = s->left + count;
    memset((void*)out, 0, (size_t)(s->left * s->c) * sizeof(D));
    memset((void*)(out + filled * s->c), 0, (size_t)((s->out_width - filled) * s->c) * sizeof(D));
    out += s->left * s->c;
    if (s->x_c == 1 && sizeof(T) == sizeof(D)) {
      for (int64_t w = 0; w < count; w++)
        memcpy((void*)(out + w * s->c), x + w * s->x_w, (size_t)s->c * sizeof(D));
      continue;
    }
    int64_t c = 0;
    for (; s->x_w == 1 && c + 8 <= s->c; c += 8) {  // blocks of eight pixels and channels
      int64_t w = 0;
      for (; w + 8 <= count; w += 8) {
        vf8 t[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) t[i] = load8(x + (c + i) * s->x_c + w);
        transpose8(t);
        for (int i = 0; i < 8; i++) {
          D* to = out + (w + i) * s->c + c;
          if (sizeof(D) == 4) store(to, t[i]);
          else for (int j = 0; j < 8; j++) to[j] = (D)t[i][j];
        }
      }
      for (; w < count; w++)
        for (int i = 0; i < 8; i++) out[w * s->c + c + i] = (D)to_float(x[(c + i) * s->x_c + w]);
    }
    for (; c < s->c; c++) {
      const T* from = x + c * s->x_c;
      for (int64_t w = 0; w < count; w++) out[w * s->c + c] = (D)to_float(from[w * s->x_w]);
    }
  }
}

}  // namespace

GC_EXPORT void gc_conv_arrange_f32(const gc_args* args, int64_t begin, int64_t end) {
  arrange<float, float>(args, begin, end);
}
GC_EXPORT void gc_conv_arrange_bf16(const gc_args* args, int64_t begin, int64_t end) {
  arrange<bf16, bf16>(args, begin, end);
}
GC_EXPORT void gc_conv_arrange_f16(const gc_args* args, int64_t begin, int64_t end) {
  arrange<f16, float>(args, begin, end);
}
