// Depthwise convolution: lanes are channels, so that every tap is one vector multiplied into the sums
// of several neighbouring pixels of an output row; see conv.h.
#include "conv_common.h"
#include "lanes.h"

namespace {
using namespace gc;

constexpr int64_t SEGMENT = 112;  // pixels of a row handed to the epilogue at once

#define GC_MEMBER inline __attribute__((always_inline))

// One vector of channels of a row of the output.
template <class T> struct Row {
  const gc_conv_shape* s;
  const T* const* rows;  // [kd * KH + kh] at this vector's first channel, null where it is padding
  const float* weights;  // at this vector's first channel
  int64_t lanes;         // VL, or less if there are fewer channels than lanes
  vf bias;

  GC_MEMBER vf input(const T* p) const { return lanes == VL ? load_lanes(p) : load_some(p, lanes); }
  GC_MEMBER vf weight(const float* p) const { return lanes == VL ? load<vf>(p) : load_some(p, lanes); }

  // A pixel whose window may leave the row.
  vf border(int64_t w) const {
    vf acc = bias;
    const int64_t heights = s->kernel[0] * s->kernel[1];
    for (int64_t y = 0; y < heights; y++) {
      if (!rows[y]) continue;
      for (int64_t kw = 0; kw < s->kernel[2]; kw++) {
        const int64_t iw = w * s->stride[2] - s->pad[2] + kw * s->dilation[2];
        if (iw < 0 || iw >= s->in[2]) continue;
        acc += input(rows[y] + iw * s->x_s[2]) * weight(weights + (y * s->kernel[2] + kw) * s->groups);
      }
    }
    return acc;
  }

  // R pixels whose windows lie inside the row. K taps S apart known at compile time, without
  // dilation: an item is loaded once for all pixels that read it. K = 0: at run time.
  template <int K, int S, int R>
  GC_MEMBER void inside(int64_t w, vf (&acc)[R]) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = bias;
    const int64_t heights = s->kernel[0] * s->kernel[1], pixel = s->x_s[2];
    for (int64_t y = 0; y < heights; y++) {
      if (!rows[y]) continue;
      const T* x = rows[y] + (w * s->stride[2] - s->pad[2]) * pixel;
      const float* k = weights + y * s->kernel[2] * s->groups;
      if (K > 0) {
        constexpr int N = K > 0 ? (R - 1) * S + K : 1, M = K > 0 ? K : 1;
        vf tap[M], item[N];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) tap[i] = load<vf>(k + i * s->groups);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) item[i] = load_lanes(x + i * pixel);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
          for (int i = 0; i < M; i++) acc[r] += tap[i] * item[r * S + i];
      } else {
        const int64_t across = s->dilation[2] * pixel, step = s->stride[2] * pixel;
        for (int64_t i = 0; i < s->kernel[2]; i++) {
          const vf tap = load<vf>(k + i * s->groups);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) acc[r] += tap * load_lanes(x + i * across + r * step);
        }
      }
    }
  }

  template <int K, int S, int R, class Put>
  GC_MEMBER void several(int64_t w, int64_t i, Put put) const {
    vf acc[R];
    inside<K, S, R>(w, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) put(i + r, acc[r]);
  }

  // Pixels [w0, w0 + n) to out[n][GC_NR], lanes from `skip` on.
  template <int K, int S>
  void run(int64_t w0, int64_t n, int64_t skip, float* out) const {
    // sums of so many pixels hide the latency of the multiply-add, and a tap is loaded for them all
    constexpr int R = S == 1 && GC_VBYTES == 64 ? 8 : 4;
    const int64_t stride = s->stride[2], reach = (s->kernel[2] - 1) * s->dilation[2];
    // windows of pixels [from, to) lie inside the row
    const int64_t from = min64(n, max64(0, (s->pad[2] + stride - 1) / stride - w0));
    const int64_t room = s->in[2] - 1 - reach + s->pad[2];
    const int64_t to = max64(from, room < 0 ? from : min64(n, room / stride + 1 - w0));
    const size_t bytes = (size_t)(lanes - skip) * sizeof(float);
    auto put = [&](int64_t i, vf v) __attribute__((always_inline)) {
      if (skip == 0 && lanes == VL) store(out + i * GC_NR, v);
      else memcpy(out + i * GC_NR, (const float*)&v + skip, bytes);
    };
    int64_t i = 0;
    for (; i < from; i++) put(i, border(w0 + i));
    if (lanes == VL) {
      for (; i + R <= to; i += R) several<K, S, R>(w0 + i, i, put);
      if (i + R / 2 <= to) several<K, S, R / 2>(w0 + i, i, put), i += R / 2;
      for (; i < to; i++) several<K, S, 1>(w0 + i, i, put);
    }
    for (; i < n; i++) put(i, border(w0 + i));
  }
};

