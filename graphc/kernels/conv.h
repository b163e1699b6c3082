// Convolution over up to three spatial dimensions of images whose channels are neighbours
// ([N, D, H, W, C] in memory), by the indirect algorithm: for a block of output pixels a table holds,
// per tap, the address of the input pixel that each output pixel reads (padding: a pixel of zeros);
// the micro-kernels multiply through it, so that nothing is copied or padded. Any stride, dilation
// and padding is only another table. The epilogue sees z = image, m = pixel, n = output channel.
//
// Weights are packed in panels of 32 output channels, the last one of a group 8, 16, 24 or 32 wide,
// zero-padded; tap = (kd * KH + kh) * KW + kw; see pack_conv_weight in
// graphc/lowering/templates/pack.py:
//
//   fp32  [group][panel][tap][channel][width]
//   bf16  [group][panel][tap][ceil(channels / 2)][width][2]   (odd: a zero closes the last pair)
#pragma once
#include "abi.h"

#define GC_CONV_PANEL 32   // output channels of one unit
#define GC_CONV_GROUP 16   // most panels that a tile of pixels meets in turn
#define GC_CONV_ROWS 14    // pixels of the largest micro tile at any ISA level
#define GC_WINOGRAD_CHANNELS 16  // fewest input channels of conv_winograd.cpp

struct gc_conv_shape {
  int64_t images, groups, oc, c;  // oc, c: per group
  int64_t in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  int64_t x_n, x_c, x_s[3];  // strides of images, channels and the spatial dimensions
  int64_t bias_type;         // 0 none, 1 fp32, 2 bf16, 3 fp16
  int64_t transposed;
  int64_t block;             // pixels of one unit, counted on through all images
};

// What an epilogue does, where that is no more than adding a second value, cutting off below and
// storing in x's dtype: whole tiles are then finished in registers, the epilogue is for the others.
struct gc_conv_finish {
  char* out;                           // result [image, pixel, channel]
  const char* add;                     // what is added, likewise, or null
  int64_t out_z, out_m, add_z, add_m;  // bytes between images and between pixels
  float low;                           // least result: 0 for relu, -inf for none
};

// ptr = {x, packed weights, bias?}, x_c = 1; one unit is (group, block of pixels, panel); finish may
// be null. scratch: unit_scratch of graphc/lowering/templates/convolution.py.
#define GC_CONV(name)                                                              \
  extern "C" void gc_conv_##name(const gc_args* args, gc_epilogue epilogue,        \
                                 int64_t begin, int64_t end)
#define GC_CONV_FINISHED(name)                                                     \
  extern "C" void gc_conv_##name(const gc_args* args, gc_epilogue epilogue,        \
                                 const gc_conv_finish* finish, int64_t begin, int64_t end)
GC_CONV_FINISHED(f32);
GC_CONV_FINISHED(bf16);
// Transposed: one unit is (group, phase of the stride, block of pixels of that phase, panel).
GC_CONV(transposed_f32);
GC_CONV(transposed_bf16);
// Transposed with windows that do not overlap: see conv_expand.cpp.
GC_CONV(expand_f32);
GC_CONV(expand_bf16);
// Windows of 3 x 3 with step 1, weights of 16 taps that are transformed: see conv_winograd.cpp.
GC_CONV(winograd_f32);
// One channel per group: weights [tap][channel] fp32; one unit is (image, row of the output, panel).
GC_CONV(depthwise_f32);
GC_CONV(depthwise_bf16);
GC_CONV(depthwise_f16);

// What packing run-time weights needs; strides in elements. One unit is one panel of one group.
struct gc_conv_pack_shape {
  int64_t groups, oc, c, taps;
  int64_t w_g, w_oc, w_c, w_tap;
};

// One micro tile: sums[mr][width] = init + pixels x packed weights.
struct gc_conv_tile {
  const char* const* pixels;  // [tap][ld]: what each output pixel reads, bytes from `offset` on
  int64_t ld, taps, offset;
  int64_t c;                  // channels
  const char* weights;        // of the first tap and channel
  int64_t tap_bytes;          // of weights
  const float* init;          // a row of biases (ldi 0) or earlier sums
  int64_t ldi;
  float* sums;                // rows of GC_CONV_PANEL
  const gc_conv_finish* finish;  // unless null, finished rows go to `out` instead, of 32 channels
  char* out;
  const char* add;
};
extern "C" void gc_conv_tile_f32(const gc_conv_tile* tile, int64_t mr, int64_t width);
extern "C" void gc_conv_tile_bf16(const gc_conv_tile* tile, int64_t mr, int64_t width);
