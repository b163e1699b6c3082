// Scores of the Lightning Indexer and the choice of the best, for a block of queries at a time.
//
//   I[t, s] = sum_h weights[t, h] * relu(query[t, h] . key[s])        s <= start + t
//
// or, where a key stands for a pool of P tokens, s < (start + t + 1) / P.
//
// Three vectors of keys at a time are packed into a panel that stays in the first level, and scored for
// all queries of the block. A tile is the dot products of up to eight heads with the keys of a panel,
// in registers, which are rectified, weighted and added to the scores there: keys are lanes, so
// nothing is added across. 480 scores at a time go into a query's buffer of candidates
// (best_positions.h).
//
// The dot product of a head is one chain over D, a score one chain over the heads, wherever a key
// lies and whatever queries come together: a row has the same scores in one piece, in chunks and alone.
//
// ptr = {query, weights, keys, table, start, out, partial}; imm = gc_indexer_shape.
// Keys may be records (records.h); queries are then narrowed in the same way. Of the candidates chosen
// like that, lightning_indexer_again (over batch x queries; ptr = {query, weights, keys, table,
// candidates, out}) chooses by the queries as they are and two terms of each key.
//
// The first Step runs over batch x chunks x blocks of queries. Where a sequence's keys are cut into
// chunks, it leaves [batch][queries][chunks] records {n, orders [count], positions [count]} in
// `partial`, of which the second (lightning_indexer_merge, over batch x queries) makes `out`.
#pragma once
#include "prelude.h"

#include "attention_tile.h"
#include "best_positions.h"
#include "record_keys.h"
#include "row_source.h"

struct gc_indexer_shape {
  int64_t queries, heads, d, count, chunks, block;
  int64_t starts;  // 0: every sequence begins at position 0
  int64_t pool;    // tokens of a key
  int64_t q_b, q_t, q_h, w_b, w_t, w_h;
  int64_t weight_type;  // 1 fp32, 2 bf16, 3 fp16
  gc_row_source keys;
};

namespace {
using namespace gc;

constexpr int PANEL_VECTORS = VL == 4 ? 4 : 3, PANEL_KEYS = PANEL_VECTORS * VL;
constexpr int TILE_HEADS = VL == 16 ? 8 : VL == 8 ? 4 : 2;
static_assert(BEST_BLOCK % PANEL_KEYS == 0, "a block is whole panels");

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
GC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

GC_INLINE vf rectified(vf x) { return vf{} > x ? vf{} : x; }  // NaN stays NaN

// The keys of the panel after this one, asked for bit by bit while this one is scored: what a single
// query does with a key takes no longer than memory needs to deliver it. `bytes` lie together from
// every `every`th row on; each step of a tile asks for `lines` of their cache lines.
struct Ahead {
  const char* const* row;  // [PANEL_KEYS]
  int64_t every, bytes, lines;
  int64_t next = 0;
  const char *at = nullptr, *end = nullptr;

  inline __attribute__((always_inline)) void fetch() {
    for (int64_t l = 0; l < lines; l++, at += 64) {
      if (at >= end) {
        if (next >= PANEL_KEYS) return;
        at = (const char*)((uintptr_t)row[next] & ~(uintptr_t)63);
        end = row[next] + bytes;
        next += every;
      }
      __builtin_prefetch(at, 0, 2);
    }
  }
};

// scores[PANEL_KEYS] += weights . relu(q [steps][R] . panel [steps][PANEL_KEYS])
template <class A, int R>
GC_INLINE void score_tile(const typename A::item* q, const typename A::item* panel, int64_t steps,
                          const float* weights, float* scores, Ahead& ahead) {
  vf acc[R][PANEL_VECTORS] = {};
  const auto step = [&]() __attribute__((always_inline)) {
    typename A::vec k[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) k[v] = load<typename A::vec>(panel + v * VL);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = A::multiply(acc[r][v], q[r], k[v]);
    }
    q += R;
    panel += PANEL_KEYS;
  };
  int64_t i = 0;
  if (ahead.lines) {
    for (; i < steps; i++) {
      ahead.fetch();
      step();
    }
  }
  for (; i + 4 <= steps; i += 4) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) step();
  }
  for (; i < steps; i++) step();
  vf sum[PANEL_VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; v++) sum[v] = load<vf>(scores + v * VL);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) sum[v] += splat(weights[r]) * rectified(acc[r][v]);
  }
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; v++) store(scores + v * VL, sum[v]);
}

