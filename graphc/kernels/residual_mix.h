// Attention Residuals: for each token the softmax-weighted sum of its candidates, in float, handed
// on to an epilogue. The score of a candidate is query . z / sqrt(mean(z^2) + eps).
//
// The last candidate (a sum that is still added to) may be float where the others are not.
//
// A row of a candidate comes from memory once: the sum finds it in the second level. While one row is
// scored, the lines of the next are asked for: prefetchers of the hardware stop at the end of a page.
//
// ptr: query [D], candidates (rows of D neighbouring elements).   imm: D, candidates, row stride of
// each.   Range: tokens.   scratch: MIX_COLUMNS floats, then 16 bytes a candidate.
#pragma once
#include <type_traits>

#include "abi.h"
#include "vmath.h"

namespace gc {

// Sums of MIX_SUM columns are summed up: as exact as torch's.
constexpr int64_t MIX_COLUMNS = 1024, MIX_SUM = 1024;

// dot += query . z and square += z . z over the first columns; gives their number.
template <class T, class Q>
GC_INLINE int64_t mix_pairs(const T*, const Q*, int64_t, vf (&)[4], vf (&)[4]) { return 0; }
#if defined(__AVX512BF16__)
GC_INLINE int64_t mix_pairs(const bf16* z, const bf16* query, int64_t width, vf (&dot)[4],
                            vf (&square)[4]) {
  int64_t n = 0;
  for (; n + 128 <= width; n += 128) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const __m512bh v = (__m512bh)_mm512_loadu_si512(z + n + u * 32);
      const __m512bh q = (__m512bh)_mm512_loadu_si512(query + n + u * 32);
      dot[u] = (vf)_mm512_dpbf16_ps((__m512)dot[u], v, q);
      square[u] = (vf)_mm512_dpbf16_ps((__m512)square[u], v, v);
    }
  }
  return n;
}
#endif

// next: the row that is scored after this one, in elements of `wide` bytes.
template <class T, class Q>
static float mix_score(const T* z, const char* next, int64_t wide, const Q* query, int64_t width,
                       float eps) {
  vf dot = {}, square = {};
  for (int64_t from = 0; from < width; from += MIX_SUM) {
    const int64_t to = width - from < MIX_SUM ? width : from + MIX_SUM;
    for (int64_t n = from * wide; n < to * wide; n += 64) __builtin_prefetch(next + n, 0, 2);
    vf d[4] = {}, s[4] = {};
    const int64_t done = mix_pairs(z + from, query + from, to - from, d, s);
    sweep<4>(from + done, to, [&](int64_t n, auto w, auto u) __attribute__((always_inline)) {
      const vf v = vload(z + n, w);
      d[u] += v * vload(query + n, w);
      s[u] += v * v;
    });
    dot += sum_of(d);
    square += sum_of(s);
  }
  return hsum(dot) / sqrtf(hsum(square) / (float)width + eps);
}

// Scores become their softmax.
static void mix_softmax(float* score, int64_t count) {
  float most = score[0], total = 0;
  for (int64_t j = 1; j < count; ++j) most = score[j] > most ? score[j] : most;
  for (int64_t j = 0; j < count; ++j) total += score[j] = vexp(score[j] - most);
  for (int64_t j = 0; j < count; ++j) score[j] /= total;
}

// sum[n] = weights . candidates at the columns n0 + n.
template <class T, class L>
static void mix_columns(const char* const* z, const float* weight, int64_t count, int64_t n0,
                        int64_t nr, float* sum) {
  constexpr int U = 8;
  const int64_t last = count - 1;
  const L* const latest = (const L*)z[last] + n0;
  int64_t n = 0;
  for (; n + U * VL <= nr; n += U * VL) {
    vf made[U] = {};
    for (int64_t j = 0; j < last; ++j)
#pragma GCC unroll 8
      for (int v = 0; v < U; ++v)
        made[v] += weight[j] * vload((const T*)z[j] + n0 + n + v * VL, All{});
#pragma GCC unroll 8
    for (int v = 0; v < U; ++v) {
      made[v] += weight[last] * vload(latest + n + v * VL, All{});
      vstore(sum + n + v * VL, made[v], All{});
    }
  }
  sweep<1>(n, nr, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
    vf made = {};
    for (int64_t j = 0; j < last; ++j) made += weight[j] * vload((const T*)z[j] + n0 + i, w);
    made += weight[last] * vload(latest + i, w);
    vstore(sum + i, made, w);
  });
}

