// Recurrent layers over time: LSTM, GRU and the plain cells with tanh or relu.
//
// A layer is one product for the input part of all time steps (gc_recurrent_project_*), then a
// walk over time that adds the hidden part (gc_lstm_*, gc_gru_*, gc_rnn_*). Blocks of kRows
// sequences are the range of the walk: they share each reading of the hidden weights. Weights are
// packed panels (gemm.h); gates and states are fp32, bf16 and fp16 only storage.
//
// gc_recurrent_bias_*:    fp32 [gates * H + H] = b_ih + b_hh; gru keeps the hidden bias of its
//                         last gate apart, in the last H items.
//                         ptr: b_ih, b_hh, dst.  imm: gates, H, gru.  Range: 1.
// gc_recurrent_project_*: ptr: x [M, I], packed w_ih, bias, dst fp32 [M, gates * H].
//                         imm: gc_gemm_shape.  Range and scratch as in matmul.py.
// the walks: ptr: out, h0, c0, hn, cn, then per direction: projected, packed w_hh, bias.
//   imm: steps, batch, H, directions, then in elements the strides over time and batch of
//   projected, then of out. h0, c0, hn, cn are [directions, batch, H]; direction 1 runs backwards
//   and writes the second H columns of out.
//   Range: directions * ceil(batch / kRows).
//   scratch: 4 * kRows * (gates + 2) * H + 64 bytes, then what a product of depth H needs.
#include "gemm.h"
#include "vmath.h"

