// Elementary functions without branches or tables, so that loops over them vectorise on every
// path. Each is one expression of float arithmetic; NaN and infinity behave as in libm.
// Errors against float64 (tests/test_vmath.py): at most 3 ulp unless stated.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "num.h"

#define GC_INLINE static inline __attribute__((always_inline))

namespace gc {

GC_INLINE uint64_t f64_to_bits(double d) { uint64_t u; memcpy(&u, &d, 8); return u; }
GC_INLINE float pow2i(int32_t n) { return bits_to_f32((uint32_t)(n + 127) << 23); }

GC_INLINE float vexp(float x) {
  float c = x > 89.0f ? 89.0f : x;
  c = c < -104.0f ? -104.0f : c;
  float t = c * 1.44269504088896341f + 12582912.0f;  // round to nearest by the float adder
  int32_t n = (int32_t)f32_to_bits(t) - 0x4b400000;
  float k = t - 12582912.0f;
  float r = c - k * 0.693145751953125f - k * 1.42860677e-6f;
  float p = 0.0013926181810489343f;
  p = p * r + 0.008363177629994445f;
  p = p * r + 0.041666554627878084f;
  p = p * r + 0.16666576998242924f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  int32_t half = n >> 1;  // two factors, so that subnormal results and overflow come out right
  return p * pow2i(half) * pow2i(n - half);
}

GC_INLINE float vexpm1(float x) {
  float p = 2.492243642934227e-05f;
  p = p * x + 0.000199621762266955f;
  p = p * x + 0.001388873772021196f;
  p = p * x + 0.008333182071584195f;
  p = p * x + 0.04166666713918055f;
  p = p * x + 0.16666667139493802f;
  p = p * x + 0.5f;
  float small = p * (x * x) + x;
  float big = vexp(x) - 1.0f;
  return (x < 0.5f && x > -0.5f) ? copysignf(small, x) : big;  // -0 stays -0
}

GC_INLINE float vlog(float x) {
  bool tiny = x < 1.17549435e-38f;
  float y = tiny ? x * 8388608.0f : x;
  int32_t b = (int32_t)f32_to_bits(y) - 0x3f3504f3;  // mantissa into [sqrt(1/2), sqrt(2))
  int32_t e = b >> 23;
  float m = bits_to_f32((uint32_t)(b - (e << 23) + 0x3f3504f3));
  float f = m - 1.0f;
  float k = (float)(tiny ? e - 23 : e);
  float p = 0.06969753982083551f;
  p = p * f - 0.11479188086670764f;
  p = p * f + 0.11685795939274597f;
  p = p * f - 0.12425776722809438f;
  p = p * f + 0.14249032730785605f;
  p = p * f - 0.16667798276479848f;
  p = p * f + 0.20000716304422572f;
  p = p * f - 0.2499999700104478f;
  p = p * f + 0.3333333117801879f;
  float u = f * f;
  float r = p * (u * f) - 0.5f * u + k * -2.12194440e-4f;
  r = r + f + k * 0.693359375f;
  r = x == 0.0f ? -INFINITY : r;
  r = x < 0.0f ? NAN : r;
  r = x == INFINITY ? INFINITY : r;
  return x != x ? x : r;
}

GC_INLINE float vlog1p(float x) {
  float u = 1.0f + x;
  float d = u - 1.0f;
  // the rounding error of 1 + x is put back to first order: log(u) * x / (u - 1)
  float r = d == 0.0f ? x : vlog(u) * (x / d);
  return x == INFINITY ? INFINITY : r;
}

GC_INLINE float vsigmoid(float x) { return 1.0f / (1.0f + vexp(-x)); }

GC_INLINE float vtanh(float x) {
  float a = fabsf(x), u = x * x;
  float p = 0.002269501684162354f;
  p = p * u - 0.008323187058278775f;
  p = p * u + 0.021762502907359264f;
  p = p * u - 0.0539584616274522f;
  p = p * u + 0.13333300146188914f;
  p = p * u - 0.33333333149374506f;
  float small = p * (u * x) + x;
  float big = 1.0f - 2.0f / (vexp(2.0f * a) + 1.0f);
  float r = a < 0.6324f ? small : big;
  return x != x ? x : copysignf(r, x);
}

// absolute error below 2e-7, at most 3 ulp
GC_INLINE float verf(float x) {
  float a = fabsf(x), u = x * x;
  float p = -9.667044571486996e-06f;
  p = p * u + 0.00011265959025609f;
  p = p * u - 0.0008484080405535107f;
  p = p * u + 0.005221031807858023f;
  p = p * u - 0.026865430727670243f;
  p = p * u + 0.11283782495236845f;
  p = p * u - 0.3761263846802871f;
  float small = x * 1.1283791670615435f + x * (p * u);
  float c = a > 4.1f ? 4.1f : a;
  float q = -8.813475906297848e-08f;
  q = q * c + 3.5957109416283726e-06f;
  q = q * c - 6.494943787614156e-05f;
  q = q * c + 0.0007004422141140502f;
  q = q * c - 0.005115367188531167f;
  q = q * c + 0.027212459497430626f;
  q = q * c - 0.11121892641184321f;
  q = q * c - 0.6308045695403662f;
  q = q * c - 1.1307512258643186f;
  q = q * c + 0.00043312918486047614f;
  float big = 1.0f - vexp(q);
  float r = a < 1.0f ? small : big;
  return x != x ? x : copysignf(r, x);
}

// argument reduction in double, for |x| up to 3e15 (2^51 quarter turns); NaN beyond. Without fused
// multiply-add (portable) the absolute error of the angle grows as 1e-16 * |x|.
GC_INLINE float vsincos(float x, int32_t shift) {
  double d = (double)x;
  double t = d * 0.63661977236758134308 + 6755399441055744.0;
  double k = t - 6755399441055744.0;
  double rd = d - k * 1.5707963267948966 - k * 6.123233995736766e-17;
  float r = (float)rd;
  int32_t q = (int32_t)f64_to_bits(t) + shift;  // the quarter turns are t's lowest bits
  float u = r * r;
  float s = 2.724992580305979e-06f;
  s = s * u - 0.00019840086735384846f;
  s = s * u + 0.008333331874710208f;
  s = s * u - 0.1666666666385529f;
  s = s * (u * r) + r;
  float c = -2.730095920390147e-07f;
  c = c * u + 2.480060037715673e-05f;
  c = c * u - 0.001388888767201679f;
  c = c * u + 0.0416666666643212f;
  c = c * (u * u) - 0.5f * u + 1.0f;
  float v = (q & 1) ? c : s;
  v = (q & 2) ? -v : v;
  v = shift == 0 && x == 0.0f ? x : v;  // -0 stays -0
  return fabsf(x) < 3e15f ? v : NAN;
}
GC_INLINE float vsin(float x) { return vsincos(x, 0); }
GC_INLINE float vcos(float x) { return vsincos(x, 1); }

GC_INLINE float vgelu(float x) { return 0.5f * x * (1.0f + verf(x * 0.70710678118654752f)); }
GC_INLINE float vgelu_tanh(float x) {
  float inner = 0.79788456080286536f * (x + 0.044715f * (x * x * x));
  return 0.5f * x * (1.0f + vtanh(inner));
}
GC_INLINE float vsilu(float x) { return x / (1.0f + vexp(-x)); }
GC_INLINE float vsoftplus(float x) {
  float e = vexp(-fabsf(x));
  float r = (x > 0.0f ? x : 0.0f) + vlog1p(e);
  return x != x ? x : r;
}

// the same names over double, through libm
GC_INLINE double vexp(double x) { return exp(x); }
GC_INLINE double vexpm1(double x) { return expm1(x); }
GC_INLINE double vlog(double x) { return log(x); }
GC_INLINE double vlog1p(double x) { return log1p(x); }
GC_INLINE double vsigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
GC_INLINE double vtanh(double x) { return tanh(x); }
GC_INLINE double verf(double x) { return erf(x); }
GC_INLINE double vsin(double x) { return sin(x); }
GC_INLINE double vcos(double x) { return cos(x); }
GC_INLINE double vgelu(double x) { return 0.5 * x * (1.0 + erf(x * 0.70710678118654752440)); }
GC_INLINE double vgelu_tanh(double x) {
  return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}
GC_INLINE double vsilu(double x) { return x / (1.0 + exp(-x)); }
GC_INLINE double vsoftplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

// integer division and remainder with Python's signs; a zero divisor gives 0 instead of a trap
template <class T> GC_INLINE bool minus_one(T b) { return (T)-1 < (T)0 && b == (T)-1; }
template <class T> GC_INLINE T floordiv(T a, T b) {
  if (b == 0) return 0;
  if (minus_one(b)) return (T)(0 - a);
  T q = (T)(a / b), r = (T)(a % b);
  return (T)((r != 0 && ((r < 0) != (b < 0))) ? q - 1 : q);
}
template <class T> GC_INLINE T truncdiv(T a, T b) {
  if (b == 0) return 0;
  if (minus_one(b)) return (T)(0 - a);
  return (T)(a / b);
}
template <class T> GC_INLINE T pymod(T a, T b) {
  if (b == 0 || minus_one(b)) return 0;
  T r = (T)(a % b);
  return (T)((r != 0 && ((r < 0) != (b < 0))) ? r + b : r);
}
template <class T> GC_INLINE T truncmod(T a, T b) { return (b == 0 || minus_one(b)) ? (T)0 : (T)(a % b); }
GC_INLINE float floordiv(float a, float b) {  // as Python: floor of the exact quotient
  if (b == 0.0f) return a / b;
  float m = fmodf(a, b), d = (a - m) / b;
  if (m != 0.0f && ((b < 0) != (m < 0))) d -= 1.0f;
  if (d == 0.0f) return copysignf(0.0f, a / b);
  float f = floorf(d);
  return d - f > 0.5f ? f + 1.0f : f;
}
GC_INLINE double floordiv(double a, double b) {
  if (b == 0.0) return a / b;
  double m = fmod(a, b), d = (a - m) / b;
  if (m != 0.0 && ((b < 0) != (m < 0))) d -= 1.0;
  if (d == 0.0) return copysign(0.0, a / b);
  double f = floor(d);
  return d - f > 0.5 ? f + 1.0 : f;
}
GC_INLINE float pymod(float a, float b) {
  float m = fmodf(a, b);
  return (m != 0.0f && ((b < 0) != (m < 0))) ? m + b : m;
}
GC_INLINE double pymod(double a, double b) {
  double m = fmod(a, b);
  return (m != 0.0 && ((b < 0) != (m < 0))) ? m + b : m;
}
GC_INLINE float truncmod(float a, float b) { return fmodf(a, b); }
GC_INLINE double truncmod(double a, double b) { return fmod(a, b); }
GC_INLINE float truncdiv(float a, float b) { return truncf(a / b); }
GC_INLINE double truncdiv(double a, double b) { return trunc(a / b); }

template <class T> GC_INLINE T ipow(T base, T exponent) {
  if (exponent < 0) return base == 1 ? (T)1 : (base == (T)-1 ? (T)((exponent & 1) ? -1 : 1) : (T)0);
  T r = 1;
  while (exponent) {
    if (exponent & 1) r = (T)(r * base);
    base = (T)(base * base);
    exponent = (T)(exponent >> 1);
  }
  return r;
}
GC_INLINE float ipow(float a, float b) { return powf(a, b); }
GC_INLINE double ipow(double a, double b) { return pow(a, b); }

// NaN-propagating minimum and maximum, as torch's
template <class T> GC_INLINE T vmax(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> GC_INLINE T vmin(T a, T b) { return (a < b || a != a) ? a : b; }

// float to integer as torch on x86: saturation is undefined there, so only the cast itself
template <class T> GC_INLINE T to_int(float x) { return (T)(int64_t)x; }
template <class T> GC_INLINE T to_int(double x) { return (T)(int64_t)x; }
template <> inline __attribute__((always_inline)) int32_t to_int<int32_t>(float x) { return (int32_t)x; }

}  // namespace gc
