// The rows that a unit of latent attention reads: found a block at a time, as they lie or converted.
#pragma once
#include "prelude.h"

#include "records_decode.h"
#include "row_source.h"

namespace {
using namespace gc;

constexpr int64_t ROWS = 128;  // of a block: rows between rescalings
constexpr int SCORE_ROWS = 8;  // scored, and converted, together
constexpr int64_t AHEAD = 2 * SCORE_ROWS;  // rows between what is asked for and what is scored

GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// The rows of a unit of work in turn.
template <class T> struct RowCursor {
  const RowSource<T>*source, *behind;  // behind: of the second parts, or null
  const int32_t* indices;  // null: consecutive rows
  int64_t b, seen;         // rows before `seen` are visible
  int64_t at, left;        // place in the indices or rows, rows still to come

  bool visible(int64_t i) const { return i >= 0 && i < seen; }

  // Takes the rows [first, first + n) of those that are visible.
  void start(int64_t first, int64_t n) {
    left = n;
    at = first;
    if (!indices) return;
    for (at = 0;; at++) {
      if (left == 0 || (visible(indices[at]) && first-- == 0)) return;
    }
  }
  // Up to ROWS rows.
  int64_t next(const T** rows, const T** tails) {
    const int64_t n = min64(left, ROWS);
    left -= n;
    if (!indices) {
      source->find(b, at, n, rows);
      if (behind) behind->find(b, at, n, tails);
      at += n;
      return n;
    }
    for (int64_t k = 0; k < n; at++) {
      if (!visible(indices[at])) continue;
      if (behind) tails[k] = behind->at(b, indices[at]);
      rows[k++] = source->at(b, indices[at]);
    }
    return n;
  }
};

// Asks for memory line by line, into the second level, while other rows are multiplied: what a core
// asks for all at once is dropped. The last span has no end.
struct Span {
  const char* at;
  int64_t bytes;
};
struct Coming {
  const char* at;
  int64_t left;
  const Span* next;

