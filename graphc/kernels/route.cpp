// Routing of tokens to experts: scores, choice of groups, choice of experts, weights.
//
// ptr: logits [T, E], bias [E] (float; not read if there is none), index int64 [T, count], weight
// float [T, count].
// imm: E, count, groups, kept, whether there is a bias, row stride of the logits, whether scores are
// a softmax (else sigmoids), whether weights are divided by their sum + eps, eps and the scale as
// bits of doubles.
// Range: T.   scratch: three rows of 32-bit items, E rounded up to ROUTE_PAD, and a ROUTE_PADth of one.
//
// A choice is made on integers that order like torch orders floats (NaN greatest, -0 equal to 0);
// what is taken, or beyond E, is less than any of them.
#include "abi.h"
#include "vmath.h"

#ifndef GC_ROUTE
#define GC_ROUTE f32, float
#endif

namespace gc {
namespace {

constexpr int64_t ROUTE_PAD = 64;
GC_INLINE int64_t padded(int64_t n) { return (n + ROUTE_PAD - 1) / ROUTE_PAD * ROUTE_PAD; }
constexpr int32_t TAKEN = INT32_MIN, NOT_A_NUMBER = INT32_MAX;

GC_INLINE vi keys_of(vf x) {
  const vi bits = (vi)(x + 0.0f);  // -0 becomes 0
  return sel(x != x, NOT_A_NUMBER - vi{}, bits ^ ((bits >> 31) & 0x7fffffff));
}
GC_INLINE int32_t key_of(float x) {
  const int32_t bits = (int32_t)f32_to_bits(x + 0.0f);
  return x != x ? NOT_A_NUMBER : bits ^ ((bits >> 31) & 0x7fffffff);
}
GC_INLINE float value_of(int32_t key) {
  return bits_to_f32((uint32_t)(key ^ ((key >> 31) & 0x7fffffff)));
}

#if defined(__AVX512F__)
GC_INLINE int32_t greatest(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
GC_INLINE int lanes_set(vi m) {
  return __builtin_popcount(_mm512_test_epi32_mask((__m512i)m, (__m512i)m));
}
#else
GC_INLINE int32_t greatest(vi v) {
  return fold(v, [](int32_t a, int32_t b) { return a > b ? a : b; });
}
GC_INLINE int lanes_set(vi m) { return -fold(m, [](int32_t a, int32_t b) { return a + b; }); }
#endif
GC_INLINE vi greater(vi a, vi b) { return sel(a > b, a, b); }
GC_INLINE vi smaller(vi a, vi b) { return sel(a > b, b, a); }

// Position of the first of some keys that equals `key`, which is among them.
GC_INLINE int64_t first_of(const int32_t* keys, int32_t key) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (;; i += VL) {
    const __m512i some = _mm512_loadu_si512(keys + i);
    const uint32_t found = _mm512_cmpeq_epi32_mask(some, _mm512_set1_epi32(key));
    if (found) return i + __builtin_ctz(found);
  }
#else
  while (!hany(load<vi>(keys + i) == key)) i += VL;
  while (keys[i] != key) i++;
  return i;
#endif
}

GC_INLINE int32_t greatest_of_block(const int32_t* keys) {
  vi most = load<vi>(keys);
#pragma GCC unroll 16
  for (int64_t i = VL; i < ROUTE_PAD; i += VL) most = greater(most, load<vi>(keys + i));
  return greatest(most);
}

// Keys in blocks of ROUTE_PAD, whose greatest are at hand: a choice looks at one block only.
struct Choice {
  int32_t *keys, *most;
  int64_t blocks;
  Choice(int32_t* keys, int64_t count, int32_t* most)
      : keys(keys), most(most), blocks(padded(count) / ROUTE_PAD) {
    for (int64_t b = 0; b < blocks; ++b) most[b] = greatest_of_block(keys + b * ROUTE_PAD);
  }
  // The greatest, the first of equal ones; it is taken.
  int64_t take() {
    int64_t block = 0;
    for (int64_t b = 1; b < blocks; ++b) block = most[b] > most[block] ? b : block;
    int32_t* const at = keys + block * ROUTE_PAD;
    const int64_t i = first_of(at, most[block]);
    at[i] = TAKEN;
    most[block] = greatest_of_block(at);
    return block * ROUTE_PAD + i;
  }
};

// The sum of the two greatest, as a key.
int32_t two_greatest(const int32_t* keys, int64_t size) {
  int32_t first = TAKEN, second = TAKEN;
  int64_t i = 0;
  if (size >= VL) {
    vi one = TAKEN - vi{}, two = one;
    for (; i + VL <= size; i += VL) {
      const vi v = load<vi>(keys + i);
      two = greater(two, smaller(one, v));
      one = greater(one, v);
    }
    first = greatest(one);
    const vi equal = one == first;
    second = lanes_set(equal) > 1 ? first : greatest(greater(two, sel(equal, TAKEN - vi{}, one)));
  }
  for (; i < size; ++i) {
    const int32_t less = keys[i] < first ? keys[i] : first;
    second = less > second ? less : second;
    first = keys[i] > first ? keys[i] : first;
  }
  return key_of(value_of(first) + value_of(second));
}

// Keys of all groups but the best become those of minus infinity. `value` and `most` have room for
// the groups and their blocks.
void keep_groups(int32_t* keys, int64_t experts, int64_t groups, int64_t kept, int32_t* value,
                 int32_t* most) {
  const int64_t size = experts / groups;
  for (int64_t g = groups / VL * VL; g < padded(groups); ++g) value[g] = TAKEN;
  for (int64_t g = 0; g < groups; ++g) value[g] = two_greatest(keys + g * size, size);
  Choice choice(value, groups, most);
  for (int64_t k = 0; k < kept; ++k) choice.take();
  const int32_t nothing = key_of(-INFINITY);
  for (int64_t g = 0; g < groups; ++g)
    if (value[g] != TAKEN)
      for (int64_t i = g * size; i < (g + 1) * size; ++i) keys[i] = nothing;
}

template <class T>
void softmax(const T* logits, int64_t n, float* out) {
  vf most = splat(-INFINITY), total = {};
  sweep<1>(0, n, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
    most = vmax(most, only(vload(logits + i, w), -INFINITY, w));
  });
  const float top = fold(most, [](float a, float b) { return vmax(a, b); });
  sweep<1>(0, n, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
    const vf e = vexp(vload(logits + i, w) - top);
    total += only(e, 0.0f, w);
    vstore(out + i, e, w);
  });
  const float whole = hsum(total);
  sweep<1>(0, n, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
    vstore(out + i, vload(out + i, w) / whole, w);
  });
}

