// Elementary functions without branches or tables, so that loops over them vectorise on every
// path. Each is one expression of float arithmetic; NaN and infinity behave as in libm.
// Errors against float64 (tests/test_vmath.py): at most 3 ulp unless stated.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vec.h"

namespace gc {

GC_INLINE uint64_t f64_to_bits(double d) { uint64_t u; memcpy(&u, &d, 8); return u; }
template <class I> GC_INLINE auto pow2i(I n) { return fbits((n + 127) << 23); }

// V is float or a vector of floats
template <class V> GC_INLINE V vexp(V x) {
  V c = sel(x > 89.0f, 89.0f + V{}, x);
  c = sel(c < -104.0f, -104.0f + V{}, c);
  V t = c * 1.44269504088896341f + 12582912.0f;  // round to nearest by the float adder
  auto n = ibits(t) - 0x4b400000;
  V k = t - 12582912.0f;
  V r = c - k * 0.693145751953125f - k * 1.42860677e-6f;
  V p = 0.0013926181810489343f * r + 0.008363177629994445f;
  p = p * r + 0.041666554627878084f;
  p = p * r + 0.16666576998242924f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  auto half = n >> 1;  // two factors, so that subnormal results and overflow come out right
  return p * pow2i(half) * pow2i(n - half);
}

#if defined(__AVX512F__)
// Lane i of the result is entry (low four bits of at[i]) of the table.
GC_INLINE vf lookup(const float* table, vi at) {
  return (vf)_mm512_permutexvar_ps((__m512i)at, _mm512_loadu_ps(table));
}

// exp(x) = 2^(k / 16) exp(r): the sixteenth powers are looked up in a register, and the whole power
// of two is put on by the instruction that knows about overflow and subnormals.
alignas(64) static const float kPow2[16] = {
    1.0f, 1.04427373f, 1.09050775f, 1.13878858f,
    1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
    1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
    1.68179286f, 1.75625217f, 1.8340081f, 1.91520655f};
template <> inline __attribute__((always_inline)) vf vexp<vf>(vf x) {
  __m512 c = _mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x);  // NaN stays: the second operand
  c = _mm512_max_ps(_mm512_set1_ps(-104.5f), c);
  vf t = (vf)c * 1.44269504088896341f + 786432.0f;  // to the nearest sixteenth, by the float adder
  vf k = t - 786432.0f;
  vf r = (vf)c - k * 0.693145751953125f - k * 1.42860677e-6f;
  vf p = 0.166668622f * r + 0.500009775f;
  p = p * (r * r) + r;
  vf power = lookup(kPow2, ibits(t));
  return (vf)_mm512_scalef_ps((__m512)(power * p + power), (__m512)k);
}
#endif

template <class V> GC_INLINE V vexpm1(V x) {
  V p = 2.492243642934227e-05f * x + 0.000199621762266955f;
  p = p * x + 0.001388873772021196f;
  p = p * x + 0.008333182071584195f;
  p = p * x + 0.04166666713918055f;
  p = p * x + 0.16666667139493802f;
  p = p * x + 0.5f;
  V small = p * (x * x) + x;
  V big = vexp(x) - 1.0f;
  return sel(vabs(x) < 0.5f, vcopysign(small, x), big);  // -0 stays -0
}

template <class V> GC_INLINE V vlog(V x) {
  auto tiny = x < 1.17549435e-38f;
  V y = sel(tiny, x * 8388608.0f, x);
  auto b = ibits(y) - 0x3f3504f3;  // mantissa into [sqrt(1/2), sqrt(2))
  auto e = b >> 23;
  V m = fbits(b - (e << 23) + 0x3f3504f3);
  V f = m - 1.0f;
  V k = to_f32(e);
  k = sel(tiny, k - 23.0f, k);
  V p = 0.06969753982083551f * f - 0.11479188086670764f;
  p = p * f + 0.11685795939274597f;
  p = p * f - 0.12425776722809438f;
  p = p * f + 0.14249032730785605f;
  p = p * f - 0.16667798276479848f;
  p = p * f + 0.20000716304422572f;
  p = p * f - 0.2499999700104478f;
  p = p * f + 0.3333333117801879f;
  V u = f * f;
  V r = p * (u * f) - 0.5f * u + k * -2.12194440e-4f;
  r = r + f + k * 0.693359375f;
  r = sel(x == 0.0f, -INFINITY + V{}, r);
  r = sel(x < 0.0f, NAN + V{}, r);
  r = sel(x == INFINITY, INFINITY + V{}, r);
  return sel(x != x, x, r);
}

template <class V> GC_INLINE V vlog1p(V x) {
  V u = 1.0f + x;
  V d = u - 1.0f;
  // the rounding error of 1 + x is put back to first order: log(u) * x / (u - 1)
  V r = sel(d == 0.0f, x, vlog(u) * (x / d));
  return sel(x == INFINITY, INFINITY + V{}, r);
}

template <class V> GC_INLINE V vsigmoid(V x) { return 1.0f / (1.0f + vexp(-x)); }

template <class V> GC_INLINE V vtanh(V x) {
  V a = vabs(x), u = x * x;
  V p = 0.002269501684162354f * u - 0.008323187058278775f;
  p = p * u + 0.021762502907359264f;
  p = p * u - 0.0539584616274522f;
  p = p * u + 0.13333300146188914f;
  p = p * u - 0.33333333149374506f;
  V small = p * (u * x) + x;
  V big = 1.0f - 2.0f / (vexp(2.0f * a) + 1.0f);
  V r = sel(a < 0.6324f, small, big);
  return sel(x != x, x, vcopysign(r, x));
}

