// Few queries over long pasts (attention_cached.h): memory sets the pace, so that rows of keys and
// values are asked for in the order they lie in, whole pages at a time, well before they are read.
//
// A unit is a piece of one sequence's keys for `unit` heads of keys. How many pieces a sequence has
// follows from its length alone; they are spread evenly over the places of the range that its longest
// has. Pieces leave records, which gc_cached_merge_* (over sequences x queries x heads) merges in
// order; a piece that is all of a sequence is finished at once.
#include "attention_cached.h"
#include "attention_decode.h"
#include "attention_record.h"

namespace {
using namespace gc;

constexpr int64_t BLOCK = 16;  // keys between rescalings
constexpr int64_t TURN = 16;   // keys after which the next rows are asked for

struct Piece {
  int64_t first, last;
};
static int64_t pieces_of(const gc_cached_shape* s, Seen seen) {
  const int64_t n = (seen.last - seen.first) / s->piece;
  return n < 1 ? 1 : n < s->pieces ? n : s->pieces;
}

// Rows that lie one after the other: the keys of head 0, and its values.
template <class T> struct Stretch {
  const T *k, *v;
  int64_t rows;
};

// The rows of a block in as many stretches as it touches pages.
template <class T> struct Block {
  int64_t keys, count;
  Stretch<T> part[BLOCK + 1];
};

// Asks for a block's rows in the order they lie in, as much at a time as is read meanwhile: what a
// core asks for all at once is dropped.
template <class T> struct Coming {
  const char* p;
  int64_t left;  // bytes from p on that lie in one piece
  const Block<T>* block;
  int64_t k_row, v_row, k_bytes, v_bytes;
  int64_t part, row, place;  // the next piece: `place` 0 keys of a row, 1 its values
  bool dense;                // rows lie in one piece

  void begin(const Block<T>* b) {
    block = b;
    part = row = place = 0;
    advance();
  }
  __attribute__((noinline)) void advance() {
    left = 0;
    if (part == block->count) return;
    const Stretch<T>& s = block->part[part];
    if (dense) {
      p = (const char*)s.k;
      left = s.rows * (k_bytes + v_bytes);
      part++;
      return;
    }
    p = place == 0 ? (const char*)(s.k + row * k_row) : (const char*)(s.v + row * v_row);
    left = place == 0 ? k_bytes : v_bytes;
    if (place++ == 0) return;
    place = 0;
    if (++row < s.rows) return;
    row = 0;
    part++;
  }
  inline __attribute__((always_inline)) void ask(int64_t bytes) {
    if (left <= 0) return;
#pragma GCC unroll 8
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
    p += bytes;
    left -= bytes;
    if (left <= 0) advance();
  }
};

template <class T> struct Unit {
  typedef typename Query<T>::type W;
  const gc_args* args;
  const gc_cached_shape* s;
  int64_t b, head, heads, rows;  // rows: queries of a head of keys
  int64_t ldq, ldo;
  int parts;           // numbers that make a weight
  float scale, cap;    // scale in units of log2
  W *q, *weights;      // [heads][rows][ldq], [rows][parts][BLOCK]
  float *out, *scores, *maximum, *total, *factor;  // [heads][rows][ldo], [rows][BLOCK], [heads][rows]
  const T* none;       // a row of zeros, where a page is missing
  Block<T>* blocks;    // two
  Coming<T> coming;

  void load_queries() {
    for (int64_t i = 0; i < heads * rows; i++) {
      const int64_t g = i % rows / s->tq, t = i % rows % s->tq, h = (head + i / rows) * s->group + g;
      const T* x = (const T*)args->ptr[0] + b * s->q_b + h * s->q_h + t * s->q_t;
      load_query(x, s->q_d, s->d, q + i * ldq, ldq);
      for (int64_t j = 0; j < ldo; j++) out[i * ldo + j] = 0.0f;
      maximum[i] = NEGATIVE_INFINITY;
      total[i] = 0.0f;
    }
  }

  void find(int64_t k0, int64_t keys, Block<T>* block) const {
    const int64_t size = s->paging.rows;
    block->keys = keys;
    block->count = 0;
    for (int64_t at = k0; at < k0 + keys;) {
      const int64_t row = at % size;
      const int64_t page = page_of(&s->paging, (const int32_t*)args->ptr[3], b, at / size);
      Stretch<T>& part = block->part[block->count++];
      part.rows = page < 0 ? 1 : min64(size - row, k0 + keys - at);
      part.k = (const T*)args->ptr[4] + page * s->k_page + row * s->k_row + head * s->k_h;
      part.v = (const T*)args->ptr[5] + page * s->v_page + row * s->v_row + head * s->v_h;
      if (page < 0) part.k = part.v = none;
      at += part.rows;
    }
  }

  // f(first of some keys, first of their values, how many, place in the block) for head h of the unit.
  template <class F> void turns(const Block<T>* block, int64_t h, F f) {
    int64_t place = 0;
    for (int64_t i = 0; i < block->count; i++) {
      const Stretch<T>& part = block->part[i];
      for (int64_t row = 0, n; row < part.rows; row += n, place += n) {
        n = min64(TURN, part.rows - row);
        f(part.k + row * s->k_row + h * s->k_h, part.v + row * s->v_row + h * s->v_h, n, place);
      }
    }
  }

  void dots(const Block<T>* block, int64_t h) {
    const W* const own = q + h * rows * ldq;
    turns(block, h, [&](const T* k, const T*, int64_t n, int64_t place) {
      float* const to = scores + place;
      int64_t r = 0;
      if (rows >= 4) {
        dot_keys<T, 4, Coming<T>&>(own, ldq, k, s->k_row, s->d, n, to, BLOCK, coming);
        for (r = 4; r + 4 <= rows; r += 4)
          dot_keys<T, 4>(own + r * ldq, ldq, k, s->k_row, s->d, n, to + r * BLOCK, BLOCK);
      }
      for (; r + 2 <= rows; r += 2)
        dot_keys<T, 2, Coming<T>&>(own + r * ldq, ldq, k, s->k_row, s->d, n, to + r * BLOCK, BLOCK, coming);
      for (; r < rows; r++)
        dot_keys<T, 1, Coming<T>&>(own + r * ldq, ldq, k, s->k_row, s->d, n, to + r * BLOCK, BLOCK, coming);
    });
  }

  void mix(const Block<T>* block, int64_t h) {
    static const float one[2] = {1.0f, 1.0f};
    float* const own = out + h * rows * ldo;
    turns(block, h, [&](const T*, const T* v, int64_t n, int64_t place) {
      const W* w = weights + place;
      int64_t r = 0;
      for (; r + 2 <= rows; r += 2)  // sums of the blocks before are rescaled
        mix_keys<T, 2, Coming<T>&>(parts, w + r * parts * BLOCK, BLOCK, v, s->v_row, s->dv, n,
                                   place ? one : factor + r, own + r * ldo, ldo, coming);
      for (; r < rows; r++)
        mix_keys<T, 1, Coming<T>&>(parts, w + r * parts * BLOCK, BLOCK, v, s->v_row, s->dv, n,
                                   place ? one : factor + r, own + r * ldo, ldo, coming);
    });
  }

  // Weights of all queries of a head for the keys from k0 on.
  void weigh(int64_t h, int64_t k0, int64_t n, int64_t start) {
    for (int64_t r = 0; r < rows; r++) {
      float* const row = scores + r * BLOCK;
      scale_scores(row, n, scale, cap);
      const int64_t place = start + r % s->tq;
      for (int64_t j = 0; j < min64(n, place - s->back - k0); j++) row[j] = NEGATIVE_INFINITY;
      for (int64_t j = max64(0, place + 1 - k0); j < n; j++) row[j] = NEGATIVE_INFINITY;
      const int64_t i = h * rows + r;
      weigh_row(row, n, maximum + i, total + i, factor + r, [](int64_t) {});
      put_weights(row, n, parts, weights + r * parts * BLOCK, BLOCK);
    }
  }

  // Nobody has asked for the first rows of a piece: there are few of them.
  void run(Piece piece, int64_t start) {
    Block<T>*now = blocks, *next = blocks + 1;
    int64_t k0 = piece.first;
    find(k0, min64(BLOCK, piece.last - k0), now);
    while (k0 < piece.last) {
      const int64_t after = k0 + now->keys;
      find(after, min64(BLOCK, piece.last - after), next);
      coming.begin(next);
      for (int64_t h = 0; h < heads; h++) {
        dots(now, h);
        weigh(h, k0, now->keys, start);
        mix(now, h);
      }
      Block<T>* const done = now;
      now = next;
      next = done;
      k0 = after;
    }
  }
};

// Stores the finished row of query t of head h.
template <class T>
static void put(const gc_args* args, const gc_cached_shape* s, int64_t b, int64_t h, int64_t t,
                const float* x, float maximum, float total) {
  const float sink =
      s->sink_type ? addend(args->ptr[7], s->sink_type, h * s->sink_h) : NEGATIVE_INFINITY;
  T* out = (T*)args->ptr[1] + ((b * s->tq + t) * s->heads * s->group + h) * s->dv;
  put_row(x, s->dv, row_factor(maximum, total, sink), out, 1);
}

// The record of piece c of a query.
static float* record_of(const gc_args* args, const gc_cached_shape* s, int64_t b, int64_t h, int64_t t,
                        int64_t c) {
  const int64_t row = (b * s->tq + t) * s->heads * s->group + h;
  return (float*)args->ptr[6] + (row * s->pieces + c) * record(s->dv);
}

// scratch in floats, d and dv rounded up to 32, R = group * tq, U = unit: out [U R dv], scores and
// weights [R 64] each, a row [dv], 2 x [U R], [R], q [U R d], zeros [U max(d, dv)]; then two blocks.
template <class T> static void few(const gc_args* args, int64_t begin, int64_t end) {
  const gc_cached_shape* s = (const gc_cached_shape*)args->imm;
  const int64_t rows = s->group * s->tq, all = s->unit * rows, zeros = s->unit * max64(s->d, s->dv);
  typedef typename Query<T>::type W;
  Unit<T> u{args, s};
  float* scratch = (float*)args->scratch;
  const auto take = [&scratch](int64_t n) { return (scratch += n) - n; };
  u.rows = rows;
  u.ldq = whole(s->d);
  u.ldo = whole(s->dv);
  u.parts = sizeof(W) == 2 && rows <= EXACT ? 2 : 1;
  u.scale = (float)(float_of(s->scale) * 1.4426950408889634074);
  u.cap = (float)float_of(s->soft_cap);
  u.out = take(all * u.ldo);
  u.scores = take(rows * BLOCK);
  u.weights = (W*)take(rows * BLOCK);
  float* const natural = take(u.ldo);
  u.maximum = take(all);
  u.total = take(all);
  u.factor = take(rows);
  u.q = (W*)take(all * u.ldq);
  T* const none = (T*)take(zeros);
  u.none = none;
  memset((void*)none, 0, (size_t)zeros * sizeof(T));
  u.blocks = (Block<T>*)(((uintptr_t)scratch + 7) & ~(uintptr_t)7);

  const int64_t units = (s->heads + s->unit - 1) / s->unit;
  for (int64_t i = begin; i < end; i++) {
    const int64_t place = i % s->pieces;
    u.b = i / s->pieces / units;
    u.head = i / s->pieces % units * s->unit;
    u.heads = min64(s->unit, s->heads - u.head);
    const int64_t start = ((const int32_t*)args->ptr[2])[u.b];
    const Seen seen = keys_seen(s, start, 0, s->tq);
    const int64_t count = max64(0, seen.last - seen.first), pieces = pieces_of(s, seen);
    const int64_t c = place * pieces / s->pieces, size = (count + pieces - 1) / pieces;
    if ((place + 1) * pieces / s->pieces == c) continue;  // another place's
    u.coming.k_row = s->k_row;
    u.coming.v_row = s->v_row;
    u.coming.k_bytes = u.heads * s->d * (int64_t)sizeof(T);
    u.coming.v_bytes = u.heads * s->dv * (int64_t)sizeof(T);
    u.coming.dense = u.heads == s->heads && s->k_row == s->heads * (s->d + s->dv) &&
        (const T*)args->ptr[5] - (const T*)args->ptr[4] == s->heads * s->d;
    u.load_queries();
    u.run({seen.first + c * size, min64(seen.last, seen.first + (c + 1) * size)}, start);
    for (int64_t j = 0; j < u.heads * rows; j++) {
      const int64_t h = (u.head + j / rows) * s->group + j % rows / s->tq, t = j % rows % s->tq;
      if (pieces == 1) {
        from_lane_order<T>(u.out + j * u.ldo, s->dv, natural);
        put<T>(args, s, u.b, h, t, natural, u.maximum[j], u.total[j]);
        continue;
      }
      float* p = record_of(args, s, u.b, h, t, c);
      p[0] = u.maximum[j];
      p[1] = u.total[j];
      from_lane_order<T>(u.out + j * u.ldo, s->dv, p + HEAD);
    }
  }
}

template <class T> static void merge(const gc_args* args, int64_t begin, int64_t end) {
  const gc_cached_shape* s = (const gc_cached_shape*)args->imm;
  const int64_t heads = s->heads * s->group;
  float* const x = (float*)args->scratch;
  for (int64_t i = begin; i < end; i++) {
    const int64_t h = i % heads, t = i / heads % s->tq, b = i / heads / s->tq;
    const Seen seen = keys_seen(s, ((const int32_t*)args->ptr[2])[b], 0, s->tq);
    const int64_t pieces = pieces_of(s, seen);
    if (pieces == 1) continue;
    float most, total;
    merge_records(record_of(args, s, b, h, t, 0), pieces, s->dv, x, &most, &total);
    put<T>(args, s, b, h, t, x, most, total);
  }
}

}  // namespace

#define GC_CACHED_FEW(TAG, T)                                                                  \
  GC_EXPORT void gc_cached_few_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    few<T>(args, begin, end);                                                                  \
  }                                                                                            \
  GC_EXPORT void gc_cached_merge_##TAG(const gc_args* args, int64_t begin, int64_t end) {      \
    merge<T>(args, begin, end);                                                                \
  }
// One dtype alone where its unit says so (templates/strided.py).
#ifndef GC_ONE_DTYPE
#define GC_ONLY_f32
#define GC_ONLY_f16
#define GC_ONLY_bf16
#endif
#ifdef GC_ONLY_f32
GC_CACHED_FEW(f32, float)
#endif
#ifdef GC_ONLY_f16
GC_CACHED_FEW(f16, gc::f16)
#endif
#ifdef GC_ONLY_bf16
GC_CACHED_FEW(bf16, gc::bf16)
#endif