// Heads of a query in tiles of 8 (or 4), then 4, 2, 1: f(first head, heads as a type).
template <class F> GC_INLINE void for_heads(int64_t heads, F f) {
  int64_t h = 0;
  for (; h + TILE_HEADS <= heads; h += TILE_HEADS) f(h, Rows<TILE_HEADS>());
  if (TILE_HEADS > 4 && h + 4 <= heads) {
    f(h, Rows<4>());
    h += 4;
  }
  if (TILE_HEADS > 2 && h + 2 <= heads) {
    f(h, Rows<2>());
    h += 2;
  }
  if (h < heads) f(h, Rows<1>());
}

// next: the rows of the panel after this one, to be asked for, or null; `bytes` together from every
// `every`th on.
template <class A>
static void score_panel(const typename A::item* q, const typename A::item* panel, int64_t steps,
                        int64_t heads, const float* weights, float* scores,
                        const char* const* next, int64_t every, int64_t bytes) {
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; v++) store(scores + v * VL, vf{});
  Ahead ahead = {next, every, bytes, 0};
  if (next) {
    const int64_t all = PANEL_KEYS / every * (bytes + 127) / 64;
    const int64_t turns = steps * max64(1, heads / TILE_HEADS);
    ahead.lines = (all + turns - 1) / turns;
  }
  for_heads(heads, [&](int64_t h, auto rows) __attribute__((always_inline)) {
    score_tile<A, decltype(rows)::count>(q + h * steps, panel, steps, weights + h, scores, ahead);
  });
}

// Heads of a query as tiles [steps][heads of the tile].
template <class T>
static void pack_query(const T* q, int64_t step, int64_t heads, int64_t d, float* dst) {
  for_heads(heads, [&](int64_t h, auto rows) {
    constexpr int R = decltype(rows)::count;
    pack_rows(q + h * step, step, 1, R, d, dst + h * d, R);
  });
}
static inline void pack_query(const bf16* q, int64_t step, int64_t heads, int64_t d, uint32_t* dst) {
  const int64_t steps = (d + 1) / 2;
  for_heads(heads, [&](int64_t h, auto rows) {
    constexpr int R = decltype(rows)::count;
    for (int r = 0; r < R; r++) {
      const bf16* row = q + (h + r) * step;
      uint32_t* out = dst + h * steps + r;
      for (int64_t i = 0; i < d / 2; i++) memcpy(out + i * R, row + 2 * i, 4);
      if (d % 2) out[d / 2 * R] = row[d - 1].u;
    }
  });
}

// Eight keys as lanes of dst [steps][PANEL_KEYS]. Rows are finished eight by eight: memory delivers
// less to a walk that takes a bit of each of many rows in turn.
template <class T> static void pack_keys(const T* const* rows, int64_t d, float* dst) {
  int64_t i = 0;
  for (; i + 8 <= d; i += 8) {
    vf8 t[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) t[j] = load8(rows[j] + i);
    transpose8(t);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) store(dst + (i + j) * PANEL_KEYS, t[j]);
  }
  for (; i < d; i++)
    for (int j = 0; j < 8; j++) dst[i * PANEL_KEYS + j] = to_float(rows[j][i]);
}
static inline void pack_keys(const bf16* const* rows, int64_t d, uint32_t* dst) {
  int64_t i = 0;
  for (; i + 16 <= d; i += 16) {  // a pair moves as one 32-bit item
    vf8 t[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) t[j] = load<vf8>(rows[j] + i);
    transpose8(t);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) store(dst + (i / 2 + j) * PANEL_KEYS, t[j]);
  }
  for (; i < d; i += 2)
    for (int j = 0; j < 8; j++)
      dst[i / 2 * PANEL_KEYS + j] = rows[j][i].u | (i + 1 < d ? (uint32_t)rows[j][i + 1].u << 16 : 0);
}

