// The tokens of chosen pools (graphc/ops/pooled_indexer.py); lightning_indexer.h chooses them.
//
// gc_pooled_positions  ptr = {chosen, start, out}: positions of the tokens of chosen pools, which are in
//   ascending order with -1 behind the last, and of those behind the last whole pool. The range is
//   (sequence, query).
#include "abi.h"

namespace gc {
namespace {

struct Expanded {
  int64_t queries, count, pool;
};

void expand(const Expanded* s, const int32_t* chosen, int64_t seen, int32_t* out) {
  int32_t* const end = out + s->count * s->pool + s->pool - 1;
  for (int64_t j = 0; j < s->count && chosen[j] >= 0; j++)
    for (int64_t i = 0; i < s->pool; i++) *out++ = (int32_t)(chosen[j] * s->pool + i);
  for (int64_t p = seen - seen % s->pool; p < seen; p++) *out++ = (int32_t)p;
  while (out < end) *out++ = -1;
}

}  // namespace
}  // namespace gc

GC_EXPORT void gc_pooled_positions(const gc_args* args, int64_t begin, int64_t end) {
  const gc::Expanded* s = (const gc::Expanded*)args->imm;
  const int64_t width = s->count * s->pool + s->pool - 1;
  for (int64_t i = begin; i < end; i++) {
    const int64_t seen = ((const int32_t*)args->ptr[1])[i / s->queries] + i % s->queries + 1;
    gc::expand(s, (const int32_t*)args->ptr[0] + i * s->count, seen < 0 ? 0 : seen,
               (int32_t*)args->ptr[2] + i * width);
  }
}
