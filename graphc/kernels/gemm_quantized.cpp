// Products with weights of 8 or 4 bits (quantized_panels.h). GC_QUANTIZED: tag, how rows are packed and
// summed, form of the weight. With dot products of bf16, few rows read codes in registers; otherwise a
// chunk of a panel is spelled out once and serves all rows of a block.
#include <type_traits>
#include <utility>

#include "quantized_panels.h"

#ifndef GC_QUANTIZED
#include "gemm_bf16.h"
#define GC_QUANTIZED int4_g32_bf16, Brain, int4_g32_form
#endif

namespace {

template <class Base, class Form>
struct Quantized : Base {
  typedef typename Base::packed packed;
  static constexpr bool paired = std::is_same<packed, uint32_t>::value;  // of bf16
  static constexpr bool scaled_sums = paired && Form::bits == 8;
  static constexpr int64_t chunk = paired && !scaled_sums ? 2048 : CODE_UNIT;
  static constexpr int64_t spelled_bytes = chunk * GC_NR * (paired ? 2 : 4);
  static constexpr int64_t expand_bytes = spelled_bytes + (scaled_sums ? GC_NR * 4 : 0);
  static constexpr bool twins(int64_t, int64_t) { return false; }

  static const void* panel(const gc_gemm* g, int64_t offset, int64_t p, int64_t kc, int64_t kl,
                           char* expand, int64_t* ldb) {
    const Codes codes = codes_of<Form>((const uint8_t*)g->b + offset, g->k, p, kc);
#if defined(__AVX512BF16__)
    if constexpr (paired) {
      *ldb = 0;
      if (g->m <= FEW) {
        memcpy(expand, &codes, sizeof codes);
        return expand;
      }
      *ldb = GC_NR;
      spell_pairs<Form>(codes, kl, (uint32_t*)expand);
      if constexpr (scaled_sums)
        for (int64_t v = 0; v < GC_NR; v += VL)
          store(expand + spelled_bytes + v * 4, scales_at<Form>(codes.panel, kc, v));
      return expand;
    }
#endif
    *ldb = GC_NR;
    spell_floats<Form>(codes, kl, (float*)expand);
    return expand;
  }

  static void micro(int64_t mr, const packed* a, const void* b, int64_t ldb, int64_t k, float* c,
                    int64_t ldc, bool add) {
#if defined(__AVX512BF16__)
    if constexpr (paired) {
      if (ldb == 0) {
        few(mr, a, *(const Codes*)b, (k + 1) / 2, c, ldc, add, tile_rows{});
        return;
      }
    }
    if constexpr (scaled_sums) {
      float sums[GC_MR * GC_NR];
      Base::micro(mr, a, b, ldb, k, sums, GC_NR, false);
      const float* const scales = (const float*)((const char*)b + spelled_bytes);
      for (int64_t v = 0; v < GC_NR; v += VL) {
        const vf scale = load<vf>(scales + v);
        for (int64_t r = 0; r < mr; r++) {
          const vf sum = load<vf>(sums + r * GC_NR + v) * scale;
          float* const o = c + r * ldc + v;
          store(o, add ? load<vf>(o) + sum : sum);
        }
      }
      return;
    }
#endif
    Base::micro(mr, a, b, ldb, k, c, ldc, add);
  }

#if defined(__AVX512BF16__)
  // Beyond FEW rows, spelling out once costs less than once a tile.
  static constexpr int64_t TILE = 12, FEW = 3 * TILE;
  typedef std::make_integer_sequence<int, TILE> tile_rows;

  template <int... R>
  static void few(int64_t mr, const packed* a, Codes codes, int64_t k, float* c, int64_t ldc,
                  bool add, std::integer_sequence<int, R...>) {
    typedef void (*kernel)(const uint32_t*, int64_t, Codes, int64_t, float*, int64_t, bool);
    static const kernel kernels[TILE + 1] = {nullptr, micro_codes<Form, R + 1>...};
    const int64_t tiles = (mr + TILE - 1) / TILE;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t r = t * mr / tiles, rows = (t + 1) * mr / tiles - r;
      kernels[rows]((const uint32_t*)a + r, mr, codes, k, c + r * ldc, ldc, add);
    }
  }
#endif
};

}  // namespace

namespace gc {
template <class Base, class Form>
constexpr int64_t chunk_unit<Quantized<Base, Form>> = CODE_UNIT;
}

#define GC_DEFINE(TAG, BASE, FORM)                                                                 \
  extern "C" void gc_gemm_##TAG(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue,       \
                                int64_t begin, int64_t end) {                                      \
    gemm_run<Quantized<BASE, FORM>>(g, args, epilogue, begin, end);                                \
  }
#define GC_EXPAND(...) GC_DEFINE(__VA_ARGS__)
GC_EXPAND(GC_QUANTIZED)
