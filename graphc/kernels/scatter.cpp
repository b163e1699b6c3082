// Writing through index tensors: scatter, scatter_reduce, index_put, index_copy, index_add.
//
// The box of written items splits into sequence dimensions (those the indices stand for) and
// column dimensions (kept as they are). Columns never share a destination, so they are the
// range; along the sequence a kernel goes in order: duplicates combine, or the last one wins,
// in the same way for every thread count.
//
// imm: S, C, K, run (most columns taken together), then
//      S x (size, src_stride), C x (size, dst_stride, src_stride),
//      K x (item bytes, dst_stride, size of the indexed dimension, S strides, C strides)
// dst[sum_c c*dst_stride + sum_k index_k*dst_stride_k] op= src[sum_s + sum_c] (times alpha for add)
// ptr: dst, src, alpha (one item of dst's dtype, read by add), index_0 ... index_{K-1}.
// Range: the product of the column sizes. Indices outside are clamped (strided.h).
#include "strided.h"

namespace gc {
namespace {

constexpr int kMaxIndices = 8;

struct Sequence { int64_t size, src_stride; };
struct Column { int64_t size, dst_stride, src_stride; };

template <class D, class S>
struct Set {
  static D apply(D, S s, D) { return (D)s; }
};
template <class D, class S>
struct Add {
  static D apply(D d, S s, D alpha) { return (D)(d + (D)s * alpha); }
};
template <class D, class S>
struct Mul {
  static D apply(D d, S s, D) { return (D)(d * (D)s); }
};
template <class D, class S>
struct Max {
  static D apply(D d, S v, D) { const D s = (D)v; return s > d || is_nan(s) ? (is_nan(d) ? d : s) : d; }
};
template <class D, class S>
struct Min {
  static D apply(D d, S v, D) { const D s = (D)v; return s < d || is_nan(s) ? (is_nan(d) ? d : s) : d; }
};

// What one operator does with a run of columns, or with a list of places in order.
struct Apply {
  void (*run)(void* dst, int64_t to, int64_t ds, const void* src, int64_t from, int64_t ss,
              int64_t n, const void* alpha);
  void (*list)(void* dst, const int64_t* to, const void* src, const int64_t* from, int64_t n,
               const void* alpha);
};

template <class D, class S, class Op>
struct Applied {
  static void run(void* dst, int64_t to, int64_t ds, const void* src, int64_t from, int64_t ss,
                  int64_t n, const void* alpha) {
    D* d = (D*)dst + to;
    const S* v = (const S*)src + from;
    const D a = *(const D*)alpha;
    if (ds == 1 && ss == 1) {
      for (int64_t j = 0; j < n; ++j) d[j] = Op::apply(d[j], v[j], a);
    } else {
      for (int64_t j = 0; j < n; ++j) d[j * ds] = Op::apply(d[j * ds], v[j * ss], a);
    }
  }
  static void list(void* dst, const int64_t* to, const void* src, const int64_t* from, int64_t n,
                   const void* alpha) {
    D* d = (D*)dst;
    const S* v = (const S*)src;
    const D a = *(const D*)alpha;
    for (int64_t j = 0; j < n; ++j) d[to[j]] = Op::apply(d[to[j]], v[from[j]], a);
  }
};

void scatter(const gc_args* args, int64_t begin, int64_t end, Apply apply) {
  void* dst = args->ptr[0];
  const void* src = args->ptr[1];
  const void* alpha = args->ptr[2];
  const int ns = (int)args->imm[0], nc = (int)args->imm[1], count = (int)args->imm[2];
  const int64_t limit = args->imm[3];
  const Sequence* seq = (const Sequence*)(args->imm + 4);
  const Column* col = (const Column*)(args->imm + 4 + 2 * ns);
  const int64_t* rest = args->imm + 4 + 2 * ns + 3 * nc;
  Indices indices[kMaxIndices];
  int64_t dst_stride[kMaxIndices];
  const int64_t *seq_strides[kMaxIndices], *col_strides[kMaxIndices];
  bool together = true;  // all columns of a run go to the same place
  for (int k = 0; k < count; ++k) {
    indices[k] = Indices{args->ptr[3 + k], rest[0] == 8, rest[2]};
    if (rest[2] <= 0) return;
    dst_stride[k] = rest[1];
    seq_strides[k] = rest + 3;
    col_strides[k] = rest + 3 + ns;
    together = together && col_strides[k][nc - 1] == 0;
    rest += 3 + ns + nc;
  }
  int64_t total = 1;
  for (int s = 0; s < ns; ++s) total *= seq[s].size;
  const Column inner = col[nc - 1];
  auto col_size = [&](int d) { return col[d].size; };
  auto seq_size = [&](int d) { return seq[d].size; };
  constexpr int kList = 256;
  int64_t index[kMaxRank], list_to[kList], list_from[kList];
  for (int64_t c = begin; c < end;) {
    unravel(c, nc, col_size, index);
    const int64_t n = min64(min64(inner.size - index[nc - 1], end - c), limit);
    int64_t to = 0, from = 0, at[kMaxIndices] = {};
    for (int d = 0; d < nc; ++d) {
      to += index[d] * col[d].dst_stride;
      from += index[d] * col[d].src_stride;
      for (int k = 0; k < count; ++k) at[k] += index[d] * col_strides[k][d];
    }
    if (count == 1 && ns == 1 && n == 1) {  // one column of a scatter along its last dimension
      const int64_t at_step = seq_strides[0][0], from_step = seq[0].src_stride;
      for (int64_t t = 0; t < total;) {
        const int64_t m = min64(total - t, kList);
        for (int64_t i = 0; i < m; ++i) {
          list_to[i] = to + indices[0].at(at[0] + (t + i) * at_step) * dst_stride[0];
          list_from[i] = from + (t + i) * from_step;
        }
        apply.list(dst, list_to, src, list_from, m, alpha);
        t += m;
      }
      c += n;
      continue;
    }
    int64_t step[kMaxRank] = {};
    int listed = 0;
    for (int64_t t = 0; t < total; ++t) {
      int64_t o = to, f = from, pos[kMaxIndices];
      for (int k = 0; k < count; ++k) pos[k] = at[k];
      for (int s = 0; s < ns; ++s) {
        f += step[s] * seq[s].src_stride;
        for (int k = 0; k < count; ++k) pos[k] += step[s] * seq_strides[k][s];
      }
      if (together && n > 1) {
        for (int k = 0; k < count; ++k) o += indices[k].at(pos[k]) * dst_stride[k];
        apply.run(dst, o, inner.dst_stride, src, f, inner.src_stride, n, alpha);
      } else {
        for (int64_t j = 0; j < n; ++j) {
          int64_t p = o + j * inner.dst_stride;
          for (int k = 0; k < count; ++k)
            p += indices[k].at(pos[k] + j * col_strides[k][nc - 1]) * dst_stride[k];
          list_to[listed] = p;
          list_from[listed] = f + j * inner.src_stride;
          if (++listed == kList) {
            apply.list(dst, list_to, src, list_from, listed, alpha);
            listed = 0;
          }
        }
      }
      advance(ns, seq_size, step);
    }
    apply.list(dst, list_to, src, list_from, listed, alpha);
    c += n;
  }
}

// Mean: dst / max(count, 1), rounding down for integers. ptr: sum, count (int64), dst.
template <class A, class D>
void divide(const gc_args* args, int64_t begin, int64_t end) {
  const A* sum = (const A*)args->ptr[0];
  const int64_t* count = (const int64_t*)args->ptr[1];
  D* dst = (D*)args->ptr[2];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = count[i] < 1 ? 1 : count[i];
    if constexpr (IsFloat<A>::value) {
      dst[i] = (D)(sum[i] / (A)n);
    } else {
      const int64_t s = (int64_t)sum[i], q = s / n;
      dst[i] = (D)(q - (s % n != 0 && s < 0));
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_ONE(NAME, D, S, OP)                                                      \
  GC_EXPORT void NAME(const gc_args* args, int64_t begin, int64_t end) {            \
    using A = gc::Applied<D, S, gc::OP<D, S>>;                                      \
    gc::scatter(args, begin, end, gc::Apply{A::run, A::list});                      \
  }
#define GC_SET(TAG, TYPE) GC_ONE(gc_scatter_set_##TAG, TYPE, TYPE, Set)
// bf16 and f16 sources go into an fp32 destination, and so do their sums on the way to a mean
#define GC_REDUCE(TAG, S)                                          \
  GC_ONE(gc_scatter_sum_##TAG, gc::Arith<S>::type, S, Add)         \
  GC_ONE(gc_scatter_prod_##TAG, gc::Arith<S>::type, S, Mul)        \
  GC_ONE(gc_scatter_amax_##TAG, gc::Arith<S>::type, S, Max)        \
  GC_ONE(gc_scatter_amin_##TAG, gc::Arith<S>::type, S, Min)
#define GC_MEAN(TAG, D)                                                             \
  GC_EXPORT void gc_scatter_mean_##TAG(const gc_args* args, int64_t begin, int64_t end) { \
    gc::divide<gc::Arith<D>::type, D>(args, begin, end);                            \
  }
GC_FOR_BYTES(GC_SET)
GC_FOR_ALL(GC_REDUCE)
GC_FOR_ALL(GC_MEAN)
