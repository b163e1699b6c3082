// Where the rows of a block of keys lie (attention_cached_few.h), how those of the next are asked for
// meanwhile, and rows of numbers out of records.
#pragma once
#include "attention_cached.h"
#include "attention_codes.h"
#include "attention_record.h"

namespace {
using namespace gc;

constexpr int64_t TURN = CODE_ROWS;  // keys of a head that are read at a time

// Rows that lie one after the other: the keys of the unit's first head, and its values; null where a
// page is missing.
template <class T> struct Stretch {
  const T *k, *v;
  int64_t rows;
};

// The rows of a block in as many stretches as it touches pages.
template <class T> struct Block {
  int64_t keys, count;
  Stretch<T> part[];  // one per row at most
};

template <class T> static int64_t block_bytes(int64_t keys) {
  return (int64_t)sizeof(Block<T>) + keys * (int64_t)sizeof(Stretch<T>);
}

// Asks for the rows of a block where whole rows lie one after the other, as much at a time as is read
// meanwhile: what a core asks for all at once is dropped.
template <class T> struct Coming {
  static constexpr bool TILED = false;
  const char* p;
  int64_t left = 0;   // bytes from p on that lie in one piece
  int64_t bytes = 0;  // of a row; 0: does not ask
  const Block<T>* block;
  int64_t part;

  void begin(const Block<T>* b) {
    block = b;
    part = 0;
    if (bytes) advance();
  }
  __attribute__((noinline)) void advance() {
    left = 0;
    if (part == block->count) return;
    const Stretch<T>& s = block->part[part++];
    p = (const char*)s.k;
    left = s.k ? s.rows * bytes : 64;
  }
  inline __attribute__((always_inline)) void ask(int64_t n) {
    if (left <= 0) return;
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(p + i, 0, 2);
    p += n;
    left -= n;
    if (left <= 0) advance();
  }
};

// The same for rows of codes, whose scales lie elsewhere in them.
struct InOrder {
  Coming<uint8_t>* coming;
  inline __attribute__((always_inline)) void ask(int64_t, int64_t) const {
    coming->ask(64 + 64 * (int64_t)sizeof(float) / FP8_TILE);
  }
};

// Rows of records as rows of numbers.
template <class R> struct Staged {
  const gc_record_format* form;
  RecordReader reader;
  R* to;  // [TURN][width]

  // Columns [first, first + width) of n records `step` bytes apart; meanwhile asks for as much of what
  // comes.
  void read(const uint8_t* from, int64_t step, int64_t n, int64_t first, int64_t width,
            Coming<uint8_t>* coming) {
    constexpr int64_t SOME = 4;
    const int64_t bytes = width * form->bytes / form->width;
    for (int64_t j = 0; j < n; j += SOME) {
      const uint8_t* rows[SOME];
      const int64_t some = min64(SOME, n - j);
      for (int64_t i = 0; i < some; i++) rows[i] = from + (j + i) * step;
      coming->ask(some * bytes);
      reader.columns(rows, some, first, width, to + j * width, width);
    }
  }
};

}  // namespace