namespace gc {
namespace {

constexpr int64_t kRows = 8;

template <class T> struct Product;
template <> struct Product<float> { static constexpr gc_gemm_function run = gc_gemm_f32; };
template <> struct Product<bf16> { static constexpr gc_gemm_function run = gc_gemm_bf16; };
template <> struct Product<f16> { static constexpr gc_gemm_function run = gc_gemm_f16; };

// Epilogue: the fp32 tile as it is, to ptr[3] with rows of imm[1] columns.
void store_gates(const gc_args* args, const float* acc, int64_t ld, int64_t, int64_t m0, int64_t mr,
           int64_t n0, int64_t nr) {
  const int64_t n = args->imm[1];
  float* out = (float*)args->ptr[3] + m0 * n + n0;
  for (int64_t r = 0; r < mr; ++r) memcpy(out + r * n, acc + r * ld, (size_t)nr * 4);
}

template <class T>
void bias(const gc_args* args) {
  const T *a = (const T*)args->ptr[0], *b = (const T*)args->ptr[1];
  float* dst = (float*)args->ptr[2];
  const int64_t h = args->imm[1], n = args->imm[0] * h;
  const int64_t apart = args->imm[2] != 0 ? n - h : n;
  for (int64_t i = 0; i < n; ++i) dst[i] = (float)a[i] + (i < apart ? (float)b[i] : 0.0f);
  for (int64_t i = 0; i < h; ++i) dst[n + i] = apart < n ? (float)b[apart + i] : 0.0f;
}

// A cell: x and g are the input and hidden part of its gates (g may be overwritten), `state` the
// fp32 memory of a row.
struct Lstm {
  static constexpr int gates = 4;
  static constexpr bool cell = true;  // the memory is c, not h
  template <class T>
  static void update(int64_t h, const float* __restrict x, float* __restrict g, const float*,
                     float* __restrict state, T* __restrict out) {
    // one gate after the other: a single loop over all of them is too wide to vectorise
    for (int64_t j = 0; j < 2 * h; ++j) g[j] = vsigmoid(x[j] + g[j]);
    for (int64_t j = 2 * h; j < 3 * h; ++j) g[j] = vtanh(x[j] + g[j]);
    for (int64_t j = 3 * h; j < 4 * h; ++j) g[j] = vsigmoid(x[j] + g[j]);
    for (int64_t j = 0; j < h; ++j) state[j] = g[h + j] * state[j] + g[j] * g[2 * h + j];
    for (int64_t j = 0; j < h; ++j) out[j] = (T)(g[3 * h + j] * vtanh(state[j]));
  }
};
struct Gru {
  static constexpr int gates = 3;
  static constexpr bool cell = false;
  template <class T>
  static void update(int64_t h, const float* __restrict x, float* __restrict g,
                     const float* __restrict hidden_bias, float* __restrict state,
                     T* __restrict out) {
    for (int64_t j = 0; j < h; ++j) {
      const float reset = vsigmoid(x[j] + g[j]);
      const float keep = vsigmoid(x[h + j] + g[h + j]);
      const float fresh = vtanh(x[2 * h + j] + reset * (g[2 * h + j] + hidden_bias[j]));
      const float v = fresh + keep * (state[j] - fresh);
      state[j] = v;
      out[j] = (T)v;
    }
  }
};
struct Tanh {
  static constexpr int gates = 1;
  static constexpr bool cell = false;
  template <class T>
  static void update(int64_t h, const float* __restrict x, float* __restrict g,
                     const float*, float* __restrict state, T* __restrict out) {
    for (int64_t j = 0; j < h; ++j) {
      state[j] = vtanh(x[j] + g[j]);
      out[j] = (T)state[j];
    }
  }
};
struct Relu {
  static constexpr int gates = 1;
  static constexpr bool cell = false;
  template <class T>
  static void update(int64_t h, const float* __restrict x, float* __restrict g,
                     const float*, float* __restrict state, T* __restrict out) {
    for (int64_t j = 0; j < h; ++j) {
      const float v = x[j] + g[j];
      state[j] = v < 0.0f ? 0.0f : v;
      out[j] = (T)state[j];
    }
  }
};

template <class T, class Cell>
void walk(const gc_args* args, int64_t begin, int64_t end) {
  const int64_t* imm = args->imm;
  const int64_t steps = imm[0], batch = imm[1], h = imm[2];
  const int64_t in_t = imm[4], in_b = imm[5], out_t = imm[6], out_b = imm[7];
  const int64_t n = Cell::gates * h, blocks = (batch + kRows - 1) / kRows;
  float* gates = (float*)args->scratch;
  float* state = gates + kRows * n;
  T* hidden = (T*)(state + kRows * h);
  char* rest = (char*)(state + 2 * kRows * h);
  rest += (64 - (uintptr_t)rest % 64) % 64;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t direction = item / blocks, b0 = item % blocks * kRows;
    const int64_t rows = batch - b0 < kRows ? batch - b0 : kRows;
    const int64_t at = (direction * batch + b0) * h;
    void* const* own = args->ptr + 5 + 3 * direction;
    const float* projected = (const float*)own[0] + b0 * in_b;
    const float* hidden_bias = (const float*)own[2] + n;
    T* out = (T*)args->ptr[0] + b0 * out_b + direction * h;
    const T* start = (const T*)args->ptr[Cell::cell ? 2 : 1] + at;
    memcpy(hidden, (const T*)args->ptr[1] + at, (size_t)(rows * h) * sizeof(T));
    for (int64_t i = 0; i < rows * h; ++i) state[i] = (float)start[i];

    gc_gemm g = {};
    g.m = rows;
    g.n = n;
    g.k = h;
    for (int d = 0; d < GC_BATCH_DIMS; ++d) g.size[d] = 1;
    g.a_m = h;
    g.a_k = 1;
    g.a = hidden;
    g.b = own[1];
    g.alpha = 1.0f;
    void* const pointers[4] = {hidden, own[1], nullptr, gates};
    const gc_args inner = {pointers, &g.m, rest};

    for (int64_t s = 0; s < steps; ++s) {
      const int64_t t = direction ? steps - 1 - s : s;
      Product<T>::run(&g, &inner, store_gates, 0, (n + 31) / 32);
      for (int64_t r = 0; r < rows; ++r) {
        Cell::update(h, projected + t * in_t + r * in_b, gates + r * n, hidden_bias, state + r * h,
                     hidden + r * h);
        memcpy(out + t * out_t + r * out_b, hidden + r * h, (size_t)h * sizeof(T));
      }
    }
    memcpy((T*)args->ptr[3] + at, hidden, (size_t)(rows * h) * sizeof(T));
    if (Cell::cell) {
      T* last = (T*)args->ptr[4] + at;
      for (int64_t i = 0; i < rows * h; ++i) last[i] = (T)state[i];
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_KERNEL(NAME, ...) \
  GC_EXPORT void NAME(const gc_args* args, int64_t begin, int64_t end) { __VA_ARGS__; }
#define GC_DEFINE(TAG, TYPE)                                                                   \
  GC_KERNEL(gc_recurrent_bias_##TAG, if (begin < end) gc::bias<TYPE>(args))                    \
  GC_KERNEL(gc_recurrent_project_##TAG,                                                        \
            gc_gemm_entry(gc_gemm_##TAG, args, gc::store_gates, true, 1.0f, 1.0f, begin, end))       \
  GC_KERNEL(gc_lstm_##TAG, gc::walk<TYPE, gc::Lstm>(args, begin, end))                         \
  GC_KERNEL(gc_gru_##TAG, gc::walk<TYPE, gc::Gru>(args, begin, end))                           \
  GC_KERNEL(gc_rnn_tanh_##TAG, gc::walk<TYPE, gc::Tanh>(args, begin, end))                     \
  GC_KERNEL(gc_rnn_relu_##TAG, gc::walk<TYPE, gc::Relu>(args, begin, end))
#ifndef GC_RECURRENT
GC_DEFINE(f32, float)
#elif GC_RECURRENT == 2
GC_DEFINE(bf16, gc::bf16)
#else
GC_DEFINE(f16, gc::f16)
#endif
