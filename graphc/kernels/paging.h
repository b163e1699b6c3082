// Rows of sequences in pages: row s of sequence b is row s % rows of page table[b][s / rows].
#pragma once
#include <stdint.h>

struct gc_paging {
  int64_t rows;    // of a page
  int64_t pages;   // there are
  int64_t blocks;  // entries of a sequence in the table; 0: no table, sequence b has page b
};

namespace gc {

// The page of rows [block * rows, (block + 1) * rows) of a sequence; -1 where it has none. What an
// entry says beyond the pages is taken as none: a kernel never touches foreign memory.
static inline int64_t page_of(const gc_paging* p, const int32_t* table, int64_t b, int64_t block) {
  if (p->blocks == 0) return block == 0 ? b : -1;
  if (block < 0 || block >= p->blocks) return -1;
  const int64_t page = table[b * p->blocks + block];
  return page < p->pages ? page : -1;
}

// Rows that a sequence can have.
static inline int64_t capacity(const gc_paging* p) {
  return p->rows * (p->blocks == 0 ? 1 : p->blocks);
}

}  // namespace gc
