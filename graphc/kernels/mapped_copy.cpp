// Strided copies whose source coordinate is a map of the destination coordinate: flips, rolls,
// repeats, reflecting, replicating and circular padding, the part copies of slice_scatter.
//
// imm: rank, then per dimension (outermost first):
//      size, dst_stride, src_stride, mode, left, source_size
// A destination coordinate o reads the source coordinate map(o - left) with
//      mode 0: identity   1: clamp to the edge   2: mirror about the edge element   3: modulo
// ptr: src, dst.  Range: the product of all sizes but the last.
#include "strided.h"

namespace gc {
namespace {

enum Mode : int64_t { kIdentity = 0, kReplicate = 1, kReflect = 2, kCircular = 3 };

struct Dim {
  int64_t size, dst_stride, src_stride, mode, left, source;

  // Source coordinate of o, its step there (+1, 0, -1) and how many items keep that step.
  int64_t run(int64_t o, int64_t* step, int64_t* length) const {
    int64_t s = o - left;
    *step = 1;
    *length = size - o;
    if (mode == kIdentity) return s;
    if (mode == kCircular) {
      s %= source;
      if (s < 0) s += source;
      *length = source - s;
      return s;
    }
    if (mode == kReplicate) {
      if (s < 0) { *step = 0; *length = -s; return 0; }
      if (s >= source) { *step = 0; return source - 1; }
      *length = source - s;
      return s;
    }
    if (source == 1) { *step = 0; return 0; }
    const int64_t period = 2 * (source - 1);  // a whole mirror image
    s %= period;
    if (s < 0) s += period;
    if (s < source - 1) { *length = source - 1 - s; return s; }
    *step = -1;
    *length = period - s;
    return period - s;
  }
};

template <class T>
void mapped_copy(const gc_args* args, int64_t begin, int64_t end) {
  const T* src = (const T*)args->ptr[0];
  T* dst = (T*)args->ptr[1];
  const int outer = (int)args->imm[0] - 1;
  const Dim* dims = (const Dim*)(args->imm + 1);
  const Dim inner = dims[outer];
  if (begin >= end || inner.size <= 0) return;
  auto size = [&](int d) { return dims[d].size; };
  int64_t index[kMaxRank], from[kMaxRank + 1], to[kMaxRank + 1], step, length;
  unravel(begin, outer, size, index);
  from[0] = to[0] = 0;
  int changed = 0;
  for (int64_t row = begin; row < end; ++row) {
    for (int d = changed; d < outer; ++d) {
      from[d + 1] = from[d] + dims[d].run(index[d], &step, &length) * dims[d].src_stride;
      to[d + 1] = to[d] + index[d] * dims[d].dst_stride;
    }
    const T* s = src + from[outer];
    T* t = dst + to[outer];
    for (int64_t o = 0; o < inner.size;) {
      const int64_t at = inner.run(o, &step, &length);
      const int64_t n = min64(length, inner.size - o);
      copy_run(t + o * inner.dst_stride, inner.dst_stride, s + at * inner.src_stride,
               step * inner.src_stride, n);
      o += n;
    }
    changed = advance(outer, size, index);
  }
}

// One strided run, cut anywhere: imm: dst_stride, src_stride.  Range: items.
template <class T>
void linear_copy(const gc_args* args, int64_t begin, int64_t end) {
  const int64_t ds = args->imm[0], ss = args->imm[1];
  copy_run((T*)args->ptr[1] + begin * ds, ds, (const T*)args->ptr[0] + begin * ss, ss, end - begin);
}

// Overwrites the rows that a mask picks: [outer, masked, inner] with a mask [masked].
// imm: masked, inner, step of value (0: one item for all, 1: a row of inner items).
// ptr: src, mask (bytes), value, dst.  Range: outer * masked.
template <class T>
void mask_fill(const gc_args* args, int64_t begin, int64_t end) {
  const int64_t masked = args->imm[0], inner = args->imm[1], step = args->imm[2];
  const T* src = (const T*)args->ptr[0];
  const uint8_t* mask = (const uint8_t*)args->ptr[1];
  const T* value = (const T*)args->ptr[2];
  T* dst = (T*)args->ptr[3];
  if (inner == 1) {
    for (int64_t r = begin; r < end;) {
      const int64_t m = r % masked, n = min64(masked - m, end - r);
      for (int64_t i = 0; i < n; ++i) dst[r + i] = mask[m + i] ? *value : src[r + i];
      r += n;
    }
    return;
  }
  for (int64_t r = begin; r < end; ++r) {
    const bool picked = mask[r % masked] != 0;
    copy_run(dst + r * inner, 1, picked ? value : src + r * inner, picked ? step : 1, inner);
  }
}

template <class T>
void fill(const gc_args* args, int64_t begin, int64_t end) {
  const T value = *(const T*)args->ptr[0];
  T* dst = (T*)args->ptr[1];
  for (int64_t i = begin; i < end; ++i) dst[i] = value;
}

}  // namespace
}  // namespace gc

#define GC_DEFINE(TAG, TYPE)                                                               \
  GC_EXPORT void gc_mapped_copy_##TAG(const gc_args* args, int64_t begin, int64_t end) {   \
    gc::mapped_copy<TYPE>(args, begin, end);                                               \
  }                                                                                        \
  GC_EXPORT void gc_linear_copy_##TAG(const gc_args* args, int64_t begin, int64_t end) {   \
    gc::linear_copy<TYPE>(args, begin, end);                                               \
  }                                                                                        \
  GC_EXPORT void gc_mask_fill_##TAG(const gc_args* args, int64_t begin, int64_t end) {     \
    gc::mask_fill<TYPE>(args, begin, end);                                                 \
  }                                                                                        \
  GC_EXPORT void gc_fill_##TAG(const gc_args* args, int64_t begin, int64_t end) {          \
    gc::fill<TYPE>(args, begin, end);                                                      \
  }
GC_FOR_BYTES(GC_DEFINE)
