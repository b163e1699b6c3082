// Means of windows over one to three spatial dimensions.
// Tensors are [planes, D, H, W], row-major; lower ranks have sizes of 1 in front.
// Range: planes * OD * OH output rows.
// gc_avg_pool_*: imm: ID IH IW OD OH OW KD KH KW SD SH SW PD PH PW (stride, padding),
//                count_include_pad, divisor (0: the window's size).  ptr: src, dst.
//                scratch: OW * 8 bytes.
// gc_adaptive_avg_pool_*: imm: ID IH IW OD OH OW.  ptr: src, dst.
#include "window.h"

namespace gc {
namespace {

template <class T>
void avg_pool(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t* p = args->imm;
  const int64_t id = p[0], ih = p[1], iw = p[2], od = p[3], oh = p[4], ow = p[5];
  const bool padded = p[15] != 0;
  A* sum = (A*)args->scratch;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t y = r % oh, z = r / oh % od, plane = r / oh / od;
    const T* src = (const T*)args->ptr[0] + plane * id * ih * iw;
    const int64_t z0 = z * p[9] - p[12], z1 = min64(z0 + p[6], id + p[12]);
    const int64_t y0 = y * p[10] - p[13], y1 = min64(y0 + p[7], ih + p[13]);
    for (int64_t i = 0; i < ow; ++i) sum[i] = 0;
    for (int64_t sz = max64(z0, 0); sz < min64(z1, id); ++sz) {
      for (int64_t sy = max64(y0, 0); sy < min64(y1, ih); ++sy) {
        const T* row = src + (sz * ih + sy) * iw;
        for (int64_t kx = 0; kx < p[8]; ++kx) {
          int64_t from, to;
          inside(kx - p[14], p[11], iw, ow, &from, &to);
          const T* tap = row + kx - p[14];
          const int64_t step = p[11];
          if (step == 1) {
            for (int64_t i = from; i < to; ++i) sum[i] += (A)tap[i];
          } else {
            for (int64_t i = from; i < to; ++i) sum[i] += (A)tap[i * step];
          }
        }
      }
    }
    const int64_t real = max64(0, min64(z1, id) - max64(z0, 0)) *
                         max64(0, min64(y1, ih) - max64(y0, 0));
    const int64_t wide = (z1 - z0) * (y1 - y0);
    T* dst = (T*)args->ptr[1] + r * ow;
    for (int64_t i = 0; i < ow; ++i) {
      const int64_t x0 = i * p[11] - p[14], x1 = min64(x0 + p[8], iw + p[14]);
      int64_t count = p[16];
      if (count == 0)
        count = padded ? wide * (x1 - x0) : real * (min64(x1, iw) - max64(x0, 0));
      dst[i] = count > 0 ? (T)(sum[i] / (A)count) : T(0.0f);
    }
  }
}

template <class A, class T>
static inline A row_sum(const T* row, int64_t n) {
  constexpr int kLanes = 16;  // separate sums: vectors without reordering the compiler may not do
  A lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += (A)row[i + l];
  A rest = 0;
  for (; i < n; ++i) rest += (A)row[i];
  for (int l = 0; l < kLanes; ++l) rest += lanes[l];
  return rest;
}

template <class T>
void adaptive_avg_pool(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t* p = args->imm;
  const int64_t id = p[0], ih = p[1], iw = p[2], od = p[3], oh = p[4], ow = p[5];
  for (int64_t r = begin; r < end; ++r) {
    const int64_t y = r % oh, z = r / oh % od, plane = r / oh / od;
    const T* src = (const T*)args->ptr[0] + plane * id * ih * iw;
    const int64_t z0 = first(z, id, od), z1 = last(z, id, od);
    const int64_t y0 = first(y, ih, oh), y1 = last(y, ih, oh);
    T* dst = (T*)args->ptr[1] + r * ow;
    for (int64_t i = 0; i < ow; ++i) {
      const int64_t x0 = first(i, iw, ow), x1 = last(i, iw, ow);
      A sum = 0;
      if (x0 == 0 && x1 == iw) {  // whole rows lie in one piece
        for (int64_t sz = z0; sz < z1; ++sz)
          sum += row_sum<A>(src + (sz * ih + y0) * iw, (y1 - y0) * iw);
      } else {
        for (int64_t sz = z0; sz < z1; ++sz)
          for (int64_t sy = y0; sy < y1; ++sy)
            sum += row_sum<A>(src + (sz * ih + sy) * iw + x0, x1 - x0);
      }
      dst[i] = (T)(sum / (A)((z1 - z0) * (y1 - y0) * (x1 - x0)));
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_ONE(NAME, TAG, TYPE)                                                              \
  GC_EXPORT void gc_##NAME##_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::NAME<TYPE>(args, begin, end);                                                        \
  }
#define GC_AVG(TAG, TYPE) GC_ONE(avg_pool, TAG, TYPE) GC_ONE(adaptive_avg_pool, TAG, TYPE)
GC_FOR_FLOATS(GC_AVG)
