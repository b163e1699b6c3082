// Interpolation over one to three spatial dimensions (lower ranks have sizes of 1 in front), and
// sampling at grid positions.
//
// gc_nearest_*, gc_linear_*, gc_cubic_*: [planes, ID, IH, IW] -> [planes, OD, OH, OW].
//   imm: ID IH IW OD OH OW, then per dimension the bits of a double: the user's scale factor or
//   0 for in/out; then a flag (nearest: pixel centres; linear, cubic: align_corners).
//   ptr: src, dst.  Range: planes * OD * OH output rows.
//   scratch: OW * 48 + IW * 8 bytes.
// gc_grid_sample_*: input [N, C, IH, IW], grid [N, OH, OW, 2] (x, y in -1..1) -> [N, C, OH, OW].
//   imm: C IH IW OH OW, mode (0 bilinear, 1 nearest), padding (0 zeros, 1 border, 2 reflection),
//   align_corners.  ptr: src, grid, dst.  Range: N * OH.  scratch: OW * 64 bytes.
// Positions are computed in float (double for float64), in torch's order of operations: the
// choice of the nearest item must agree with torch.
#include "resize.h"

namespace gc {
namespace {

template <class T, class P>
void nearest_rows(const gc_args* args, int64_t begin, int64_t end) {
  const Box p = *(const Box*)args->imm;
  int64_t* column = (int64_t*)args->scratch;
  const P sz = step_of<P>(p.id, p.od, bits_to_f64(p.scale[0]));
  const P sy = step_of<P>(p.ih, p.oh, bits_to_f64(p.scale[1]));
  const P sx = step_of<P>(p.iw, p.ow, bits_to_f64(p.scale[2]));
  for (int64_t i = 0; i < p.ow; ++i) column[i] = nearest(sx, i, p.iw, p.flag != 0);
  int64_t previous = -1;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t z = nearest(sz, r / p.oh % p.od, p.id, p.flag != 0);
    const int64_t y = nearest(sy, r % p.oh, p.ih, p.flag != 0);
    const int64_t from = ((r / p.oh / p.od * p.id + z) * p.ih + y) * p.iw;
    const T* src = (const T*)args->ptr[0] + from;
    T* dst = (T*)args->ptr[1] + r * p.ow;
    if (from == previous) {  // enlarging repeats rows
      memcpy(dst, dst - p.ow, (size_t)p.ow * sizeof(T));
    } else {
      for (int64_t i = 0; i < p.ow; ++i) dst[i] = src[column[i]];
    }
    previous = from;
  }
}

// Cubic convolution (Keys 1981) with a = -0.75.
template <class P>
static inline void tap(int64_t o, int64_t in, int64_t out, double scale, bool corners, Tap<P, 4>* t) {
  const P at = position<P>(o, in, out, scale, corners), low = std::floor(at);
  const P x = at - low, a = (P)-0.75;
  const int64_t i = (int64_t)low;
  for (int k = 0; k < 4; ++k) t->at[k] = max64(0, min64(i - 1 + k, in - 1));
  auto near = [&](P d) { return ((a + 2) * d - (a + 3)) * d * d + 1; };
  auto far = [&](P d) { return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a; };
  t->weight[0] = far(x + 1);
  t->weight[1] = near(x);
  t->weight[2] = near(1 - x);
  t->weight[3] = far(2 - x);
}

// Blends the source rows of the depth and height taps, then the columns of the blended row.
template <class T, int Taps>
void interpolate(const gc_args* args, int64_t begin, int64_t end) {
  using P = typename Arith<T>::type;
  const Box p = *(const Box*)args->imm;
  const bool corners = p.flag != 0;
  int32_t* at[Taps];
  P* weight[Taps];
  char* memory = (char*)args->scratch;
  for (int k = 0; k < Taps; ++k, memory += p.ow * sizeof(P)) weight[k] = (P*)memory;
  P* blend = (P*)memory;
  memory += p.iw * sizeof(P);
  for (int k = 0; k < Taps; ++k, memory += p.ow * 4) at[k] = (int32_t*)memory;
  Tap<P, Taps> t;
  for (int64_t i = 0; i < p.ow; ++i) {
    tap(i, p.iw, p.ow, bits_to_f64(p.scale[2]), corners, &t);
    for (int k = 0; k < Taps; ++k) {
      at[k][i] = (int32_t)t.at[k];
      weight[k][i] = t.weight[k];
    }
  }
  for (int64_t r = begin; r < end; ++r) {
    const T* plane = (const T*)args->ptr[0] + r / p.oh / p.od * p.id * p.ih * p.iw;
    Tap<P, Taps> z, y;
    tap(r % p.oh, p.ih, p.oh, bits_to_f64(p.scale[1]), corners, &y);
    tap(r / p.oh % p.od, p.id, p.od, bits_to_f64(p.scale[0]), corners, &z);
    bool first = true;
    for (int a = 0; a < (p.id == 1 ? 1 : Taps); ++a) {
      const P wz = p.id == 1 ? 1 : z.weight[a];
      for (int b = 0; b < (p.ih == 1 ? 1 : Taps); ++b) {
        const P w = p.ih == 1 ? wz : wz * y.weight[b];
        if (w == 0) continue;  // this tap lies on an item: its neighbour must not add 0 * inf
        const T* row = plane + (z.at[a] * p.ih + y.at[b]) * p.iw;
        if (first) {
          for (int64_t i = 0; i < p.iw; ++i) blend[i] = w * (P)row[i];
        } else {
          for (int64_t i = 0; i < p.iw; ++i) blend[i] += w * (P)row[i];
        }
        first = false;
      }
    }
    T* dst = (T*)args->ptr[1] + r * p.ow;
    for (int64_t i = 0; i < p.ow; ++i) {
      P v = weight[0][i] * blend[at[0][i]];
      for (int k = 1; k < Taps; ++k) v += weight[k][i] * blend[at[k][i]];
      dst[i] = (T)v;
    }
  }
}

// Folds a coordinate at the borders low/2 and high/2.
template <class P>
static inline P reflect(P x, int64_t low, int64_t high) {
  if (low == high) return 0;
  const P least = (P)low / 2, span = (P)(high - low) / 2;
  x = std::fabs(x - least);
  const P extra = std::fmod(x, span);
  const P flips = std::floor(x / span);
  return std::fmod(flips, (P)2) == 0 ? extra + least : span - extra + least;
}

template <class P>
static inline P grid_position(P x, int64_t size, int64_t padding, bool corners) {
  x = corners ? (x + 1) / 2 * (P)(size - 1) : ((x + 1) * (P)size - 1) / 2;
  if (padding == 2)
    x = corners ? reflect(x, 0, 2 * (size - 1)) : reflect(x, -1, 2 * size - 1);
  if (padding != 0) x = x < 0 ? 0 : x > (P)(size - 1) ? (P)(size - 1) : x;
  return x > (P)-1e9 && x < (P)1e9 ? x : (P)-100;  // NaN and far away: outside
}

template <class T>
void grid_sample(const gc_args* args, int64_t begin, int64_t end) {
  using P = typename Arith<T>::type;
  const int64_t c = args->imm[0], ih = args->imm[1], iw = args->imm[2], oh = args->imm[3];
  const int64_t ow = args->imm[4], mode = args->imm[5], padding = args->imm[6];
  const bool corners = args->imm[7] != 0;
  int64_t* at = (int64_t*)args->scratch;  // [ow][4], -1 outside
  P* weight = (P*)(at + 4 * ow);
  for (int64_t r = begin; r < end; ++r) {
    const T* grid = (const T*)args->ptr[1] + r * ow * 2;
    for (int64_t i = 0; i < ow; ++i) {
      const P x = grid_position((P)grid[2 * i], iw, padding, corners);
      const P y = grid_position((P)grid[2 * i + 1], ih, padding, corners);
      auto flat = [&](int64_t sy, int64_t sx) {
        return sy >= 0 && sy < ih && sx >= 0 && sx < iw ? sy * iw + sx : -1;
      };
      if (mode == 1) {
        at[4 * i] = flat((int64_t)std::nearbyint(y), (int64_t)std::nearbyint(x));
        continue;
      }
      const P fx = std::floor(x), fy = std::floor(y), dx = x - fx, dy = y - fy;
      const int64_t sx = (int64_t)fx, sy = (int64_t)fy;
      for (int k = 0; k < 4; ++k) at[4 * i + k] = flat(sy + k / 2, sx + k % 2);
      weight[4 * i] = (1 - dy) * (1 - dx);
      weight[4 * i + 1] = (1 - dy) * dx;
      weight[4 * i + 2] = dy * (1 - dx);
      weight[4 * i + 3] = dy * dx;
    }
    const int64_t n = r / oh, y = r % oh;
    for (int64_t j = 0; j < c; ++j) {
      const T* src = (const T*)args->ptr[0] + (n * c + j) * ih * iw;
      T* dst = (T*)args->ptr[2] + ((n * c + j) * oh + y) * ow;
      if (mode == 1) {
        for (int64_t i = 0; i < ow; ++i) dst[i] = at[4 * i] < 0 ? (T)0.0f : src[at[4 * i]];
        continue;
      }
      for (int64_t i = 0; i < ow; ++i) {
        P v = 0;
        for (int k = 0; k < 4; ++k)
          v += at[4 * i + k] < 0 ? (P)0 : weight[4 * i + k] * (P)src[at[4 * i + k]];
        dst[i] = (T)v;
      }
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_KERNEL(NAME, ...) \
  GC_EXPORT void NAME(const gc_args* args, int64_t begin, int64_t end) { __VA_ARGS__(args, begin, end); }
#define GC_NEAREST(TAG, TYPE) GC_KERNEL(gc_nearest_##TAG, gc::nearest_rows<TYPE, float>)
#define GC_FLOAT(TAG, TYPE)                                   \
  GC_KERNEL(gc_linear_##TAG, gc::interpolate<TYPE, 2>)        \
  GC_KERNEL(gc_cubic_##TAG, gc::interpolate<TYPE, 4>)         \
  GC_KERNEL(gc_grid_sample_##TAG, gc::grid_sample<TYPE>)
GC_FOR_BYTES(GC_NEAREST)
#if !defined(GC_ONE_DTYPE) || defined(GC_ONLY_f64)
GC_KERNEL(gc_nearest_f64, gc::nearest_rows<double, double>)
#endif
GC_FOR_FLOATS(GC_FLOAT)
