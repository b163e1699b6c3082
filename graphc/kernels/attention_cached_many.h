// Many queries over a past (attention_cached.h), by the tiles of attention_prefill.cpp.
//
// A unit is `unit` panels of 32 queries of one sequence's head of keys; its scratch holds their sums.
// Keys and values come out of their pages into panels SPAN keys at a time, once for all queries of
// the unit; each panel of queries then goes over the whole span, so that its sums come near once.
#pragma once
#include "prelude.h"

#include "attention_cached.h"
#include "attention_mask.h"
#include "attention_pack.h"
#include "attention_panel.h"
#include "records_decode.h"
#include "vmath.h"

namespace {
using namespace gc;

constexpr int64_t KEYS = GC_ATTENTION_KEYS;  // keys between rescalings: their scores stay in L1
constexpr int64_t SPAN = 4 * KEYS;
GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
GC_INLINE double float_of(int64_t bits) { double d; memcpy(&d, &bits, 8); return d; }

// dst[columns / 32][SPAN][32] from rows of n values, zeros behind them.
template <class T>
static void pack_values(const T* const* rows, int64_t keys, int64_t n, float* dst) {
  for (int64_t c = 0; c < n; c += GC_NR, dst += SPAN * GC_NR) {
    const int64_t width = min64(GC_NR, n - c);
    for (int64_t j = 0; j < keys; j++) {
      float* const to = dst + j * GC_NR;
      const T* const from = rows[j] + c;
      int64_t i = 0;
      for (; i + 8 <= width; i += 8) store(to + i, load8(from + i));
      for (; i < width; i++) to[i] = to_float(from[i]);
      for (; i < GC_NR; i++) to[i] = 0.0f;
    }
  }
}

// The same as pairs of two rows, [columns / 32][SPAN / 2][32][2].
static inline void pack_values(const bf16* const* rows, int64_t keys, int64_t n, uint32_t* dst) {
  for (int64_t j = 0; j < keys; j += 2) {
    const bf16 *a = rows[j], *b = j + 1 < keys ? rows[j + 1] : a;
    for (int64_t c = 0; c < n; c += GC_NR)
      pair_rows(a + c, b - a, j + 1 < keys ? 2 : 1, min64(GC_NR, n - c),
                dst + (c / GC_NR * (SPAN / 2) + j / 2) * GC_NR);
  }
}

// Keys and values of a span, as panels; S: what is stored, R: rows as they are packed.
template <class R, class S, class A> struct Span {
  typedef typename A::item Item;
  const gc_cached_shape* s;
  const int32_t* table;
  RecordReader reader;
  const S *k, *v;  // of the head, in page 0
  int64_t k_at, v_at;  // columns, of records
  const S* none;   // a row of zeros, where a page is missing
  const S** rows;  // keys, then values: SPAN each
  Item *keys, *values;
  R* staged;  // [32][max(d, dv)], of records

  void find(int64_t b, int64_t k0, int64_t n) const {
    const int64_t size = s->paging.rows;
    for (int64_t j = 0; j < n;) {
      const int64_t page = page_of(&s->paging, table, b, (k0 + j) / size), first = (k0 + j) % size;
      const int64_t end = min64(n, j + size - first);
      for (int64_t row = first; j < end; j++, row++) {
        rows[j] = page < 0 ? none : k + page * s->k_page + row * s->k_row;
        rows[SPAN + j] = page < 0 ? none : v + page * s->v_page + row * s->v_row;
      }
    }
  }

  void pack(int64_t b, int64_t k0, int64_t n) {
    find(b, k0, n);
    const int64_t steps = A::steps(s->d);
    for (int64_t j = 0; j < n; j += GC_NR) {
      const int64_t some = min64(GC_NR, n - j), coming = min64(n, j + 2 * GC_NR);
      if constexpr (std::is_same<S, uint8_t>::value) {
        const R* found[GC_NR];
        read(rows + SPAN + j, some, v_at, s->dv, found);
        pack_values(found, some, s->dv, values + A::steps(j) * GC_NR);
        read(rows + j, some, k_at, s->d, found);
        pack_lanes(found, some, 1, s->d, keys + j * steps);
      } else {
        for (int64_t i = j + GC_NR; i < coming; i++)
          for (int64_t c = 0; c < s->d; c += 64 / (int64_t)sizeof(S)) __builtin_prefetch(rows[i] + c);
        pack_lanes(rows + j, some, 1, s->d, keys + j * steps);
      }
    }
    if constexpr (!std::is_same<S, uint8_t>::value) pack_values(rows + SPAN, n, s->dv, values);
  }

  void read(const uint8_t* const* from, int64_t n, int64_t first, int64_t width, const R** found) {
    for (int64_t i = 0; i < n; i++) found[i] = staged + i * width;
    reader.columns(from, n, first, width, staged, width);
  }
};

template <class T, class S, class A> static void many(const gc_args* args, int64_t begin, int64_t end) {
  typedef typename A::item Item;
  typedef typename Numbers<T, S>::type R;
  const gc_cached_shape* s = (const gc_cached_shape*)args->imm;
  const int64_t lanes = s->tq * s->group, panels = (lanes + GC_NR - 1) / GC_NR;
  const int64_t units = (panels + s->unit - 1) / s->unit;
  const int64_t columns = (s->dv + GC_NR - 1) / GC_NR * GC_NR, d = A::steps(s->d);
  const float scale = (float)float_of(s->scale), soft_cap = (float)float_of(s->soft_cap);
  const float factor = scale == 0.0f ? 1.0f : fabsf(scale) * LOG2E;
  const float cap = soft_cap == 0.0f || scale == 0.0f ? 0.0f : fabsf(scale) / soft_cap;
  gc_prefill_shape place = {};  // what hides keys by position
  place.group = s->group;
  place.back = s->back;

  char* scratch = (char*)args->scratch;
  const auto bytes = [&scratch](int64_t n) { return (scratch += (n + 63) & -64) - ((n + 63) & -64); };
  const auto take = [&bytes](int64_t n) { return (float*)bytes(4 * n); };
  float *const scores = take(KEYS * GC_NR), *const top = take(GC_NR);
  Panel<Item>* const unit = (Panel<Item>*)bytes(s->unit * (int64_t)sizeof(Panel<Item>));
  for (int64_t i = 0; i < s->unit; i++) {
    unit[i].q = (Item*)take(d * GC_NR);
    unit[i].out = take(GC_NR * columns);
    unit[i].base = take(GC_NR);
    unit[i].total = take(GC_NR);
  }
  constexpr bool RECORDS = std::is_same<S, uint8_t>::value;
  Span<R, S, A> span{s, (const int32_t*)args->ptr[3], RecordReader(&s->form)};
  const int64_t widest = max64(s->d, s->dv), zeros = RECORDS ? s->form.bytes : widest * (int64_t)sizeof(S);
  span.none = (const S*)bytes(zeros);
  memset((void*)span.none, 0, (size_t)zeros);
  span.staged = RECORDS ? (R*)take(GC_NR * widest) : nullptr;
  span.rows = (const S**)bytes(2 * SPAN * (int64_t)sizeof(S*));
  span.keys = (Item*)take(SPAN * d);
  span.values = (Item*)take(A::steps(SPAN) * columns);

  for (int64_t u = begin; u < end; u++) {
    // The longest units come first, so that threads end together.
    const int64_t first_panel = (units - 1 - u % units) * s->unit;
    const int64_t head = u / units % s->heads, b = u / units / s->heads;
    const int64_t count = min64(s->unit, panels - first_panel);
    const int64_t start = ((const int32_t*)args->ptr[2])[b];
    const T* q = (const T*)args->ptr[0] + b * s->q_b + head * s->group * s->q_h;
    T* const out = (T*)args->ptr[1] + (b * s->tq * s->heads + head) * s->group * s->dv;
    span.k = (const S*)args->ptr[4] + head * s->k_h;
    span.v = (const S*)args->ptr[5] + head * s->v_h;
    if (RECORDS) {
      span.k_at = s->k_at + head * s->k_next;
      span.v_at = s->v_at + head * s->v_next;
    }

    int64_t key_begin = capacity(&s->paging), key_end = 0;
    for (int64_t i = 0; i < count; i++) {
      Panel<Item>& p = unit[i];
      p.first = (first_panel + i) * GC_NR;
      p.lanes = min64(GC_NR, lanes - p.first);
      p.width = (p.lanes + VL - 1) / VL * VL;
      p.t0 = p.first / s->group;
      p.t1 = (p.first + p.lanes - 1) / s->group;
      const Seen seen = keys_seen(s, start, p.t0, p.t1 + 1);
      p.begin = seen.first / GC_NR * GC_NR;
      p.end = seen.last;
      p.fresh = true;
      key_begin = min64(key_begin, p.begin);
      key_end = max64(key_end, p.end);
      const T* rows[GC_NR];
      for (int64_t l = 0; l < p.lanes; l++) {
        const int64_t t = (p.first + l) / s->group, h = (p.first + l) % s->group;
        rows[l] = q + t * s->q_t + h * s->q_h;
        const float sink =
            s->sink_type ? read(args->ptr[7], s->sink_type, (head * s->group + h) * s->sink_h)
                         : NEGATIVE_INFINITY;
        p.base[l] = sink == NEGATIVE_INFINITY ? sink : sink * LOG2E / factor;
        p.total[l] = sink == NEGATIVE_INFINITY ? 0.0f : 1.0f;
      }
      for (int64_t l = p.lanes; l < GC_NR; l++) p.base[l] = p.total[l] = 0.0f;
      pack_lanes(rows, p.lanes, s->q_d, s->d, p.q);
      if (scale <= 0.0f) scale_lanes(p.q, d, scale == 0.0f);
    }

    for (int64_t k0 = key_begin; k0 < key_end; k0 += SPAN) {
      const int64_t k1 = min64(k0 + SPAN, key_end);
      span.pack(b, k0, k1 - k0);
      for (int64_t i = 0; i < count; i++) {
        Panel<Item>& p = unit[i];
        for (int64_t at = k0; at < k1; at += KEYS) {
          const int64_t b0 = max64(at, p.begin), b1 = min64(min64(at + KEYS, k1), p.end), keys = b1 - b0;
          if (keys <= 0) continue;
          const bool edge = b1 - 1 > start + p.t0 || b0 < start + p.t1 - s->back;
          const bool plain = !edge && cap == 0.0f && keys % WHOLE == 0;
          for (int64_t l = 0; l < p.width; l++) top[l] = NEGATIVE_INFINITY;
          score_block<A>(span.keys + (b0 - k0) * d, p.q, d, keys, p.width, scores, plain ? top : nullptr);
          if (!plain) {
            if (cap != 0.0f)
              for (int64_t j = 0; j < keys * GC_NR; j++) scores[j] = vtanh(scores[j] * cap) / cap;
            if (edge) hide_positions(&place, p.first, b0 - start, keys, scores);
            maximum(scores, keys, p.width, top);
          }
          weigh<A>(&p, scores, keys, factor, top, columns);
          for (int64_t c = 0; c < columns; c += GC_NR)
            mix_block<A>((const Item*)scores,
                         span.values + (c / GC_NR * A::steps(SPAN) + A::steps(b0 - k0)) * GC_NR, GC_NR,
                         A::steps(keys), p.lanes, p.out + c, columns, !p.fresh);
          p.fresh = false;
        }
      }
    }

    for (int64_t i = 0; i < count; i++) {
      Panel<Item>& p = unit[i];
      finish(&p, columns);
      for (int64_t l = 0; l < p.lanes; l++) {
        const int64_t t = (p.first + l) / s->group, h = (p.first + l) % s->group;
        T* const to = out + (t * s->heads * s->group + h) * s->dv;
        for (int64_t c = 0; c < s->dv; c++) to[c] = (T)p.out[l * columns + c];
      }
    }
  }
}

}  // namespace
