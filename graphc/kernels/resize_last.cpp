// Interpolation of images whose channels are neighbours in memory (channels last): each pixel of the
// result is a blend of whole pixels. Positions as in resize.cpp, in torch's order of operations.
// Range: N * OD * OH rows of the result. ptr = {x, out}; imm = gc_resize_shape.
#include <cmath>

#include "lanes.h"
#include "resize.h"

namespace gc {
namespace {

struct gc_resize_shape {
  Box box;
  int64_t c, x_n, x_c, x_s[3], y_n, y_s[3];
};

template <class T>
static void copy_pixel(const gc_resize_shape* s, const T* x, T* out) {
  if (s->x_c == 1) memcpy((void*)out, x, (size_t)s->c * sizeof(T));
  else for (int64_t c = 0; c < s->c; c++) out[c] = x[c * s->x_c];
}

template <class T>
void nearest_last(const gc_args* args, int64_t begin, int64_t end) {
  const gc_resize_shape* s = (const gc_resize_shape*)args->imm;
  const Box& p = s->box;
  const float sz = step_of<float>(p.id, p.od, bits_to_f64(p.scale[0]));
  const float sy = step_of<float>(p.ih, p.oh, bits_to_f64(p.scale[1]));
  const float sx = step_of<float>(p.iw, p.ow, bits_to_f64(p.scale[2]));
  for (int64_t u = begin; u < end; u++) {
    const int64_t h = u % p.oh, d = u / p.oh % p.od, n = u / p.oh / p.od;
    const int64_t z = nearest(sz, d, p.id, p.flag != 0), y = nearest(sy, h, p.ih, p.flag != 0);
    const T* row = (const T*)args->ptr[0] + n * s->x_n + z * s->x_s[0] + y * s->x_s[1];
    T* out = (T*)args->ptr[1] + n * s->y_n + d * s->y_s[0] + h * s->y_s[1];
    for (int64_t o = 0; o < p.ow; o++)
      copy_pixel(s, row + nearest(sx, o, p.iw, p.flag != 0) * s->x_s[2], out + o * s->y_s[2]);
  }
}

template <class T>
void linear_last(const gc_args* args, int64_t begin, int64_t end) {
  const gc_resize_shape* s = (const gc_resize_shape*)args->imm;
  const Box& p = s->box;
  const bool corners = p.flag != 0;
  for (int64_t u = begin; u < end; u++) {
    const int64_t h = u % p.oh, d = u / p.oh % p.od, n = u / p.oh / p.od;
    Tap<float, 2> tz, ty, tx;
    tap(d, p.id, p.od, bits_to_f64(p.scale[0]), corners, &tz);
    tap(h, p.ih, p.oh, bits_to_f64(p.scale[1]), corners, &ty);
    const T* x = (const T*)args->ptr[0] + n * s->x_n;
    T* out = (T*)args->ptr[1] + n * s->y_n + d * s->y_s[0] + h * s->y_s[1];
    for (int64_t o = 0; o < p.ow; o++, out += s->y_s[2]) {
      tap(o, p.iw, p.ow, bits_to_f64(p.scale[2]), corners, &tx);
      const T* from[8];
      float weight[8];
      int count = 0;
      for (int a = 0; a < (p.id == 1 ? 1 : 2); a++)
        for (int b = 0; b < (p.ih == 1 ? 1 : 2); b++)
          for (int c = 0; c < (p.iw == 1 ? 1 : 2); c++) {
            const float w = (p.id == 1 ? 1.0f : tz.weight[a]) * (p.ih == 1 ? 1.0f : ty.weight[b]) *
                            (p.iw == 1 ? 1.0f : tx.weight[c]);
            if (w == 0) continue;  // its pixel must not add 0 * inf
            from[count] = x + tz.at[a] * s->x_s[0] + ty.at[b] * s->x_s[1] + tx.at[c] * s->x_s[2];
            weight[count++] = w;
          }
      int64_t c = 0;
      for (; s->x_c == 1 && c + VL <= s->c; c += VL) {
        vf v = splat(weight[0]) * load_lanes(from[0] + c);
        for (int k = 1; k < count; k++) v += splat(weight[k]) * load_lanes(from[k] + c);
        store_lanes(out + c, v);
      }
      for (; c < s->c; c++) {
        float v = weight[0] * to_float(from[0][c * s->x_c]);
        for (int k = 1; k < count; k++) v += weight[k] * to_float(from[k][c * s->x_c]);
        out[c] = (T)v;
      }
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_KERNEL(NAME, ...) \
  GC_EXPORT void NAME(const gc_args* args, int64_t begin, int64_t end) { __VA_ARGS__(args, begin, end); }
#define GC_RESIZE(TAG, TYPE)                                       \
  GC_KERNEL(gc_nearest_last_##TAG, gc::nearest_last<TYPE>)         \
  GC_KERNEL(gc_linear_last_##TAG, gc::linear_last<TYPE>)
GC_RESIZE(f32, float)
GC_RESIZE(bf16, gc::bf16)
GC_RESIZE(f16, gc::f16)