static inline float weight_at(const void* w, int64_t type, int64_t i) {
  if (type == 1) return ((const float*)w)[i];
  return type == 2 ? (float)((const bf16*)w)[i] : (float)((const f16*)w)[i];
}

GC_INLINE int64_t record_size(int64_t count) { return 1 + 2 * count; }

// Everything a thread needs; scratch in 4-byte items, see lowering/templates/lightning_indexer.py.
// T: of queries; K: of keys, T or bytes of records.
template <class T, class A, class K> struct Indexer {
  typedef typename A::item Item;
  static constexpr bool RECORDS = !std::is_same<T, K>::value;
  const gc_args* args;
  const gc_indexer_shape* s;
  int64_t steps;
  Item *panel, *queries;    // [steps][PANEL_KEYS]; [block][heads][steps]
  float *scores, *weights;  // [block][BEST_BLOCK]; [block][heads]
  int32_t* candidates;
  RecordKeys<T> records;
  RowSource<K> source;

  Indexer(const gc_args* a) : args(a), s((const gc_indexer_shape*)a->imm), steps(A::steps(s->d)) {
    char* at = (char*)a->scratch;
    const auto take = [&at](int64_t items) { return (at += items * 4) - items * 4; };
    scores = (float*)take(s->block * BEST_BLOCK);
    panel = (Item*)take(48 * s->d);
    queries = (Item*)take(s->block * s->heads * s->d);
    weights = (float*)take(s->block * s->heads);
    const int64_t none = (RECORDS ? GROUPED / 2 : 1) * s->d;
    K* zeros = (K*)take(none);
    memset((void*)zeros, 0, (size_t)none * 4);
    candidates = (int32_t*)take(s->block * 2 * best_room(s->count));
    source = {&s->keys, (const K*)a->ptr[2], (const int32_t*)a->ptr[3], zeros};
    if constexpr (RECORDS)
      records = {(const gc_record_keys*)(s + 1), zeros, (float*)take((27 + s->heads) * s->d)};
  }

  const int32_t* start() const { return s->starts ? (const int32_t*)args->ptr[4] : nullptr; }
  int32_t* row(int64_t b, int64_t t) const {
    return (int32_t*)args->ptr[5] + (b * s->queries + t) * s->count;
  }

  void load_query(int64_t i, int64_t b, int64_t t, bool narrow) {
    const T* q = (const T*)args->ptr[0] + b * s->q_b + t * s->q_t;
    if (RECORDS && narrow)
      pack_query(records.narrowed(q, s->q_h, s->heads, s->d), s->d, s->heads, s->d,
                 queries + i * s->heads * steps);
    else
      pack_query(q, s->q_h, s->heads, s->d, queries + i * s->heads * steps);
    for (int64_t h = 0; h < s->heads; h++)
      weights[i * s->heads + h] =
          weight_at(args->ptr[1], s->weight_type, b * s->w_b + t * s->w_t + h * s->w_h);
  }

  int64_t row_bytes() const {
    return RECORDS ? records.keys->format.bytes : s->d * (int64_t)sizeof(T);
  }
  // Rows that lie together from every so many on, where those begin at a multiple of it.
  int64_t run() const {
    const bool dense = s->keys.row * (int64_t)sizeof(K) == row_bytes();
    return dense && s->keys.page_rows % GROUPED == 0 ? GROUPED : 1;
  }

  // n rows from the `first`th on as the panel, which is whole eights of rows. The number of rows[0] is
  // a multiple of 16.
  void pack(const K* const* rows, int64_t first, int64_t n) {
    for (int64_t r = 0; r < n; r += 8) {
      if constexpr (RECORDS) {
        const bool grouped = records.grouped();
#if GC_RECORD_PANEL
        if constexpr (std::is_same<A, Pairs>::value) {
          if (grouped && r % GROUPED == 0 &&
              records.panel.pack(rows[first + r], s->d, panel + r, PANEL_KEYS)) {
            r += 8;
            continue;
          }
        }
#endif
        int64_t lane[8];
        const K* from[8];
        for (int j = 0; j < 8; j++) {
          const int64_t row = first + r + j;
          lane[j] = row % GROUPED;
          from[j] = rows[grouped ? row & -GROUPED : row];
        }
        pack_keys(records.rows(from, lane, s->d, false), s->d, panel + r);
      } else {
        pack_keys(rows + first + r, s->d, panel + r);
      }
    }
  }

  // Scores the queries [first, rows), which see seen(i) keys, against the keys [k, k + n). `end`:
  // of the keys that will be wanted.
  template <class F>
  void score_block(int64_t b, int64_t k, int64_t n, int64_t end, int64_t first, int64_t rows,
                   F seen) {
    const K* places[BEST_BLOCK + PANEL_KEYS];
    const int64_t known = min64(end - k, n + PANEL_KEYS);
    source.find(b, k, known, places);
    for (int64_t j = known; j < n + PANEL_KEYS; j++) places[j] = source.zeros;
    for (int64_t j = 0; j < n; j += PANEL_KEYS) {
      pack(places, j, min64(n - j, PANEL_KEYS));
      const char* const* next = (const char* const*)(places + j + PANEL_KEYS);
      if (j + PANEL_KEYS >= known) next = nullptr;
      for (int64_t i = first; i < rows; i++) {
        if (seen(i) <= k + j) continue;
        score_panel<A>(queries + i * s->heads * steps, panel, steps, s->heads, weights + i * s->heads,
                       scores + i * BEST_BLOCK + j, next, run(), run() * row_bytes());
        next = nullptr;
      }
    }
  }

  // Queries t0 .. t0 + rows of sequence b, chunk `chunk` of their keys.
  void run(int64_t b, int64_t chunk, int64_t t0, int64_t rows) {
    const int64_t longest = rows_seen(start(), b, t0 + rows - 1, s->keys.capacity, s->pool);
    int64_t first = 0;  // queries before it see no more keys than are wanted: they need no scores
    for (; first < rows; first++) {
      const int64_t seen = rows_seen(start(), b, t0 + first, s->keys.capacity, s->pool);
      if (seen > s->count) break;
      if (chunk == 0) put_all(row(b, t0 + first), seen, s->count);
    }
    if (first == rows) return;
    const int64_t even = (longest + s->chunks - 1) / s->chunks;
    const int64_t piece = (even + BEST_BLOCK / 10 - 1) / (BEST_BLOCK / 10) * (BEST_BLOCK / 10);
    const int64_t begin = min64(longest, chunk * piece), end = min64(longest, begin + piece);
    BestPositions best[64];
    for (int64_t i = first; i < rows; i++) {
      best[i].start(s->count, candidates + i * 2 * best_room(s->count));
      load_query(i, b, t0 + i, true);
    }
    const auto seen = [&](int64_t i) {
      return rows_seen(start(), b, t0 + i, s->keys.capacity, s->pool);
    };
    for (int64_t k = begin; k < end; k += BEST_BLOCK) {
      const int64_t n = min64(BEST_BLOCK, end - k);
      score_block(b, k, n, end, first, rows, seen);
      for (int64_t i = first; i < rows; i++) {
        const int64_t shown = min64(n, seen(i) - k);
        if (shown > 0) best[i].offer(scores + i * BEST_BLOCK, shown, k);
      }
    }
    for (int64_t i = first; i < rows; i++) {
      best[i].finish();
      if (s->chunks == 1) put(row(b, t0 + i), best[i], s->count);
      else keep(best[i], b, t0 + i, chunk);
    }
  }

#if GC_RECORD_PANEL
  // The same, sixteen keys that share their bytes at a time: they are turned faster than one of them is
  // picked out. False where a scale is none that this can do.
  bool pack_groups(int64_t b, const int32_t* among, int64_t n) {
    uint32_t *const both = (uint32_t*)records.groups(s->d), *const second = both + GROUPED * steps;
    int64_t packed = -1;
    for (int64_t r = 0; r < n; r++) {
      const int64_t first = among[r] & -GROUPED;
      if (first != packed) {
        const uint8_t* const group = source.at(b, first);
        if (group == source.zeros || !records.panel.pack(group, s->d, both, GROUPED) ||
            !records.panel.pack(group + records.keys->second, s->d, second, GROUPED))
          return false;
        for (int64_t i = 0; i < GROUPED * steps; i += VL) add_pairs(both + i, second + i);
        packed = first;
      }
      const uint32_t* const from = both + among[r] % GROUPED;
      for (int64_t i = 0; i < steps; i++) panel[i * PANEL_KEYS + r] = from[i * GROUPED];
    }
    return true;
  }
  static inline __attribute__((always_inline)) void add_pairs(uint32_t* to, const uint32_t* more) {
    const vi a = load<vi>(to), m = load<vi>(more), upper = vi{} + (int32_t)0xffff0000;
    const vf low = (vf)(a << 16) + (vf)(m << 16), high = (vf)(a & upper) + (vf)(m & upper);
    store(to, pair_lanes(low, high));
  }
#endif

  // Keys as the panel, by both terms, with zeros behind them.
  void pack_candidates(int64_t b, const int32_t* among, int64_t n) {
#if GC_RECORD_PANEL
    if constexpr (std::is_same<A, Pairs>::value)
      if (records.grouped() && pack_groups(b, among, n)) return;
#endif
    for (int64_t r = 0; r < PANEL_KEYS; r += 8) {
      const K* from[8];
      int64_t lane[8];
      for (int j = 0; j < 8; j++) {
        const int64_t row = r + j < n ? among[r + j] : 0;
        lane[j] = row % GROUPED;
        from[j] = r + j < n ? source.at(b, records.grouped() ? row & -GROUPED : row) : source.zeros;
      }
      pack_keys(records.rows(from, lane, s->d, true), s->d, panel + r);
    }
  }

  // The best of the candidates of a query, which are in ascending order with -1 behind the last.
  void again(int64_t b, int64_t t, const int32_t* among, int64_t most) {
    int32_t* const out = row(b, t);
    int64_t n = 0;
    while (n < most && among[n] >= 0) n++;
    if (n <= s->count) {
      for (int64_t j = 0; j < s->count; j++) out[j] = j < n ? among[j] : -1;
      return;
    }
    BestPositions best;
    best.start(s->count, candidates);
    load_query(0, b, t, false);
    for (int64_t k = 0; k < n; k += BEST_BLOCK) {
      const int64_t shown = min64(BEST_BLOCK, n - k);
      for (int64_t j = 0; j < shown; j += PANEL_KEYS) {
        pack_candidates(b, among + k + j, min64(shown - j, PANEL_KEYS));
        score_panel<A>(queries, panel, steps, s->heads, weights, scores + j, nullptr, 1, 0);
      }
      best.offer(scores, shown, k);
    }
    best.finish();
    for (int64_t j = 0; j < s->count; j++) out[j] = among[best.position[j]];
  }

  static void put_all(int32_t* out, int64_t n, int64_t count) {
    for (int64_t j = 0; j < count; j++) out[j] = j < n ? (int32_t)j : -1;
  }
  static void put(int32_t* out, const BestPositions& best, int64_t count) {
    memcpy(out, best.position, (size_t)best.held * 4);
    for (int64_t j = best.held; j < count; j++) out[j] = -1;
  }
  int32_t* record(int64_t b, int64_t t, int64_t chunk) const {
    return (int32_t*)args->ptr[6] +
        ((b * s->queries + t) * s->chunks + chunk) * record_size(s->count);
  }
  void keep(const BestPositions& best, int64_t b, int64_t t, int64_t chunk) {
    int32_t* p = record(b, t, chunk);
    p[0] = (int32_t)best.held;
    memcpy(p + 1, best.order, (size_t)best.held * 4);
    memcpy(p + 1 + s->count, best.position, (size_t)best.held * 4);
  }
};

