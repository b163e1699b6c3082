// Depthwise convolution: a channel's rows are copied once into zero-padded scratch (columns sorted by
// phase of the stride, so that taps read adjacent values), then summed along the width; see conv.h.
#include "conv_common.h"

namespace {
using namespace gc;

constexpr int64_t TILE = 4096;  // pixels handed to the epilogue at once

// One channel as the taps read it: row y of the padded plane holds, for each phase f of the stride,
// the columns f, f + stride, ... at offset f * phase.
struct Plane {
  int64_t rows, phases, phase, row;
  explicit Plane(const gc_conv_shape* s) {
    phases = s->stride[2];
    const int64_t reach = (s->kernel[2] - 1) * s->dilation[2];
    phase = max64(s->out[2], VL) + reach / phases + 1 + VL;
    row = phase * phases;
    rows = (s->out[1] - 1) * s->stride[1] + (s->kernel[1] - 1) * s->dilation[1] + 1;
  }
};

template <class T>
static void fill_plane(const gc_conv_shape* s, const Plane& p, const T* x, float* plane) {
  const int64_t H = s->in[1], W = s->in[2], top = s->pad[1], left = min64(s->pad[2], p.phase * p.phases);
  for (int64_t y = 0; y < p.rows; y++) {
    float* dst = plane + y * p.row;
    const int64_t iy = y - top;
    if (iy < 0 || iy >= H) {
      memset(dst, 0, (size_t)p.row * sizeof(float));
      continue;
    }
    const T* src = x + iy * W;
    if (p.phases == 1) {
      const int64_t n = max64(0, min64(W, p.phase - left));
      for (int64_t i = 0; i < left; i++) dst[i] = 0.0f;
      int64_t i = 0;
      for (; i + 8 <= n; i += 8) store(dst + left + i, load8(src + i));
      for (; i < n; i++) dst[left + i] = to_float(src[i]);
      for (i = left + n; i < p.row; i++) dst[i] = 0.0f;
      continue;
    }
    for (int64_t f = 0; f < p.phases; f++) {
      float* out = dst + f * p.phase;
      // Column j of this phase is input column j * phases + f - left.
      int64_t j = 0, ix = f - left;
      for (; j < p.phase && ix < 0; j++, ix += p.phases) out[j] = 0.0f;
      if (p.phases == 2) {
        for (; j + 8 <= p.phase && ix + 16 <= W; j += 8, ix += 16)
          store(out + j, __builtin_shufflevector(load8(src + ix), load8(src + ix + 8), 0, 2, 4, 6,
                                                 8, 10, 12, 14));
      }
      for (; j < p.phase && ix < W; j++, ix += p.phases) out[j] = to_float(src[ix]);
      for (; j < p.phase; j++) out[j] = 0.0f;
    }
  }
}

// R output rows of V vectors each: out[r * ld]. K x K taps known at compile time, or (K == 0) at
// run time; without dilation a loaded vector serves all rows it touches.
template <int K, int S, int R, int V>
GC_INLINE void sum_rows(const gc_conv_shape* s, const Plane& p, const float* plane,
                        const float* weights, float bias, float* out, int64_t ld) {
  constexpr int STEP = S > 0 ? S : 1;
  vf acc[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) acc[r][v] = splat(bias);
  if (K > 0) {
#pragma GCC unroll 16
    for (int y = 0; y < (R - 1) * S + K; y++) {
#pragma GCC unroll 8
      for (int x = 0; x < K; x++) {
        const float* src = plane + y * p.row + x % STEP * p.phase + x / STEP;
        vf in[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) in[v] = load<vf>(src + v * VL);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const int ky = y - r * S;
          if (ky < 0 || ky >= K) continue;
          const vf w = splat(weights[ky * K + x]);
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) acc[r][v] += w * in[v];
        }
      }
    }
  } else {
    for (int64_t ky = 0; ky < s->kernel[1]; ky++) {
      for (int64_t kx = 0; kx < s->kernel[2]; kx++) {
        const int64_t at = kx * s->dilation[2];
        const float* src = plane + ky * s->dilation[1] * p.row + at % p.phases * p.phase + at / p.phases;
        const vf w = splat(weights[ky * s->kernel[2] + kx]);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int v = 0; v < V; v++)
            acc[r][v] += w * load<vf>(src + r * s->stride[1] * p.row + v * VL);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) store(out + r * ld + v * VL, acc[r][v]);
}

