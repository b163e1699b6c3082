// Maxima of windows over one to three spatial dimensions.
// Tensors are [planes, D, H, W], row-major; lower ranks have sizes of 1 in front.
// Range: planes * OD * OH output rows.
// gc_max_pool_*: imm: ID IH IW OD OH OW KD KH KW SD SH SW PD PH PW DD DH DW (stride, padding,
//                dilation), indices wanted.  ptr: src, dst, indices (int64, flat in the plane).
//                scratch: OW * 16 bytes. Planes of less than 2^31 items.
// gc_adaptive_max_pool_*: imm: ID IH IW OD OH OW.  ptr: src, dst, indices.
// Of equal items the first counts; NaN wins over everything.
#include <limits>

#include "window.h"

namespace gc {
namespace {

template <class A>
static inline A lowest() {
  return std::numeric_limits<A>::has_infinity ? -std::numeric_limits<A>::infinity()
                                              : std::numeric_limits<A>::lowest();
}

// best[i] = max(best[i], row[i * step]) with the place of the maximum if `where` is wanted; the
// step is a compile-time constant in the usual cases.
template <bool Wanted, class A, class T>
static inline __attribute__((always_inline)) void max_taps(A* __restrict best,
                                                           int32_t* __restrict where,
                                                           const T* __restrict row, int64_t step,
                                                           int32_t flat, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const A v = (A)row[i * step];
    const bool better = v > best[i] || is_nan(v);
    best[i] = better ? v : best[i];
    if (Wanted) where[i] = better ? flat + (int32_t)(i * step) : where[i];
  }
}
template <bool Wanted, class A, class T>
static void max_row(A* best, int32_t* where, const T* row, int64_t step, int32_t flat, int64_t n) {
  constexpr bool usual = IsFloat<T>::value;  // integers are rare: one loop keeps the build short
  if (usual && step == 1) max_taps<Wanted>(best, where, row, 1, flat, n);
  else if (usual && step == 2) max_taps<Wanted>(best, where, row, 2, flat, n);
  else max_taps<Wanted>(best, where, row, step, flat, n);
}

// The first tap of window o that lies inside.
static inline int64_t first_tap(int64_t o, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t at = o * stride - padding;
  return at >= 0 ? at : at + (-at + dilation - 1) / dilation * dilation;
}

template <class T>
void max_pool(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t* p = args->imm;
  const int64_t id = p[0], ih = p[1], iw = p[2], od = p[3], oh = p[4], ow = p[5];
  const bool wanted = p[18] != 0;
  A* best = (A*)args->scratch;
  int32_t* where = (int32_t*)(best + ow);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t y = r % oh, z = r / oh % od, plane = r / oh / od;
    const T* src = (const T*)args->ptr[0] + plane * id * ih * iw;
    for (int64_t i = 0; i < ow; ++i) best[i] = lowest<A>();
    if (wanted) {  // a window without anything above the lowest value gives its first tap
      const int64_t row =
          (first_tap(z, p[9], p[12], p[15]) * ih + first_tap(y, p[10], p[13], p[16])) * iw;
      for (int64_t i = 0; i < ow; ++i)
        where[i] = (int32_t)(row + first_tap(i, p[11], p[14], p[17]));
    }
    for (int64_t kz = 0; kz < p[6]; ++kz) {
      const int64_t sz = z * p[9] - p[12] + kz * p[15];
      if (sz < 0 || sz >= id) continue;
      for (int64_t ky = 0; ky < p[7]; ++ky) {
        const int64_t sy = y * p[10] - p[13] + ky * p[16];
        if (sy < 0 || sy >= ih) continue;
        for (int64_t kx = 0; kx < p[8]; ++kx) {
          const int64_t shift = kx * p[17] - p[14];
          int64_t from, to;
          inside(shift, p[11], iw, ow, &from, &to);
          if (from >= to) continue;
          const int64_t flat = (sz * ih + sy) * iw + from * p[11] + shift;
          if (wanted)
            max_row<true>(best + from, where + from, src + flat, p[11], (int32_t)flat, to - from);
          else
            max_row<false>(best + from, where, src + flat, p[11], 0, to - from);
        }
      }
    }
    T* dst = (T*)args->ptr[1] + r * ow;
    for (int64_t i = 0; i < ow; ++i) dst[i] = (T)best[i];
    if (wanted) {
      int64_t* indices = (int64_t*)args->ptr[2] + r * ow;
      for (int64_t i = 0; i < ow; ++i) indices[i] = where[i];
    }
  }
}

template <class T>
void adaptive_max_pool(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t* p = args->imm;
  const int64_t id = p[0], ih = p[1], iw = p[2], od = p[3], oh = p[4], ow = p[5];
  for (int64_t r = begin; r < end; ++r) {
    const int64_t y = r % oh, z = r / oh % od, plane = r / oh / od;
    const T* src = (const T*)args->ptr[0] + plane * id * ih * iw;
    T* dst = (T*)args->ptr[1] + r * ow;
    int64_t* indices = (int64_t*)args->ptr[2] + r * ow;
    for (int64_t i = 0; i < ow; ++i) {
      A best = lowest<A>();
      int64_t where = -1;
      for (int64_t sz = first(z, id, od); sz < last(z, id, od); ++sz)
        for (int64_t sy = first(y, ih, oh); sy < last(y, ih, oh); ++sy)
          for (int64_t sx = first(i, iw, ow); sx < last(i, iw, ow); ++sx) {
            const int64_t flat = (sz * ih + sy) * iw + sx;
            const A v = (A)src[flat];
            if (v > best || is_nan(v) || where < 0) {
              best = v;
              where = flat;
            }
          }
      dst[i] = (T)best;
      indices[i] = where;
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_ONE(NAME, TAG, TYPE)                                                              \
  GC_EXPORT void gc_##NAME##_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::NAME<TYPE>(args, begin, end);                                                        \
  }
#define GC_MAX(TAG, TYPE) GC_ONE(max_pool, TAG, TYPE) GC_ONE(adaptive_max_pool, TAG, TYPE)
GC_FOR_ALL(GC_MAX)
