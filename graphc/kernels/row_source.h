// Rows that sequences keep: one behind the other, or in pages found through a table (graphc/ops/pages.py).
#pragma once
#include <stdint.h>

// Of dense rows `outer` is the stride of a sequence; of paged ones that of a page, which has
// page_rows of them (0: dense), and `table` that of a sequence's row of the table. A sequence has
// room for `capacity` rows.
struct gc_row_source {
  int64_t capacity, outer, row, page_rows, table;
};

namespace gc {

template <class T> struct RowSource {
  const gc_row_source* s;
  const T* base;
  const int32_t* table;
  const T* zeros;  // the rows of a page that is missing

  // Row i of sequence b.
  const T* at(int64_t b, int64_t i) const {
    if (s->page_rows == 0) return base + b * s->outer + i * s->row;
    const uint32_t row = (uint32_t)i, rows = (uint32_t)s->page_rows;  // of 64 bits it takes longer
    const int32_t page = table[b * s->table + row / rows];
    return page < 0 ? zeros : base + page * s->outer + row % rows * s->row;
  }

  // rows[0, n): the rows from `first` on.
  void find(int64_t b, int64_t first, int64_t n, const T** rows) const {
    for (int64_t i = 0; i < n;) {
      const int64_t left = s->page_rows ? s->page_rows - (first + i) % s->page_rows : n;
      const T* row = at(b, first + i);
      const int64_t step = row == zeros ? 0 : s->row, end = i + left < n ? i + left : n;
      for (; i < end; i++, row += step) rows[i] = row;
    }
  }
};

// How many rows a query at `start + t` sees, where a row stands for `tokens` whole tokens.
static inline int64_t rows_seen(const int32_t* start, int64_t b, int64_t t, int64_t capacity,
                                int64_t tokens = 1) {
  const int64_t seen = ((start ? start[b] : 0) + t + 1) / tokens;
  return seen < 0 ? 0 : seen < capacity ? seen : capacity;
}

}  // namespace gc
