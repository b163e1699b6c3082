// Few queries over pasts as they are, or in records: see attention_cached_few.h.
#include "attention_cached_few.h"

#define GC_CACHED_FEW(TAG, T)                                                                    \
  GC_EXPORT void GC_NAMED(gc_cached_few, TAG)(const gc_args* args, int64_t begin, int64_t end) { \
    few<T, GC_ROWS(T)>(args, begin, end);                                                        \
  }                                                                                              \
  GC_EXPORT void GC_NAMED(gc_cached_merge, TAG)(const gc_args* args, int64_t begin,              \
                                                int64_t end) {                                   \
    merge<T>(args, begin, end);                                                                  \
  }
// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif
#ifdef GC_ONLY_f32
GC_CACHED_FEW(f32, float)
#endif
#ifdef GC_ONLY_f16
GC_CACHED_FEW(f16, gc::f16)
#endif
#ifdef GC_ONLY_bf16
GC_CACHED_FEW(bf16, gc::bf16)
#endif
