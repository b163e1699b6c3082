// Products of bf16 rows with coded weights (gemm_coded.h). Few rows expand them in registers; for
// many, and without vdpbf16ps, a panel chunk is expanded once and goes the way of plain panels.
#include "gemm_coded.h"

namespace {

#if defined(__AVX512BF16__)
typedef void (*coded_kernel)(const uint32_t*, const CodedChunk*, int64_t, float*, int64_t, bool);
const coded_kernel CODED[CODED_ROWS + 1] = {
    nullptr,        micro_coded<1>, micro_coded<2>, micro_coded<3>, micro_coded<4>,
    micro_coded<5>, micro_coded<6>, micro_coded<7>, micro_coded<8>};
#endif

struct Coded : Brain {
  static constexpr bool twins(int64_t, int64_t) { return false; }
#if defined(__AVX512BF16__)
  static constexpr int64_t expand_bytes = chunk * GC_NR * 2;
#endif
  static const void* panel(const gc_gemm* g, int64_t, int64_t p, int64_t kc, int64_t kl, char* expand,
                           int64_t* ldb) {
    const int64_t panels = (g->n + GC_NR - 1) / GC_NR, records = (g->k + CODED_STEPS - 1) / CODED_STEPS;
    CodedChunk chunk = coded_chunk(g->b, panels, records, p, kc / CODED_STEPS);
#if defined(__AVX512BF16__)
    if (g->m <= CODED_ROWS) {
      *ldb = 0;
      memcpy(expand, &chunk, sizeof chunk);
      return expand;
    }
#endif
    *ldb = GC_NR;
    for (int64_t i = 0; i < kl; i += CODED_STEPS, chunk.record++, chunk.records += CODED_BYTES) {
      const bool whole = chunk.record == *chunk.list;
      const uint8_t* const raw = whole ? chunk.raw : nullptr;
#if defined(__AVX512BF16__)
      decode_record(chunk.table, chunk.records, raw, (uint16_t*)expand + i * GC_NR);
#else
      uint16_t words[CODED_WORDS];
      decode_record(chunk.table, chunk.records, raw, words);
      widen_pairs((const char*)words, min64(CODED_STEPS, kl - i), (float*)expand + i * GC_NR);
#endif
      if (whole) chunk.list++, chunk.raw += CODED_WORDS;
    }
    return expand;
  }
  static void micro(int64_t mr, const packed* a, const void* b, int64_t ldb, int64_t k, float* c,
                    int64_t ldc, bool add) {
#if defined(__AVX512BF16__)
    if (ldb == 0) {
      CODED[mr](a, (const CodedChunk*)b, pairs(k), c, ldc, add);
      return;
    }
#endif
    Brain::micro(mr, a, b, ldb, k, c, ldc, add);
  }
};

}  // namespace

extern "C" void gc_gemm_coded(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,
                              int64_t begin, int64_t end) {
  gemm_run<Coded>(g, args, epilogue, begin, end);
}
