// Gathering windows into columns and back.
// imm: C IH IW OH OW KH KW SH SW PH PW DH DW.  ptr: src, dst.
// im2col: [N, C, IH, IW] -> [N, C, KH, KW, OH, OW].  Range: N * C * KH * KW.
// col2im: the other way, overlapping items add up.   Range: N * C.
// col2im needs scratch: IW * 8 bytes.
#include "window.h"

namespace gc {
namespace {

struct Fold {
  int64_t c, ih, iw, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw;
};

template <class T>
void im2col(const gc_args* args, int64_t begin, int64_t end) {
  const Fold f = *(const Fold*)args->imm;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t kx = r % f.kw, ky = r / f.kw % f.kh, plane = r / f.kw / f.kh;
    const T* src = (const T*)args->ptr[0] + plane * f.ih * f.iw;
    T* dst = (T*)args->ptr[1] + r * f.oh * f.ow;
    const int64_t shift = kx * f.dw - f.pw;
    int64_t from, to;
    inside(shift, f.sw, f.iw, f.ow, &from, &to);
    for (int64_t y = 0; y < f.oh; ++y, dst += f.ow) {
      const int64_t sy = y * f.sh - f.ph + ky * f.dh;
      const bool row = sy >= 0 && sy < f.ih;
      const int64_t a = row ? from : f.ow, b = row ? to : f.ow;
      for (int64_t i = 0; i < a; ++i) dst[i] = T();
      if (a < b) copy_run(dst + a, 1, src + sy * f.iw + a * f.sw + shift, f.sw, b - a);
      for (int64_t i = b; i < f.ow; ++i) dst[i] = T();
    }
  }
}

template <class T>
void col2im(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const Fold f = *(const Fold*)args->imm;
  A* sum = (A*)args->scratch;  // IW items
  for (int64_t plane = begin; plane < end; ++plane) {
    const T* src = (const T*)args->ptr[0] + plane * f.kh * f.kw * f.oh * f.ow;
    for (int64_t sy = 0; sy < f.ih; ++sy) {
      for (int64_t i = 0; i < f.iw; ++i) sum[i] = 0;
      for (int64_t ky = 0; ky < f.kh; ++ky) {
        const int64_t at = sy + f.ph - ky * f.dh;
        if (at < 0 || at % f.sh != 0 || at / f.sh >= f.oh) continue;
        for (int64_t kx = 0; kx < f.kw; ++kx) {
          const int64_t shift = kx * f.dw - f.pw;
          int64_t from, to;
          inside(shift, f.sw, f.iw, f.ow, &from, &to);
          const T* row = src + ((ky * f.kw + kx) * f.oh + at / f.sh) * f.ow;
          for (int64_t i = from; i < to; ++i) sum[i * f.sw + shift] += (A)row[i];
        }
      }
      T* dst = (T*)args->ptr[1] + (plane * f.ih + sy) * f.iw;
      for (int64_t i = 0; i < f.iw; ++i) dst[i] = (T)sum[i];
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_ONE(NAME, TAG, TYPE)                                                              \
  GC_EXPORT void gc_##NAME##_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::NAME<TYPE>(args, begin, end);                                                        \
  }
#define GC_COL2IM(TAG, TYPE) GC_ONE(col2im, TAG, TYPE)
#define GC_IM2COL(TAG, TYPE) GC_ONE(im2col, TAG, TYPE)
GC_FOR_FLOATS(GC_COL2IM)
GC_FOR_BYTES(GC_IM2COL)
