// The short causal convolution of each channel (graphc/ops/short_convolution.py): lanes are channels.
//
// ptr = {x, weights, bias, y, states before, states after, slots}; imm = gc_short_convolution_shape.
// Weights are floats [W][C], the bias floats [C]. The range is batch x blocks of tokens x blocks of
// channels. The unit of a sequence's first tokens reads its state, and then writes the new one: it may
// lie in the same memory, which no other unit touches.
#include "prelude.h"

#include "vmath.h"

struct gc_short_convolution_shape {
  int64_t tokens, channels, width;
  int64_t states;  // how many there are, if slots choose among them; else 0
  int64_t fresh;   // the states before are zeros, and not read
  int64_t biased, silu, state_type;  // 0 fp32, 1 bf16, 2 fp16
  int64_t x_b, x_t, y_b, y_t;
};

namespace {
using namespace gc;

constexpr int64_t TOKENS = 32, CHANNELS = 512;  // of a block: BLOCK in templates/short_convolution.py
constexpr int64_t WIDEST = 8;
constexpr int R = GC_VBYTES == 64 ? 8 : 4;  // outputs that share what they read

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// f(c, lanes) for the vectors of n channels, the last one in part.
template <class F> GC_INLINE void vectors(int64_t n, F f) {
  int64_t c = 0;
  for (; c + VL <= n; c += VL) f(c, All{});
  if (c < n) f(c, First{n - c});
}

template <class D, class S> static void copy_row(const S* from, int64_t n, D* to) {
  vectors(n, [&](int64_t c, auto lanes) __attribute__((always_inline)) {
    vstore(to + c, vload(from + c, lanes), lanes);
  });
}
// Rows of a state have the dtype of x or float32.
template <class T> static void read_state(const void* from, int64_t at, int64_t type, int64_t n, T* to) {
  if (type == 0) copy_row((const float*)from + at, n, to);
  else copy_row((const T*)from + at, n, to);
}
template <class T> static void write_state(const T* from, int64_t n, void* to, int64_t at, int64_t type) {
  if (type == 0) copy_row(from, n, (float*)to + at);
  else copy_row(from, n, (T*)to + at);
}

template <class T> struct Block {
  const T* x;            // token 0 of the sequence at the first channel
  const T* history;      // [W - 1][CHANNELS], the tokens before it
  const float *weights, *bias;  // bias: null if there is none
  T* y;
  int64_t x_t, y_t, weight_step, width, channels;

  const T* row(int64_t t) const {
    return t < 0 ? history + (width - 1 + t) * CHANNELS : x + t * x_t;
  }

  // N tokens from t on. W: the width, if it is known when this is compiled, else 0.
  template <int W, int N, bool SILU> void run(int64_t t) const {
    constexpr int TAPS = W > 0 ? W : (int)WIDEST;
    const int64_t count = W > 0 ? W : width;
    const T* rows[TAPS - 1 + N];
    for (int64_t i = 0; i < count - 1 + N; i++) rows[i] = row(t - count + 1 + i);
    T* const to = y + t * y_t;
    vectors(channels, [&](int64_t c, auto lanes) __attribute__((always_inline)) {
      vf acc[N];
      const vf start = bias ? vload(bias + c, lanes) : vf{};
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) acc[n] = start;
      if (W > 0) {
        vf item[TAPS - 1 + N];
#pragma GCC unroll 16
        for (int i = 0; i < TAPS - 1 + N; i++) item[i] = vload(rows[i] + c, lanes);
#pragma GCC unroll 8
        for (int j = 0; j < TAPS; j++) {
          const vf tap = vload(weights + j * weight_step + c, lanes);
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) acc[n] += tap * item[n + j];
        }
      } else {
        for (int64_t j = 0; j < count; j++) {
          const vf tap = vload(weights + j * weight_step + c, lanes);
#pragma GCC unroll 8
          for (int n = 0; n < N; n++) acc[n] += tap * vload(rows[n + j] + c, lanes);
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) vstore(to + n * y_t + c, SILU ? vsilu(acc[n]) : acc[n], lanes);
    });
  }

