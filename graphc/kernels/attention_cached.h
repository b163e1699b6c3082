// Attention of new tokens over sequences that have a past of their own length: query t of sequence b
// is at position start[b] + t and sees the keys up to there, `back` positions behind it at most.
//
// Rows of keys and values lie in pages (paging.h) or, without a table, in one buffer per sequence.
// Few queries: attention_cached_few.h; many: attention_cached_many.h. Rows in records (records.h) are
// read a number of them at a time into rows of bf16, where those are multiplied, or of floats.
#pragma once
#include "abi.h"
#include "paging.h"
#include "records.h"

// What is stored of numbers T, and the names of the kernels, in units for rows as they are and in those
// for records.
#ifdef GC_CACHED_RECORDS
#define GC_ROWS(T) uint8_t
#define GC_NAMED(NAME, TAG) NAME##_records_##TAG
#else
#define GC_ROWS(T) T
#define GC_NAMED(NAME, TAG) NAME##_##TAG
#endif

// ptr = {q, out, start, table, k, v, partial, sinks}. Strides count elements; rows of keys, of values
// and of results lie in one piece. The head of query g of key head h is h * group + g.
struct gc_cached_shape {
  gc_paging paging;
  int64_t tq, heads, group, d, dv;  // heads: of keys
  int64_t scale, soft_cap;          // bits of float64; soft_cap 0: none
  int64_t back;
  int64_t sink_type, sink_h;        // as of masks in attention_decode.h
  int64_t q_b, q_h, q_t, q_d;       // out is dense [B, tq, heads * group, dv]
  int64_t k_page, k_row, k_h;
  int64_t v_page, v_row, v_h;
  // Few queries: key heads of a unit, pieces of a sequence's keys at most, keys of one at least, keys
  // between rescalings (a multiple of 16). Many: panels of 32 queries of a unit, in the first.
  int64_t unit, pieces, piece, block;
  // Of rows in records alone, whose strides count bytes: columns of a record at which the keys and the
  // values of the first head are, and from head to head.
  gc_record_format form;
  int64_t k_at, k_next, v_at, v_next;
};

namespace gc {

// Keys [first, last) that some query of a sequence sees.
struct Seen {
  int64_t first, last;
};
static inline Seen keys_seen(const gc_cached_shape* s, int64_t start, int64_t t0, int64_t t1) {
  const int64_t most = capacity(&s->paging), begin = start + t0 - s->back, end = start + t1;
  return {begin < 0 ? 0 : begin, end < most ? end : most};
}

// What rows are multiplied as, of queries T and stored S.
template <class T, class S> struct Numbers { using type = S; };
template <class T> struct Numbers<T, uint8_t> { using type = float; };
#if defined(__AVX512BF16__)
template <> struct Numbers<bf16, uint8_t> { using type = bf16; };
#endif

}  // namespace gc