template <class T>
void route(const gc_args* args, int64_t begin, int64_t end) {
  const int64_t experts = args->imm[0], count = args->imm[1], groups = args->imm[2];
  const float* const bias = args->imm[4] ? (const float*)args->ptr[1] : nullptr;
  const bool divided = args->imm[7];
  double eps, scale;
  memcpy(&eps, args->imm + 8, 8);
  memcpy(&scale, args->imm + 9, 8);
  const int64_t most = padded(experts);
  float* const score = (float*)args->scratch;
  int32_t *const keys = (int32_t*)(score + most), *const value = keys + most,
                *const best = value + most;
  for (int64_t t = begin; t < end; ++t) {
    const T* const logits = (const T*)args->ptr[0] + t * args->imm[5];
    if (args->imm[6]) softmax(logits, experts, score);
    else sweep<1>(0, experts, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
      vstore(score + i, vsigmoid(vload(logits + i, w)), w);
    });
    for (int64_t i = experts / VL * VL; i < most; ++i) keys[i] = TAKEN;
    sweep<1>(0, experts, [&](int64_t i, auto w, auto) __attribute__((always_inline)) {
      vf biased = vload(score + i, w);
      if (bias) biased += vload(bias + i, w);
      store(keys + i, only(keys_of(biased), TAKEN, w));
    });
    if (groups > 1) keep_groups(keys, experts, groups, args->imm[3], value, best);
    Choice choice(keys, experts, best);
    int64_t* const index = (int64_t*)args->ptr[2] + t * count;
    float* const weight = (float*)args->ptr[3] + t * count;
    float sum = 0;
    for (int64_t k = 0; k < count; ++k) {
      index[k] = choice.take();
      weight[k] = score[index[k]];
      sum += weight[k];
    }
    if (divided)
      for (int64_t k = 0; k < count; ++k) weight[k] /= sum + (float)eps;
    for (int64_t k = 0; k < count; ++k) weight[k] *= (float)scale;
  }
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(TAG, TYPE)                                                           \
  GC_EXPORT void gc_route_##TAG(const gc_args* args, int64_t begin, int64_t end) {     \
    gc::route<TYPE>(args, begin, end);                                                 \
  }
#define GC_EXPAND(...) GC_DEFINE(__VA_ARGS__)
GC_EXPAND(GC_ROUTE)
