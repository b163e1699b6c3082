// Rows of numbers as records of bytes (graphc/ops/records.py): E4M3 codes with the scales of their
// blocks, and numbers as they are.
#pragma once
#include <math.h>

#include "vec.h"

struct gc_segment { int64_t kind, width; };
// group: so many rows of a page share their bytes (records.py), 1 or GROUPED.
struct gc_record_format { int64_t segments, width, bytes, group; gc_segment segment[4]; };

namespace gc {

enum RecordKind {
  MX_FLOOR = 1, MX_CEIL = 2, MX_EVEN = 3, FP8 = 4, FP8_POW2 = 5, PLAIN_F32 = 6, PLAIN_BF16 = 7,
  PLAIN_F16 = 8
};
constexpr int64_t MX_BLOCK = 32, FP8_TILE = 128, GROUPED = 16;
constexpr int32_t INFINITE = 0x7f800000;  // the bits of infinity; of NaN there are more

GC_INLINE bool is_mx(int64_t kind) { return kind <= MX_EVEN; }
GC_INLINE bool is_plain(int64_t kind) { return kind >= PLAIN_F32; }
GC_INLINE int64_t plain_size(int64_t kind) { return kind == PLAIN_F32 ? 4 : 2; }
GC_INLINE int64_t scale_count(const gc_segment& s) {
  const int64_t block = is_mx(s.kind) ? MX_BLOCK : FP8_TILE;
  return (s.width + block - 1) / block;
}
GC_INLINE int64_t segment_bytes(const gc_segment& s) {
  if (is_plain(s.kind)) return s.width * plain_size(s.kind);
  return s.width + scale_count(s) * (is_mx(s.kind) ? 1 : 4);
}

// -- single numbers as lanes --------------------------------------------------------------------

// The nearest number of E4M3, ties to even, saturating; and its code.
GC_INLINE vf e4m3_rounded(vf x) {
  const vi magnitude = (vi)x & 0x7fffffff;
  const vf v = (vf)magnitude < splat(448.0f) ? (vf)magnitude : splat(448.0f);
  const vi b = (vi)v;
  const vi normal = (b + 0x7ffff + ((b >> 20) & 1)) & ~0xfffff;
  const vf small = v + splat(16384.0f) - splat(16384.0f);
  const vf rounded = b < 121 << 23 ? small : (vf)normal;
  return magnitude > INFINITE ? x : vcopysign(rounded, x);
}
GC_INLINE vi e4m3_codes(vf x) {
  const vi bits = (vi)x, magnitude = bits & 0x7fffffff;
  const vf v = (vf)magnitude < splat(448.0f) ? (vf)magnitude : splat(448.0f);
  const vi b = (vi)v;
  const vi normal = ((b + 0x7ffff + ((b >> 20) & 1)) >> 20) - (120 << 3);
  const vi small = (vi)(v + splat(16384.0f)) - (vi)splat(16384.0f);  // steps of 2^-9
  vi code = b < 121 << 23 ? small : normal;
  code = magnitude > INFINITE ? vi{} + 0x7f : code;
  return code | ((bits >> 24) & 0x80);
}
GC_INLINE vf e4m3_numbers(vi code) {
  const vi magnitude = code & 0x7f, shifted = magnitude << 20;
  const vf small = (vf)(shifted | 121 << 23) - splat(0.015625f);
  vf v = magnitude < 8 ? small : (vf)(shifted + (120 << 23));
  v = magnitude == 0x7f ? splat(NAN) : v;
  return (vf)((vi)v | (code & 0x80) << 24);
}
GC_INLINE void put_codes(uint8_t* to, vi codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
#else
  store(to, __builtin_convertvector(codes, vb));
#endif
}
GC_INLINE vi get_codes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__) && GC_VBYTES == 32
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load<vb>(from), vi);
#endif
}

// -- scales -------------------------------------------------------------------------------------

// The E8M0 code of a block whose largest magnitude has these bits.
GC_INLINE int32_t mx_scale(int32_t most, int64_t rule) {
  if (most >= INFINITE) return 255;
  int32_t c;
  if (rule == MX_EVEN) c = ((most + 0x7ffff + ((most >> 20) & 1)) >> 23) - 8;
  else c = (most >> 23) - 8 + (rule == MX_CEIL && (most & 0x7fffff) > 0x600000);
  return c < 0 ? 0 : c;
}
GC_INLINE float mx_power(int32_t code) {  // 2^(code - 127)
  return code == 255 ? NAN : bits_to_f32(code == 0 ? 0x400000u : (uint32_t)code << 23);
}
GC_INLINE float tile_scale(float most, bool power_of_two) {
  const float s = (most > 1e-4f ? most : 1e-4f) / 448.0f;
  if (!power_of_two) return s;
  const uint32_t bits = f32_to_bits(s);
  return bits_to_f32((bits + 0x7fffffu) & 0x7f800000u);
}

// -- rows ---------------------------------------------------------------------------------------

template <class S, class T> static inline void convert(const S* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) vstore(to + i, vload(from + i, All{}), All{});
  if (i < n) vstore(to + i, vload(from + i, First{n - i}), First{n - i});
}