// Where the candidates' rows are (of T, the last one of L), and the weights of the token that is
// looked at.
template <class T, class L, class Q>
struct Mix {
  const int64_t width, count, *step;
  const Q* query;
  const char** z;
  float* weight;
  float eps;

  Mix(const gc_args* args, int first, void* scratch, float e, int64_t begin)
      : width(args->imm[0]), count(args->imm[1]), step(args->imm + 2), query((const Q*)args->ptr[0]),
        z((const char**)scratch), weight((float*)(z + count)), eps(e) {
    for (int64_t j = 0; j < count; ++j) z[j] = (const char*)args->ptr[first + j] + begin * bytes(j);
  }
  int64_t size(int64_t j) const { return j + 1 < count ? sizeof(T) : sizeof(L); }
  int64_t bytes(int64_t j) const { return step[j] * size(j); }
  void look(bool more) {
    const int64_t last = count - 1;
    for (int64_t j = 0; j < last; ++j)
      weight[j] = mix_score((const T*)z[j], z[j + 1], size(j + 1), query, width, eps);
    const char* const next = more ? z[0] + bytes(0) : z[last];
    weight[last] = mix_score((const L*)z[last], next, size(more ? 0 : last), query, width, eps);
    mix_softmax(weight, count);
  }
  void next() {
    for (int64_t j = 0; j < count; ++j) z[j] += bytes(j);
  }
};

template <class T, class L, class Q>
static void residual_mix(const gc_args* args, gc_epilogue epilogue, float eps, int64_t begin,
                         int64_t end) {
  float* const sum = (float*)args->scratch;
  Mix<T, L, Q> mix(args, 1, sum + MIX_COLUMNS, eps, begin);
  for (int64_t t = begin; t < end; ++t, mix.next()) {
    mix.look(t + 1 < end);
    for (int64_t n0 = 0; n0 < mix.width; n0 += MIX_COLUMNS) {
      const int64_t nr = mix.width - n0 < MIX_COLUMNS ? mix.width - n0 : MIX_COLUMNS;
      mix_columns<T, L>(mix.z, mix.weight, mix.count, n0, nr, sum);
      epilogue(args, sum, nr, 0, t, 1, n0, nr);
    }
  }
}

static float mix_squares(const float* x, int64_t width) {
  vf s[4] = {};
  sweep<4>(0, width, [&](int64_t n, auto w, auto u) __attribute__((always_inline)) {
    const vf v = vload(x + n, w);
    s[u] += v * v;
  });
  return hsum(sum_of(s));
}

// The same, and the mix divided by its root mean square, times a gain (G is void: none), before it
// is handed on: it is never in memory. ptr: query, gain if any, candidates.
// scratch: a row of floats, then 16 bytes a candidate.
template <class T, class L, class Q, class G>
static void residual_mix_norm(const gc_args* args, gc_epilogue epilogue, float eps, float norm_eps,
                              int64_t begin, int64_t end) {
  constexpr bool gained = !std::is_void_v<G>;
  float* const row = (float*)args->scratch;
  const int64_t width = args->imm[0];
  Mix<T, L, Q> mix(args, 1 + gained, row + (width + 15) / 16 * 16, eps, begin);
  for (int64_t t = begin; t < end; ++t, mix.next()) {
    mix.look(t + 1 < end);
    float square = 0;
    for (int64_t n0 = 0; n0 < width; n0 += MIX_COLUMNS) {
      const int64_t nr = width - n0 < MIX_COLUMNS ? width - n0 : MIX_COLUMNS;
      mix_columns<T, L>(mix.z, mix.weight, mix.count, n0, nr, row + n0);
      square += mix_squares(row + n0, nr);
    }
    const float scale = 1.0f / sqrtf(square / (float)width + norm_eps);
    sweep<1>(0, width, [&](int64_t n, auto w, auto) __attribute__((always_inline)) {
      vf v = vload(row + n, w) * scale;
      if constexpr (gained) v *= vload((const G*)args->ptr[1] + n, w);
      vstore(row + n, v, w);
    });
    epilogue(args, row, width, 0, t, 1, 0, width);
  }
}

}  // namespace gc
