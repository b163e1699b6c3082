// Implicit GEMM: packed weights times panels of 32 output pixels that are gathered into scratch one
// chunk of (tap, channel) steps at a time; see conv.h.
#include "conv_common.h"
#include "gemm_micro.h"
#include "gemm_pairs.h"

#include <type_traits>

namespace {
using namespace gc;

constexpr int P = GC_CONV_PANEL;
constexpr int64_t SUM = 128;         // steps between partial sums: keeps the fp32 error low
constexpr int64_t DIRECT_TILES = 3;  // with more, a packed copy of the rows is worth its cost
static_assert(P == GC_NR, "a panel of pixels is a panel of the micro-kernel");

// Up to 32 neighbouring output pixels of one image, as stretches within output rows.
struct Pixels {
  int count, runs;
  int begin[P + 1];           // first lane of each run
  int64_t d[P], h[P], w[P];   // output coordinates of its first pixel

  void set(const gc_conv_shape* s, int64_t first) {
    const int64_t H = s->out[1], W = s->out[2];
    count = (int)min64(P, s->out[0] * H * W - first);
    int64_t ow = first % W, oh = first / W % H, od = first / W / H;
    runs = 0;
    for (int j = 0; j < count;) {
      begin[runs] = j;
      d[runs] = od;
      h[runs] = oh;
      w[runs++] = ow;
      j += (int)min64(W - ow, count - j);
      ow = 0;
      if (++oh == H) {
        oh = 0;
        od++;
      }
    }
    begin[runs] = count;
  }
};

// What one tap reads for each pixel of a panel.
enum Mode { ZERO, LINEAR, RUNS, LANES };
struct Tap {
  int64_t number = -1;  // the tap this describes
  Mode mode = ZERO;
  bool whole = false;          // no lane is padding
  int64_t low = 0, high = -1;  // smallest and largest element that a vector may touch
  int64_t start = 0;           // LINEAR: element of lane 0
  int runs = 0;                // RUNS: lanes first[i] .. stop[i] read from source[i] on
  int first[P], stop[P];
  int64_t source[P];
  int32_t mask[P];             // -1 inside the image, 0 padding
  int32_t index[P];            // LANES

  void set(const gc_conv_shape* s, const Pixels& p, int64_t tap) {
    if (tap == number) return;
    number = tap;
    const int64_t kw = tap % s->kernel[2] * s->dilation[2],
                  kh = tap / s->kernel[2] % s->kernel[1] * s->dilation[1],
                  kd = tap / s->kernel[2] / s->kernel[1] * s->dilation[0];
    set_runs(s, p, kd, kh, kw);
  }

