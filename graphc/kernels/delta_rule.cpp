// The delta rule: see delta_rule.h.
#include "delta_rule_chunk.h"
#include "delta_rule_few.h"

namespace {

template <class T> static void delta_rule(const gc_args* args, int64_t begin, int64_t end) {
  const gc_delta_rule_shape* s = (const gc_delta_rule_shape*)args->imm;
  const int64_t panels = (s->v + GC_NR - 1) / GC_NR;
  const bool in_place = s->tokens > 0 && s->tokens <= FEW && s->v % VL == 0;
  float* const scratch = (float*)args->scratch;
  for (int64_t u = begin; u < end;) {
    const int64_t z = u / panels, first = u % panels, last = min64(panels, first + end - u);
    const Head<T> head = head_of<T>(args, z);
    u += last - first;
    if (in_place) {
      const int64_t column = first * GC_NR, to = min64(s->v, last * GC_NR);
      const float* next = u < end ? head_of<T>(args, z + 1).before : nullptr;
      few(head, column, to, next, scratch);
    } else if (s->by_head) {
      chunks<true>(head, first, last, scratch);
    } else {
      chunks<false>(head, first, last, scratch);
    }
  }
}

}  // namespace

// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif
#define GC_DELTA_RULE(TAG, TYPE)                                                       \
  GC_EXPORT void gc_delta_rule_##TAG(const gc_args* args, int64_t begin, int64_t end) { \
    delta_rule<TYPE>(args, begin, end);                                                 \
  }
#ifdef GC_ONLY_f32
GC_DELTA_RULE(f32, float)
#endif
#ifdef GC_ONLY_f16
GC_DELTA_RULE(f16, f16)
#endif
#ifdef GC_ONLY_bf16
GC_DELTA_RULE(bf16, bf16)
#endif
