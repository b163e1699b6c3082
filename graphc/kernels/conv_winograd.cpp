// Convolution with windows of 3 x 3 and step 1 by Winograd's minimal filtering F(2 x 2, 3 x 3)
// (A. Lavin, S. Gray: Fast algorithms for convolutional neural networks, 2015): a tile of 2 x 2
// output pixels takes 16 multiplications for each pair of channels instead of 36. With d the 4 x 4
// input pixels under a tile and g a window,
//
//   y = A' [ (G g G') * (B' d B) ] A    B' d: d0 - d2, d1 + d2, d2 - d1, d1 - d3
//                                       A' m: m0 + m1 + m2, m1 - m2 - m3
//
// where * is elementwise, so that over all channels it is 16 matrix products: tiles x channels by
// channels x output channels. The weights, G g G', are transformed at build time in double precision
// and packed as those of 16 taps (conv.h). What is summed is larger than in the direct
// method, so chains of sums are shorter, or errors would be larger.
//
// A group has at least GC_WINOGRAD_CHANNELS input channels. A unit is (group, block of s->block tiles counted on through all images, panel).
#include "conv_common.h"

namespace {
using namespace gc;

constexpr int POINTS = 16;
static_assert(VL <= GC_WINOGRAD_CHANNELS, "channels fill a vector");
// Products of a chain, and sums of chains that are added up in registers.
constexpr int64_t CHAIN = 8, CHAINS = 64;
constexpr int64_t LINE = 16;  // floats
constexpr int MOST_ROWS = GC_VBYTES == 64 ? 7 : 3;  // of a micro tile: twice as many registers

// sums[R][NV vectors] = x[R][c] (rows `length` floats apart) times columns of packed weights, a panel
// `wide` columns wide. Chains are short and added up twice: in registers, and in memory. `ahead` are
// weights for later, of which every chain asks for some lines.
template <class V, int R, int NV>
static void product(const float* x, int64_t length, int64_t c, const float* w, int64_t wide,
                    float* sums, const float* ahead, int64_t lines) {
  constexpr int64_t L = sizeof(V) / 4;
  for (int64_t first = 0; first < c; first += CHAINS) {
    V total[R][NV] = {};
    const int64_t end = min64(c, first + CHAINS);
    int64_t i = first;
    for (; i + CHAIN <= end; i += CHAIN, w += CHAIN * wide, ahead += CHAIN * wide) {
      for (int64_t k = 0; k < lines; k++) __builtin_prefetch(ahead + k * LINE, 0, 2);
      V chain[R][NV] = {};
#pragma GCC unroll 8
      for (int k = 0; k < CHAIN; k++) {
        V b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) b[v] = load<V>(w + k * wide + v * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const V a = x[r * length + i + k] - V{};
#pragma GCC unroll 4
          for (int v = 0; v < NV; v++) chain[r][v] = k ? chain[r][v] + a * b[v] : a * b[v];
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) total[r][v] += chain[r][v];
    }
    for (; i < end; i++, w += wide)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
          total[r][v] += (x[r * length + i] - V{}) * load<V>(w + v * L);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        float* to = sums + r * GC_NR + v * L;
        store(to, first ? load<V>(to) + total[r][v] : total[r][v]);
      }
  }
}

template <int R>
static void product_of(const float* x, int64_t length, int64_t c, const float* w, int64_t wide,
                       float* sums, const float* ahead, int64_t lines) {
  int64_t h = 0;
  for (; h + 2 * VL <= wide; h += 2 * VL, lines = 0)
    product<vf, R, 2>(x, length, c, w + h, wide, sums + h, ahead, lines);
  for (; h + VL <= wide; h += VL, lines = 0)
    product<vf, R, 1>(x, length, c, w + h, wide, sums + h, ahead, lines);
#if GC_VBYTES == 64
  if (h < wide) product<vf8, R, 1>(x, length, c, w + h, wide, sums + h, ahead, lines);
#endif
}

typedef void (*product_kernel)(const float*, int64_t, int64_t, const float*, int64_t, float*,
                               const float*, int64_t);
#if GC_VBYTES == 64
static const product_kernel PRODUCT[] = {nullptr,       product_of<1>, product_of<2>, product_of<3>,
                                         product_of<4>, product_of<5>, product_of<6>, product_of<7>};
#else
static const product_kernel PRODUCT[] = {nullptr, product_of<1>, product_of<2>, product_of<3>};
#endif

// B' d of four vectors.
GC_INLINE void spread4(const vf& d0, const vf& d1, const vf& d2, const vf& d3, vf (&to)[4]) {
  to[0] = d0 - d2;
  to[1] = d1 + d2;
  to[2] = d2 - d1;
  to[3] = d1 - d3;
}

struct Winograd {
  const gc_args* args;
  const gc_conv_shape* s;
  gc_epilogue epilogue;
  int64_t rows, columns, tiles, blocks;  // tiles of a plane in rows of columns; of all planes
  int64_t length;                        // floats of a transformed pixel
  float *bias, *zeros, *results, *products, *input;

  Winograd(const gc_args* a, gc_epilogue e) : args(a), s((const gc_conv_shape*)a->imm), epilogue(e) {
    rows = (s->out[1] + 1) / 2;
    columns = (s->out[2] + 1) / 2;
    tiles = s->images * s->out[0] * rows * columns;
    blocks = (tiles + s->block - 1) / s->block;
    length = (s->c + 15) / 16 * 16 + 16;  // no multiple of what shares cache sets
    bias = (float*)a->scratch;
    zeros = bias + GC_NR;
    results = zeros + length;  // [2][2 * block][GC_NR]
    products = results + 4 * s->block * GC_NR;  // [POINTS][block][GC_NR]
    input = products + POINTS * s->block * GC_NR;  // [POINTS][block][length]
    memset(zeros, 0, (size_t)length * sizeof(float));
    memset(products, 0, (size_t)(POINTS * s->block * GC_NR) * sizeof(float));
  }

