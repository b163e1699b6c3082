// Sorting along one dimension: sort, argsort, topk, kthvalue, median.
//
// A value becomes an unsigned key that orders like torch orders values (NaN greatest, -0 equal
// to +0); descending order flips the key's bits. Equal keys keep their index order, so every
// sort is stable; topk resolves ties as eager torch does (see Ties). Keys of up to 32 bits travel with
// their index in one 64-bit word, wider ones as a pair.
//
// Tensors are [outer, n, inner], row-major.  Range: outer * inner columns.
// gc_sort_*:   imm: n, inner, descending.      ptr: src, values, indices (int64).
// gc_topk_*:   imm: n, inner, k, largest, sorted.  ptr: src, values [outer, k, inner], indices.
// gc_kth_*:    imm: n, inner, k (from 0), median.  ptr: src, values [outer, inner], indices.
//              median: a row with NaN gives its first NaN.
// scratch in words of 16 bytes: sort 2 * n, kth n, topk n.
#include "strided.h"

#include <algorithm>

namespace gc {
namespace {

// Order-preserving unsigned keys.
static inline uint32_t key_of(float v) {
  v += 0.0f;  // -0 becomes +0
  const uint32_t u = f32_to_bits(v), flip = (uint32_t)((int32_t)u >> 31) | 0x80000000u;
  return v != v ? 0xffffffffu : u ^ flip;
}
static inline uint64_t key_of(double v) {
  v += 0.0;
  uint64_t u;
  memcpy(&u, &v, 8);
  const uint64_t flip = (uint64_t)((int64_t)u >> 63) | 0x8000000000000000u;
  return v != v ? ~0ull : u ^ flip;
}
// 16-bit formats: sign and magnitude bits, `infinity` being the magnitude of infinity
template <class T>
static inline uint32_t key_of_half(T v, uint32_t infinity) {
  uint16_t u;
  memcpy(&u, &v, 2);
  const uint32_t magnitude = u & 0x7fffu;
  const uint32_t key = u & 0x8000u ? 0x8000u - magnitude : 0x8000u + magnitude;
  return magnitude > infinity ? 0xffffu : key;
}
static inline uint32_t key_of(bf16 v) { return key_of_half(v, 0x7f80u); }
static inline uint32_t key_of(f16 v) { return key_of_half(v, 0x7c00u); }
static inline uint32_t key_of(uint8_t v) { return v; }
static inline uint32_t key_of(int8_t v) { return (uint8_t)(v ^ 0x80); }
static inline uint32_t key_of(int16_t v) { return (uint16_t)(v ^ 0x8000); }
static inline uint32_t key_of(int32_t v) { return (uint32_t)v ^ 0x80000000u; }
static inline uint64_t key_of(int64_t v) { return (uint64_t)v ^ 0x8000000000000000u; }

struct Pair {
  uint64_t key, index;
  bool operator<(const Pair& o) const { return key != o.key ? key < o.key : index < o.index; }
};
struct Packed {
  uint64_t word;
  bool operator<(const Packed& o) const { return word < o.word; }
};
static inline Packed make(uint32_t key, int64_t i) { return {(uint64_t)key << 32 | (uint32_t)i}; }
static inline Pair make(uint64_t key, int64_t i) { return {key, (uint64_t)i}; }
static inline int64_t index_of(const Packed& p) { return (int64_t)(uint32_t)p.word; }
static inline int64_t index_of(const Pair& p) { return (int64_t)p.index; }
static inline uint64_t digits_of(const Packed& p) { return p.word >> 32; }
static inline uint64_t digits_of(const Pair& p) { return p.key; }

// Sorts n words; `spare` holds as many. Least significant digit radix sort from 256 items on:
// it is stable, and the words arrive in index order. Digits that all items share are skipped.
template <class W, int Bytes>
__attribute__((noinline)) W* sort_words(W* words, W* spare, int64_t n) {
  if (n < 256) {
    std::sort(words, words + n);
    return words;
  }
  uint32_t histogram[Bytes][256] = {};
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t d = digits_of(words[i]);
    for (int b = 0; b < Bytes; ++b) ++histogram[b][d >> (8 * b) & 255];
  }
  for (int b = 0; b < Bytes; ++b) {
    uint32_t* count = histogram[b];
    if (count[digits_of(words[0]) >> (8 * b) & 255] == (uint64_t)n) continue;
    uint32_t sum = 0;
    for (int v = 0; v < 256; ++v) {
      const uint32_t c = count[v];
      count[v] = sum;
      sum += c;
    }
    for (int64_t i = 0; i < n; ++i)
      spare[count[digits_of(words[i]) >> (8 * b) & 255]++] = words[i];
    std::swap(words, spare);
  }
  return words;
}

template <class W>
__attribute__((noinline)) void select(W* words, int64_t k, int64_t n) {
  std::nth_element(words, words + k, words + n);
}

// The smallest word not below `least`. Words are distinct, so the next one in order is
// next_word(..., last + 1); those below wrap around to large differences.
static inline uint64_t next_word(const uint64_t* words, int64_t n, uint64_t least) {
  uint64_t best = ~0ull;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t above = words[i] - least;
    best = above < best ? above : best;
  }
  return best + least;
}

