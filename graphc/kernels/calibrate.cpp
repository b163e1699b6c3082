// What this machine can do at best: arithmetic on registers, and memory streams of a given size.
// `graphc doctor --calibrate` runs it; graphc/runtime/calibration.py says what is measured when.
// This is a measuring device, no Step: it has threads and memory of its own.
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "abi.h"
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
using namespace gc;

enum Kind { F32, BF16, INT8, READ, WRITE, COPY, WRITE_STREAMING, COPY_STREAMING, KINDS };

// Accumulators: enough to cover latency times ports, few enough to stay in registers.
#if defined(__AVX512F__)
constexpr int CHAINS = 24;
#else
constexpr int CHAINS = 12;
#endif
constexpr int64_t BATCH = 4096;  // repetitions per pass

volatile float sink;

// Multiply-adds that depend on themselves only: neither can be moved out of the loop.
__attribute__((noinline)) double pass_f32() {
  vf c[CHAINS];
  const vf a = splat(0.999f), b = splat(0.001f);
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) c[i] = splat(2.0f + i);  // 1 would stay 1: a constant
  for (int64_t k = 0; k < BATCH; k++) {
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) c[i] = c[i] * a + b;
  }
  float sum = 0;
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) sum += c[i][0];
  sink = sum;
  return 2.0 * VL * CHAINS * BATCH;
}

#if defined(__AVX512BF16__)
__attribute__((noinline)) double pass_bf16() {
  __m512 c[CHAINS];
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00), b = (__m512bh)_mm512_set1_epi16(0x3c00);
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) c[i] = _mm512_set1_ps((float)i);
  for (int64_t k = 0; k < BATCH; k++) {
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) {
      c[i] = _mm512_dpbf16_ps(c[i], a, b);
      __asm__("" : "+v"(c[i]));  // in its register
    }
  }
  float sum = 0;
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) sum += _mm512_cvtss_f32(c[i]);
  sink = sum;
  return 64.0 * CHAINS * BATCH;
}
#endif

#if defined(__AVX512VNNI__)
__attribute__((noinline)) double pass_int8() {
  __m512i c[CHAINS];
  const __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(1);
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) c[i] = _mm512_set1_epi32(i);
  for (int64_t k = 0; k < BATCH; k++) {
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) {
      c[i] = _mm512_dpbusd_epi32(c[i], a, b);
      __asm__("" : "+v"(c[i]));
    }
  }
  int64_t sum = 0;
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) sum += _mm_cvtsi128_si32(_mm512_castsi512_si128(c[i]));
  sink = (float)sum;
  return 128.0 * CHAINS * BATCH;
}
#endif

typedef int64_t vq __attribute__((vector_size(GC_VBYTES)));
constexpr int64_t STRIDE = 4 * GC_VBYTES;

__attribute__((noinline)) void pass_read(const char* p, int64_t bytes) {
  vq a{}, b{}, c{}, d{};
  for (int64_t i = 0; i + STRIDE <= bytes; i += STRIDE) {
    a ^= load<vq>(p + i);
    b ^= load<vq>(p + i + GC_VBYTES);
    c ^= load<vq>(p + i + 2 * GC_VBYTES);
    d ^= load<vq>(p + i + 3 * GC_VBYTES);
  }
  a = (a | b) | (c | d);
  sink = (float)(a[0] ^ a[1]);
}

__attribute__((noinline)) void pass_write(char* p, int64_t bytes) {
  const vq v = vq{} + 3;
  for (int64_t i = 0; i < bytes; i += GC_VBYTES) {
    store(p + i, v);
    __asm__ volatile("" ::: "memory");  // or it becomes a call of memset
  }
}

__attribute__((noinline)) void pass_copy(char* p, int64_t bytes) {
  const int64_t half = bytes / 2;
  for (int64_t i = 0; i < half; i += GC_VBYTES) {
    store(p + half + i, load<vq>(p + i));
    __asm__ volatile("" ::: "memory");
  }
}

#if defined(__x86_64__)
// Stores that pass the caches by, at the vector width of the level.
inline void stream(char* p, const vq& v) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif defined(__AVX__)
  _mm256_stream_si256((__m256i*)p, (__m256i)v);
#else
  _mm_stream_si128((__m128i*)p, (__m128i)v);
#endif
}

__attribute__((noinline)) void pass_write_streaming(char* p, int64_t bytes) {
  const vq v = vq{} + 3;
  for (int64_t i = 0; i < bytes; i += GC_VBYTES) stream(p + i, v);
  _mm_sfence();
}

__attribute__((noinline)) void pass_copy_streaming(char* p, int64_t bytes) {
  const int64_t half = bytes / 2;
  for (int64_t i = 0; i < half; i += GC_VBYTES) stream(p + half + i, load<vq>(p + i));
  _mm_sfence();
}
#endif

