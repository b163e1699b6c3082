// The native executor: runs the step table of one program in one call.
//
// It is compiled as an ordinary unit and linked into each plan's kernels.so. Python
// (graphc/runtime/native.py) hands it a program as a flat int64 table and, per run, a frame of base
// addresses. Expressions are evaluated once per assignment of the symbols; a run then adds base
// addresses and calls kernels. A run allocates nothing. Only libc and pthreads are used, so a plan
// does not depend on a C++ runtime of a certain age.
//
// Threads: a pool belongs to the process, not to a plan. The first library that needs a pool of n
// threads makes it; later libraries get its address and call it through `gc_pool::run`, so several
// Sessions do not multiply threads. Parallel steps of different Sessions take turns.
#include <atomic>
#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"

namespace {

// ---------------------------------------------------------------- pause

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

inline int64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

}  // namespace

// ---------------------------------------------------------------- thread pool

#define GC_POOL_VERSION 1

struct gc_job {
  gc_kernel kernel;
  void* const* ptr;
  const int64_t* imm;
  char* scratch;  // of thread 0; thread t has scratch + t * stride
  int64_t stride;
  int64_t range;
  int64_t chunk;
};

struct gc_pool {  // the part that other libraries see; never changes within GC_POOL_VERSION
  int64_t version;
  int64_t threads;
  void (*run)(gc_pool*, const gc_job*);
};

namespace {

// State word of a parallel region: upper half its number, bit 31 "closed", below the count of
// workers inside. A worker enters an open region by compare-and-swap; the caller closes it when the
// work is handed out and waits only for those inside. A worker that sleeps through a region, or is
// off its core on a busy machine, is never waited for.
constexpr uint64_t CLOSED = 1u << 31;
constexpr uint64_t COUNT = CLOSED - 1;

struct Pool : gc_pool {
  alignas(64) std::atomic<uint64_t> state;
  alignas(64) std::atomic<int64_t> next;
  alignas(64) std::atomic<int32_t> sleepers;
  std::atomic<int32_t> waiting;  // the caller sleeps until the region is empty
  int32_t spin;
  gc_job job;
  pthread_mutex_t turn;  // one parallel region at a time
  pthread_mutex_t mutex;
  pthread_cond_t work;
  pthread_cond_t done;
};

struct Worker {
  Pool* pool;
  int64_t thread;
};

void take_part(Pool* pool, int64_t thread) {
  const gc_job& job = pool->job;
  gc_args args = {job.ptr, job.imm, job.scratch + thread * job.stride};
  for (;;) {
    int64_t begin = pool->next.fetch_add(job.chunk, std::memory_order_relaxed);
    if (begin >= job.range) return;
    int64_t end = job.range - begin < job.chunk ? job.range : begin + job.chunk;
    job.kernel(&args, begin, end);
  }
}

void* worker_main(void* argument) {
  Worker* worker = (Worker*)argument;
  Pool* pool = worker->pool;
  int64_t thread = worker->thread;
  free(worker);
  fesetenv(FE_DFL_ENV);  // not what the creating thread happened to have
  uint64_t seen = 0;
  for (;;) {
    uint64_t s = pool->state.load(std::memory_order_acquire);
    for (int32_t i = 0; (s >> 32) == seen && i < pool->spin; i++) {
      relax();
      s = pool->state.load(std::memory_order_acquire);
    }
    if ((s >> 32) == seen) {
      pthread_mutex_lock(&pool->mutex);
      pool->sleepers.fetch_add(1);
      while (((s = pool->state.load()) >> 32) == seen)
        pthread_cond_wait(&pool->work, &pool->mutex);
      pool->sleepers.fetch_sub(1);
      pthread_mutex_unlock(&pool->mutex);
    }
    seen = s >> 32;
    bool inside = false;
    while (!inside && (s >> 32) == seen && !(s & CLOSED))
      inside = pool->state.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel);
    if (!inside) continue;
    take_part(pool, thread);
    s = pool->state.fetch_sub(1);  // seq_cst: orders with the caller's `waiting`
    if ((s & COUNT) == 1 && (s & CLOSED) && pool->waiting.load()) {
      pthread_mutex_lock(&pool->mutex);
      pthread_cond_signal(&pool->done);
      pthread_mutex_unlock(&pool->mutex);
    }
  }
  return nullptr;
}

