// Many queries over pasts as they are, or in records: see attention_cached_many.h.
#include "attention_cached_many.h"

#define GC_CACHED_MANY(TAG, T, A)                                                                 \
  GC_EXPORT void GC_NAMED(gc_cached_many, TAG)(const gc_args* args, int64_t begin, int64_t end) { \
    many<T, GC_ROWS(T), A>(args, begin, end);                                                     \
  }
// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif

#ifdef GC_ONLY_f32
GC_CACHED_MANY(f32, float, Floats)
#endif
#ifdef GC_ONLY_f16
GC_CACHED_MANY(f16, gc::f16, Floats)
#endif
#ifdef GC_ONLY_bf16
#if defined(__AVX512BF16__)
GC_CACHED_MANY(bf16, gc::bf16, Pairs)
#else
GC_CACHED_MANY(bf16, gc::bf16, Floats)
#endif
#endif
