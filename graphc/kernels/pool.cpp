// Pooling windows over one to three spatial dimensions; lower ranks have sizes of 1 in front.
//
// Tensors are [planes, D, H, W], row-major.  Range: planes * OD * OH output rows.
// gc_max_pool_*:  imm: ID IH IW OD OH OW KD KH KW SD SH SW PD PH PW DD DH DW (stride, padding,
//                 dilation), indices wanted.  ptr: src, dst, indices (int64, flat in the plane).
//                 scratch: OW * 16 bytes.
// gc_avg_pool_*:  imm: ID IH IW OD OH OW KD KH KW SD SH SW PD PH PW, count_include_pad, divisor
//                 (0: the window's size).  ptr: src, dst.  scratch: OW * 8 bytes.
// gc_adaptive_avg_pool_*: imm: ID IH IW OD OH OW.  ptr: src, dst.
// gc_adaptive_max_pool_*: the same.  ptr: src, dst, indices.
// A maximum takes the first of equal items; NaN wins over everything.
#include "strided.h"

#include <limits>

namespace gc {
namespace {

template <class A>
static inline A lowest() {
  return std::numeric_limits<A>::has_infinity ? -std::numeric_limits<A>::infinity()
                                              : std::numeric_limits<A>::lowest();
}

// The output columns whose tap reads inside the row: 0 <= o * stride + shift < size.
static inline void inside(int64_t shift, int64_t stride, int64_t size, int64_t out, int64_t* from,
                          int64_t* to) {
  *from = shift >= 0 ? 0 : (-shift + stride - 1) / stride;
  const int64_t last = size - 1 - shift;
  *to = last < 0 ? 0 : min64(out, last / stride + 1);
  *from = min64(*from, *to);
}

template <class A, class T>
static inline void max_row(A* best, const T* row, int64_t stride, int64_t n) {
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) {
      const A v = (A)row[i];
      best[i] = v > best[i] || is_nan(v) ? v : best[i];
    }
  } else if (stride == 2) {
    for (int64_t i = 0; i < n; ++i) {
      const A v = (A)row[2 * i];
      best[i] = v > best[i] || is_nan(v) ? v : best[i];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const A v = (A)row[i * stride];
      best[i] = v > best[i] || is_nan(v) ? v : best[i];
    }
  }
}

template <class T>
void max_pool(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t* p = args->imm;
  const int64_t id = p[0], ih = p[1], iw = p[2], od = p[3], oh = p[4], ow = p[5];
  const bool wanted = p[18] != 0;
  int64_t* where = (int64_t*)args->scratch;
  A* best = (A*)(where + ow);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t y = r % oh, z = r / oh % od, plane = r / oh / od;
    const T* src = (const T*)args->ptr[0] + plane * id * ih * iw;
    for (int64_t i = 0; i < ow; ++i) best[i] = lowest<A>();
    if (wanted)
      for (int64_t i = 0; i < ow; ++i) where[i] = -1;
    for (int64_t kz = 0; kz < p[6]; ++kz) {
      const int64_t sz = z * p[9] - p[12] + kz * p[15];
      if (sz < 0 || sz >= id) continue;
      for (int64_t ky = 0; ky < p[7]; ++ky) {
        const int64_t sy = y * p[10] - p[13] + ky * p[16];
        if (sy < 0 || sy >= ih) continue;
        const T* row = src + (sz * ih + sy) * iw;
        for (int64_t kx = 0; kx < p[8]; ++kx) {
          const int64_t shift = kx * p[17] - p[14];
          int64_t from, to;
          inside(shift, p[11], iw, ow, &from, &to);
          const T* tap = row + from * p[11] + shift;
          if (!wanted) {
            max_row(best + from, tap, p[11], to - from);
            continue;
          }
          const int64_t flat = tap - src - from * p[11];
          for (int64_t i = from; i < to; ++i) {
            const A v = (A)tap[(i - from) * p[11]];
            const bool better = v > best[i] || is_nan(v) || where[i] < 0;
            best[i] = better ? v : best[i];
            where[i] = better ? flat + i * p[11] : where[i];
          }
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

// Window o of an adaptive pooling: [floor(o*in/out), ceil((o+1)*in/out)).
static inline int64_t first(int64_t o, int64_t in, int64_t out) { return o * in / out; }
static inline int64_t last(int64_t o, int64_t in, int64_t out) {
  return ((o + 1) * in + out - 1) / out;
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

// Gathering windows into columns and back.
// imm: C IH IW OH OW KH KW SH SW PH PW DH DW.  ptr: src, dst.
// im2col: [N, C, IH, IW] -> [N, C, KH, KW, OH, OW].  Range: N * C * KH * KW.
// col2im: the other way, overlapping items add up.   Range: N * C.
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
#define GC_MAX(TAG, TYPE) GC_ONE(max_pool, TAG, TYPE) GC_ONE(adaptive_max_pool, TAG, TYPE)
#define GC_AVG(TAG, TYPE) \
  GC_ONE(avg_pool, TAG, TYPE) GC_ONE(adaptive_avg_pool, TAG, TYPE) GC_ONE(col2im, TAG, TYPE)
#define GC_MOVE(TAG, TYPE) GC_ONE(im2col, TAG, TYPE)
GC_FOR_ALL(GC_MAX)
GC_FOR_FLOATS(GC_AVG)
GC_FOR_BYTES(GC_MOVE)