template <class T>
struct Column {
  using Key = decltype(key_of(T()));
  using Word = decltype(make(Key(), 0));
  static constexpr int kBytes = sizeof(Key);

  static void fill(Word* words, const T* src, int64_t n, int64_t stride, bool flip) {
    const Key mask = flip ? (Key)~(Key)0 : 0;
    for (int64_t i = 0; i < n; ++i) words[i] = make((Key)(key_of(src[i * stride]) ^ mask), i);
  }
};

template <class T>
void sort(const gc_args* args, int64_t begin, int64_t end) {
  using C = Column<T>;
  const int64_t n = args->imm[0], inner = args->imm[1];
  const bool descending = args->imm[2] != 0;
  typename C::Word* words = (typename C::Word*)args->scratch;
  for (int64_t c = begin; c < end; ++c) {
    const int64_t base = c / inner * n * inner + c % inner;
    const T* src = (const T*)args->ptr[0] + base;
    T* values = (T*)args->ptr[1] + base;
    int64_t* indices = (int64_t*)args->ptr[2] + base;
    C::fill(words, src, n, inner, descending);
    const typename C::Word* sorted = sort_words<typename C::Word, C::kBytes>(words, words + n, n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = index_of(sorted[i]);
      values[i * inner] = src[at * inner];
      indices[i * inner] = at;
    }
  }
}

// The choice that eager torch makes among equal values is an accident of its algorithm; models
// whose scores tie (rectified scores are often 0) depend on it. With ties the same standard
// algorithms run on the same pairs with the same order, so the same elements are chosen.
template <class T>
struct Ties {
  using Value = decltype(+T());
  struct Item {
    Value first;
    int64_t second;
  };

  // whether the k chosen, best first, are the only possible answer
  static bool unique(const T* src, int64_t n, int64_t inner, const int64_t* chosen, int64_t k) {
    for (int64_t i = 1; i < k; ++i)
      if (key_of(src[chosen[i * inner] * inner]) == key_of(src[chosen[(i - 1) * inner] * inner])) return false;
    const auto last = key_of(src[chosen[(k - 1) * inner] * inner]);
    int64_t equal = 0;
    for (int64_t i = 0; i < n; ++i) equal += key_of(src[i * inner]) == last;
    return equal == 1;
  }

  template <class Order>
  static void run(Item* items, int64_t n, int64_t k, bool sorted, Order before) {
    if (k * 64 <= n) {
      std::partial_sort(items, items + k, items + n, before);
      return;
    }
    std::nth_element(items, items + k - 1, items + n, before);
    if (sorted) std::sort(items, items + k - 1, before);
  }

  static void choose(Item* items, int64_t n, int64_t k, bool largest, bool sorted) {
    if (largest)
      run(items, n, k, sorted, [](const Item& x, const Item& y) {
        return (x.first != x.first && y.first == y.first) || x.first > y.first;
      });
    else
      run(items, n, k, sorted, [](const Item& x, const Item& y) {
        return (x.first == x.first && y.first != y.first) || x.first < y.first;
      });
  }
};

constexpr int64_t kDirect = 4096;  // up to this k * n, topk looks at every item k times

// The best k of a column, best first, ties to the lowest index.
template <class T>
void best(typename Column<T>::Word* words, const T* src, int64_t n, int64_t inner, int64_t k,
          typename Column<T>::Key mask, int64_t* indices) {
  using C = Column<T>;
  using Key = typename C::Key;
  using Word = typename C::Word;
  constexpr int kBlock = 64;
  const int64_t room = min64(n, 2 * k + kBlock);
  if (sizeof(Word) == 8 && k <= 16 && k * n <= kDirect) {  // the router of a mixture of experts
    C::fill(words, src, n, inner, mask != 0);
    uint64_t least = 0;
    for (int64_t i = 0; i < k; ++i) {
      const uint64_t word = next_word((const uint64_t*)words, n, least);
      least = word + 1;
      indices[i * inner] = (int64_t)(uint32_t)word;
    }
    return;
  }
  int64_t held = 0;
  Key limit = (Key)~(Key)0;
  bool limited = false;
  for (int64_t b = 0; b < n; b += kBlock) {
    const int64_t m = min64(kBlock, n - b);
    Key keys[kBlock];
    const T* s = src + b * inner;
    int hits = 0;
    if (inner == 1 && m == kBlock) {
      for (int i = 0; i < kBlock; ++i) keys[i] = (Key)(key_of(s[i]) ^ mask);
      for (int i = 0; i < kBlock; ++i) hits += keys[i] < limit;
    } else {
      for (int64_t i = 0; i < m; ++i) keys[i] = (Key)(key_of(s[i * inner]) ^ mask);
      for (int64_t i = 0; i < m; ++i) hits += keys[i] < limit;
    }
    if (limited && hits == 0) continue;
    for (int64_t i = 0; i < m; ++i)
      if (!limited || keys[i] < limit) words[held++] = make(keys[i], b + i);
    if (held + kBlock > room && held > k) {
      select(words, k - 1, held);
      // later items lose ties against every kept one: strictly smaller keys only
      limit = (Key)digits_of(words[k - 1]);
      limited = true;
      held = k;
    }
  }
  if (held > k) select(words, k - 1, held);
  std::sort(words, words + min64(k, held));
  for (int64_t i = 0; i < k; ++i) indices[i * inner] = index_of(words[i]);
}

