// fp32 products. See gemm.h.
#include "gemm_f32.h"

extern "C" void gc_gemm_f32(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                            int64_t begin, int64_t end) {
  gemm_run<Float>(g, args, epilogue, begin, end);
}

// Packs a strided b: ptr = {b, panels}; see gc_pack_shape. One unit is one panel of one batch.
GC_EXPORT void gc_pack_panels_f32(const gc_args* args, int64_t begin, int64_t end) {
  pack_panels<float>(args, begin, end);
}