 private:
  void set_runs(const gc_conv_shape* s, const Pixels& p, int64_t kd, int64_t kh, int64_t kw) {
    const int64_t D = s->in[0], H = s->in[1], W = s->in[2], step = s->stride[2];
    bool straight = step == 1;
    int valid = 0;
    runs = 0;
    for (int r = 0; r < p.runs; r++) {
      const int64_t id = p.d[r] * s->stride[0] - s->pad[0] + kd,
                    ih = p.h[r] * s->stride[1] - s->pad[1] + kh,
                    iw = p.w[r] * step - s->pad[2] + kw, at = (id * H + ih) * W + iw;
      const int j = p.begin[r], n = p.begin[r + 1] - j;
      if (r == 0) start = at;
      straight = straight && at - j == start;
      if (id < 0 || id >= D || ih < 0 || ih >= H) continue;
      const int64_t lo = iw >= 0 ? 0 : (-iw + step - 1) / step;
      const int64_t hi = iw >= W ? 0 : min64(n, (W - iw + step - 1) / step);
      if (lo >= hi) continue;
      first[runs] = j + (int)lo;
      stop[runs] = j + (int)hi;
      source[runs++] = at + lo * step;
      valid += (int)(hi - lo);
    }
    whole = valid == P;
    if (!whole) {
      int j = 0;
      for (int r = 0; r < runs; r++) {
        for (; j < first[r]; j++) mask[j] = 0;
        for (; j < stop[r]; j++) mask[j] = -1;
      }
      for (; j < P; j++) mask[j] = 0;
    }
    if (runs == 0) {
      mode = ZERO;
    } else if (straight) {
      mode = LINEAR;
      low = start;
      high = start + P - 1;
    } else {
      // Sources ascend; the last vector of a run may read 8 steps past its last lane.
      mode = step <= 2 ? RUNS : LANES;
      low = source[0];
      high = source[runs - 1] + (stop[runs - 1] - first[runs - 1] + 7) * step;
      if (step > 2) high = source[runs - 1] + (stop[runs - 1] - first[runs - 1] - 1) * step;
    }
    if (mode != ZERO) set_index(step);
  }
  void set_index(int64_t step) {  // for LANES, and at the ends of the tensor
    for (int r = 0; r < runs; r++)
      for (int j = first[r]; j < stop[r]; j++)
        index[j] = (int32_t)(source[r] + (j - first[r]) * step);
  }
};

template <class T> GC_INLINE void copy_lanes(const T* src, float* dst) {
#pragma GCC unroll 4
  for (int v = 0; v < P; v += 8) store(dst + v, load8(src + v));
}
template <> inline void copy_lanes<float>(const float* src, float* dst) {
#pragma GCC unroll 8
  for (int v = 0; v < P; v += VL) store(dst + v, load<vf>(src + v));
}

GC_INLINE void mask_lanes(float* dst, const int32_t* mask) {
#pragma GCC unroll 8
  for (int v = 0; v < P; v += VL) store(dst + v, load<vi>(dst + v) & load<vi>(mask + v));
}

// dst[32] of one channel; [x + low, x + high) is memory that may be read.
template <class T>
GC_INLINE void gather(const Tap& tap, int64_t step, const T* x, int64_t low, int64_t high,
                      float* dst) {
  const bool inside = tap.low >= low && tap.high < high;
  if (tap.mode == LINEAR && inside) {
    copy_lanes(x + tap.start, dst);
    if (!tap.whole) mask_lanes(dst, tap.mask);
  } else if (tap.mode == RUNS && inside) {
    // A vector may run over into the lanes of the next run, which come later.
    for (int r = 0; r < tap.runs; r++) {
      const T* src = x + tap.source[r];
      for (int j = tap.first[r]; j < tap.stop[r]; j += 8, src += 8 * step) {
        vf8 v = load8(src);
        if (step == 2) v = __builtin_shufflevector(v, load8(src + 8), 0, 2, 4, 6, 8, 10, 12, 14);
        store(dst + j, v);
      }
    }
    if (!tap.whole) mask_lanes(dst, tap.mask);
  } else if (tap.mode == ZERO) {
    memset(dst, 0, P * sizeof(float));
  } else {
    for (int j = 0; j < P; j++) dst[j] = tap.whole || tap.mask[j] ? to_float(x[tap.index[j]]) : 0.0f;
  }
}

// The common case: dst[n][32] from n channels whose 32 values are adjacent.
template <class T>
static void copy_channels(const Tap& tap, const T* src, int64_t step, int64_t n, float* dst) {
  if (tap.whole) {
    for (int64_t c = 0; c < n; c++, src += step, dst += P) copy_lanes(src, dst);
    return;
  }
  int32_t mask[P];
  memcpy(mask, tap.mask, sizeof mask);
  for (int64_t c = 0; c < n; c++, src += step, dst += P) {
#pragma GCC unroll 4
    for (int v = 0; v < P; v += 8) {
      typedef int32_t vi8 __attribute__((vector_size(32)));
      store(dst + v, (vi8)load8(src + v) & load<vi8>(mask + v));
    }
  }
}
template <>
void copy_channels<float>(const Tap& tap, const float* src, int64_t step, int64_t n, float* dst) {
  vi mask[P / VL];
#pragma GCC unroll 8
  for (int v = 0; v < P / VL; v++) mask[v] = tap.whole ? ~vi{} : load<vi>(tap.mask + v * VL);
  for (int64_t c = 0; c < n; c++, src += step, dst += P) {
#pragma GCC unroll 8
    for (int v = 0; v < P / VL; v++) store(dst + v * VL, load<vi>(src + v * VL) & mask[v]);
  }
}

// Loads the steps [k0, k0 + kl) of `count` panels: chunk[panel][step][32].
template <class T>
static void load_chunk(const gc_conv_shape* s, const Pixels* p, Tap* tap, int64_t count,
                       const T* x, int64_t low, int64_t high, int64_t k0, int64_t kl,
                       float* chunk, int64_t panel) {
  for (int64_t k = k0; k < k0 + kl;) {
    const int64_t c0 = k % s->c, n = min64(s->c - c0, k0 + kl - k);
    for (int64_t q = 0; q < count; q++) tap[q].set(s, p[q], k / s->c);
    for (int64_t q = 0; q < count; q++) {
      const int64_t at = c0 * s->x_c, last = at + (n - 1) * s->x_c;
      float* dst = chunk + q * panel + (k - k0) * P;
      const Tap& t = tap[q];
      if (t.mode == LINEAR && t.low + at >= low && t.high + last < high) {
        copy_channels(t, x + at + t.start, s->x_c, n, dst);
        continue;
      }
      for (int64_t c = 0; c < n; c++, dst += P) {
        const int64_t here = at + c * s->x_c;
        gather(t, s->stride[2], x + here, low - here, high - here, dst);
      }
    }
    k += n;
  }
}

// Whether fp32 rows can be read in place: all steps of the chunk belong to one tap without padding.
template <class T>
static bool in_place(const gc_conv_shape* s, const Pixels& p, Tap& tap, int64_t low, int64_t high,
                     int64_t k0, int64_t kl) {
  if (sizeof(T) != 4 || kl == 0 || k0 / s->c != (k0 + kl - 1) / s->c) return false;
  tap.set(s, p, k0 / s->c);
  const int64_t c = k0 % s->c;
  return tap.mode == LINEAR && tap.whole && tap.low + c * s->x_c >= low &&
         tap.high + (c + kl - 1) * s->x_c < high;
}

// sums[mr][32] (+)= weights x rows for a chunk of kl steps, fp32.
static void sum_chunk(int64_t mr, const float* a, const float* b, int64_t ldb, int64_t kl,
                      float* sums, int64_t ld, bool add) {
  for (int64_t k = 0; k < kl || k == 0; k += SUM)
    MICRO[mr](a + k * mr, mr, b + k * ldb, ldb, min64(SUM, kl - k), sums, ld, add || k > 0);
}

#if defined(__AVX512BF16__)
constexpr bool HAVE_PAIRS = true;
static void sum_pairs(int64_t mr, const float* a, const float* b, int64_t kl, float* sums, int64_t ld,
                      bool add) {
  PAIRS[mr]((const uint32_t*)(const void*)a, (const uint32_t*)(const void*)b, (kl + 1) / 2, sums, ld,
            add);
}
static void make_pairs(const float* src, int64_t width, int64_t k, float* dst) {
  pair_steps(src, width, k, (uint32_t*)(void*)dst);
}
#else
constexpr bool HAVE_PAIRS = false;
static void sum_pairs(int64_t, const float*, const float*, int64_t, float*, int64_t, bool) {}
static void make_pairs(const float*, int64_t, int64_t, float*) {}
#endif

template <class T>
static void convolve(const gc_args* args, gc_epilogue epilogue, int64_t begin, int64_t end) {
  const gc_conv_shape* s = (const gc_conv_shape*)args->imm;
  const int64_t pixels = s->out[0] * s->out[1] * s->out[2], panels = (pixels + P - 1) / P;
  const int64_t taps = s->kernel[0] * s->kernel[1] * s->kernel[2], depth = taps * s->c;
  const int64_t plane = s->in[0] * s->in[1] * s->in[2];
  const int64_t tiles = (s->oc + GC_MR - 1) / GC_MR;
  const int64_t blocks = (s->oc + s->rows - 1) / s->rows;
  // [group][steps][32]; a run may write past its step, so there is one more.
  const int64_t steps = min64(GC_CONV_CHUNK, depth) + 1;
  float* const chunk = (float*)args->scratch;
  float* const tile = chunk + s->group * steps * P;  // [rows][group * 32]
  // bf16: weights and rows meet as pairs; those of a micro tile are made for each group of panels.
  constexpr bool paired = HAVE_PAIRS && std::is_same<T, bf16>::value;
  float* const pairs = tile + min64(s->oc, s->rows) * s->group * P;  // [steps / 2][mr]
  const int64_t extent =
      (s->images - 1) * s->x_n + (s->groups * s->c - 1) * s->x_c + plane;  // readable elements
  Pixels p[GC_CONV_MAX_GROUP];
  while (begin < end) {
    const int64_t outer = begin / panels, first = begin % panels;
    const int64_t count = min64(min64(s->group, panels - first), end - begin);
    begin += count;
    const int64_t block = outer % blocks, g = outer / blocks % s->groups,
                  image = outer / blocks / s->groups;
    const int64_t t0 = block * tiles / blocks, t1 = (block + 1) * tiles / blocks;
    const int64_t r0 = t0 * s->oc / tiles, rows = t1 * s->oc / tiles - r0, ld = count * P;
    const float* weights = (const float*)args->ptr[1] + g * s->oc * depth;
    const int64_t offset = image * s->x_n + g * s->c * s->x_c;
    const T* x = (const T*)args->ptr[0] + offset;
    const int64_t low = -offset, high = extent - offset;
    Tap tap[GC_CONV_MAX_GROUP];
    for (int64_t q = 0; q < count; q++) p[q].set(s, (first + q) * P);
    for (int64_t k0 = 0;;) {
      const int64_t kl = min64(GC_CONV_CHUNK, depth - k0);
      const float* b[GC_CONV_MAX_GROUP];
      int64_t ldb = s->x_c;
      bool direct = t1 - t0 <= DIRECT_TILES;
      for (int64_t q = 0; q < count; q++)
        direct = direct && in_place<T>(s, p[q], tap[q], low, high, k0, kl);
      if (direct) {
        for (int64_t q = 0; q < count; q++)
          b[q] = (const float*)(const void*)x + k0 % s->c * s->x_c + tap[q].start;
      } else {
        load_chunk(s, p, tap, count, x, low, high, k0, kl, chunk, steps * P);
        for (int64_t q = 0; q < count; q++) {
          b[q] = chunk + q * steps * P;
          if (paired) make_pairs(b[q], P, kl, chunk + q * steps * P);
        }
        ldb = P;
      }
      for (int64_t t = t0; t < t1; t++) {
        const int64_t r = t * s->oc / tiles, mr = (t + 1) * s->oc / tiles - r;
        const float* a = weights + r * depth + k0 * mr;
        if (paired) make_pairs(a, mr, kl, pairs);
        for (int64_t q = 0; q < count; q++) {
          float* const sums = tile + (r - r0) * ld + q * P;
          if (paired) sum_pairs(mr, pairs, b[q], kl, sums, ld, k0 > 0);
          else sum_chunk(mr, a, b[q], ldb, kl, sums, ld, k0 > 0);
        }
      }
      k0 += kl;
      if (k0 >= depth) break;
    }
    const int64_t n0 = first * P, m0 = g * s->oc + r0;
    if (s->bias_type) {
      for (int64_t r = 0; r < rows; r++) {
        const float bias = bias_value(s, args->ptr[2], m0 + r);
        for (int64_t i = 0; i < ld; i++) tile[r * ld + i] += bias;
      }
    }
    epilogue(args, tile, ld, image, m0, rows, n0, min64(pixels - n0, ld));
  }
}

// Packs run-time weights: ptr = {weights, packed}. One unit is one micro tile of one group.
template <class T>
static void pack_weights(const gc_args* args, int64_t begin, int64_t end) {
  const gc_conv_pack_shape* s = (const gc_conv_pack_shape*)args->imm;
  const int64_t tiles = (s->oc + GC_MR - 1) / GC_MR, depth = s->taps * s->c;
  for (int64_t g = begin; g < end; g++) {
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t r = t * s->oc / tiles, mr = (t + 1) * s->oc / tiles - r;
      const T* w = (const T*)args->ptr[0] + g * s->w_g + r * s->w_oc;
      float* dst = (float*)args->ptr[1] + (g * s->oc + r) * depth;
      for (int64_t tap = 0; tap < s->taps; tap++)
        for (int64_t c = 0; c < s->c; c++)
          for (int64_t i = 0; i < mr; i++)
            *dst++ = to_float(w[i * s->w_oc + c * s->w_c + tap * s->w_tap]);
    }
  }
}

}  // namespace

GC_CONV(f32) { convolve<float>(args, epilogue, begin, end); }
GC_CONV(bf16) { convolve<bf16>(args, epilogue, begin, end); }
GC_CONV(f16) { convolve<f16>(args, epilogue, begin, end); }

GC_EXPORT void gc_conv_pack_f32(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<float>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_bf16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<bf16>(args, begin, end);
}
GC_EXPORT void gc_conv_pack_f16(const gc_args* args, int64_t begin, int64_t end) {
  pack_weights<f16>(args, begin, end);
}
