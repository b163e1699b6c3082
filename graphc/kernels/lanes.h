// Vectors of fp32 lanes from and to neighbouring items of any storage type.
#pragma once
#include "widen.h"

namespace gc {

GC_INLINE vf load_lanes(const float* p) { return load<vf>(p); }
GC_INLINE vf load_lanes(const bf16* p) { return from_bf16(load<vh>(p)); }
GC_INLINE vf load_lanes(const f16* p) {
  vf v;
  for (int i = 0; i < VL; i++) v[i] = (float)p[i];
  return v;
}
// The first n lanes, `step` items apart, the others zero.
template <class T> static vf load_some(const T* p, int64_t n, int64_t step = 1) {
  float v[VL] = {};
  for (int64_t i = 0; i < n; i++) v[i] = to_float(p[i * step]);
  return load<vf>(v);
}

GC_INLINE void store_lanes(float* p, const vf& v) { store(p, v); }
template <class T> GC_INLINE void store_lanes(T* p, const vf& v) {
  float lanes[VL];
  store(lanes, v);
  for (int i = 0; i < VL; i++) p[i] = (T)lanes[i];
}
// The same of lanes whose values the storage type holds exactly.
template <class T> GC_INLINE void store_exact(T* p, const vf& v) { store_lanes(p, v); }
GC_INLINE void store_exact(bf16* p, const vf& v) { store(p, narrow((vu)v >> 16)); }
template <class T> static void store_some(T* p, const vf& v, int64_t n) {
  float lanes[VL];
  store(lanes, v);
  for (int64_t i = 0; i < n; i++) p[i] = (T)lanes[i];
}

}  // namespace gc
