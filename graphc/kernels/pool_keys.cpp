// Pooled keys of an indexer (graphc/ops/pooled_indexer.py): lanes are channels.
//
// gc_pool_keys_*   ptr = {pages, ring, key, gate, bias, table, start, slots}; bias is float [P][D].
//   The range is (sequence, pool that its new tokens may complete). Tokens before `start` are read
//   from the ring. gc_pool_records_*: the pages hold records; scratch: a row of floats.
// gc_append_ring_*  ptr = {ring, key, gate, start, slots}. The range is (sequence, one of its last
//   P new tokens).
#include "abi.h"
#include "paging.h"
#include "records.h"
#include "vmath.h"

#ifndef GC_POOL_KEYS
#define GC_POOL_KEYS f32, float
#endif

namespace gc {
namespace {

struct Tokens {
  int64_t pool, width, length;  // tokens of a pool; channels; new tokens of a sequence
  int64_t key_b, key_t, gate_b, gate_t;
  int64_t slots;
  gc_paging paging;     // rows are pools
  int64_t page, row;    // strides of the pages
  gc_record_format format;  // where they hold records
};

// Key and gate of the token at each position of a sequence, new or in its slot of the ring.
template <class T> struct Source {
  const Tokens* s;
  const T *old, *key, *gate;
  int64_t first;

  const T* key_at(int64_t p) const {
    return p < first ? old + p % s->pool * 2 * s->width : key + (p - first) * s->key_t;
  }
  const T* gate_at(int64_t p) const {
    return p < first ? old + (p % s->pool * 2 + 1) * s->width : gate + (p - first) * s->gate_t;
  }
};

// to[n] = the mean of the keys of a pool that begins at position p, by channel.
template <class T, class To>
void pool_of(const Source<T>& source, int64_t p, const float* bias, To* to) {
  const int64_t count = source.s->pool, width = source.s->width;
  sweep<1>(0, width, [&](int64_t n, auto w, auto) __attribute__((always_inline)) {
    const auto logit = [&](int64_t i) __attribute__((always_inline)) {
      return vload(source.gate_at(p + i) + n, w) + vload(bias + i * width + n, w);
    };
    vf most = logit(0);
    for (int64_t i = 1; i < count; i++) {
      const vf x = logit(i);
      most = sel(x > most, x, most);
    }
    vf sum = {}, shares = {};
    for (int64_t i = 0; i < count; i++) {
      const vf share = vexp(logit(i) - most);
      shares += share;
      sum += share * vload(source.key_at(p + i) + n, w);
    }
    vstore(to + n, sum / shares, w);
  });
}

template <class T, bool Records>
void pool_keys(const gc_args* args, int64_t begin, int64_t end) {
  const Tokens* s = (const Tokens*)args->imm;
  const int32_t *table = (const int32_t*)args->ptr[5], *start = (const int32_t*)args->ptr[6],
                *slots = (const int32_t*)args->ptr[7];
  const int64_t most = (s->length + s->pool - 1) / s->pool;
  for (int64_t u = begin; u < end; u++) {
    const int64_t b = u / most, first = start[b], slot = slots[b], pool = first / s->pool + u % most;
    if (first < 0 || slot < 0 || slot >= s->slots) continue;
    if (pool >= (first + s->length) / s->pool) continue;
    const int64_t page = page_of(&s->paging, table, b, pool / s->paging.rows);
    if (page < 0) continue;
    const Source<T> source = {s, (const T*)args->ptr[1] + slot * s->pool * 2 * s->width,
                              (const T*)args->ptr[2] + b * s->key_b,
                              (const T*)args->ptr[3] + b * s->gate_b, first};
    const int64_t place = page * s->page + pool % s->paging.rows * s->row;
    const float* const bias = (const float*)args->ptr[4];
    if (Records) {
      float* const row = (float*)args->scratch;
      pool_of(source, pool * s->pool, bias, row);
      encode_record(row, &s->format, (uint8_t*)args->ptr[0] + place);
    } else {
      pool_of(source, pool * s->pool, bias, (T*)args->ptr[0] + place);
    }
  }
}

template <class T>
void append_ring(const gc_args* args, int64_t begin, int64_t end) {
  const Tokens* s = (const Tokens*)args->imm;
  const int32_t *start = (const int32_t*)args->ptr[3], *slots = (const int32_t*)args->ptr[4];
  const int64_t last = s->length < s->pool ? s->length : s->pool;
  const size_t size = (size_t)s->width * sizeof(T);
  for (int64_t u = begin; u < end; u++) {
    const int64_t b = u / last, t = s->length - last + u % last, slot = slots[b];
    if (start[b] < 0 || slot < 0 || slot >= s->slots) continue;
    T* to = (T*)args->ptr[0] + (slot * s->pool + (start[b] + t) % s->pool) * 2 * s->width;
    memcpy((void*)to, (const T*)args->ptr[1] + b * s->key_b + t * s->key_t, size);
    memcpy((void*)(to + s->width), (const T*)args->ptr[2] + b * s->gate_b + t * s->gate_t, size);
  }
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(TAG, TYPE)                                                                   \
  GC_EXPORT void gc_pool_keys_##TAG(const gc_args* args, int64_t begin, int64_t end) {         \
    gc::pool_keys<TYPE, false>(args, begin, end);                                              \
  }                                                                                            \
  GC_EXPORT void gc_pool_records_##TAG(const gc_args* args, int64_t begin, int64_t end) {      \
    gc::pool_keys<TYPE, true>(args, begin, end);                                               \
  }                                                                                            \
  GC_EXPORT void gc_append_ring_##TAG(const gc_args* args, int64_t begin, int64_t end) {       \
    gc::append_ring<TYPE>(args, begin, end);                                                   \
  }
#define GC_EXPAND(...) GC_DEFINE(__VA_ARGS__)
GC_EXPAND(GC_POOL_KEYS)
