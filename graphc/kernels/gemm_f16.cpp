// fp16 products, fp32 accumulation. See gemm.h.
#include "gemm_f16.h"

extern "C" void gc_gemm_f16(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                            int64_t begin, int64_t end) {
  gemm_run<Half>(g, args, epilogue, begin, end);
}

GC_EXPORT void gc_pack_panels_f16(const gc_args* args, int64_t begin, int64_t end) {
  pack_panels<f16>(args, begin, end);
}
