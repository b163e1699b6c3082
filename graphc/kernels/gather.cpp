// Reading through index tensors: embedding, index, index_select, gather, take.
//
// imm: rank, K, then per output dimension: size, src_stride;
//      then per index tensor: item bytes (4|8), src_stride, size of the indexed dimension,
//      and its stride in each of the output dimensions.
// out[o] = src[sum_d o_d * src_stride_d + sum_k index_k[o] * src_stride_k]; out is row-major.
// ptr: src, out, index_0 ... index_{K-1}.
// Range: the product of all sizes but the last; for a single dimension its items.
// Indices outside are clamped (strided.h).
#include "strided.h"

namespace gc {
namespace {

constexpr int kMaxIndices = 8;

struct Size { int64_t size, src_stride; };

// Items [from, to) of one row: `at` is where each index tensor's row starts.
template <class T, bool Wide>
static void single(T* t, const T* s, int64_t src_step, const void* index, int64_t at, int64_t step,
                   int64_t stride, int64_t size, int64_t from, int64_t to) {
  const Indices all{index, Wide, size};
  if (step == 1 && stride == 1 && src_step == 0) {
    for (int64_t i = from; i < to; ++i) t[i] = s[all.at(at + i)];
  } else {
    for (int64_t i = from; i < to; ++i) t[i] = s[i * src_step + all.at(at + i * step) * stride];
  }
}

template <class T>
void gather(const gc_args* args, int64_t begin, int64_t end) {
  const T* src = (const T*)args->ptr[0];
  T* out = (T*)args->ptr[1];
  const int rank = (int)args->imm[0], outer = rank - 1, count = (int)args->imm[1];
  const Size* dims = (const Size*)(args->imm + 2);
  const int64_t* rest = args->imm + 2 + 2 * rank;
  Indices indices[kMaxIndices];
  int64_t src_stride[kMaxIndices], inner_stride[kMaxIndices];
  const int64_t* strides[kMaxIndices];
  bool whole_rows = true;  // no index depends on the last dimension
  for (int k = 0; k < count; ++k) {
    indices[k] = Indices{args->ptr[2 + k], rest[0] == 8, rest[2]};
    if (rest[2] <= 0) return;
    src_stride[k] = rest[1];
    strides[k] = rest + 3;
    inner_stride[k] = rest[3 + outer];
    whole_rows = whole_rows && inner_stride[k] == 0;
    rest += 3 + rank;
  }
  const Size inner = dims[outer];
  auto row = [&](T* t, int64_t base, const int64_t* at, int64_t from, int64_t to) {
    if (whole_rows) {
      for (int k = 0; k < count; ++k) base += indices[k].at(at[k]) * src_stride[k];
      copy_run(t + from, 1, src + base + from * inner.src_stride, inner.src_stride, to - from);
    } else if (count == 1) {
      auto run = indices[0].wide ? single<T, true> : single<T, false>;
      run(t, src + base, inner.src_stride, indices[0].data, at[0], inner_stride[0], src_stride[0],
          indices[0].size, from, to);
    } else {
      for (int64_t i = from; i < to; ++i) {
        int64_t o = base + i * inner.src_stride;
        for (int k = 0; k < count; ++k)
          o += indices[k].at(at[k] + i * inner_stride[k]) * src_stride[k];
        t[i] = src[o];
      }
    }
  };
  if (outer == 0) {
    const int64_t at[kMaxIndices] = {};
    row(out, 0, at, begin, end);
    return;
  }
  // Rows in runs along the second last dimension, whose start is worked out once.
  auto size = [&](int d) { return dims[d].size; };
  const int last = outer - 1;
  int64_t index[kMaxRank];
  for (int64_t r = begin; r < end;) {
    unravel(r, outer, size, index);
    const int64_t n = min64(dims[last].size - index[last], end - r);
    int64_t base = 0, at[kMaxIndices] = {};
    for (int d = 0; d < outer; ++d) {
      base += index[d] * dims[d].src_stride;
      for (int k = 0; k < count; ++k) at[k] += index[d] * strides[k][d];
    }
    for (int64_t j = 0; j < n; ++j) {
      row(out + (r + j) * inner.size, base, at, 0, inner.size);
      base += dims[last].src_stride;
      for (int k = 0; k < count; ++k) at[k] += strides[k][last];
    }
    r += n;
  }
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(TAG, TYPE)                                                          \
  GC_EXPORT void gc_gather_##TAG(const gc_args* args, int64_t begin, int64_t end) {   \
    gc::gather<TYPE>(args, begin, end);                                               \
  }
GC_FOR_BYTES(GC_DEFINE)
