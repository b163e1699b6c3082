// Attention of few queries over many keys: see attention_decode.h.
//
// ptr = {q, out, partial, mask, sinks, k_0, v_0, k_1, v_1, ...}; imm = gc_decode_shape. The first Step
// (attention_decode_*) runs over size x chunks x row blocks. Where there is more than one chunk it leaves,
// per row and chunk, a record [maximum, sum, ..][dv] in `partial`, and attention_merge_* (over size x
// rows) makes `out` of them.
#pragma once
#include "attention_decode.h"
#include "attention_record.h"

namespace {
using namespace gc;

// The most rows of a unit that memory sets the pace of where they are read as a whole.
template <class T> constexpr int64_t FEW = sizeof(T) == 4 ? 4 : 2;
constexpr bool EIGHT = GC_VBYTES == 64;  // whether registers hold the sums of so many rows

// Keys between rescalings; blocks are even and hold up to twice that. Memory delivers most to a walk
// that neither changes between keys and values nor stops for a softmax: with few rows, whose values
// are walked over as a whole, a whole piece is one block. Else scores, weights and values stay near,
// and what comes some turns later is asked for.
template <class T> constexpr bool in_one(int64_t rows, int64_t dv) {
  return dv == 4 * PAIR ? rows <= FEW<T> : rows < 4 && dv < 4 * PAIR;
}
template <class T> constexpr int64_t block_keys(int64_t rows, int64_t dv) {
  return in_one<T>(rows, dv) ? 512 : 128;
}
// Keys and values are read in turns of so many, a page of values where memory sets the pace. In float32
// they are the longest sums, too.
template <class T> constexpr int64_t turn_keys(int64_t rows, int64_t dv) {
  if (in_one<T>(rows, dv)) return 256;
  return rows > MANY ? 32 : turn_rows(dv * (int64_t)sizeof(T));
}

// One unit of work: some rows of a batch over a piece of the keys.
template <class T>
struct Unit {
  typedef typename Query<T>::type W;
  const gc_args* args;
  const gc_decode_shape* s;
  int64_t z, rows, row0, first, last;  // keys [first, last)
  int64_t ldq, ldo, lds;
  int parts;                           // numbers that make a weight
  float scale, cap;                    // scale in units of log2
  W *q, *weights;                      // weights [rows][parts][lds]
  float *out, *scores, *maximum, *total, *factor;

  const T *keys[GC_DECODE_SEGMENTS], *values[GC_DECODE_SEGMENTS];

  void find_segments() {
    for (int64_t i = 0; i < s->segments; i++) {
      const gc_decode_segment& g = s->segment[i];
      keys[i] = (const T*)args->ptr[5 + 2 * i] + gc_batch_offset(s->size, g.k_z, z);
      values[i] = (const T*)args->ptr[6 + 2 * i] + gc_batch_offset(s->size, g.v_z, z);
    }
  }

