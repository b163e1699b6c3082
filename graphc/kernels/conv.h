// Convolution over up to three spatial dimensions, [N, C, D, H, W] -> [N, OC, OD, OH, OW], fp32
// arithmetic for every storage type; the epilogue sees z = image, m = output channel, n = pixel.
//
// Weights are packed rows [group][micro tile][tap][channel][mr], tap = (kd * KH + kh) * KW + kw,
// mr the rows of the tile (GC_MR in isa.h, even split); see pack_conv_weight in
// graphc/lowering/templates/pack.py.
#pragma once
#include "abi.h"

#define GC_CONV_PANEL 32    // pixels of one unit
#define GC_CONV_MAX_GROUP 8   // neighbouring units computed together
#define GC_CONV_CHUNK 1024  // steps of (tap, channel) gathered at once

struct gc_conv_shape {
  int64_t images, groups, oc, c;  // oc, c: per group
  int64_t in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  int64_t transposed;
  int64_t x_n, x_c;               // strides; the spatial part is row-major
  int64_t bias_type;              // 0 none, 1 fp32, 2 bf16, 3 fp16
  int64_t rows;                   // output channels of one unit, a multiple of 42 (14 and 6)
  int64_t group;                  // neighbouring units computed together
};

// ptr = {x, packed weights, bias?}; one unit is (image, group, block of channels, panel of pixels).
#define GC_CONV(name)                                                              \
  extern "C" void gc_conv_##name(const gc_args* args, gc_epilogue epilogue,        \
                                 int64_t begin, int64_t end)
GC_CONV(f32);
GC_CONV(bf16);
GC_CONV(f16);
// One channel per group and no depth: one unit is (image, channel).
GC_CONV(depthwise_f32);
GC_CONV(depthwise_bf16);
GC_CONV(depthwise_f16);

// One unit is (image, group, block of channels, output row, 32 * stride pixels of it).
GC_CONV(transposed_f32);
GC_CONV(transposed_bf16);
GC_CONV(transposed_f16);

// What packing run-time weights needs; strides in elements.
struct gc_conv_pack_shape {
  int64_t groups, oc, c, taps;
  int64_t w_g, w_oc, w_c, w_tap;
};