// One or four rows of the output, W columns.
template <int K, int S, int R>
static void sum_width(const gc_conv_shape* s, const Plane& p, const float* plane,
                      const float* weights, float bias, float* out) {
  const int64_t W = s->out[2];
  if (W < VL) {
    float narrow[R * VL];
    sum_rows<K, S, R, 1>(s, p, plane, weights, bias, narrow, VL);
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < W; i++) out[r * W + i] = narrow[r * VL + i];
    return;
  }
  int64_t x = 0;
  for (; x + 2 * VL <= W; x += 2 * VL)
    sum_rows<K, S, R, 2>(s, p, plane + x, weights, bias, out + x, W);
  for (; x < W; x += VL) {
    const int64_t at = min64(x, W - VL);  // the last vector overlaps the one before
    sum_rows<K, S, R, 1>(s, p, plane + at, weights, bias, out + at, W);
  }
}

template <int K, int S>
static void sum_plane(const gc_conv_shape* s, const Plane& p, const float* plane,
                      const float* weights, float bias, int64_t y0, int64_t rows, float* tile) {
  for (int64_t y = y0; y < y0 + rows;) {
    const float* base = plane + y * s->stride[1] * p.row;
    float* out = tile + (y - y0) * s->out[2];
    const bool four = y + 4 <= y0 + rows;
    if (four) sum_width<K, S, 4>(s, p, base, weights, bias, out);
    else sum_width<K, S, 1>(s, p, base, weights, bias, out);
    y += four ? 4 : 1;
  }
}

template <class T>
static void depthwise(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const Plane p(s);
  const int64_t H = s->out[1], W = s->out[2], taps = s->kernel[1] * s->kernel[2];
  const int64_t most = max64(1, TILE / W);
  float* const tile = (float*)args->scratch;
  float* const plane = tile + max64(TILE, W);
  const bool square = s->kernel[1] == s->kernel[2] && s->stride[1] == s->stride[2] &&
                      s->dilation[1] == 1 && s->dilation[2] == 1;
  const int64_t kind = square ? s->kernel[1] * 10 + s->stride[1] : 0;
  for (int64_t u = begin; u < end; u++) {
    const int64_t image = u / s->groups, channel = u % s->groups;
    fill_plane(s, p, (const T*)args->ptr[0] + image * s->x_n + channel * s->x_c, plane);
    const float* weights = (const float*)args->ptr[1] + channel * taps;
    const float bias = s->bias_type ? bias_value(s, args->ptr[2], channel) : 0.0f;
    for (int64_t y = 0; y < H; y += most) {
      const int64_t rows = min64(most, H - y);
      if (kind == 31) sum_plane<3, 1>(s, p, plane, weights, bias, y, rows, tile);
      else if (kind == 32) sum_plane<3, 2>(s, p, plane, weights, bias, y, rows, tile);
      else if (kind == 51) sum_plane<5, 1>(s, p, plane, weights, bias, y, rows, tile);
      else if (kind == 52) sum_plane<5, 2>(s, p, plane, weights, bias, y, rows, tile);
      else sum_plane<0, 0>(s, p, plane, weights, bias, y, rows, tile);
      epilogue(args, tile, rows * W, image, channel, 1, y * W, rows * W);
    }
  }
}

}  // namespace

GC_CONV(depthwise_f32) { depthwise<float>(args, epilogue, begin, end); }
GC_CONV(depthwise_bf16) { depthwise<bf16>(args, epilogue, begin, end); }
GC_CONV(depthwise_f16) { depthwise<f16>(args, epilogue, begin, end); }