// Keeps the best k seen so far plus a buffer of candidates below the current limit; a full
// buffer is cut back to k. Most blocks of a long row hold no candidate and cost one compare.
template <class T>
void topk(const gc_args* args, int64_t begin, int64_t end) {
  using C = Column<T>;
  using Key = typename C::Key;
  const int64_t n = args->imm[0], inner = args->imm[1], k = args->imm[2];
  const bool largest = args->imm[3] != 0, sorted = args->imm[4] != 0;
  const Key mask = largest ? (Key)~(Key)0 : 0;
  if (k <= 0) return;
  for (int64_t c = begin; c < end; ++c) {
    const int64_t outer = c / inner, at = c % inner;
    const T* src = (const T*)args->ptr[0] + outer * n * inner + at;
    T* values = (T*)args->ptr[1] + outer * k * inner + at;
    int64_t* indices = (int64_t*)args->ptr[2] + outer * k * inner + at;
    best<T>((typename C::Word*)args->scratch, src, n, inner, k, mask, indices);
    if ((!sorted && k * 64 > n) || !Ties<T>::unique(src, n, inner, indices, k)) {
      auto* items = (typename Ties<T>::Item*)args->scratch;
      for (int64_t i = 0; i < n; ++i) items[i] = {(typename Ties<T>::Value)src[i * inner], i};
      Ties<T>::choose(items, n, k, largest, sorted);
      for (int64_t i = 0; i < k; ++i) indices[i * inner] = items[i].second;
    }
    for (int64_t i = 0; i < k; ++i) values[i * inner] = src[indices[i * inner] * inner];
  }
}

template <class T>
void kth(const gc_args* args, int64_t begin, int64_t end) {
  using C = Column<T>;
  const int64_t n = args->imm[0], inner = args->imm[1], k = args->imm[2];
  typename C::Word* words = (typename C::Word*)args->scratch;
  if (n <= 0) return;
  for (int64_t c = begin; c < end; ++c) {
    const T* src = (const T*)args->ptr[0] + c / inner * n * inner + c % inner;
    int64_t at = -1;
    if (args->imm[3] != 0 && IsFloat<T>::value) {
      for (int64_t i = 0; i < n && at < 0; ++i)
        if (is_nan(src[i * inner])) at = i;
    }
    if (at < 0) {
      C::fill(words, src, n, inner, false);
      select(words, k, n);
      at = index_of(words[k]);
    }
    ((T*)args->ptr[1])[c] = src[at * inner];
    ((int64_t*)args->ptr[2])[c] = at;
  }
}

// torch's binary search: NaN boundaries count as greatest, a NaN value goes to the end.
// imm: boundaries per row, values per row, rows share one sequence, right, int32 result, sorted
// by sorter.  ptr: sequence, values, result, sorter (int64; sequence if there is none).
template <class T>
void search(const gc_args* args, int64_t begin, int64_t end) {
  using A = typename Arith<T>::type;
  const int64_t n = args->imm[0], per_row = args->imm[1];
  const bool shared = args->imm[2] != 0, right = args->imm[3] != 0, narrow = args->imm[4] != 0;
  const bool sorted = args->imm[5] != 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = shared ? 0 : i / per_row;
    const T* sequence = (const T*)args->ptr[0] + row * n;
    const int64_t* sorter = (const int64_t*)args->ptr[3] + row * n;
    const A value = (A)((const T*)args->ptr[1])[i];
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      int64_t from = middle;
      if (sorted) from = max64(0, min64(sorter[middle], n - 1));
      const A bound = (A)sequence[from];
      const bool before = right ? !(bound > value) : !(bound >= value);
      if (before) low = middle + 1; else high = middle;
    }
    if (narrow) ((int32_t*)args->ptr[2])[i] = (int32_t)low;
    else ((int64_t*)args->ptr[2])[i] = low;
  }
}

}  // namespace
}  // namespace gc

#define GC_ONE(NAME, TAG, TYPE)                                                              \
  GC_EXPORT void gc_##NAME##_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::NAME<TYPE>(args, begin, end);                                                        \
  }
#define GC_DEFINE(TAG, TYPE) \
  GC_ONE(sort, TAG, TYPE) GC_ONE(topk, TAG, TYPE) GC_ONE(kth, TAG, TYPE) GC_ONE(search, TAG, TYPE)
GC_FOR_ALL(GC_DEFINE)
