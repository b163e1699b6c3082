// bf16 weights in 12 bits each, exactly.
//
// The upper byte of a bf16 holds its sign and all but one bit of its exponent. Few of the 256 occur in
// a panel of 32 columns: the 16 most frequent are a table, and a weight is its lower byte and 4 bits
// that name the upper one. Weights go by records of four steps of K: 64 bytes of codes, and 2 x 64
// lower bytes, so that interleaving bytes within 16 gives the pairs of gemm.h. A record with an upper
// byte that has no code keeps all its upper bytes behind the records, and its number is in a list.
//
//   [panels] gc_coded_panel | to 64 bytes | [panels][records][192] | raw upper bytes | lists
//
// One write of it: graphc/ops/coded_linear.py.
#pragma once
#include "gemm_bf16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct gc_coded_panel {
  uint8_t table[16];
  uint64_t list;  // bytes from the start of the weight to ascending numbers, UINT32_MAX at the end
  uint64_t raw;   // likewise to the upper bytes of these records
};

namespace {

constexpr int64_t CODED_STEPS = 4, CODED_WORDS = CODED_STEPS * GC_NR, CODED_BYTES = 192;
constexpr int64_t CODED_ROWS = 8;  // from here on expanding once serves more than one tile

// Records of a panel from number `record` on.
struct CodedChunk {
  const uint8_t *table, *records, *raw;
  const uint32_t* list;
  uint32_t record;
};

inline CodedChunk coded_chunk(const void* weight, int64_t panels, int64_t records, int64_t p,
                              int64_t record) {
  const uint8_t* base = (const uint8_t*)weight;
  const gc_coded_panel* const panel = (const gc_coded_panel*)base + p;
  const int64_t head = (panels * (int64_t)sizeof(gc_coded_panel) + 63) / 64 * 64;
  CodedChunk chunk{panel->table, base + head + (p * records + record) * CODED_BYTES,
                   base + panel->raw, (const uint32_t*)(base + panel->list), (uint32_t)record};
  for (; *chunk.list < chunk.record; chunk.list++) chunk.raw += CODED_WORDS;
  if (p + 4 < panels) __builtin_prefetch(panel + 4);
  if (p + 1 < panels) {
    __builtin_prefetch(base + panel[1].list);
    __builtin_prefetch(base + panel[1].raw);
  }
  return chunk;
}

// The 128 weights of one record as two steps of pairs, [2][32][2].
inline void decode_record(const uint8_t* table, const uint8_t* record, const uint8_t* raw,
                          uint16_t* dst) {
#if defined(__AVX2__)
  const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int half = 0; half < 64; half += 32) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)(record + half));
    for (int s = 0; s < 2; s++) {
      const __m256i low = _mm256_loadu_si256((const __m256i*)(record + 64 + 64 * s + half));
      const __m256i code = _mm256_and_si256(s ? _mm256_srli_epi16(both, 4) : both, nibble);
      const __m256i high = raw ? _mm256_loadu_si256((const __m256i*)(raw + 64 * s + half))
                               : _mm256_shuffle_epi8(codes, code);
      _mm256_storeu_si256((__m256i*)(dst + 64 * s + half / 2), _mm256_unpacklo_epi8(low, high));
      _mm256_storeu_si256((__m256i*)(dst + 64 * s + 32 + half / 2), _mm256_unpackhi_epi8(low, high));
    }
  }
#else
  for (int s = 0; s < 2; s++) {
    for (int i = 0; i < 64; i++) {
      const int code = s ? record[i] >> 4 : record[i] & 15;
      const int high = raw ? raw[64 * s + i] : table[code];
      dst[64 * s + i % 16 / 8 * 32 + i / 16 * 8 + i % 8] =
          (uint16_t)(high << 8 | record[64 + 64 * s + i]);
    }
  }
#endif
}

#if defined(__AVX512BF16__)

