// Pooling of images whose channels are neighbours in memory (channels last): lanes are channels.
// [N, C, D, H, W] with any strides, those of the result's channels 1; lower ranks have sizes of 1.
// Range: N * OD * OH rows of the result. ptr = {x, out}; imm = gc_pool_shape.
#include <limits>

#include "lanes.h"
#include "window.h"

namespace gc {
namespace {

enum Mode { MAXIMUM, MEAN, ADAPTIVE_MEAN };

struct gc_pool_shape {
  int64_t mode, c, in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  int64_t padded, divisor;  // of means: count padding; 0: the window's size
  int64_t x_n, x_c, x_s[3], y_n, y_s[3];
};

// The items of a window along one dimension: begin, begin + step, ... < end, all inside.
struct Span {
  int64_t begin, end, step, wide;  // wide: the size of the window with its padding
  Span(const gc_pool_shape* s, int i, int64_t o) {
    if (s->mode == ADAPTIVE_MEAN) {
      begin = first(o, s->in[i], s->out[i]);
      end = last(o, s->in[i], s->out[i]);
      step = 1;
      wide = end - begin;
      return;
    }
    step = s->dilation[i];
    const int64_t at = o * s->stride[i] - s->pad[i];
    const int64_t stop = min64(at + (s->kernel[i] - 1) * step + 1, s->in[i] + s->pad[i]);
    wide = stop - at;
    begin = at >= 0 ? at : at + (-at + step - 1) / step * step;
    end = min64(stop, s->in[i]);
  }
  int64_t count() const { return max64(0, end - begin); }
};

template <class T> struct Window {
  const T* x;
  const int64_t* step;
  const Span &z, &y, &w;
  template <class F> void rows(F f) const {
    for (int64_t d = z.begin; d < z.end; d += z.step)
      for (int64_t h = y.begin; h < y.end; h += y.step) f(x + d * step[0] + h * step[1]);
  }
};

GC_INLINE vf larger(const vf& best, const vf& v) {  // best, if v is NaN
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)v, (__m512)best);
#else
  return v > best ? v : best;
#endif
}

// V vectors of channels of one window.
template <int V, class T, class Load>
GC_INLINE void pool(const gc_pool_shape* s, const Window<T>& window, float divisor, Load load_at,
                    vf (&result)[V]) {
  const int64_t pixel = s->x_s[2];
  const Span& w = window.w;
  if (s->mode == MAXIMUM) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) result[v] = splat(-std::numeric_limits<float>::infinity());
    vf nan[V] = {};  // NaN wins: found beside the maxima, which wait for each other
    window.rows([&](const T* row) __attribute__((always_inline)) {
      for (int64_t i = w.begin; i < w.end; i += w.step)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          const vf x = load_at(row + i * pixel, v);
          result[v] = larger(result[v], x);
          nan[v] = x != x ? x : nan[v];
        }
    });
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) result[v] = nan[v] != nan[v] ? nan[v] : result[v];
    return;
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) result[v] = vf{};
  window.rows([&](const T* row) __attribute__((always_inline)) {
    vf sum[V] = {};  // of one row: short chains of sums
    for (int64_t i = w.begin; i < w.end; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[v] += load_at(row + i * pixel, v);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) result[v] += sum[v];
  });
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) result[v] = result[v] / splat(divisor);
}

template <class T>
void pool_last(const gc_args* args, int64_t begin, int64_t end) {
  const gc_pool_shape* s = (const gc_pool_shape*)args->imm;
  constexpr int V = 2;
  for (int64_t u = begin; u < end; u++) {
    const int64_t h = u % s->out[1], d = u / s->out[1] % s->out[0], n = u / s->out[1] / s->out[0];
    const Span z(s, 0, d), y(s, 1, h);
    const T* x = (const T*)args->ptr[0] + n * s->x_n;
    T* out = (T*)args->ptr[1] + n * s->y_n + d * s->y_s[0] + h * s->y_s[1];
    for (int64_t o = 0; o < s->out[2]; o++, out += s->y_s[2]) {
      const Span w(s, 2, o);
      const int64_t count = s->divisor  ? s->divisor
                            : s->padded ? z.wide * y.wide * w.wide
                                        : z.count() * y.count() * w.count();
      const float divisor = (float)max64(count, 1);
      int64_t c = 0;
      for (; s->x_c == 1 && c + V * VL <= s->c; c += V * VL) {
        vf v[V];
        pool<V, T>(s, {x + c, s->x_s, z, y, w}, divisor,
                   [](const T* p, int i) __attribute__((always_inline)) { return load_lanes(p + i * VL); }, v);
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
          if (s->mode == MAXIMUM) store_exact(out + c + i * VL, v[i]);
          else store_lanes(out + c + i * VL, v[i]);
        }
      }
      for (; c < s->c; c += VL) {
        const int64_t lanes = min64(VL, s->c - c), step = s->x_c;
        vf v[1];
        pool<1, T>(s, {x + c * step, s->x_s, z, y, w}, divisor,
                   [=](const T* p, int) { return load_some(p, lanes, step); }, v);
        store_some(out + c, v[0], lanes);
      }
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_POOL(TAG, TYPE)                                                                    \
  GC_EXPORT void gc_pool_last_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::pool_last<TYPE>(args, begin, end);                                                    \
  }
GC_POOL(f32, float)
GC_POOL(bf16, gc::bf16)
GC_POOL(f16, gc::f16)
