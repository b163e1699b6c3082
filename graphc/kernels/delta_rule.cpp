// The delta rule: see delta_rule.h.
#include "delta_rule_chunk.h"
#include "delta_rule_few.h"

namespace {

// Tokens of a head before the next head has its turn: rows of neighbouring heads share pages, whose
// addresses are then found once for all of them. A multiple of CHUNK.
constexpr int64_t TURN = 256;

// Parts of heads of one sequence.
template <class T> static void many_tokens(const gc_args* args, int64_t begin, int64_t end) {
  const gc_delta_rule_shape* s = (const gc_delta_rule_shape*)args->imm;
  const int64_t panels = (s->v + GC_NR - 1) / GC_NR;
  const int64_t turn = end - begin > panels ? TURN : s->tokens;
  int64_t t = 0;
  do {
    const int64_t stop = min64(s->tokens, t + turn);
    for (int64_t u = begin; u < end;) {
      const int64_t first = u % panels, last = min64(panels, first + end - u);
      const Head<T> head = head_of<T>(args, u / panels);
      const float* const before = t > 0 ? head.after : head.before;
      if (s->by_head) chunks<true>(head, first, last, t, stop, before, (float*)args->scratch);
      else chunks<false>(head, first, last, t, stop, before, (float*)args->scratch);
      u += last - first;
    }
    t = stop;
  } while (t < s->tokens);
}

template <class T> static void few_tokens(const gc_args* args, int64_t begin, int64_t end) {
  const gc_delta_rule_shape* s = (const gc_delta_rule_shape*)args->imm;
  const int64_t panels = (s->v + GC_NR - 1) / GC_NR;
  for (int64_t u = begin; u < end;) {
    const int64_t z = u / panels, first = u % panels, last = min64(panels, first + end - u);
    const Head<T> head = head_of<T>(args, z);
    u += last - first;
    const float* const next = u + panels <= end ? head_of<T>(args, z + 1).before : nullptr;
    few(head, first * GC_NR, min64(s->v, last * GC_NR), next, (float*)args->scratch);
  }
}

template <class T> static void delta_rule(const gc_args* args, int64_t begin, int64_t end) {
  const gc_delta_rule_shape* s = (const gc_delta_rule_shape*)args->imm;
  if (s->tokens > 0 && s->tokens <= FEW && s->v % VL == 0) {
    few_tokens<T>(args, begin, end);
    return;
  }
  const int64_t sequence = s->heads * ((s->v + GC_NR - 1) / GC_NR);
  for (int64_t u = begin; u < end;) {
    const int64_t stop = min64(end, (u / sequence + 1) * sequence);
    many_tokens<T>(args, u, stop);
    u = stop;
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