template <class V> GC_INLINE V verf(V x) {
  V a = vabs(x), u = x * x;
  V p = -9.667044571486996e-06f * u + 0.00011265959025609f;
  p = p * u - 0.0008484080405535107f;
  p = p * u + 0.005221031807858023f;
  p = p * u - 0.026865430727670243f;
  p = p * u + 0.11283782495236845f;
  p = p * u - 0.3761263846802871f;
  V small = x * 1.1283791670615435f + x * (p * u);
  V c = sel(a > 4.1f, 4.1f + V{}, a);
  V q = -8.813475906297848e-08f * c + 3.5957109416283726e-06f;
  q = q * c - 6.494943787614156e-05f;
  q = q * c + 0.0007004422141140502f;
  q = q * c - 0.005115367188531167f;
  q = q * c + 0.027212459497430626f;
  q = q * c - 0.11121892641184321f;
  q = q * c - 0.6308045695403662f;
  q = q * c - 1.1307512258643186f;
  q = q * c + 0.00043312918486047614f;
  V big = 1.0f - vexp(q);
  V r = sel(a < 1.0f, small, big);
  return sel(x != x, x, vcopysign(r, x));
}

#if defined(__AVX512F__)
// erf around sixteen points k * 0.2582: the polynomial's coefficients are looked up in registers.
// The last constant is rounded up: beyond 4 the result is exactly 1.
alignas(64) static const float kErf[6][16] = {
    {0.0f, 0.285000501f, 0.534793076f, 0.726680362f,
     0.855874675f, 0.932112021f, 0.971540941f, 0.989413195f,
     0.996513134f, 0.998985049f, 0.999739286f, 0.999940968f,
     0.99998823f, 0.999997935f, 0.999999681f, 1.0f},
    {1.12837917f, 1.05560599f, 0.864255618f, 0.619264453f,
     0.388332436f, 0.213120269f, 0.102362154f, 0.0430276527f,
     0.0158288539f, 0.00509618132f, 0.00143593199f, 0.000354092304f,
     7.64174863e-05f, 1.44332019e-05f, 2.38575783e-06f, 3.45130882e-07f},
    {2.32281309e-07f, -0.272551005f, -0.446293893f, -0.479678525f,
     -0.401070946f, -0.275141693f, -0.158582186f, -0.0777692169f,
     -0.0326959444f, -0.0118420216f, -0.00370719298f, -0.00100549284f,
     -0.00023669242f, -4.84211424e-05f, -8.61738942e-06f, -1.33523471e-06f},
    {-0.37614017f, -0.304950022f, -0.134439494f, 0.0412834783f,
     0.146703557f, 0.165761938f, 0.129660985f, 0.0793637936f,
     0.039748797f, 0.0166477073f, 0.00590322762f, 0.00178612635f,
     0.000463557708f, 0.000103581737f, 1.99822493e-05f, 3.33499736e-06f},
    {0.000269689407f, 0.129189372f, 0.182248845f, 0.14331233f,
     0.058127377f, -0.0147367147f, -0.0471364975f, -0.0456316154f,
     -0.0301753293f, -0.0154729318f, -0.00644657691f, -0.00223329895f,
     -0.000651962494f, -0.000161755657f, -3.43076366e-05f, -6.24652546e-06f},
    {0.111026641f, 0.0776491073f, 0.00259865271f, -0.0565043887f,
     -0.0675987112f, -0.0417885783f, -0.0095543353f, 0.00916038451f,
     0.0129253098f, 0.00931207223f, 0.00484016131f, 0.00197920757f,
     0.000660518351f, 0.00018345979f, 4.29171495e-05f, 8.52282273e-06f},
};
template <> inline __attribute__((always_inline)) vf verf<vf>(vf x) {
  const float step = 0.2582f;
  vf a = (vf)_mm512_min_ps(_mm512_set1_ps(4.0f), (__m512)vabs(x));  // erf(4) is 1; NaN stays
  vf t = a * (1.0f / step) + 12582912.0f;
  vi at = ibits(t);
  vf r = a - (t - 12582912.0f) * step;
  vf p = lookup(kErf[5], at) * r + lookup(kErf[4], at);
  p = p * r + lookup(kErf[3], at);
  p = p * r + lookup(kErf[2], at);
  p = p * r + lookup(kErf[1], at);
  p = p * r + lookup(kErf[0], at);
  return (vf)((vi)p | ((vi)x & (int32_t)0x80000000));
}
#endif

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
GC_INLINE vf vsin(vf x) { return each<vf>([](float t) { return vsincos(t, 0); }, x); }
GC_INLINE vf vcos(vf x) { return each<vf>([](float t) { return vsincos(t, 1); }, x); }

template <class V> GC_INLINE V vgelu(V x) {
  return 0.5f * x * (1.0f + verf(x * 0.70710678118654752f));
}
// 0.5 (1 + tanh(y)) is the sigmoid of 2 y
template <class V> GC_INLINE V vgelu_tanh(V x) {
  V inner = -1.5957691216057308f * (x + 0.044715f * (x * x * x));
  return x / (1.0f + vexp(inner));
}
template <class V> GC_INLINE V vsilu(V x) { return x / (1.0f + vexp(-x)); }
template <class V> GC_INLINE V vsoftplus(V x) {
  V e = vexp(-vabs(x));
  V r = sel(x > 0.0f, x, V{}) + vlog1p(e);
  return sel(x != x, x, r);
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

// float to integer as torch on x86: saturation is undefined there, so only the cast itself
template <class T> GC_INLINE T to_int(float x) { return (T)(int64_t)x; }
template <class T> GC_INLINE T to_int(double x) { return (T)(int64_t)x; }
template <> inline __attribute__((always_inline)) int32_t to_int<int32_t>(float x) { return (int32_t)x; }

}  // namespace gc