  // The transformed input of tile `at`, the r-th of its block.
  void transform(const float* x, int64_t at, int64_t r) const {
    const int64_t column = at % columns, row = at / columns % rows, plane = at / columns / rows;
    const int64_t h = 2 * row - s->pad[1], w = 2 * column - s->pad[2];
    x += plane / s->out[0] * s->x_n + plane % s->out[0] * s->x_s[0];
    const float* from[4][4];
    for (int64_t i = 0; i < 4; i++)
      for (int64_t j = 0; j < 4; j++) {
        const bool inside = h + i >= 0 && h + i < s->in[1] && w + j >= 0 && w + j < s->in[2];
        from[i][j] = inside ? x + (h + i) * s->x_s[1] + (w + j) * s->x_s[2] : zeros;
      }
    float* const to = input + r * length;
    const int64_t step = s->block * length;
    for (int64_t c = 0;; c = min64(c + VL, s->c - VL)) {  // the last ones may overlap
      vf half[4][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        vf t[4];
        spread4(load<vf>(from[0][j] + c), load<vf>(from[1][j] + c), load<vf>(from[2][j] + c),
                load<vf>(from[3][j] + c), t);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) half[i][j] = t[i];
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        vf t[4];
        spread4(half[i][0], half[i][1], half[i][2], half[i][3], t);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) store(to + (4 * i + j) * step + c, t[j]);
      }
      if (c + VL >= s->c) break;
    }
  }

  // products[point][tile][...] of `count` tiles.
  void multiply(const float* weights, int64_t width, int64_t count) const {
    const int64_t parts = (count + MOST_ROWS - 1) / MOST_ROWS, step = s->c * width;
    const int64_t lines = (CHAIN * width / LINE + parts - 1) / parts;  // of the next point's weights
    for (int64_t point = 0; point < POINTS; point++) {
      for (int64_t t = 0; t < parts; t++) {
        const int64_t r0 = t * count / parts, r1 = (t + 1) * count / parts;
        PRODUCT[r1 - r0](input + (point * s->block + r0) * length, length, s->c,
                         weights + point * step, width, products + (point * s->block + r0) * GC_NR,
                         weights + (point + 1) * step + t * lines * LINE, lines);
      }
    }
  }

  // Output pixels of `n` tiles of one row, the first the r-th of the block.
  void collect(int64_t r, int64_t n, int64_t width) const {
    const int64_t step = s->block * GC_NR;
    float *upper = results, *lower = results + 2 * s->block * GC_NR;
    const float* from = products + r * GC_NR;
    for (int64_t i = 0; i < n; i++, from += GC_NR, upper += 2 * GC_NR, lower += 2 * GC_NR) {
      for (int64_t v = 0; v < width; v += VL) {
        const vf b = load<vf>(bias + v);
        vf half[2][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const vf m0 = load<vf>(from + j * step + v), m1 = load<vf>(from + (4 + j) * step + v),
                   m2 = load<vf>(from + (8 + j) * step + v),
                   m3 = load<vf>(from + (12 + j) * step + v);
          half[0][j] = m0 + m1 + m2;
          half[1][j] = m1 - m2 - m3;
        }
        store(upper + v, half[0][0] + half[0][1] + half[0][2] + b);
        store(upper + GC_NR + v, half[0][1] - half[0][2] - half[0][3] + b);
        store(lower + v, half[1][0] + half[1][1] + half[1][2] + b);
        store(lower + GC_NR + v, half[1][1] - half[1][2] - half[1][3] + b);
      }
    }
  }

  void run(int64_t begin, int64_t end) const {
    const Panels<float> panels(s->oc, s->c, POINTS);
    const int64_t H = s->out[1], W = s->out[2];
    int64_t loaded = -1;
    for (int64_t u = begin; u < end; u++) {
      const int64_t p = u % panels.count, block = u / panels.count % blocks,
                    g = u / panels.count / blocks;
      const int64_t first = block * tiles / blocks, count = (block + 1) * tiles / blocks - first;
      if (u / panels.count != loaded) {  // the panels of a block share its input
        loaded = u / panels.count;
        const float* x = (const float*)args->ptr[0] + g * s->c;
        for (int64_t r = 0; r < count; r++) transform(x, first + r, r);
      }
      const int64_t width = panels.width(p), nr = panels.channels(p), n0 = g * s->oc + p * GC_NR;
      multiply((const float*)args->ptr[1] + panels.start(g, p), width, count);
      memset(bias, 0, GC_NR * sizeof(float));
      bias_values(s, args, n0, nr, bias);
      for (int64_t r = 0; r < count;) {
        const int64_t at = first + r, column = at % columns, row = at / columns % rows,
                      plane = at / columns / rows;
        const int64_t n = min64(columns - column, count - r);
        collect(r, n, width);
        const int64_t z = plane / s->out[0], w = 2 * column, pixels = min64(2 * n, W - w);
        const int64_t m0 = (plane % s->out[0] * H + 2 * row) * W + w;
        epilogue(args, results, GC_NR, z, m0, pixels, n0, nr);
        if (2 * row + 1 < H)
          epilogue(args, results + 2 * s->block * GC_NR, GC_NR, z, m0 + W, pixels, n0, nr);
        r += n;
      }
    }
  }
};

}  // namespace

GC_CONV(winograd_f32) { Winograd(args, epilogue).run(begin, end); }
