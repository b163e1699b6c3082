// Contiguous dtype conversions that other kernel families need around them.
// ptr: src, dst.  Range: elements.
#include "strided.h"

namespace gc {
namespace {

template <class S, class D>
void convert(const gc_args* args, int64_t begin, int64_t end) {
  const S* src = (const S*)args->ptr[0];
  D* dst = (D*)args->ptr[1];
  for (int64_t i = begin; i < end; ++i) dst[i] = (D)src[i];
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(NAME, S, D)                                                             \
  GC_EXPORT void gc_convert_##NAME(const gc_args* args, int64_t begin, int64_t end) {     \
    gc::convert<S, D>(args, begin, end);                                                  \
  }
#define GC_TO_F32(TAG, TYPE) GC_DEFINE(TAG##_f32, TYPE, float)
#define GC_TO_F64(TAG, TYPE) GC_DEFINE(TAG##_f64, TYPE, double)
#define GC_TO_I64(TAG, TYPE) GC_DEFINE(TAG##_i64, TYPE, int64_t)
#define GC_TO_I32(TAG, TYPE) GC_DEFINE(TAG##_i32, TYPE, int32_t)
GC_FOR_ALL(GC_TO_F32)
GC_FOR_ALL(GC_TO_F64)
GC_FOR_ALL(GC_TO_I64)
GC_FOR_ALL(GC_TO_I32)
GC_DEFINE(f32_bf16, float, gc::bf16)
GC_DEFINE(f32_f16, float, gc::f16)
