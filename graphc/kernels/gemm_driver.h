// The loops around the micro-kernels, shared by the storage formats.
#pragma once
#include "gemm.h"
#include "gemm_micro.h"

namespace gc {

constexpr int64_t GEMM_KC = 192;  // partial sums of at most this length: as exact as MKL
constexpr int64_t GEMM_TILE = GC_GEMM_ROWS * GC_NR;  // floats of the accumulator tile, in L1
constexpr int64_t GEMM_MAX_GROUP = 8;

// c[r][n] = alpha * c + beta * addend; alpha == beta == 1 is the plain case.
template <class T>
static void add_tile(const gc_gemm* g, float* tile, int64_t ld, int64_t z, int64_t m0, int64_t mr,
                     int64_t n0, int64_t nr) {
  const T* c = (const T*)g->c + gc_batch_offset(g->size, g->c_z, z) + m0 * g->c_m + n0 * g->c_n;
  for (int64_t r = 0; r < mr; r++, tile += ld, c += g->c_m) {
    const float alpha = g->alpha, beta = g->beta;
    if (alpha == 1.0f && beta == 1.0f) {
      if (g->c_n == 1) {
        for (int64_t i = 0; i < nr; i++) tile[i] += to_float(c[i]);
      } else {
        for (int64_t i = 0; i < nr; i++) tile[i] += to_float(c[i * g->c_n]);
      }
    } else {
      for (int64_t i = 0; i < nr; i++) tile[i] = alpha * tile[i] + beta * to_float(c[i * g->c_n]);
    }
  }
}

static void finish_tile(const gc_gemm* g, float* tile, int64_t ld, int64_t z, int64_t m0,
                        int64_t mr, int64_t n0, int64_t nr) {
  if (g->c) {
    if (g->c_type == 0) add_tile<float>(g, tile, ld, z, m0, mr, n0, nr);
    else if (g->c_type == 1) add_tile<bf16>(g, tile, ld, z, m0, mr, n0, nr);
    else add_tile<f16>(g, tile, ld, z, m0, mr, n0, nr);
  } else if (g->alpha != 1.0f) {
    for (int64_t r = 0; r < mr; r++)
      for (int64_t i = 0; i < nr; i++) tile[r * ld + i] *= g->alpha;
  }
}

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows [m0, m1) of block `i`: whole micro tiles, spread evenly over the blocks.
struct RowSplit {
  int64_t m, tiles, blocks;
  explicit RowSplit(int64_t rows)
      : m(rows), tiles((rows + GC_MR - 1) / GC_MR), blocks((rows + GC_GEMM_ROWS - 1) / GC_GEMM_ROWS) {
    // blocks of equal length, for threads that share them, where that takes few more tiles
    const int64_t equal = (tiles + blocks - 1) / blocks * blocks;
    if (equal - tiles <= tiles / 16) tiles = equal;
  }
  int64_t tile_begin(int64_t block) const { return block * tiles / blocks; }
  int64_t row(int64_t tile) const { return tile * m / tiles; }
};

// A Format says how a storage format is packed and summed:
//   element           storage type of a
//   packed            element of a packed row; packed_length(k) of them hold k values
//   direct            a single row with unit stride serves as packed row
//   chunk             most steps of K between partial sums, a multiple of chunk_unit
//   expand_bytes      scratch for panel()
//   pack(src, row, step, mr, k, dst)           packs mr rows of a
//   panel(g, offset, p, kc, kl, expand, &ldb)  rows kc..kc+kl of panel p of b
//   micro(mr, a, b, ldb, k, c, ldc, add)       c[mr][32] (+)= a x b
//   twins(rows, k)    whether two panels are taken in turn
//   twin(mr, a, b, next, ldb, k, c, columns, ldc, add)  also a x the panel `next` bytes on, into the
//                                              c `columns` further
template <class Format>
constexpr int64_t chunk_unit = 4;

template <class Format>
static void gemm_run(const gc_gemm* g, const gc_args* args, gc_epilogue epilogue, int64_t begin,
                     int64_t end) {
  typedef typename Format::element T;
  typedef typename Format::packed P;
  const RowSplit split(g->m);
  const int64_t panels = (g->n + GC_NR - 1) / GC_NR, k = g->k;
  float* const tile = (float*)args->scratch;
  char* const expand = (char*)(tile + GEMM_TILE);
  P* const rows = (P*)(expand + Format::expand_bytes);
  const int64_t row_length = Format::packed_length(k);
  constexpr int64_t unit = chunk_unit<Format>;
  const int64_t chunks = (k + Format::chunk - 1) / Format::chunk;  // of equal length, whole units
  const int64_t chunk = chunks > 1 ? ((k + chunks - 1) / chunks + unit - 1) / unit * unit : k;
  while (begin < end) {
    const int64_t block_index = begin / panels, z = block_index / split.blocks,
                  block = block_index % split.blocks;
    const int64_t stop = min64(end, (block_index + 1) * panels) - block_index * panels;
    int64_t panel = begin - block_index * panels;
    begin += stop - panel;
    const int64_t t0 = split.tile_begin(block), t1 = split.tile_begin(block + 1);
    const int64_t m0 = split.row(t0), mb = split.row(t1) - m0;
    const T* a = (const T*)g->a + gc_batch_offset(g->size, g->a_z, z) + m0 * g->a_m;
    const int64_t b_offset = gc_batch_offset(g->size, g->b_z, z);
    const P* packed = rows;
    if (Format::direct && mb == 1 && g->a_k == 1) {
      packed = (const P*)a;
    } else {
      for (int64_t t = t0; t < t1; t++) {
        const int64_t r = split.row(t) - m0, mr = split.row(t + 1) - m0 - r;
        Format::pack(a + r * g->a_m, g->a_m, g->a_k, mr, k, rows + r * row_length);
      }
    }
    const bool twin = Format::twins(mb, k);  // one tile of rows then
    // Groups of panels share one call of the epilogue, as many as the tile holds.
    const int64_t most = GEMM_TILE / (mb * GC_NR);
    const int64_t group = most < 1 ? 1 : min64(most, GEMM_MAX_GROUP);
    while (panel < stop) {
      const int64_t count = min64(group, stop - panel), ld = count * GC_NR;
      // The second stream of twins begins amid the group: each goes on from panel to panel.
      const bool whole = g->ldb == 0 || g->n >= (panel + count) * GC_NR;
      const int64_t half = twin && whole ? count / 2 : 0;
      for (int64_t i = 0; i < count - half; i++) {
        const bool two = i < half;
        const int64_t p = two ? i : i + half;
        for (int64_t kc = 0;;) {
          const int64_t kl = min64(chunk, k - kc);
          int64_t ldb;
          const void* b = Format::panel(g, b_offset, panel + p, kc, kl, expand, &ldb);
          if constexpr (Format::twins(1, 1)) {
            if (two) {
              const void* next = Format::panel(g, b_offset, panel + p + half, kc, kl, expand, &ldb);
              Format::twin(mb, packed + mb * Format::packed_length(kc), b,
                           (const char*)next - (const char*)b, ldb, kl, tile + p * GC_NR,
                           half * GC_NR, ld, kc > 0);
            }
          }
          for (int64_t t = two ? t1 : t0; t < t1; t++) {
            const int64_t r = split.row(t) - m0, mr = split.row(t + 1) - m0 - r;
            Format::micro(mr, packed + r * row_length + mr * Format::packed_length(kc), b, ldb, kl,
                          tile + r * ld + p * GC_NR, ld, kc > 0);
          }
          kc += kl;
          if (kc >= k) break;
        }
      }
      const int64_t n0 = panel * GC_NR, nr = min64(g->n - n0, ld);
      finish_tile(g, tile, ld, z, m0, mb, n0, nr);
      if (g->rows == 0 || g->rows == g->m) {
        epilogue(args, tile, ld, z, m0, mb, n0, nr);
      } else {
        for (int64_t r = 0; r < mb;) {
          const int64_t row = z * g->m + m0 + r, at = row % g->rows,
                        part = min64(mb - r, g->rows - at);
          epilogue(args, tile + r * ld, ld, row / g->rows, at, part, n0, nr);
          r += part;
        }
      }
      panel += count;
    }
  }
}

static inline void pack_any(const float* src, int64_t column, int64_t step, int64_t nr, int64_t k,
                            float* dst) {
  pack_panel(src, column, step, nr, k, dst);
}
template <class T>
static inline void pack_any(const T* src, int64_t column, int64_t step, int64_t nr, int64_t k,
                            T* dst) {
  for (int64_t i = 0; i < k; i++)
    for (int64_t j = 0; j < GC_NR; j++)
      dst[i * GC_NR + j] = j < nr ? src[i * step + j * column] : T(0.0f);
}

// [panels][K][32] from strided columns; the element type stays.
template <class T>
static void pack_panels(const gc_args* args, int64_t begin, int64_t end) {
  const gc_pack_shape* s = (const gc_pack_shape*)args->imm;
  const int64_t panels = (s->n + GC_NR - 1) / GC_NR, k = s->k;
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / panels, n0 = u % panels * GC_NR, nr = min64(GC_NR, s->n - n0);
    const T* b = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->b_z, z) + n0 * s->b_n;
    T* dst = (T*)args->ptr[1] + u * k * GC_NR;
    if (s->b_n == 1 && nr == GC_NR) {
      for (int64_t i = 0; i < k; i++) memcpy(dst + i * GC_NR, b + i * s->b_k, GC_NR * sizeof(T));
    } else {
      pack_any(b, s->b_n, s->b_k, nr, k, dst);
    }
  }
}

}  // namespace gc