  explicit Coming(const Span* first) : at(first->at), left(first->bytes), next(first + 1) {}
  inline __attribute__((always_inline)) void line() {
    __builtin_prefetch(at, 0, 2);
    at += 64;
    left -= 64;
    if (left > 0) return;
    at = next->at;
    left = next->bytes;
    next++;
  }
};

// S: what is stored, bytes being records; Item: what is multiplied. Rows are multiplied as they lie,
// or as floats, or, where an item is a pair, as bf16.
template <class S, class Item> class LatentRows {
  static constexpr bool RECORDS = std::is_same<S, uint8_t>::value;
  static constexpr bool CONVERT =
      RECORDS || (std::is_same<Item, float>::value && !std::is_same<S, float>::value);
  typedef typename std::conditional<std::is_same<Item, float>::value, float, bf16>::type Number;

  const gc_row_source* shape_;
  gc_row_source tail_;
  int64_t split_, width_, bytes_, more_;  // numbers; bytes of a row and of its second part
  RowSource<S> source_, behind_;
  RowCursor<S> cursor_;
  RecordReader reader_;
  S* zeros_;
  Number* staged_;  // [ROWS][width]
  const S *rows_[2][ROWS], *tails_[2][ROWS];
  int64_t n_, coming_;
  Span spans_[2 * SCORE_ROWS + 1];
  int turn_;

  // Some rows of a block of n.
  void list(int turn, int64_t first, int64_t n) {
    Span* to = spans_;
    for (int64_t j = first; j < min64(n, first + SCORE_ROWS); j++) {
      *to++ = {(const char*)rows_[turn][j], bytes_};
      if (more_) *to++ = {(const char*)tails_[turn][j], more_};
    }
    *to = {(const char*)zeros_, INT64_MAX};
  }

 public:
  const Item* items[ROWS];
  const Item* const* tails;  // second parts that are multiplied as they lie

  // Rows of `width` numbers, the first `split` of them in the first part.
  LatentRows(const gc_row_source* shape, int64_t split, int64_t width, const gc_record_format* form)
      : shape_(shape), split_(split), width_(width), reader_(form) {
    bytes_ = RECORDS ? form->bytes : split * (int64_t)sizeof(S);
    more_ = (width - split) * (int64_t)sizeof(S);
  }
  LatentRows(const LatentRows&) = delete;

  // scratch: rows of zeros and of a block, [1 + ROWS][width rounded up to 32]
  void place(const gc_args* a, int64_t tail_outer, int64_t tail_row, float* scratch) {
    const int64_t whole = (width_ + 31) & -32;
    zeros_ = (S*)scratch;
    staged_ = (Number*)(scratch + whole + 32);
    memset((void*)zeros_, 0, (size_t)(whole + 32) * sizeof(float));
    source_ = {shape_, (const S*)a->ptr[1], (const int32_t*)a->ptr[2], zeros_};
    tail_ = *shape_;
    tail_.outer = tail_outer;
    tail_.row = tail_row;
    behind_ = {&tail_, (const S*)a->ptr[7], (const int32_t*)a->ptr[2], zeros_};
  }

  // Whether second parts are multiplied as they lie, and how many numbers of the first then are.
  bool parted() const { return !CONVERT && split_ != width_; }
  int64_t in_place() const { return split_; }

  // Takes the rows [first, first + n) of those that are visible.
  void start(int64_t b, const int32_t* indices, int64_t seen, int64_t first, int64_t n) {
    cursor_ = {&source_, split_ == width_ ? nullptr : &behind_, indices, b, seen, 0, 0};
    cursor_.start(first, n);
    turn_ = 0;
    coming_ = cursor_.next(rows_[0], tails_[0]);
    for (int64_t j = 0; j < AHEAD; j += SCORE_ROWS) {
      list(0, j, coming_);
      for (Coming coming(spans_); coming.left <= bytes_ + more_;) coming.line();
    }
  }

  // How many the next block has; those up to whole tiles are zeros.
  int64_t next() {
    n_ = coming_;
    if (n_ == 0) return 0;
    turn_ ^= 1;
    coming_ = cursor_.next(rows_[turn_], tails_[turn_]);
    const S **rows = rows_[turn_ ^ 1], **behind = tails_[turn_ ^ 1];
    for (int64_t j = n_; j % SCORE_ROWS; j++) rows[j] = behind[j] = zeros_;
    tails = (const Item* const*)behind;
    return n_;
  }

  // Makes items of the rows [first, first + SCORE_ROWS).
  void stage(int64_t first) {
    const S *const *rows = rows_[turn_ ^ 1], *const *behind = tails_[turn_ ^ 1];
    if constexpr (RECORDS) reader_.rows(rows + first, SCORE_ROWS, staged_ + first * width_);
    for (int64_t j = first; j < first + SCORE_ROWS; j++) {
      if constexpr (RECORDS) {
        items[j] = (const Item*)(staged_ + j * width_);
      } else if constexpr (CONVERT) {
        float* const row = staged_ + j * width_;
        gc::convert(rows[j], split_, row);
        if (split_ != width_) gc::convert(behind[j], width_ - split_, row + split_);
        items[j] = row;
      } else {
        items[j] = (const Item*)rows[j];
      }
    }
  }

  // The rows of the block as they are stored, zeros up to whole tiles; room for numbers of all.
  const S* const* stored() const { return rows_[turn_ ^ 1]; }
  Number* room() const { return staged_; }

  // The rows AHEAD of those from `first` on.
  Coming ahead(int64_t first) {
    const int64_t j = first + AHEAD, whole = (n_ + SCORE_ROWS - 1) & -SCORE_ROWS;
    if (j < n_) list(turn_ ^ 1, j, n_);
    else list(turn_, j < whole ? coming_ : j - whole, coming_);
    return Coming(spans_);
  }
};

}  // namespace
