// The last step of a mixture of experts: parts of a token's experts, weighted and summed in the order
// of its slots, in float, handed on to an epilogue.
//
// ptr: parts [T, K, D], index [T, K], weight [T, K].
// imm: K, D, experts, bytes of an index, type of weights (0 fp32, 1 bf16, 2 fp16).
// Range: T * pieces of a row of D columns.   scratch: EXPERTS_COLUMNS floats.
#pragma once
#include "abi.h"
#include "vec.h"

namespace gc {

constexpr int64_t EXPERTS_COLUMNS = 1024;

GC_INLINE float number_at(const void* p, int64_t type, int64_t i) {
  return type == 0 ? ((const float*)p)[i]
                   : type == 1 ? (float)((const bf16*)p)[i] : (float)((const f16*)p)[i];
}

template <class T>
static void experts_sum(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const int64_t slots = args->imm[0], width = args->imm[1], experts = args->imm[2],
                type = args->imm[4];
  const bool wide = args->imm[3] == 8;
  const int64_t pieces = (width + EXPERTS_COLUMNS - 1) / EXPERTS_COLUMNS;
  float* const sum = (float*)args->scratch;
  for (int64_t u = begin; u < end; ++u) {
    const int64_t t = u / pieces, n0 = u % pieces * EXPERTS_COLUMNS;
    const int64_t nr = width - n0 < EXPERTS_COLUMNS ? width - n0 : EXPERTS_COLUMNS;
    bool some = false;
    for (int64_t i = t * slots; i < (t + 1) * slots; ++i) {
      const int64_t e =
          wide ? ((const int64_t*)args->ptr[1])[i] : ((const int32_t*)args->ptr[1])[i];
      if ((uint64_t)e >= (uint64_t)experts) continue;
      const float weight = number_at(args->ptr[2], type, i);
      const T* const part = (const T*)args->ptr[0] + i * width + n0;
      if (some) {
        sweep<4>(0, nr, [&](int64_t n, auto w, auto) __attribute__((always_inline)) {
          vstore(sum + n, vload(sum + n, w) + weight * vload(part + n, w), w);
        });
      } else {
        sweep<4>(0, nr, [&](int64_t n, auto w, auto) __attribute__((always_inline)) {
          vstore(sum + n, weight * vload(part + n, w), w);
        });
      }
      some = true;
    }
    if (!some) memset(sum, 0, (size_t)nr * 4);
    epilogue(args, sum, nr, 0, t, 1, n0, nr);
  }
}

}  // namespace gc
