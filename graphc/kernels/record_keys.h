// Keys of an indexer that lie in records (records.h), for lightning_indexer.h.
#pragma once
#include "records.h"

// `second`: bytes from a key's record to that of what it leaves; `candidates` of a query, of which
// `count` are chosen by both.
struct gc_record_keys {
  int64_t second, candidates;
  gc_record_format format;
};

namespace gc {

template <class T> struct RecordKeys {
  const gc_record_keys* keys;
  const uint8_t* zeros;  // in the place of missing records
  float* scratch;        // of ten rows, and of a query's
  const T* place[8];

  // Eight keys as numbers, at places that hold until the next call.
  const T* const* rows(const uint8_t* const* from, int64_t d, bool both) {
    T* to = (T*)scratch;
    for (int j = 0; j < 8; j++, to += d) {
      place[j] = to;
      decode_record(from[j], &keys->format, to);
      if (both && from[j] != zeros) add(from[j], d, to);
    }
    return place;
  }

  // The query's heads, `step` apart, as records would keep them.
  const T* narrowed(const T* q, int64_t step, int64_t heads, int64_t d) {
    T* const made = (T*)(scratch + 10 * d);
    float* const row = scratch;
    uint8_t* const record = (uint8_t*)(scratch + d);
    for (int64_t h = 0; h < heads; h++, q += step) {
      for (int64_t i = 0; i < d; i++) row[i] = to_float(q[i]);
      encode_record(row, &keys->format, record);
      decode_record(record, &keys->format, made + h * d);
    }
    return made;
  }

  // Both terms, summed before they are rounded.
  void add(const uint8_t* from, int64_t d, T* to) {
    float *const sum = scratch + 8 * d, *const more = sum + d;
    decode_record(from, &keys->format, sum);
    decode_record(from + keys->second, &keys->format, more);
    for (int64_t i = 0; i < d; i++) to[i] = T(sum[i] + more[i]);
  }
};

}  // namespace gc
