// Storage number formats and their conversions, written so that g++ and clang vectorise them.
#pragma once
#include <stdint.h>
#include <string.h>

namespace gc {

static inline float bits_to_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t f32_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

// bfloat16: the upper half of a float; narrowing rounds to nearest even, NaN stays NaN.
struct bf16 {
  uint16_t u;
  bf16() = default;
  bf16(float f) {
    uint32_t b = f32_to_bits(f);
    uint32_t r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    u = (uint16_t)((b & 0x7fffffffu) > 0x7f800000u ? ((b >> 16) | 0x40u) : r);
  }
  operator float() const { return bits_to_f32((uint32_t)u << 16); }
};

#if defined(__FLT16_MAX__) && !defined(GC_NO_FLOAT16)
struct f16 {
  _Float16 h;
  f16() = default;
  f16(float f) : h((_Float16)f) {}
  operator float() const { return (float)h; }
};
#else
// IEEE half without compiler support: exact both ways, round to nearest even.
struct f16 {
  uint16_t u;
  f16() = default;
  f16(float f) {
    uint32_t b = f32_to_bits(f), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a > 0x7f800000u) { u = (uint16_t)(sign | 0x7e00u); return; }
    if (a >= 0x477ff000u) { u = (uint16_t)(sign | 0x7c00u); return; }
    if (a < 0x38800000u) {  // subnormal half: let the float adder do the rounding
      float t = bits_to_f32(a) + 0.5f;
      u = (uint16_t)(sign | (f32_to_bits(t) - 0x3f000000u));
      return;
    }
    u = (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
  }
  operator float() const {
    uint32_t sign = (uint32_t)(u & 0x8000u) << 16, a = u & 0x7fffu;
    if (a >= 0x7c00u) return bits_to_f32(sign | 0x7f800000u | ((a & 0x3ffu) << 13));
    float t = bits_to_f32((a << 13)) * 5.192296858534828e33f;  // 2^112
    return bits_to_f32(f32_to_bits(t) | sign);
  }
};
#endif

}  // namespace gc