// One pass; gives the operations done or the bytes moved (a copy's are counted on both sides).
double pass(int64_t kind, char* p, int64_t bytes) {
  switch (kind) {
    case F32: return pass_f32();
#if defined(__AVX512BF16__)
    case BF16: return pass_bf16();
#endif
#if defined(__AVX512VNNI__)
    case INT8: return pass_int8();
#endif
    case READ: pass_read(p, bytes); break;
    case WRITE: pass_write(p, bytes); break;
    case COPY: pass_copy(p, bytes); break;
#if defined(__x86_64__)
    case WRITE_STREAMING: pass_write_streaming(p, bytes); break;
    case COPY_STREAMING: pass_copy_streaming(p, bytes); break;
#endif
  }
  return (double)bytes;
}

bool known(int64_t kind) {
  if (kind < 0 || kind >= KINDS) return false;
#if !defined(__AVX512BF16__)
  if (kind == BF16) return false;
#endif
#if !defined(__AVX512VNNI__)
  if (kind == INT8) return false;
#endif
#if !defined(__x86_64__)
  if (kind == WRITE_STREAMING || kind == COPY_STREAMING) return false;
#endif
  return true;
}

double seconds_of(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Memory on large pages where the system has them, touched by the thread that will use it.
struct Memory {
  static constexpr size_t PAGE = 2 << 20;
  char* base = nullptr;
  char* p = nullptr;
  size_t mapped = 0;
  explicit Memory(size_t bytes) {
    if (!bytes) return;
    mapped = bytes + PAGE;
    void* got = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return;
    base = (char*)got;
    p = (char*)(((uintptr_t)base + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
#if defined(MADV_HUGEPAGE)
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 1, bytes);
  }
  ~Memory() {
    if (base) munmap(base, mapped);
  }
};

// All threads wait until the last one is there.
struct Meeting {
  int64_t threads;
  std::atomic<int64_t> arrived{0};
  explicit Meeting(int64_t n) : threads(n) {}
  void meet(int64_t number) {
    arrived.fetch_add(1);
    for (int64_t spins = 0; arrived.load() < number * threads; spins++)
      if (spins > 2000) sched_yield();
  }
};

struct Measurement {
  int64_t kind, bytes, threads, rounds;
  double seconds, best = 0;
  Meeting meeting;
  std::atomic<int64_t> passes{1};
  std::atomic<bool> failed{false};

  Measurement(int64_t k, int64_t b, int64_t t, int64_t r, double s)
      : kind(k), bytes(b), threads(t), rounds(r), seconds(s), meeting(t) {}

  // A thread alone is timed by its own CPU time, which a busy machine doesn't stretch; several are
  // timed by the clock, from the moment all are there to the moment all are done.
  void run(int64_t thread) {
    Memory memory(kind < READ ? 0 : (size_t)bytes);
    if (kind >= READ && !memory.p) failed = true;
    int64_t met = 0;
    meeting.meet(++met);
    if (failed) return;
    const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    if (thread == 0) {
      pass(kind, memory.p, bytes);
      int64_t count = 1;
      double took = 0;
      for (;;) {
        const double begin = seconds_of(clock);
        for (int64_t i = 0; i < count; i++) pass(kind, memory.p, bytes);
        took = seconds_of(clock) - begin;
        if (took >= seconds / 4) break;
        count *= 2;
      }
      const double wanted = seconds * (double)count / took;
      passes = wanted < 1 ? 1 : (int64_t)wanted;
    }
    for (int64_t round = 0; round < rounds; round++) {
      meeting.meet(++met);
      const double begin = seconds_of(clock);
      double done = 0;
      for (int64_t i = passes; i > 0; i--) done += pass(kind, memory.p, bytes);
      meeting.meet(++met);
      if (thread == 0)
        best = std::max(best, (double)threads * done / (seconds_of(clock) - begin));
    }
  }
};

}  // namespace

// The best rate per second of `rounds` rounds of about `seconds` each, of `threads` threads together,
// each with `bytes` of its own; 0 if this CPU or build lacks the instruction, -1 without memory.
GC_EXPORT double gc_calibrate(int64_t kind, int64_t bytes, int64_t threads, int64_t rounds,
                              double seconds) {
  if (!known(kind) || threads < 1 || bytes < 0) return 0;
  bytes = bytes / (2 * STRIDE) * (2 * STRIDE);
  try {
    Measurement measurement(kind, bytes, threads, rounds, seconds);
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; t++)
      others.emplace_back([&measurement, t] { measurement.run(t); });
    measurement.run(0);
    for (auto& other : others) other.join();
    return measurement.failed ? -1 : measurement.best;
  } catch (const std::exception&) {
    return -1;
  }
}