void pool_run(gc_pool* base, const gc_job* job) {
  Pool* pool = (Pool*)base;
  pthread_mutex_lock(&pool->turn);
  pool->job = *job;
  pool->next.store(0, std::memory_order_relaxed);
  uint64_t number = ((pool->state.load(std::memory_order_relaxed) >> 32) + 1) & 0xffffffffu;
  pool->state.store(number << 32);
  int32_t asleep = pool->sleepers.load();
  if (asleep > 0) {
    int64_t wanted = (job->range + job->chunk - 1) / job->chunk - 1;
    pthread_mutex_lock(&pool->mutex);
    if (wanted >= asleep) {
      pthread_cond_broadcast(&pool->work);
    } else {
      for (int64_t i = 0; i < wanted; i++) pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
  }
  take_part(pool, 0);
  uint64_t s = pool->state.fetch_or(CLOSED);
  for (int32_t i = 0; (s & COUNT) && i < pool->spin; i++) {
    relax();
    s = pool->state.load(std::memory_order_acquire);
  }
  if (s & COUNT) {
    pthread_mutex_lock(&pool->mutex);
    pool->waiting.store(1);
    while (pool->state.load() & COUNT) pthread_cond_wait(&pool->done, &pool->mutex);
    pool->waiting.store(0);
    pthread_mutex_unlock(&pool->mutex);
  }
  pthread_mutex_unlock(&pool->turn);
}

}  // namespace

GC_EXPORT int64_t gc_pool_version() { return GC_POOL_VERSION; }

// A pool of `threads` threads, the caller of a run counted in; null if threads cannot be made.
// Pools live as long as the process.
GC_EXPORT gc_pool* gc_pool_create(int64_t threads) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, sizeof(Pool))) return nullptr;
  memset(memory, 0, sizeof(Pool));
  Pool* pool = (Pool*)memory;
  pool->version = GC_POOL_VERSION;
  pool->threads = threads;
  pool->run = pool_run;
  // About 40 us of spinning covers the gap between steps; with more threads than cores, spinning
  // only takes time from the thread one waits for.
  pool->spin = threads <= sysconf(_SC_NPROCESSORS_ONLN) ? 2000 : 20;
  pthread_mutex_init(&pool->turn, nullptr);
  pthread_mutex_init(&pool->mutex, nullptr);
  pthread_cond_init(&pool->work, nullptr);
  pthread_cond_init(&pool->done, nullptr);
  pool->state.store(CLOSED);
  sigset_t all, before;  // signals belong to the threads of the host program
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = 0;
  for (int64_t t = 1; t < threads && !failed; t++) {
    Worker* worker = (Worker*)malloc(sizeof(Worker));
    if (!worker) {
      failed = 1;
      break;
    }
    *worker = {pool, t};
    pthread_t thread;
    failed = pthread_create(&thread, nullptr, worker_main, worker);
    if (failed) free(worker);
    else pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return failed ? nullptr : pool;  // workers already started sleep forever
}

// ---------------------------------------------------------------- programs