// The steps of pairs [begin, end) of a chunk; begin is even. A function of its own: vectors of what
// calls it are in no registers yet.
static __attribute__((noinline)) void decode_rest(const CodedChunk* chunk, int64_t begin, int64_t end,
                                                  uint16_t* dst) {
  const uint32_t* list = chunk->list;
  const uint8_t* raw = chunk->raw;
  for (int64_t i = begin; i < end; i += 2, dst += CODED_WORDS) {
    const uint32_t record = chunk->record + (uint32_t)(i / 2);
    for (; *list < record; list++) raw += CODED_WORDS;
    decode_record(chunk->table, chunk->records + i / 2 * CODED_BYTES, record == *list ? raw : nullptr,
                  dst);
  }
}

// c[MR][32] (+)= a [k/2][MR] pairs x the weights of a chunk, summed up in the same order as by
// micro_pairs: the same bits.
template <int MR>
static void micro_coded(const uint32_t* a, const CodedChunk* chunk, int64_t k, float* c, int64_t ldc,
                        bool add) {
  constexpr int U = MR == 1 ? 2 : MR == 2 ? 4 : 1, S = U > 2 ? U : 2;
  // The core's prefetchers do best alone as long as arithmetic takes less time than the lines.
  constexpr int64_t ahead = MR >= 4 ? 36 * CODED_BYTES : 0;
  uint16_t rest[2 * CODED_WORDS];
  if (k % S) decode_rest(chunk, k - k % S, k, rest);
  __m512 acc[U][MR][2] = {};
  const __m512i table = _mm512_maskz_broadcast_i32x4(
      0xffff, _mm_loadu_si128((const __m128i*)chunk->table));
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t *b = chunk->records, *raw = chunk->raw;
  const uint32_t* list = chunk->list;
  uint32_t record = chunk->record;
  int64_t i = 0;
  for (; i + S <= k; i += S) {
#pragma GCC unroll 2
    for (int s = 0; s < S; s += 2, b += CODED_BYTES, record++) {
      if (ahead)
#pragma GCC unroll 3
        for (int line = 0; line < CODED_BYTES; line += 64) __builtin_prefetch(b + ahead + line, 0, 2);
      const __m512i both = _mm512_loadu_si512(b);
      __m512i h0 = _mm512_shuffle_epi8(table, _mm512_and_si512(both, nibble));
      __m512i h1 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
      if (__builtin_expect(record == *list, 0)) {
        h0 = _mm512_loadu_si512(raw);
        h1 = _mm512_loadu_si512(raw + 64);
        raw += CODED_WORDS;
        list++;
        __builtin_prefetch(raw + 64);
      }
      const __m512i l0 = _mm512_loadu_si512(b + 64), l1 = _mm512_loadu_si512(b + 128);
      const __m512bh w[2][2] = {
          {(__m512bh)_mm512_unpacklo_epi8(l0, h0), (__m512bh)_mm512_unpackhi_epi8(l0, h0)},
          {(__m512bh)_mm512_unpacklo_epi8(l1, h1), (__m512bh)_mm512_unpackhi_epi8(l1, h1)}};
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const int u = (s + j) % U;
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
          const __m512bh av = (__m512bh)_mm512_set1_epi32((int)a[(s + j) * MR + r]);
          acc[u][r][0] = _mm512_dpbf16_ps(acc[u][r][0], av, w[j][0]);
          acc[u][r][1] = _mm512_dpbf16_ps(acc[u][r][1], av, w[j][1]);
        }
      }
    }
    a += S * MR;
  }
  const uint16_t* w = rest;
  __asm__("" : "+r"(w) : : "memory");  // once in a register, not once a row in memory
  for (; i < k; i++, w += 2 * GC_NR, a += MR) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w);
    const __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + GC_NR);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const __m512bh av = (__m512bh)_mm512_set1_epi32((int)a[r]);
      acc[0][r][0] = _mm512_dpbf16_ps(acc[0][r][0], av, w0);
      acc[0][r][1] = _mm512_dpbf16_ps(acc[0][r][1], av, w1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      __m512 sum = acc[0][r][v];
#pragma GCC unroll 8
      for (int u = 1; u < U; u++) sum = _mm512_add_ps(sum, acc[u][r][v]);
      float* o = c + r * ldc + v * 16;
      _mm512_storeu_ps(o, add ? _mm512_add_ps(_mm512_loadu_ps(o), sum) : sum);
    }
  }
}

#endif

}  // namespace
