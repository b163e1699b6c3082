// Positions of interpolation, in torch's order of operations.
#pragma once
#include "strided.h"

#include <cmath>

namespace gc {

template <class P>
static inline P step_of(int64_t in, int64_t out, double scale) {
  return scale > 0 ? (P)(1.0 / scale) : (P)in / (P)out;
}

template <class P>
static inline int64_t nearest(P step, int64_t o, int64_t in, bool centre) {
  const P at = centre ? std::floor(step * ((P)o + (P)0.5) - (P)0.5 + (P)0.5) : std::floor(step * (P)o);
  const int64_t i = (int64_t)at;
  return i < 0 ? 0 : min64(i, in - 1);
}

struct Box {
  int64_t id, ih, iw, od, oh, ow, scale[3], flag;
};

// The taps of one output coordinate: source coordinates and weights.
template <class P, int Taps>
struct Tap {
  int64_t at[Taps];
  P weight[Taps];
};

template <class P>
static inline P position(int64_t o, int64_t in, int64_t out, double scale, bool corners) {
  if (corners) return out > 1 ? (P)(in - 1) / (P)(out - 1) * (P)o : (P)0;
  return step_of<P>(in, out, scale) * ((P)o + (P)0.5) - (P)0.5;
}

template <class P>
static inline void tap(int64_t o, int64_t in, int64_t out, double scale, bool corners, Tap<P, 2>* t) {
  P at = position<P>(o, in, out, scale, corners);
  at = at < 0 ? 0 : at;
  const int64_t i = min64((int64_t)at, in - 1);
  P w = at - (P)i;
  w = w > 1 ? 1 : w;
  t->at[0] = i;
  t->at[1] = min64(i + 1, in - 1);
  t->weight[0] = 1 - w;
  t->weight[1] = w;
}

}  // namespace gc