namespace {

constexpr int64_t MAGIC = 0x31504347;  // "GCP1"
constexpr int64_t UNBOUND = INT64_MIN;  // value of a symbol that is not known yet
constexpr int STACK = 64;

enum Opcode { CONST, SYMBOL, ADD, SUB, MUL, DIV, MOD, MIN, MAX, EQ, NE, LT, LE, AND, OR, NOT, NEG,
              ABS, POW, SELECT, OPCODES };
// operands of each opcode
const int8_t ARITY[OPCODES] = {0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 3};

enum Kind { INPUT, OUTPUT, WEIGHT, STATE, ARENA, EXTERNAL, KINDS };

enum Error { UNDEFINED = 1, NO_MEMORY = 2, SCRATCH = 3 };

struct Buffer { int64_t kind, index, offset; };
struct Step { int64_t function, ptr, ptrs, imm, imms, range, grain, scratch; };
struct Pointer { int64_t buffer, offset; };

// A number, or "undefined": an unbound symbol, a division by zero, an overflow. Undefined values
// may exist as long as nothing executed needs them.
struct Value { int64_t v; bool ok; };

struct Program {
  int64_t symbols, expressions, words, buffers, steps, ptrs, imms;
  int64_t *begin, *code, *imm;  // parts of the blob
  Buffer* buffer;
  Step* step;
  Pointer* pointer;
  void** functions;
  int64_t* current;  // the assignment `values` belongs to
  int64_t* values;
  uint8_t* defined;
  uint8_t* constant;
  int64_t* imm_values;
  int64_t* ptr_offsets;
  void** addresses;
  uint8_t* step_defined;
  int64_t scratch;  // largest defined scratch of any step
  bool evaluated;
};

Value apply(int64_t op, Value a, Value b, Value c) {
  if (op == SELECT) return !a.ok ? a : (a.v ? b : c);
  if (op == AND || op == OR) {  // decided by either side, even if the other is undefined
    bool stop = op == OR;
    if ((a.ok && (a.v != 0) == stop) || (b.ok && (b.v != 0) == stop)) return {stop, true};
    return {!stop, a.ok && b.ok};
  }
  if (!a.ok || (ARITY[op] > 1 && !b.ok)) return {0, false};
  int64_t x = a.v, y = b.v, r = 0;
  bool bad = false;
  switch (op) {
    case ADD: bad = __builtin_add_overflow(x, y, &r); break;
    case SUB: bad = __builtin_sub_overflow(x, y, &r); break;
    case MUL: bad = __builtin_mul_overflow(x, y, &r); break;
    case DIV:
    case MOD: {
      if (y == 0 || (x == INT64_MIN && y == -1)) return {0, false};
      int64_t q = x / y, m = x % y;
      if (m != 0 && (m < 0) != (y < 0)) { q--; m += y; }
      r = op == DIV ? q : m;
      break;
    }
    case MIN: r = x < y ? x : y; break;
    case MAX: r = x > y ? x : y; break;
    case EQ: r = x == y; break;
    case NE: r = x != y; break;
    case LT: r = x < y; break;
    case LE: r = x <= y; break;
    case NOT: r = x == 0; break;
    case NEG: bad = __builtin_sub_overflow((int64_t)0, x, &r); break;
    case ABS: bad = x < 0 ? __builtin_sub_overflow((int64_t)0, x, &r) : (r = x, false); break;
    case POW: {
      if (y < 0 || (y > 63 && x != 0 && x != 1 && x != -1)) return {0, false};
      if (y > 63) { r = x == -1 ? (y % 2 ? -1 : 1) : x; break; }
      r = 1;
      for (int64_t i = 0; i < y && !bad; i++) bad = __builtin_mul_overflow(r, x, &r);
      break;
    }
    default: bad = true;
  }
  return {r, !bad};
}

Value evaluate_one(const Program* p, int64_t e, const int64_t* symbols) {
  Value stack[STACK + 3];
  int top = 0;
  for (const int64_t *c = p->code + p->begin[e], *end = p->code + p->begin[e + 1]; c < end;) {
    int64_t op = *c++;
    if (op == CONST) {
      stack[top++] = {*c++, true};
    } else if (op == SYMBOL) {
      int64_t s = symbols[*c++];
      stack[top++] = {s, s != UNBOUND};
    } else {
      top -= ARITY[op];
      Value a = stack[top];
      stack[top] = apply(op, a, ARITY[op] > 1 ? stack[top + 1] : a, ARITY[op] > 2 ? stack[top + 2] : a);
      top++;
    }
  }
  return stack[0];
}

// Checks the code of expression e: known opcodes, symbols in range, stack depth, one result.
bool check_expression(const Program* p, int64_t e, uint8_t* constant) {
  int64_t c = p->begin[e], end = p->begin[e + 1];
  if (c < 0 || end < c || end > p->words) return false;
  int depth = 0;
  *constant = 1;
  while (c < end) {
    int64_t op = p->code[c++];
    if (op < 0 || op >= OPCODES) return false;
    if (op == CONST || op == SYMBOL) {
      if (c >= end || ++depth > STACK) return false;
      if (op == SYMBOL) {
        if (p->code[c] < 0 || p->code[c] >= p->symbols) return false;
        *constant = 0;
      }
      c++;
    } else {
      if (depth < ARITY[op]) return false;
      depth -= ARITY[op] - 1;
    }
  }
  return depth == 1;
}

bool check_program(Program* p) {
  auto expression = [&](int64_t e) { return e >= 0 && e < p->expressions; };
  for (int64_t e = 0; e < p->expressions; e++)
    if (!check_expression(p, e, p->constant + e)) return false;
  for (int64_t b = 0; b < p->buffers; b++)
    if (p->buffer[b].kind < 0 || p->buffer[b].kind >= KINDS) return false;
  for (int64_t k = 0; k < p->ptrs; k++)
    if (p->pointer[k].buffer < 0 || p->pointer[k].buffer >= p->buffers ||
        !expression(p->pointer[k].offset))
      return false;
  for (int64_t k = 0; k < p->imms; k++)
    if (!expression(p->imm[k])) return false;
  for (int64_t i = 0; i < p->steps; i++) {
    const Step& s = p->step[i];
    if (s.function < 0) continue;  // a fallback
    if (!expression(s.range) || !expression(s.scratch)) return false;
    if (s.ptr < 0 || s.ptrs < 0 || s.ptr + s.ptrs > p->ptrs) return false;
    if (s.imm < 0 || s.imms < 0 || s.imm + s.imms > p->imms) return false;
  }
  return true;
}

void evaluate(Program* p, const int64_t* symbols) {
  for (int64_t e = 0; e < p->expressions; e++) {
    if (p->evaluated && p->constant[e]) continue;
    Value value = evaluate_one(p, e, symbols);
    p->values[e] = value.v;
    p->defined[e] = value.ok;
  }
  p->scratch = 0;
  for (int64_t i = 0; i < p->steps; i++) {
    const Step& s = p->step[i];
    if (s.function < 0) continue;
    bool ok = p->defined[s.range] && p->defined[s.scratch];
    for (int64_t k = s.imm; k < s.imm + s.imms; k++) {
      p->imm_values[k] = p->values[p->imm[k]];
      ok &= p->defined[p->imm[k]] != 0;
    }
    for (int64_t k = s.ptr; k < s.ptr + s.ptrs; k++) {
      int64_t e = p->pointer[k].offset;
      p->ptr_offsets[k] = p->values[e];
      ok &= p->defined[e] != 0;
    }
    p->step_defined[i] = ok;
    if (p->defined[s.scratch] && p->values[s.scratch] > p->scratch) p->scratch = p->values[s.scratch];
  }
  memcpy(p->current, symbols, (size_t)p->symbols * 8);
  p->evaluated = true;
}

}  // namespace