  template <int W, bool SILU> void tokens(int64_t t, int64_t end) const {
    for (; t + R <= end; t += R) run<W, R, SILU>(t);
    for (; t < end; t++) run<W, 1, SILU>(t);
  }
};

template <class T> static void short_convolution(const gc_args* args, int64_t begin, int64_t end) {
  const gc_short_convolution_shape* s = (const gc_short_convolution_shape*)args->imm;
  const int64_t across = (s->channels + CHANNELS - 1) / CHANNELS;
  const int64_t along = s->tokens > TOKENS ? (s->tokens + TOKENS - 1) / TOKENS : 1;
  T* const history = (T*)args->scratch;
  for (int64_t u = begin; u < end; u++) {
    const int64_t c = u % across * CHANNELS, t = u / across % along * TOKENS, b = u / across / along;
    const int64_t kept = s->width - 1, channels = min64(CHANNELS, s->channels - c);
    const Block<T> block = {
        (const T*)args->ptr[0] + b * s->x_b + c, history, (const float*)args->ptr[1] + c,
        s->biased ? (const float*)args->ptr[2] + c : nullptr, (T*)args->ptr[3] + b * s->y_b + c,
        s->x_t, s->y_t, s->channels, s->width, channels};
    const int64_t stop = min64(s->tokens, t + TOKENS);
    int64_t state = b;
    if (s->states) {  // what lies outside is never touched, whatever a slot says
      const int64_t slot = ((const int32_t*)args->ptr[6])[b];
      state = slot < 0 ? 0 : min64(slot, s->states - 1);
    }
    if (t == 0) {
      for (int64_t i = 0; i < kept; i++) {
        if (s->fresh) memset((void*)(history + i * CHANNELS), 0, (size_t)channels * sizeof(T));
        else read_state(args->ptr[4], (state * kept + i) * s->channels + c, s->state_type, channels,
                        history + i * CHANNELS);
      }
    }
    if (s->width == 4) {
      s->silu ? block.template tokens<4, true>(t, stop) : block.template tokens<4, false>(t, stop);
    } else {
      s->silu ? block.template tokens<0, true>(t, stop) : block.template tokens<0, false>(t, stop);
    }
    if (t == 0)
      for (int64_t i = 0; i < kept; i++)
        write_state(block.row(s->tokens - kept + i), channels, args->ptr[5],
                    (state * kept + i) * s->channels + c, s->state_type);
  }
}

// Packs weights that are not known before: ptr = {weights, packed}; imm = {C, W, steps of both}. One unit
// is a tap.
template <class T> static void pack(const gc_args* args, int64_t begin, int64_t end) {
  const int64_t channels = args->imm[0], step = args->imm[1], tap = args->imm[2];
  for (int64_t j = begin; j < end; j++)
    for (int64_t c = 0; c < channels; c++)
      ((float*)args->ptr[1])[j * channels + c] = to_float(((const T*)args->ptr[0])[c * step + j * tap]);
}

}  // namespace

// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif
#define GC_SHORT_CONVOLUTION(TAG, TYPE)                                                              \
  GC_EXPORT void gc_short_convolution_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    short_convolution<TYPE>(args, begin, end);                                                        \
  }                                                                                                   \
  GC_EXPORT void gc_short_convolution_pack_##TAG(const gc_args* args, int64_t begin, int64_t end) {   \
    pack<TYPE>(args, begin, end);                                                                     \
  }
#ifdef GC_ONLY_f32
GC_SHORT_CONVOLUTION(f32, float)
#endif
#ifdef GC_ONLY_f16
GC_SHORT_CONVOLUTION(f16, f16)
#endif
#ifdef GC_ONLY_bf16
GC_SHORT_CONVOLUTION(bf16, bf16)
#endif
