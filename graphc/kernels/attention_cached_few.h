// Few queries over long pasts (attention_cached.h): memory sets the pace, and gives most to a walk
// along its addresses. A block of keys is multiplied for all heads of the unit, then its values are
// mixed: where a page holds a head's rows together, that is the order they lie in. Where it holds
// whole rows, they are asked for in their order, as much at a time as is read of the block before.
//
// A unit is a piece of one sequence's keys for `unit` heads of keys. How many pieces a sequence has
// follows from its length alone; they are spread evenly over the places of the range that its longest
// has. Pieces leave records, which gc_cached_merge_* (over sequences x queries x heads) merges in
// order; a piece that is all of a sequence is finished at once.
#pragma once
#include "attention_cached_rows.h"
#include "attention_decode.h"

namespace {
using namespace gc;

constexpr int64_t PAGE = 512;  // rows of pages that are not cut into pieces, at most

// Pieces of a sequence.
static int64_t pieces_of(const gc_cached_shape* s, Seen seen) {
  const int64_t n = (seen.last - seen.first) / s->piece;
  return n < 1 ? 1 : n < s->pieces ? n : s->pieces;
}

// T: of queries and results; S: what is stored, bytes being records; R: rows as they are multiplied.
template <class T, class S> struct Unit {
  typedef typename Numbers<T, S>::type R;
  typedef typename Query<R>::type W;
  static constexpr bool RECORDS = std::is_same<S, uint8_t>::value;
  static constexpr bool CODES = RECORDS && std::is_same<R, bf16>::value && AS_CODES;
  static constexpr bool TWICE = MANY >= 4;  // whether what comes is asked for twice, in short turns
  const gc_args* args;
  const gc_cached_shape* s;
  int64_t b, head, heads, rows;  // rows: queries of a head of keys
  int64_t ldq, ldo, lds;  // lds: keys of a block at most
  int parts;           // numbers that make a weight
  float scale, cap;    // scale in units of log2
  W *q, *weights;      // [heads][rows][ldq], [heads][rows][parts][lds]
  float *out, *scores, *maximum, *total, *factor;  // [heads][rows][ldo], [..][lds], [heads][rows]
  const S* none;       // a row of zeros, where a page is missing
  Block<S>* blocks;    // two
  const Block<S>* after;  // the block that is read next
  Coming<S> coming;
  Quiet quiet;
  Staged<R> staged = {&s->form, RecordReader(&s->form), nullptr};

  void load_queries() {
    for (int64_t i = 0; i < heads * rows; i++) {
      const int64_t g = i % rows / s->tq, t = i % rows % s->tq, h = (head + i / rows) * s->group + g;
      const T* x = (const T*)args->ptr[0] + b * s->q_b + h * s->q_h + t * s->q_t;
      if (few_codes(column(false, i / rows), s->d)) {
        load_code_queries(x, i);
      } else if constexpr (std::is_same<T, R>::value) {
        load_query(x, s->q_d, s->d, q + i * ldq, ldq);
      } else {  // floats, whose lanes are in order
        for (int64_t j = 0; j < ldq; j++) q[i * ldq + j] = j < s->d ? to_float(x[j * s->q_d]) : 0.0f;
      }
      for (int64_t j = 0; j < ldo; j++) out[i * ldo + j] = 0.0f;
      maximum[i] = NEGATIVE_INFINITY;
      total[i] = 0.0f;
    }
  }

  // Query i for the tiles that its head's keys have: of each, those of all queries lie together.
  void load_code_queries(const T* x, int64_t i) {
    if constexpr (CODES)
      each_tile(column(false, i / rows), s->d, [&](int64_t c, auto vectors) {
        constexpr int N = vectors.count * 64;
        load_code_query(x + c * s->q_d, s->q_d, N, q + i / rows * rows * ldq + rows * c + i % rows * N);
      });
  }

  // The column of a record at which the keys, or values, of head h of the unit begin.
  int64_t column(bool values, int64_t h) const {
    return values ? s->v_at + (head + h) * s->v_next : s->k_at + (head + h) * s->k_next;
  }
  // Finished sums i, in their order.
  void natural(int64_t i, float* to) const {
    if (few_codes(column(true, i / rows), s->dv)) from_code_lanes(out + i * ldo, s->dv, to);
    else from_lane_order<R>(out + i * ldo, s->dv, to);
  }

  void find(int64_t k0, int64_t keys, Block<S>* block) const {
    const int64_t size = s->paging.rows;
    block->keys = keys;
    block->count = 0;
    for (int64_t at = k0; at < k0 + keys;) {
      const int64_t row = at % size;
      const int64_t page = page_of(&s->paging, (const int32_t*)args->ptr[3], b, at / size);
      Stretch<S>& part = block->part[block->count++];
      part.rows = page < 0 ? 1 : min64(size - row, k0 + keys - at);
      part.k = part.v = nullptr;
      if (page >= 0) {
        part.k = (const S*)args->ptr[4] + page * s->k_page + row * s->k_row + head * s->k_h;
        part.v = (const S*)args->ptr[5] + page * s->v_page + row * s->v_row + head * s->v_h;
      }
      at += part.rows;
    }
  }

  // The row `by` rows behind row `row` of a stretch, in the order all are read: the keys of the block's
  // heads in turn, their values, then the keys of the block after it.
  const S* row_after(const Block<S>* block, bool values, int64_t h, int64_t i, int64_t row, int64_t by) const {
    for (row += by; row >= block->part[i].rows;) {
      row -= block->part[i].rows;
      if (++i < block->count) continue;
      i = 0;
      if (++h < heads) continue;
      h = 0;
      if (values) block = after;
      values = !values;
      if (block->count == 0) return none;
    }
    const S* const x = values ? block->part[i].v : block->part[i].k;
    if (!x) return none;
    return values ? x + h * s->v_h + row * s->v_row : x + h * s->k_h + row * s->k_row;
  }
  // How many rows are read at a time: of records as many as leave room for the next in the first level.
  int64_t turn_of(int64_t width) const {
    if (RECORDS) return width > FP8_TILE ? TURN / 2 : TURN;
    if (!TWICE || !tiled() || rows > MANY) return TURN;
    return turn_rows(width * (int64_t)sizeof(S));
  }
  // What asks for those some turns later meanwhile. The reader of records does so itself.
  auto next_rows(const Block<S>* block, bool values, int64_t h, int64_t i, int64_t row) const {
    const int64_t width = values ? s->dv : s->d, step = values ? s->v_row : s->k_row;
    const auto rows_after = [&](int64_t turns) {
      return later(row_after(block, values, h, i, row, turns * turn_of(width)), width, step);
    };
    if constexpr (TWICE) return Twice{rows_after(rows > MANY ? 1 : 3), rows_after(rows > MANY ? 1 : 2)};
    else return rows_after(1);
  }

  // f(first of some rows of head h, step between them, how many, place in the block, what makes what
  // asks for those to come). Of records, the columns of that head, or, where those are multiplied as they lie,
  // also(codes, place in the block).
  template <class F, class G>
  void turns(const Block<S>* block, bool values, int64_t h, F f, G also) {
    const int64_t step = values ? s->v_row : s->k_row, offset = h * (values ? s->v_h : s->k_h);
    const int64_t width = values ? s->dv : s->d;
    const int64_t first = column(values, h);
    const int64_t turn = turn_of(width);
    int64_t place = 0;
    for (int64_t i = 0; i < block->count; i++) {
      const Stretch<S>& part = block->part[i];
      const S* const x = values ? part.v : part.k;
      for (int64_t row = 0, n; row < part.rows; row += n, place += n) {
        n = min64(turn, part.rows - row);
        const S* const own = x ? x + row * step + offset : none;
        if constexpr (CODES) {
          if (few_codes(first, width)) {
            const int64_t apart = x ? step : 0;
            const auto tiles = [&](auto asks) {
              each_tile(first, width, [&](int64_t c, auto vectors) {
                codes<vectors.count>(own, apart, n, place, first + c, c, asks(c), also);
              });
            };
            if (s->k_h == 0) {  // whole rows
              tiles([&](int64_t) { return InOrder{&coming}; });
            } else {
              const S* const later = row_after(block, values, h, i, row, 4 * turn) + first;
              const S* const soon = row_after(block, values, h, i, row, (rows > 2 ? 1 : 2) * turn) + first;
              tiles([&](int64_t c) { return LaterRows{later + c, soon + c, step}; });
            }
            continue;
          }
        }
        if constexpr (RECORDS) {
          staged.read(own, x ? step : 0, n, first, width, &coming);
          f(staged.to, width, n, place, [] { return Near(); });
        } else {
          f(own, step, n, place, [&] { return next_rows(block, values, h, i, row); });
        }
      }
    }
  }

  // Whether rows of codes are multiplied as they lie: where making numbers of them again and again, and
  // adding up what each tile of them yields, is less than keeping them.
  bool few_codes(int64_t first, int64_t width) const {
    return CODES && rows <= (width > FP8_TILE ? MANY / 2 : MANY) && in_codes(&s->form, first, width);
  }
  // f(column, how many times 64 from there on have one scale) for those of rows of codes.
  template <class F> static void each_tile(int64_t first, int64_t width, F f) {
    for (int64_t c = 0; c < width;) {
      if ((first + c) % FP8_TILE == 0 && width - c >= FP8_TILE) f(c, Count<2>()), c += 128;
      else f(c, Count<1>()), c += 64;
    }
  }
  // also(codes, their column in rows of the head, how many queries, the first of them, place in the
  // block, what asks for rows to come)
  template <int N, class Next, class G>
  void codes(const S* own, int64_t step, int64_t n, int64_t place, int64_t first, int64_t column,
             const Next& next, G& also) {
    CodeRows<N> all;
    all.begin(own + first, step, n, s->form.segment[0].width + first / FP8_TILE * 4 - first);
    int64_t r = 0;
    const auto group = [&](auto count, const auto& asks) {
      also(all, column, count, r, place, asks);
      r += count.count;
    };
    if (rows >= 4) group(Count<4>(), next);
    else if (rows >= 2) group(Count<2>(), next);
    else group(Count<1>(), next);
    while (r + 4 <= rows) group(Count<4>(), NoRows());
    if (r + 2 <= rows) group(Count<2>(), NoRows());
    if (r < rows) group(Count<1>(), NoRows());
  }

  // Whether some of each of several rows is read in turn, and what comes next asked for, as in
  // attention_decode_driver.h.
  bool tiled() const {
    return rows >= 4 && (RECORDS || (!coming.bytes && (TWICE || s->dv != 4 * PAIR)));
  }
  auto& next_block() {
    if constexpr (RECORDS) return quiet;
    else return coming;
  }

  void dots(const Block<S>* block, int64_t h) {
    const W* const own = q + h * rows * ldq;
    turns(block, false, h, [&](const R* k, int64_t step, int64_t n, int64_t place, auto next) {
      float* const to = scores + h * rows * lds + place;
      int64_t r = 0;
      if (rows >= 4) {
        if (tiled()) dot_keys<R, 4>(own, ldq, k, step, s->d, n, to, lds, next());
        else dot_keys<R, 4>(own, ldq, k, step, s->d, n, to, lds, next_block());
        r = 4;
      }
      for (; r + 4 <= rows; r += 4)
        dot_keys<R, 4>(own + r * ldq, ldq, k, step, s->d, n, to + r * lds, lds, Near());
      for (; r + 2 <= rows; r += 2)
        dot_keys<R, 2>(own + r * ldq, ldq, k, step, s->d, n, to + r * lds, lds, next_block());
      for (; r < rows; r++)
        dot_keys<R, 1>(own + r * ldq, ldq, k, step, s->d, n, to + r * lds, lds, next_block());
    }, [&](const auto& codes, int64_t c, auto count, int64_t r, int64_t place, const auto& next) {
      dot_codes<count.count>(own + rows * c, r, codes, scores + h * rows * lds + place, lds, c > 0, next);
    });
  }

  void mix(const Block<S>* block, int64_t h) {
    static const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    float* const own = out + h * rows * ldo;
    turns(block, true, h, [&](const R* v, int64_t step, int64_t n, int64_t place, auto coming_rows) {
      const W* w = weights + h * rows * parts * lds + place;
      const float* const f = factor + h * rows;
      int64_t r = 0;
      const auto some = [&](auto count, auto&& next) __attribute__((always_inline)) {
        constexpr int ROWS = decltype(count)::count;  // sums of the blocks before are rescaled
        mix_keys<R, ROWS>(parts, w + r * parts * lds, lds, v, step, s->dv, n, place ? nullptr : f + r,
                       own + r * ldo, ldo, next);
        r += ROWS;
      };
      if (tiled()) {
        some(Count<4>(), coming_rows());
        while (r + 4 <= rows) some(Count<4>(), Near());
      }
      while (s->dv <= 4 * PAIR && r + 2 <= rows) some(Count<2>(), next_block());
      while (r < rows) some(Count<1>(), next_block());
    }, [&](const auto& codes, int64_t c, auto count, int64_t r, int64_t place, const auto& next) {
      const float* const weight = scores + (h * rows + r) * lds + place;
      const float* const change = place ? one : factor + h * rows + r;
      constexpr int ROWS = count.count;
      if (ROWS == 1 && parts == 2) mix_codes<1, 2>(weight, lds, codes, change, own + r * ldo + c, ldo, next);
      else mix_codes<ROWS, 1>(weight, lds, codes, change, own + r * ldo + c, ldo, next);
    });
  }

  // Weights of all queries for the n keys from k0 on.
  void weigh(int64_t k0, int64_t n, int64_t start) {
    for (int64_t i = 0; i < heads * rows; i++) {
      float* const row = scores + i * lds;
      scale_scores(row, n, scale, cap);
      const int64_t place = start + i % rows % s->tq;
      for (int64_t j = 0; j < min64(n, place - s->back - k0); j++) row[j] = NEGATIVE_INFINITY;
      for (int64_t j = max64(0, place + 1 - k0); j < n; j++) row[j] = NEGATIVE_INFINITY;
      const auto quiet = [](int64_t) {};
      if (sizeof(W) == 2 && parts == 1) weigh_row<false>(row, n, maximum + i, total + i, factor + i, quiet);
      else weigh_row<true>(row, n, maximum + i, total + i, factor + i, quiet);
      if (!few_codes(column(true, i / rows), s->dv))
        put_weights(row, n, parts, weights + i * parts * lds, lds);
    }
  }

  // Blocks end where pages do, as far as possible.
  int64_t block_at(int64_t k0, int64_t last) const {
    const int64_t size = s->paging.rows, n = size <= lds ? lds / size * size - k0 % size : lds;
    return max64(0, min64(n, last - k0));
  }
  void run(int64_t first, int64_t last, int64_t start) {
    Block<S>*now = blocks, *next = (Block<S>*)((char*)blocks + block_bytes<S>(lds));
    find(first, block_at(first, last), now);
    for (int64_t k0 = first; k0 < last;) {
      const int64_t end = k0 + now->keys;
      find(end, block_at(end, last), next);
      coming.begin(after = next);
      for (int64_t h = 0; h < heads; h++) dots(now, h);
      weigh(k0, now->keys, start);
      for (int64_t h = 0; h < heads; h++) mix(now, h);
      Block<S>* const done = now;
      now = next;
      next = done;
      k0 = end;
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

// Bytes of a row where those of a page lie in one piece, whole rows or, of records, whole pages; else 0.
template <class S> static int64_t row_bytes(const gc_cached_shape* s, int64_t values) {
  if (std::is_same<S, uint8_t>::value) {
    const int64_t head = s->paging.rows * s->k_row;
    const bool heads = s->k_h == head && s->v_h == head && values == s->heads * head;
    if (heads) return 2 * s->heads * s->k_row;
    return s->k_h == 0 && s->k_row == s->form.bytes ? s->k_row : 0;
  }
  const bool rows = s->k_h == s->d && s->v_h == s->dv && s->k_row == s->heads * (s->d + s->dv) &&
      values == s->heads * s->d;
  return rows ? s->k_row * (int64_t)sizeof(S) : 0;
}

// scratch in floats, d and dv rounded up to 32, A = unit * group * tq, K = block: out [A dv], scores and
// weights [A K] each, a row [dv], 3 x [A], q [A d], zeros [max(d, dv)] or of records their bytes and
// [TURN][max(d, dv)]; then two blocks.
template <class T, class S> static void few(const gc_args* args, int64_t begin, int64_t end) {
  const gc_cached_shape* s = (const gc_cached_shape*)args->imm;
  const int64_t rows = s->group * s->tq, all = s->unit * rows, wide = max64(s->d, s->dv);
  typedef Unit<T, S> U;
  typedef typename U::R R;
  typedef typename U::W W;
  U u{args, s};
  float* scratch = (float*)args->scratch;
  const auto take = [&scratch](int64_t n) { return (scratch += n) - n; };
  u.rows = rows;
  u.ldq = whole(s->d);
  u.ldo = whole(s->dv);
  u.lds = s->block;
  u.parts = sizeof(W) == 2 && rows <= EXACT ? 2 : 1;
  u.scale = (float)(float_of(s->scale) * 1.4426950408889634074);
  u.cap = (float)float_of(s->soft_cap);
  u.out = take(all * u.ldo);
  u.scores = take(all * u.lds);
  u.weights = (W*)take(all * u.lds);
  float* const natural = take(u.ldo);
  u.maximum = take(all);
  u.total = take(all);
  u.factor = take(all);
  u.q = (W*)take(all * u.ldq);
  const int64_t zeros = U::RECORDS ? (s->form.bytes + 3) / 4 : wide;
  float* const none = take(zeros);
  u.none = (const S*)none;
  memset(none, 0, (size_t)zeros * sizeof(float));
  if (U::RECORDS) u.staged.to = (R*)take(TURN * wide);
  u.blocks = (Block<S>*)(((uintptr_t)scratch + 7) & ~(uintptr_t)7);

  if (s->unit == s->heads) u.coming.bytes = row_bytes<S>(s, (const S*)args->ptr[5] - (const S*)args->ptr[4]);
  const int64_t units = (s->heads + s->unit - 1) / s->unit;
  for (int64_t i = begin; i < end; i++) {
    const int64_t place = i % s->pieces;
    u.b = i / s->pieces / units;
    u.head = i / s->pieces % units * s->unit;
    u.heads = min64(s->unit, s->heads - u.head);
    const int64_t start = ((const int32_t*)args->ptr[2])[u.b];
    const Seen seen = keys_seen(s, start, 0, s->tq);
    const int64_t pieces = pieces_of(s, seen), c = place * pieces / s->pieces;
    const int64_t whole = s->paging.rows <= PAGE ? s->paging.rows : s->block;
    const int64_t base = seen.first / whole * whole, each = (seen.last - base + pieces - 1) / pieces;
    const int64_t size = (each + whole - 1) / whole * whole;  // pieces end where pages do
    if ((place + 1) * pieces / s->pieces == c) continue;  // another place's
    u.load_queries();
    u.run(max64(seen.first, base + c * size), min64(seen.last, base + (c + 1) * size), start);
    for (int64_t j = 0; j < u.heads * rows; j++) {
      const int64_t h = (u.head + j / rows) * s->group + j % rows / s->tq, t = j % rows % s->tq;
      if (pieces == 1) {
        u.natural(j, natural);
        put<T>(args, s, u.b, h, t, natural, u.maximum[j], u.total[j]);
        continue;
      }
      float* p = record_of(args, s, u.b, h, t, c);
      p[0] = u.maximum[j];
      p[1] = u.total[j];
      u.natural(j, p + HEAD);
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