// Base addresses of one run; mirrored by graphc/runtime/native.py.
struct gc_frame {
  const int64_t* symbols;
  void* const* inputs;
  void* const* outputs;
  char* weights;
  void* const* states;
  char* arena;
  void* const* externals;  // by buffer number: kinds "external" and "dynamic"
  char* scratch;
  int64_t scratch_stride;  // bytes per thread
  gc_pool* pool;           // null: one thread, no synchronisation
  int64_t* times;          // null, or nanoseconds per step, added to
};

// Addresses of functions of this library; names are NUL-terminated, one behind the other.
// Gives the position of the first unknown name, or -1.
GC_EXPORT int64_t gc_resolve(const char* names, int64_t n, void** addresses) {
  Dl_info self;
  if (!dladdr((void*)&gc_resolve, &self)) return 0;
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!library) return 0;
  int64_t missing = -1;
  for (int64_t i = 0; i < n && missing < 0; i++) {
    addresses[i] = dlsym(library, names);
    if (!addresses[i]) missing = i;
    names += strlen(names) + 1;
  }
  dlclose(library);
  return missing;
}

// blob: MAGIC, symbols, expressions, words, buffers, steps, ptrs, imms, functions; then
// begin[expressions + 1], code[words], buffers as (kind, index, offset), steps as (function or -1,
// ptr, ptrs, imm, imms, range, grain, scratch), pointers as (buffer, offset), imm[imms].
// Null if it is inconsistent.
GC_EXPORT void* gc_program_create(const int64_t* blob, int64_t n, void* const* functions) {
  constexpr int64_t HEAD = 9;
  if (n < HEAD || blob[0] != MAGIC) return nullptr;
  Program* p = (Program*)calloc(1, sizeof(Program));
  if (!p) return nullptr;
  const int64_t* h = blob + 1;
  p->symbols = h[0], p->expressions = h[1], p->words = h[2], p->buffers = h[3], p->steps = h[4];
  p->ptrs = h[5], p->imms = h[6];
  const int64_t known = h[7];
  int64_t total = HEAD;
  for (int i = 0; i < 8; i++)
    if (h[i] < 0 || h[i] > n) return free(p), nullptr;
  total += p->expressions + 1 + p->words + 3 * p->buffers + 8 * p->steps + 2 * p->ptrs + p->imms;
  if (total != n) return free(p), nullptr;

  size_t words = (size_t)(n + known + p->symbols + p->expressions + p->imms + 2 * p->ptrs);
  size_t bytes = (size_t)(2 * p->expressions + p->steps);
  int64_t* memory = (int64_t*)calloc(words * 8 + bytes + 8, 1);
  if (!memory) return free(p), nullptr;
  memcpy(memory, blob, (size_t)n * 8);
  int64_t* at = memory + HEAD;
  auto take = [&](int64_t count) { int64_t* part = at; at += count; return part; };
  p->begin = take(p->expressions + 1);
  p->code = take(p->words);
  p->buffer = (Buffer*)take(3 * p->buffers);
  p->step = (Step*)take(8 * p->steps);
  p->pointer = (Pointer*)take(2 * p->ptrs);
  p->imm = take(p->imms);
  p->functions = (void**)take(known);
  p->current = take(p->symbols);
  p->values = take(p->expressions);
  p->imm_values = take(p->imms);
  p->ptr_offsets = take(p->ptrs);
  p->addresses = (void**)take(p->ptrs);
  p->defined = (uint8_t*)at;
  p->constant = p->defined + p->expressions;
  p->step_defined = p->constant + p->expressions;
  if (known) memcpy(p->functions, functions, (size_t)known * 8);
  bool good = check_program(p);
  for (int64_t i = 0; i < p->steps && good; i++) good = p->step[i].function < known;
  if (!good) return free(memory), free(p), nullptr;
  return p;
}

