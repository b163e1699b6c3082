// See gemm_simple.h.
#include "gemm_simple.h"

#include <type_traits>

namespace {

constexpr int64_t ROWS = 8, COLUMNS = 64, DEPTH = 64;

template <class T, bool Integer> struct Accumulator { typedef T type; };
template <class T> struct Accumulator<T, true> { typedef typename std::make_unsigned<T>::type type; };

// T is the storage type; sums wrap in its unsigned twin, or in unsigned int for narrow types.
template <class T>
void product(const gc_args* args, bool addend, double alpha, double beta, int64_t begin,
             int64_t end) {
  constexpr bool integer = std::is_integral<T>::value;
  typedef typename Accumulator<typename std::conditional<(integer && sizeof(T) < 4), int32_t, T>::type,
                               integer>::type A;
  const gc_product_shape* s = (const gc_product_shape*)args->imm;
  A* const block = (A*)args->scratch;  // DEPTH x COLUMNS of b
  A* const sum = block + DEPTH * COLUMNS;
  const int64_t units = (s->m + ROWS - 1) / ROWS;
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / units, m0 = u % units * ROWS, mr = s->m - m0 < ROWS ? s->m - m0 : ROWS;
    const T* a = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->a_z, z) + m0 * s->a_m;
    const T* b = (const T*)args->ptr[1] + gc_batch_offset(s->size, s->b_z, z);
    T* out = (T*)args->ptr[addend ? 3 : 2] + (z * s->m + m0) * s->n;
    for (int64_t n0 = 0; n0 < s->n; n0 += COLUMNS) {
      const int64_t nr = s->n - n0 < COLUMNS ? s->n - n0 : COLUMNS;
      for (int64_t i = 0; i < ROWS * COLUMNS; i++) sum[i] = 0;
      for (int64_t k0 = 0; k0 < s->k; k0 += DEPTH) {
        const int64_t kr = s->k - k0 < DEPTH ? s->k - k0 : DEPTH;
        for (int64_t i = 0; i < kr; i++)
          for (int64_t j = 0; j < COLUMNS; j++)
            block[i * COLUMNS + j] = j < nr ? (A)b[(k0 + i) * s->b_k + (n0 + j) * s->b_n] : A(0);
        for (int64_t r = 0; r < mr; r++) {
          for (int64_t i = 0; i < kr; i++) {
            const A value = (A)a[r * s->a_m + (k0 + i) * s->a_k];
            for (int64_t j = 0; j < COLUMNS; j++)
              sum[r * COLUMNS + j] += value * block[i * COLUMNS + j];
          }
        }
      }
      const T* c = addend ? (const T*)args->ptr[2] + gc_batch_offset(s->size, s->c_z, z) +
                                m0 * s->c_m + n0 * s->c_n
                          : nullptr;
      for (int64_t r = 0; r < mr; r++) {
        for (int64_t j = 0; j < nr; j++) {
          A value = sum[r * COLUMNS + j];
          if (!integer) value = (A)(alpha * (double)value);
          if (addend) {
            const A extra = (A)c[r * s->c_m + j * s->c_n];
            value += integer ? extra : (A)(beta * (double)extra);
          }
          out[r * s->n + n0 + j] = (T)value;
        }
      }
    }
  }
}

}  // namespace

GC_PRODUCT(f64) { product<double>(args, addend, alpha, beta, begin, end); }
GC_PRODUCT(i8) { product<int8_t>(args, addend, alpha, beta, begin, end); }
GC_PRODUCT(u8) { product<uint8_t>(args, addend, alpha, beta, begin, end); }
GC_PRODUCT(i16) { product<int16_t>(args, addend, alpha, beta, begin, end); }
GC_PRODUCT(i32) { product<int32_t>(args, addend, alpha, beta, begin, end); }
GC_PRODUCT(i64) { product<int64_t>(args, addend, alpha, beta, begin, end); }