template <class T>
static void depthwise(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t D = s->out[0], H = s->out[1], W = s->out[2], heights = s->kernel[0] * s->kernel[1];
  const int64_t panels = (s->groups + GC_NR - 1) / GC_NR;
  float* const tile = (float*)args->scratch;  // [SEGMENT][GC_NR]
  float* const bias = tile + SEGMENT * GC_NR;
  const T** const rows = (const T**)(bias + GC_NR);
  const bool plain = s->dilation[2] == 1;
  const int64_t K = plain ? s->kernel[2] : 0, S = s->stride[2];
  for (int64_t u = begin; u < end; u++) {
    const int64_t n0 = u % panels * GC_NR, row = u / panels, nr = min64(GC_NR, s->groups - n0);
    const int64_t h = row % H, d = row / H % D, image = row / H / D;
    const T* x = (const T*)args->ptr[0] + image * s->x_n;
    for (int64_t w = 0; w < W; w += SEGMENT) {
      const int64_t n = min64(SEGMENT, W - w);
      for (int64_t c = n0; c < n0 + nr; c += VL) {
        // the last vector of channels starts earlier instead of ending later
        const int64_t first = max64(0, min64(c, s->groups - VL)), lanes = min64(VL, s->groups);
        for (int64_t y = 0; y < heights; y++) {
          const int64_t id = d * s->stride[0] - s->pad[0] + y / s->kernel[1] * s->dilation[0];
          const int64_t ih = h * s->stride[1] - s->pad[1] + y % s->kernel[1] * s->dilation[1];
          const bool outside = id < 0 || id >= s->in[0] || ih < 0 || ih >= s->in[1];
          rows[y] = outside ? nullptr : x + id * s->x_s[0] + ih * s->x_s[1] + first;
        }
        bias_values(s, args, first, lanes, bias);
        const Row<T> r = {s, rows, (const float*)args->ptr[1] + first, lanes, load<vf>(bias)};
        float* const out = tile + (c - n0);
        if (K == 3 && S == 1) r.template run<3, 1>(w, n, c - first, out);
        else if (K == 3 && S == 2) r.template run<3, 2>(w, n, c - first, out);
        else if (K == 5 && S == 1) r.template run<5, 1>(w, n, c - first, out);
        else if (K == 5 && S == 2) r.template run<5, 2>(w, n, c - first, out);
        else r.template run<0, 0>(w, n, c - first, out);
      }
      epilogue(args, tile, GC_NR, image, (d * H + h) * W + w, n, n0, nr);
    }
  }
}

// Packs run-time weights: ptr = {weights, packed}; one unit is one tap; see gc_conv_pack_shape.
template <class T> static void pack_weights(const gc_args* args, int64_t begin, int64_t end) {
  const gc_conv_pack_shape* s = (const gc_conv_pack_shape*)args->imm;
  for (int64_t tap = begin; tap < end; tap++)
    for (int64_t g = 0; g < s->groups; g++)
      ((float*)args->ptr[1])[tap * s->groups + g] =
          to_float(((const T*)args->ptr[0])[g * s->w_g + tap * s->w_tap]);
}

}  // namespace

GC_CONV(depthwise_f32) { depthwise<float>(args, epilogue, begin, end); }
GC_CONV(depthwise_bf16) { depthwise<bf16>(args, epilogue, begin, end); }
GC_CONV(depthwise_f16) { depthwise<f16>(args, epilogue, begin, end); }

GC_EXPORT void gc_conv_pack_depthwise_f32(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<float>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_depthwise_bf16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<bf16>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_depthwise_f16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<f16>(args, begin, end);
}