GC_INLINE int32_t greatest(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = 0;
  for (int i = 0; i < VL; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}
// The bits of the largest magnitude of n numbers, whole vectors.
GC_INLINE int32_t largest_bits(const float* x, int64_t n) {
  vi top = {};
  for (int64_t i = 0; i < n; i += VL) {
    const vi magnitude = load<vi>(x + i) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  return greatest(top);
}

// n numbers, n <= FP8_TILE, as codes and their scale.
GC_INLINE void encode_block(const float* x, int64_t n, int64_t kind, uint8_t* codes, void* scale) {
  float padded[FP8_TILE];
  uint8_t made[FP8_TILE];
  const int64_t full = (n + VL - 1) / VL * VL;
  const bool whole = full == n;
  if (!whole) {
    memcpy(padded, x, (size_t)n * 4);
    for (int64_t i = n; i < full; i++) padded[i] = 0.0f;
  }
  const float* const from = whole ? x : padded;
  uint8_t* const to = whole ? codes : made;
  const int32_t most = largest_bits(from, full);
  float by;
  if (is_mx(kind)) {
    const int32_t code = mx_scale(most, kind);
    *(uint8_t*)scale = (uint8_t)code;
    by = code == 255 ? 1.0f : mx_power(code);
  } else {
    const bool finite = most < INFINITE;
    by = tile_scale(finite ? bits_to_f32((uint32_t)most) : 1.0f, kind == FP8_POW2);
    const float kept = finite ? by : NAN;
    memcpy(scale, &kept, 4);
  }
  for (int64_t i = 0; i < full; i += VL) put_codes(to + i, e4m3_codes(load<vf>(from + i) / splat(by)));
  if (!whole) memcpy(codes, made, (size_t)n);
}

// n numbers, n <= MX_BLOCK, whole vectors, as a block of MXFP8 would keep them, in place.
GC_INLINE void narrow_block(float* x, int64_t n, int64_t rule) {
  const int32_t code = mx_scale(largest_bits(x, n), rule);
  const vf by = splat(code == 255 ? 1.0f : mx_power(code)), scale = splat(mx_power(code));
  for (int64_t i = 0; i < n; i += VL) store(x + i, e4m3_rounded(load<vf>(x + i) / by) * scale);
}

// A record of the row x.
static inline void encode_record(const float* x, const gc_record_format* f, uint8_t* to) {
  for (int64_t k = 0; k < f->segments; k++) {
    const gc_segment& s = f->segment[k];
    if (s.kind == PLAIN_F32) {
      convert(x, s.width, (float*)to);
    } else if (s.kind == PLAIN_BF16) {
      for (int64_t i = 0; i < s.width; i++) {  // by hand: the instruction for it drops subnormals
        const bf16 rounded = x[i];
        memcpy(to + 2 * i, &rounded, 2);
      }
    } else if (s.kind == PLAIN_F16) {
      convert(x, s.width, (f16*)to);
    } else {
      const int64_t block = is_mx(s.kind) ? MX_BLOCK : FP8_TILE, size = is_mx(s.kind) ? 1 : 4;
      for (int64_t i = 0; i < s.width; i += block)
        encode_block(x + i, s.width - i < block ? s.width - i : block, s.kind, to + i,
                     to + s.width + i / block * size);
    }
    x += s.width;
    to += segment_bytes(s);
  }
}

// n <= FP8_TILE numbers of one scale.
template <class T> GC_INLINE void decode_block(const uint8_t* codes, int64_t n, float scale, T* to) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) vstore(to + i, e4m3_numbers(get_codes(codes + i)) * splat(scale), All{});
  if (i == n) return;
  uint8_t rest[VL] = {};
  memcpy(rest, codes + i, (size_t)(n - i));
  vstore(to + i, e4m3_numbers(get_codes(rest)) * splat(scale), First{n - i});
}

// Where the codes 2 i and 2 i + 1 of a row are in the bytes of GROUPED, and the scale of its block i.
GC_INLINE int64_t pair_place(int64_t i, int64_t row) {
  return i / 2 * 64 + row / 4 * 16 + i % 2 * 8 + row % 4 * 2;
}
GC_INLINE int64_t scale_place(int64_t width, int64_t i, int64_t row) {
  return GROUPED * width + i * GROUPED + row;
}
static inline void put_in_group(const uint8_t* record, int64_t width, uint8_t* group, int64_t row) {
  for (int64_t i = 0; i < width / 2; i++) memcpy(group + pair_place(i, row), record + 2 * i, 2);
  for (int64_t i = 0; i < width / MX_BLOCK; i++) group[scale_place(width, i, row)] = record[width + i];
}
static inline void get_from_group(const uint8_t* group, int64_t width, int64_t row, uint8_t* record) {
  for (int64_t i = 0; i < width / 2; i++) memcpy(record + 2 * i, group + pair_place(i, row), 2);
  for (int64_t i = 0; i < width / MX_BLOCK; i++) record[width + i] = group[scale_place(width, i, row)];
}

// The numbers of a record.
template <class T>
static inline void decode_record(const uint8_t* from, const gc_record_format* f, T* to) {
  for (int64_t k = 0; k < f->segments; k++) {
    const gc_segment& s = f->segment[k];
    if (s.kind == PLAIN_F32) {
      convert((const float*)from, s.width, to);
    } else if (s.kind == PLAIN_BF16) {
      convert((const bf16*)from, s.width, to);
    } else if (s.kind == PLAIN_F16) {
      convert((const f16*)from, s.width, to);
    } else {
      const int64_t block = is_mx(s.kind) ? MX_BLOCK : FP8_TILE;
      for (int64_t i = 0; i < s.width; i += block) {
        float scale;
        if (is_mx(s.kind)) scale = mx_power(from[s.width + i / block]);
        else memcpy(&scale, from + s.width + i / block * 4, 4);
        decode_block(from + i, s.width - i < block ? s.width - i : block, scale, to + i);
      }
    }
    from += segment_bytes(s);
    to += s.width;
  }
}

}  // namespace gc
