// Which rows belong to which expert: a stable counting sort of the (token, slot) pairs, and the
// blocks of rows that the products of experts.cpp work on. One unit: it takes a nanosecond a pair.
//
// ptr: index [T, K] (int32 or int64), order int32 [T * K], blocks int32 [1 + most, 3].
// imm: pairs T * K, experts, bytes of an index.   scratch: 4 bytes an expert, rounded up to 64.
//
// order lists pairs t * K + slot, those of expert 0 first; pairs of no expert are left out. blocks
// begins with their number; then (expert, first row, rows): at most GC_GEMM_ROWS rows of an expert,
// which are spread evenly over its blocks.
#include <string.h>

#include "gemm.h"

namespace gc {
namespace {

template <class I>
void order_pairs(const gc_args* args) {
  const I* index = (const I*)args->ptr[0];
  int32_t* const order = (int32_t*)args->ptr[1];
  int32_t* const blocks = (int32_t*)args->ptr[2];
  const int64_t pairs = args->imm[0], experts = args->imm[1];
  int32_t* const next = (int32_t*)args->scratch;
  memset(next, 0, (size_t)experts * 4);
  for (int64_t i = 0; i < pairs; ++i)
    if ((uint64_t)index[i] < (uint64_t)experts) ++next[index[i]];
  int32_t* block = blocks + 3;
  int32_t start = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = next[e], parts = (rows + GC_GEMM_ROWS - 1) / GC_GEMM_ROWS;
    next[e] = start;
    for (int64_t b = 0; b < parts; ++b, block += 3) {
      const int64_t from = b * rows / parts;
      block[0] = (int32_t)e;
      block[1] = start + (int32_t)from;
      block[2] = (int32_t)((b + 1) * rows / parts - from);
    }
    start += (int32_t)rows;
  }
  blocks[0] = (int32_t)((block - blocks) / 3 - 1);
  for (int64_t i = 0; i < pairs; ++i)
    if ((uint64_t)index[i] < (uint64_t)experts) order[next[index[i]]++] = (int32_t)i;
}

}  // namespace
}  // namespace gc

GC_EXPORT void gc_experts_order(const gc_args* args, int64_t, int64_t) {
  if (args->imm[2] == 8) gc::order_pairs<int64_t>(args);
  else gc::order_pairs<int32_t>(args);
}
