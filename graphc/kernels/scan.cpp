// Running reductions along one dimension: cumsum, cumprod, cummax, cummin, logcumsumexp.
//
// Tensors are [outer, n, inner], row-major; imm: n, inner.  Range: outer * inner columns.
// ptr: src, dst (, indices int64 for cummax and cummin).
// fp32 runs in double and integers in int64, as in torch; bf16 and fp16 run in fp32.
// Equal values: the later index counts. NaN, once met, stays.
#include "strided.h"

#include <cmath>

namespace gc {
namespace {

constexpr int kColumns = 32;  // columns of one pass: their accumulators stay in registers or L1

// Splits [begin, end) into runs of neighbouring columns: body(base offset, columns).
template <class Body>
static inline void runs(int64_t n, int64_t inner, int64_t begin, int64_t end, Body body) {
  for (int64_t c = begin; c < end;) {
    const int64_t at = c % inner;
    const int64_t m = min64(min64(inner - at, end - c), kColumns);
    body(c / inner * n * inner + at, m);
    c += m;
  }
}

struct Sum {
  template <class A> static A first(A v) { return v; }
  template <class A> static A next(A a, A v) { return a + v; }
};
struct Product {
  template <class A> static A first(A v) { return v; }
  template <class A> static A next(A a, A v) { return a * v; }
};
struct LogSumExp {
  template <class A> static A first(A v) { return v; }
  template <class A> static A next(A a, A v) {
    if (a != a) return a;
    if (v != v) return v;
    const A low = a < v ? a : v, high = a < v ? v : a;
    if (low == high && std::isinf(low)) return low;
    return high + std::log1p(std::exp(low - high));
  }
};

template <class S, class D, class Op>
void scan(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Wide<D>::type;
  const int64_t n = args->imm[0], inner = args->imm[1];
  if (n <= 0) return;
  runs(n, inner, begin, end, [&](int64_t base, int64_t m) {
    const S* src = (const S*)args->ptr[0] + base;
    D* dst = (D*)args->ptr[1] + base;
    if (m == 1) {
      A a = Op::first((A)src[0]);
      dst[0] = (D)a;
      for (int64_t i = 1; i < n; ++i) {
        a = Op::next(a, (A)src[i * inner]);
        dst[i * inner] = (D)a;
      }
      return;
    }
    A a[kColumns];
    for (int64_t j = 0; j < m; ++j) {
      a[j] = Op::first((A)src[j]);
      dst[j] = (D)a[j];
    }
    for (int64_t i = 1; i < n; ++i) {
      const S* s = src + i * inner;
      D* d = dst + i * inner;
      for (int64_t j = 0; j < m; ++j) {
        a[j] = Op::next(a[j], (A)s[j]);
        d[j] = (D)a[j];
      }
    }
  });
}

template <class T, bool Greater>
void extreme(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t n = args->imm[0], inner = args->imm[1];
  if (n <= 0) return;
  runs(n, inner, begin, end, [&](int64_t base, int64_t m) {
    const T* src = (const T*)args->ptr[0] + base;
    T* dst = (T*)args->ptr[1] + base;
    int64_t* indices = (int64_t*)args->ptr[2] + base;
    T best[kColumns];
    int64_t where[kColumns];
    for (int64_t j = 0; j < m; ++j) {
      best[j] = src[j];
      where[j] = 0;
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m; ++j) {
        const T v = src[i * inner + j];
        const A x = (A)v, b = (A)best[j];
        const bool better = is_nan(x) || (!is_nan(b) && (Greater ? x >= b : x <= b));
        best[j] = better ? v : best[j];
        where[j] = better ? i : where[j];
        dst[i * inner + j] = best[j];
        indices[i * inner + j] = where[j];
      }
    }
  });
}

}  // namespace
}  // namespace gc

#define GC_KERNEL(NAME, CALL) \
  GC_EXPORT void NAME(const gc_args* args, int64_t begin, int64_t end) { CALL(args, begin, end); }
#define GC_SCAN(TAG, S, D)                                 \
  GC_KERNEL(gc_cumsum_##TAG, (gc::scan<S, D, gc::Sum>))    \
  GC_KERNEL(gc_cumprod_##TAG, (gc::scan<S, D, gc::Product>))
#define GC_SCAN_FLOAT(TAG, TYPE) \
  GC_SCAN(TAG, TYPE, TYPE) GC_KERNEL(gc_logcumsumexp_##TAG, (gc::scan<TYPE, TYPE, gc::LogSumExp>))
#define GC_SCAN_INT(TAG, TYPE) GC_SCAN(TAG, TYPE, int64_t)
#define GC_EXTREME(TAG, TYPE)                           \
  GC_KERNEL(gc_cummax_##TAG, (gc::extreme<TYPE, true>)) \
  GC_KERNEL(gc_cummin_##TAG, (gc::extreme<TYPE, false>))
GC_FOR_FLOATS(GC_SCAN_FLOAT)
GC_FOR_INTS(GC_SCAN_INT)
GC_FOR_ALL(GC_EXTREME)