  void load_queries() {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t g = (row0 + r) / s->tq, t = (row0 + r) % s->tq;
      const T* x = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->q_z, z) + g * s->q_g +
          t * s->q_t;
      load_query(x, s->q_d, s->d, q + r * ldq, ldq);
      for (int64_t i = 0; i < ldo; i++) out[r * ldo + i] = 0.0f;
      maximum[r] = NEGATIVE_INFINITY;
      total[r] = 0.0f;
    }
  }

  // f(segment, its number, first key in it, count, place behind k0) for the keys [k0, k0 + n).
  template <class F>
  void stretches(int64_t k0, int64_t n, F f) const {
    int64_t start = 0;
    for (int64_t i = 0; i < s->segments; i++) {
      const gc_decode_segment& segment = s->segment[i];
      const int64_t from = max64(k0, start), to = min64(k0 + n, start + segment.keys);
      if (from < to) f(segment, i, from - start, to - from, from - k0);
      start += segment.keys;
    }
  }

  bool one() const { return in_one<T>(rows, s->dv); }
  // Whether values are walked over more than once, or some columns after the others.
  bool in_tiles() const { return !one() && (rows > 1 || s->dv != WIDE<1> * PAIR); }
  // The rows that come some turns after those at p.
  Twice turns_later(const T* p, int64_t width, int64_t step) const {
    const int64_t ahead = turn_keys<T>(rows, s->dv) * (rows > MANY ? 1 : 3);
    return {later(p + ahead * step, width, step), later(p + ahead / 2 * step, width, step)};
  }

  // Scores of the n keys from k0 on, `place` keys into their block.
  void dots(int64_t k0, int64_t n, int64_t place) const {
    stretches(k0, n, [&](const gc_decode_segment& g, int64_t i, int64_t at, int64_t m, int64_t to) {
      const T* k = keys[i] + at * g.k_t;
      float* const o = scores + place + to;
      int64_t r = 0;
      const auto first = [&](auto count, auto&& next) __attribute__((always_inline)) {
        constexpr int R = decltype(count)::count;
        dot_keys<T, R>(q, ldq, k, g.k_t, s->d, m, o, lds, next);
        r = R;
      };
      if (in_tiles()) {
        if (rows >= 4) first(Count<4>(), turns_later(k, s->d, g.k_t));
        else if (rows >= 2) first(Count<2>(), turns_later(k, s->d, g.k_t));
        else first(Count<1>(), turns_later(k, s->d, g.k_t));
      } else if (rows >= 4) {
        first(Count<4>(), Quiet());
      }
      for (; r + 4 <= rows; r += 4)
        dot_keys<T, 4>(q + r * ldq, ldq, k, g.k_t, s->d, m, o + r * lds, lds, Near());
      for (; r + 2 <= rows; r += 2)
        dot_keys<T, 2>(q + r * ldq, ldq, k, g.k_t, s->d, m, o + r * lds, lds);
      for (; r < rows; r++)
        dot_keys<T, 1>(q + r * ldq, ldq, k, g.k_t, s->d, m, o + r * lds, lds);
    });
  }

  template <int R, class Next = Quiet>
  void mix_rows(int64_t r, const W* w, const T* v, int64_t step, int64_t m, bool start,
                Next&& next = Next()) const {
    mix_keys<T, R>(parts, w + r * parts * lds, lds, v, step, s->dv, m, start ? factor + r : nullptr,
                   out + r * ldo, ldo, next);
  }
  void mix(int64_t k0, int64_t n, int64_t place) const {
    stretches(k0, n, [&](const gc_decode_segment& g, int64_t i, int64_t at, int64_t m, int64_t to) {
      const T* v = values[i] + at * g.v_t;
      const W* w = weights + place + to;
      const bool start = place + to == 0;  // sums of the blocks before are rescaled
      int64_t r = 0;
      if (in_tiles() && rows < 4) {
        mix_rows<1>(0, w, v, g.v_t, m, start, turns_later(v, s->dv, g.v_t));
        r = 1;
      } else if (in_tiles()) {
        auto next = turns_later(v, s->dv, g.v_t);
        if (EIGHT && rows >= 8) mix_rows<8>(0, w, v, g.v_t, m, start, next), r = 8;
        else mix_rows<4>(0, w, v, g.v_t, m, start, next), r = 4;
        for (; EIGHT && r + 8 <= rows; r += 8) mix_rows<8>(r, w, v, g.v_t, m, start);
        for (; r + 4 <= rows; r += 4) mix_rows<4>(r, w, v, g.v_t, m, start);
      }
      if (one())
        for (; r + 2 <= rows; r += 2) mix_rows<2>(r, w, v, g.v_t, m, start);
      for (; r < rows; r++) mix_rows<1>(r, w, v, g.v_t, m, start);
    });
  }

  // What masks and positions do to n scores from key k0 on.
  void add_mask(int64_t r, int64_t k0, int64_t n, float* row) const {
    const int64_t g = (row0 + r) / s->tq, t = (row0 + r) % s->tq;
    if (s->mask_type) {
      const int64_t at = gc_batch_offset(s->size, s->mask_z, z) + g * s->mask_g + t * s->mask_t +
          k0 * s->mask_k;
      for (int64_t j = 0; j < n; j++)
        row[j] += addend(args->ptr[3], s->mask_type, at + j * s->mask_k);
    }
    for (int64_t j = 0; j < min64(n, t - s->back - k0); j++) row[j] = NEGATIVE_INFINITY;
    for (int64_t j = max64(0, t + s->ahead + 1 - k0); j < n; j++) row[j] = NEGATIVE_INFINITY;
  }

  // Memory would idle while few rows of scores become weights: it is asked for the first values.
  struct Coming {
    const char* row;
    int64_t step, bytes;
    void ask(int64_t i) const {
      const char* p = row + i * step;
      for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch(p + j, 0, 2);
    }
  };
  Coming coming(int64_t k0) const {
    Coming c{nullptr, 0, 0};
    if (one())
      stretches(k0, 1, [&](const gc_decode_segment& g, int64_t i, int64_t at, int64_t, int64_t) {
        c = {(const char*)(values[i] + at * g.v_t), g.v_t * (int64_t)sizeof(T), s->dv * (int64_t)sizeof(T)};
      });
    return c;
  }

  // Scores of a row to weights 2^(score - maximum).
  void softmax(int64_t r, int64_t k0, int64_t n) {
    float* const row = scores + r * lds;
    scale_scores(row, n, scale, cap);
    add_mask(r, k0, n, row);
    const Coming next = coming(k0);
    const auto ask = [&](int64_t i) { next.ask(r * n / VL + i); };
    if (sizeof(W) == 2 && parts == 1) weigh_row<false>(row, n, &maximum[r], &total[r], &factor[r], ask);
    else weigh_row<true>(row, n, &maximum[r], &total[r], &factor[r], ask);
    put_weights(row, n, parts, weights + r * parts * lds, lds);
  }

  // The values of a block are read in turn with the keys of the next: memory delivers both.
  void run() {
    const int64_t count = last - first, blocks = max64(1, count / (lds / 2));
    const int64_t size = (count + blocks - 1) / blocks, turn = turn_keys<T>(rows, s->dv);
    for (int64_t k0 = first - size, n = 0; k0 < last;) {
      const int64_t after = k0 + size, m = max64(0, min64(size, last - after));
      for (int64_t place = 0; place < max64(n, m); place += turn) {
        if (place < m) dots(after + place, min64(turn, m - place), place);
        if (place < n) mix(k0 + place, min64(turn, n - place), place);
      }
      if (m > 0)
        for (int64_t r = 0; r < rows; r++) softmax(r, after, m);
      k0 = after;
      n = m;
    }
  }
};