GC_EXPORT void gc_program_destroy(void* program) {
  if (!program) return;
  Program* p = (Program*)program;
  free(p->begin - 9);
  free(p);
}

// Evaluates all expressions (a symbol may be UNBOUND); gives the scratch bytes per thread.
GC_EXPORT int64_t gc_program_evaluate(void* program, const int64_t* symbols) {
  Program* p = (Program*)program;
  if (!p->evaluated || memcmp(p->current, symbols, (size_t)p->symbols * 8)) evaluate(p, symbols);
  return p->scratch;
}

GC_EXPORT const int64_t* gc_program_values(void* program) { return ((Program*)program)->values; }
GC_EXPORT const uint8_t* gc_program_defined(void* program) { return ((Program*)program)->defined; }

// Runs steps [first, last); fallback steps in between are skipped. 0, or error + 8 * step.
GC_EXPORT int64_t gc_program_run(void* program, const gc_frame* frame, int64_t first, int64_t last) {
  Program* p = (Program*)program;
  gc_program_evaluate(p, frame->symbols);
  for (int64_t i = first; i < last; i++) {
    const Step& s = p->step[i];
    if (s.function < 0) continue;
    if (!p->step_defined[i]) return UNDEFINED + 8 * i;
    int64_t range = p->values[s.range];
    if (range <= 0) continue;
    if (p->values[s.scratch] > frame->scratch_stride) return SCRATCH + 8 * i;
    for (int64_t k = s.ptr; k < s.ptr + s.ptrs; k++) {
      const Buffer& b = p->buffer[p->pointer[k].buffer];
      char* base = nullptr;
      switch (b.kind) {
        case INPUT: base = (char*)frame->inputs[b.index]; break;
        case OUTPUT: base = (char*)frame->outputs[b.index]; break;
        case WEIGHT: base = frame->weights; break;
        case STATE: base = (char*)frame->states[b.index]; break;
        case ARENA: base = frame->arena; break;
        default: base = (char*)frame->externals[p->pointer[k].buffer];
      }
      if (!base) return NO_MEMORY + 8 * i;
      p->addresses[k] = base + b.offset + p->ptr_offsets[k];
    }
    gc_kernel kernel = (gc_kernel)p->functions[s.function];
    int64_t begin = frame->times ? nanoseconds() : 0;
    int64_t grain = s.grain > 0 ? s.grain : 1;
    if (!frame->pool || range <= grain) {
      gc_args args = {p->addresses + s.ptr, p->imm_values + s.imm, frame->scratch};
      kernel(&args, 0, range);
    } else {
      // About 8 chunks per thread balance uneven work; multiples of the grain keep tiles whole.
      int64_t parts = 8 * frame->pool->threads;
      int64_t chunk = ((range + parts - 1) / parts + grain - 1) / grain * grain;
      gc_job job = {kernel, p->addresses + s.ptr, p->imm_values + s.imm, frame->scratch,
                    frame->scratch_stride, range, chunk};
      frame->pool->run(frame->pool, &job);
    }
    if (frame->times) frame->times[i] += nanoseconds() - begin;
  }
  return 0;
}

// abi.h of the headers this library was compiled with
GC_EXPORT int64_t gc_abi_version() { return GC_ABI_VERSION; }
