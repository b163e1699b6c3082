// Copies that turn one axis into another: dst[b * db + a] = src[a * sa + b], in tiles that lie in
// registers, so that whole lines of memory are read and written.
#pragma once
#include "isa.h"

namespace gc {

typedef uint16_t vs8 __attribute__((vector_size(16)));

// Eight by eight elements of four and two bytes.
GC_INLINE void turn8(uint32_t* dst, int64_t db, const uint32_t* src, int64_t sa) {
  vf8 r[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = load<vf8>(src + i * sa);
  transpose8(r);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) store(dst + i * db, r[i]);
}
GC_INLINE void turn8(uint16_t* dst, int64_t db, const uint16_t* src, int64_t sa) {
  vs8 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = load<vs8>(src + i * sa);
#pragma GCC unroll 3
  for (int stage = 0; stage < 3; stage++) {  // interleaving row i with row i + 4, three times
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      t[2 * i] = __builtin_shufflevector(r[i], r[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = t[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) store(dst + i * db, r[i]);
}

// nb rows of na elements are written.
template <class T>
GC_INLINE void turn(T* dst, int64_t db, const T* src, int64_t sa, int64_t nb, int64_t na) {
  constexpr int64_t kTile = 16;
  for (int64_t a0 = 0; a0 < na; a0 += kTile)
    for (int64_t b0 = 0; b0 < nb; b0 += kTile) {
      const int64_t a1 = a0 + kTile < na ? a0 + kTile : na;
      const int64_t b1 = b0 + kTile < nb ? b0 + kTile : nb;
      if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
        if (a1 - a0 == kTile && b1 - b0 == kTile) {
          for (int64_t b = b0; b < b1; b += 8)
            for (int64_t a = a0; a < a1; a += 8) turn8(dst + b * db + a, db, src + a * sa + b, sa);
          continue;
        }
      }
      for (int64_t b = b0; b < b1; b++)
        for (int64_t a = a0; a < a1; a++) dst[b * db + a] = src[a * sa + b];
    }
}

}  // namespace gc
