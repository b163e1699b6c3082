// The kernel ABI: what a Step of a plan calls. Bump GC_ABI_VERSION on any change here, and of what
// graphc/runtime/native.py shares with executor.cpp.
//
// A kernel is a plain single-threaded function over the half-open range [begin, end). It owns no
// threads, allocates nothing and keeps no state: the executor hands out sub-ranges ("grains") of
// [0, range) to its threads, in any order, each exactly once.
#pragma once
#include <stdint.h>

#define GC_ABI_VERSION 2

struct gc_args {
  void* const* ptr;    // buffers in the order the Step declares them, byte offsets already added
  const int64_t* imm;  // run-time integers (sizes, strides, ...), in the order the Step declares them
  void* scratch;       // private to the calling thread, 64-byte aligned, as large as the Step declares
};

typedef void (*gc_kernel)(const gc_args* args, int64_t begin, int64_t end);

// Epilogue of a product-like kernel: called with one finished tile of fp32 accumulators.
// The logical result is [Z, M, N]; the tile covers rows m0..m0+mr and columns n0..n0+nr of
// batch z, row r of the tile starting at acc + r * ld. It converts, adds, activates and stores.
typedef void (*gc_epilogue)(const gc_args* args, const float* acc, int64_t ld, int64_t z, int64_t m0,
                            int64_t mr, int64_t n0, int64_t nr);

#if defined(_MSC_VER)
#define GC_EXPORT extern "C"
#else
#define GC_EXPORT extern "C" __attribute__((visibility("default")))
#endif