// Stores a finished row, whose weights sum up to `total` under `maximum`.
template <class T>
static void put(const gc_args* args, const gc_decode_shape* s, int64_t z, int64_t row, const float* x,
                float maximum, float total) {
  const int64_t g = row / s->tq, t = row % s->tq;
  float sink = NEGATIVE_INFINITY;
  if (s->sink_type)
    sink = addend(args->ptr[4], s->sink_type, gc_batch_offset(s->size, s->sink_z, z) + g * s->sink_g);
  T* o = (T*)args->ptr[1] + gc_batch_offset(s->size, s->out_z, z) + g * s->out_g + t * s->out_t;
  put_row(x, s->dv, row_factor(maximum, total, sink), o, s->out_d);
}

// scratch in floats: out [rows][dv], scores, weights [rows][lds], [dv], 3 x [ROWS], q [rows][d]; d
// and dv rounded up to 32
template <class T>
static void decode(const gc_args* args, int64_t begin, int64_t end) {
  const gc_decode_shape* s = (const gc_decode_shape*)args->imm;
  const int64_t all = s->group * s->tq, blocks = (all + GC_DECODE_ROWS - 1) / GC_DECODE_ROWS;
  const int64_t piece = (s->tk + s->chunks - 1) / s->chunks;
  const int64_t most = min64(all, GC_DECODE_ROWS);
  typedef typename Query<T>::type W;
  Unit<T> u{args, s};
  u.ldq = whole(s->d);
  u.ldo = whole(s->dv);
  u.parts = sizeof(W) == 2 && all <= EXACT ? 2 : 1;
  u.out = (float*)args->scratch;
  u.scores = u.out + most * u.ldo;
  u.lds = 2 * block_keys<T>(most, s->dv);
  u.weights = (W*)(u.scores + most * u.lds);
  float* const natural = u.scores + 2 * most * u.lds;
  u.maximum = natural + u.ldo;
  u.total = u.maximum + GC_DECODE_ROWS;
  u.factor = u.total + GC_DECODE_ROWS;
  u.q = (W*)(u.factor + GC_DECODE_ROWS);
  u.scale = (float)(float_of(s->scale) * 1.4426950408889634074);
  u.cap = (float)float_of(s->soft_cap);
  for (int64_t i = begin; i < end; i++) {
    const int64_t chunk = i / blocks % s->chunks;
    u.z = i / blocks / s->chunks;
    u.row0 = i % blocks * GC_DECODE_ROWS;
    u.rows = min64(GC_DECODE_ROWS, all - u.row0);
    u.first = chunk * piece;
    u.last = min64(s->tk, u.first + piece);
    u.first = max64(u.first, -s->back);  // what no row sees is not read
    u.last = min64(u.last, s->tq + s->ahead);
    u.find_segments();
    u.load_queries();
    if (u.first < u.last) u.run();
    for (int64_t r = 0; r < u.rows; r++) {
      const int64_t row = u.row0 + r;
      if (s->chunks == 1) {
        from_lane_order<T>(u.out + r * u.ldo, s->dv, natural);
        put<T>(args, s, u.z, row, natural, u.maximum[r], u.total[r]);
      } else {
        float* p = (float*)args->ptr[2] + ((u.z * all + row) * s->chunks + chunk) * record(s->dv);
        p[0] = u.maximum[r];
        p[1] = u.total[r];
        from_lane_order<T>(u.out + r * u.ldo, s->dv, p + HEAD);
      }
    }
  }
}

template <class T>
static void merge(const gc_args* args, int64_t begin, int64_t end) {
  const gc_decode_shape* s = (const gc_decode_shape*)args->imm;
  if (s->chunks == 1) return;
  const int64_t all = s->group * s->tq, step = record(s->dv);
  float* const x = (float*)args->scratch;
  for (int64_t i = begin; i < end; i++) {
    float most, total;
    merge_records((const float*)args->ptr[2] + i * s->chunks * step, s->chunks, s->dv, x, &most, &total);
    put<T>(args, s, i / all, i % all, x, most, total);
  }
}

}  // namespace

#define GC_DECODE(TAG, TYPE)                                                                  \
  GC_EXPORT void attention_decode_##TAG(const gc_args* args, int64_t begin, int64_t end) {           \
    decode<TYPE>(args, begin, end);                                                           \
  }                                                                                           \
  GC_EXPORT void attention_merge_##TAG(const gc_args* args, int64_t begin, int64_t end) {     \
    merge<TYPE>(args, begin, end);                                                            \
  }