template <class T, class A, class K>
static void index_rows(const gc_args* args, int64_t begin, int64_t end) {
  Indexer<T, A, K> indexer(args);
  const gc_indexer_shape* s = indexer.s;
  const int64_t blocks = (s->queries + s->block - 1) / s->block;
  for (int64_t u = begin; u < end; u++) {
    // The last queries see most: they come first, so that threads end together.
    const int64_t t0 = (blocks - 1 - u % blocks) * s->block;
    const int64_t chunk = u / blocks % s->chunks, b = u / blocks / s->chunks;
    indexer.run(b, chunk, t0, min64(s->block, s->queries - t0));
  }
}

// Chooses among the candidates of each query.
template <class T, class A>
static void choose_again(const gc_args* args, int64_t begin, int64_t end) {
  Indexer<T, A, uint8_t> indexer(args);
  const gc_indexer_shape* s = indexer.s;
  const int64_t most = indexer.records.keys->candidates;
  for (int64_t i = begin; i < end; i++)
    indexer.again(i / s->queries, i % s->queries, (const int32_t*)args->ptr[4] + i * most, most);
}

// scratch: best_room(count) candidates
static void merge_rows(const gc_args* args, int64_t begin, int64_t end) {
  const gc_indexer_shape* s = (const gc_indexer_shape*)args->imm;
  if (s->chunks == 1) return;
  const int32_t* start = s->starts ? (const int32_t*)args->ptr[4] : nullptr;
  for (int64_t i = begin; i < end; i++) {
    const int64_t b = i / s->queries, t = i % s->queries;
    if (rows_seen(start, b, t, s->keys.capacity, s->pool) <= s->count) continue;
    BestPositions best;
    best.start(s->count, (int32_t*)args->scratch);
    const int32_t* p = (const int32_t*)args->ptr[6] + i * s->chunks * record_size(s->count);
    for (int64_t c = 0; c < s->chunks; c++, p += record_size(s->count))
      best.offer(p + 1, p + 1 + s->count, p[0]);
    best.finish();
    int32_t* out = (int32_t*)args->ptr[5] + i * s->count;
    memcpy(out, best.position, (size_t)best.held * 4);
    for (int64_t j = best.held; j < s->count; j++) out[j] = -1;
  }
}

}  // namespace

#define GC_INDEXER_OVER(TAG, ...)                                                                 \
  GC_EXPORT void lightning_indexer_##TAG(const gc_args* args, int64_t begin, int64_t end) {       \
    index_rows<__VA_ARGS__>(args, begin, end);                                                    \
  }                                                                                               \
  GC_EXPORT void lightning_indexer_merge_##TAG(const gc_args* args, int64_t begin, int64_t end) { \
    merge_rows(args, begin, end);                                                                 \
  }
#ifdef GC_INDEXER_RECORDS  // keys are records
#define GC_INDEXER(TAG, TYPE, ARITHMETIC)                                                         \
  GC_INDEXER_OVER(records_##TAG, TYPE, ARITHMETIC, uint8_t)                                       \
  GC_EXPORT void lightning_indexer_again_##TAG(const gc_args* args, int64_t begin, int64_t end) { \
    choose_again<TYPE, ARITHMETIC>(args, begin, end);                                             \
  }
#else
#define GC_INDEXER(TAG, TYPE, ARITHMETIC) GC_INDEXER_OVER(TAG, TYPE, ARITHMETIC, TYPE)
#endif
