// Keys of an indexer that lie in records (records.h), for lightning_indexer.h.
#pragma once
#include "record_panel.h"
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
  float* scratch;        // of 27 rows, and of a query's
  const T* place[8];
#if GC_RECORD_PANEL
  RecordPanel panel;
#endif

  // Room for the pairs of two groups.
  float* groups(int64_t d) const { return scratch + 11 * d; }
  bool grouped() const { return keys->format.group != 1; }

  // Eight keys as numbers, at places that hold until the next call. Where sixteen share their bytes,
  // `from` are where the bytes begin and `lane` says which of them a key is.
  const T* const* rows(const uint8_t* const* from, const int64_t* lane, int64_t d, bool both) {
    T* to = (T*)scratch;
    for (int j = 0; j < 8; j++, to += d) {
      place[j] = to;
      if (both && from[j] != zeros) add(from[j], lane[j], d, to);
      else decode_record(record(from[j], lane[j], d), &keys->format, to);
    }
    return place;
  }

  // The query's heads, `step` apart, as records would keep them.
  const T* narrowed(const T* q, int64_t step, int64_t heads, int64_t d) {
    T* const made = (T*)(scratch + 27 * d);
    const int64_t rule = keys->format.segment[0].kind;
    for (int64_t h = 0; h < heads; h++, q += step) {
      for (int64_t at = 0; at < d; at += MX_BLOCK) {
        const int64_t n = d - at < MX_BLOCK ? d - at : MX_BLOCK;
        float block[MX_BLOCK] = {};
        convert(q + at, n, block);
        narrow_block(block, MX_BLOCK, rule);
        convert(block, n, made + h * d + at);
      }
    }
    return made;
  }

  const uint8_t* record(const uint8_t* from, int64_t lane, int64_t d) {
    if (!grouped() || from == zeros) return from;
    uint8_t* const own = (uint8_t*)(scratch + 10 * d);
    get_from_group(from, d, lane, own);
    return own;
  }

  // Both terms, summed before they are rounded.
  void add(const uint8_t* from, int64_t lane, int64_t d, T* to) {
    float *const sum = scratch + 8 * d, *const more = sum + d;
    decode_record(record(from, lane, d), &keys->format, sum);
    decode_record(record(from + keys->second, lane, d), &keys->format, more);
    for (int64_t i = 0; i < d; i++) to[i] = T(sum[i] + more[i]);
  }
};

}  // namespace gc
