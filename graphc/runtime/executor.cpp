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

// ---------------------------------------------------------------- trace

// What a trace holds; mirrored by graphc/runtime/trace.py. Times are of CLOCK_MONOTONIC.
struct gc_event {
  int64_t step, thread;
  int64_t chunk;  // 0: the whole Step, as its caller saw it; 1: one chunk of it, by `thread`
  int64_t begin, end;  // nanoseconds
  int64_t from, to;    // the part of the Step's range
};

struct gc_trace {
  int64_t capacity;
  int64_t count;  // beyond `capacity`: that many more were dropped
  gc_event* events;
};

namespace {

void record(gc_trace* trace, const gc_event& event) {
  int64_t k = __atomic_fetch_add(&trace->count, 1, __ATOMIC_RELAXED);
  if (k < trace->capacity) trace->events[k] = event;
}

}  // namespace

// ---------------------------------------------------------------- thread pool

#define GC_POOL_VERSION 2

struct gc_sample {  // what the caller itself did of a job, and how long it then waited for others
  int64_t nanoseconds, units, waited;
};

struct gc_job {
  gc_kernel kernel;
  void* const* ptr;
  const int64_t* imm;
  char* scratch;  // of thread 0; thread t has scratch + t * stride
  int64_t stride;
  int64_t range;
  int64_t chunk;  // handed out at a time: a multiple of the Step's grain
  int64_t wake;   // whether it is worth waking threads that sleep
  gc_sample* sample;  // null, or filled in
  gc_trace* trace;
  int64_t step;
};

struct gc_pool {  // the part that other libraries see; never changes within GC_POOL_VERSION
  int64_t version;
  int64_t threads;
  void (*run)(gc_pool*, const gc_job*);
};

namespace {

// A parallel region is cut into chunks, and these into parts, one for each thread: part t is the t-th
// piece of the range, so what a thread wrote in one Step it mostly reads itself in the next, out of
// its own cache. A thread that is done with its part goes on with those of the others.
//
// The ticket of a part: behind its last chunk above, the next chunk to hand out below. A thread
// takes a chunk by adding one; it has it if what it added to was below the end. So a worker that
// sleeps through a region, or is off its core on a busy machine, is never waited for: the caller
// waits only for chunks that were taken. What a chunk needs is read after taking it, when the region
// cannot end before the chunk is done.
constexpr uint64_t NEXT = 0xffffffffu;
constexpr int64_t CHUNKS = 8;  // chunks per thread: balances uneven work
constexpr int64_t MOST_CHUNKS = 32;  // of a long Step

// How long to look for work, or for the end of a region, before sleeping. The first covers the gap
// between parallel Steps, the second the last chunk of another thread.
constexpr int64_t IDLE_NS = 100000;
constexpr int64_t JOIN_NS = 50000;

// One cache line goes from the caller to a worker to start it, one back when it is done; what rarely
// changes is kept off both.
struct alignas(128) Part {
  std::atomic<uint64_t> ticket;
  gc_kernel kernel;
  void* const* ptr;
  const int64_t* imm;
  int64_t first, range, chunk;  // of the region
};

struct Pool : gc_pool {
  Part* parts;  // behind the pool, by thread
  alignas(128) std::atomic<int64_t> finished;  // chunks by workers, ever
  alignas(128) std::atomic<int32_t> sleepers;
  std::atomic<int32_t> waiting;  // the caller sleeps until the region is done
  int64_t idle, join;            // nanoseconds of spinning
  char* scratch;
  int64_t stride;
  gc_trace* trace;
  int64_t step;  // only kept while tracing
  alignas(128) pthread_mutex_t turn;  // one parallel region at a time
  int64_t wanted;                     // `finished` when the region is done
  pthread_mutex_t mutex;
  pthread_cond_t work;
  pthread_cond_t done;
};

struct Worker {
  Pool* pool;
  int64_t thread;
};

inline bool has_work(uint64_t ticket) { return (ticket & NEXT) < (ticket >> 32); }

void run_chunk(Pool* pool, const Part& part, int64_t thread, int64_t number) {
  int64_t begin = part.first + number * part.chunk;
  int64_t end = part.range - begin < part.chunk ? part.range : begin + part.chunk;
  gc_args args = {part.ptr, part.imm, pool->scratch + thread * pool->stride};
  gc_trace* trace = pool->trace;
  int64_t start = trace ? nanoseconds() : 0;
  part.kernel(&args, begin, end);
  if (trace) record(trace, {pool->step, thread, 1, start, nanoseconds(), begin, end});
}

// Takes chunks while there are any, of its own part first; gives how many.
int64_t take_parts(Pool* pool, int64_t thread) {
  int64_t taken = 0;
  for (int64_t k = thread, left = pool->threads; left > 0; left--) {
    Part& part = pool->parts[k];
    while (has_work(part.ticket.load(std::memory_order_relaxed))) {
      uint64_t ticket = part.ticket.fetch_add(1, std::memory_order_acq_rel);
      if (!has_work(ticket)) break;
      run_chunk(pool, part, thread, (int64_t)(ticket & NEXT));
      taken++;
    }
    if (++k == pool->threads) k = 0;
  }
  return taken;
}

bool any_work(Pool* pool) {
  for (int64_t t = 0; t < pool->threads; t++)
    if (has_work(pool->parts[t].ticket.load())) return true;
  return false;
}

// Waits for the condition, spinning; false if it does not come true in so many nanoseconds.
template <class Condition>
bool spin_until(int64_t limit, Condition condition) {
  for (int i = 0; i < 64; i++) {  // without looking at the clock: the usual case
    if (condition()) return true;
    relax();
  }
  for (int64_t begin = nanoseconds(); nanoseconds() - begin < limit;) {
    for (int i = 0; i < 32; i++) {
      if (condition()) return true;
      relax();
    }
  }
  return condition();
}

void* worker_main(void* argument) {
  Worker* worker = (Worker*)argument;
  Pool* pool = worker->pool;
  int64_t thread = worker->thread;
  free(worker);
  fesetenv(FE_DFL_ENV);  // not what the creating thread happened to have
  const std::atomic<uint64_t>& own = pool->parts[thread].ticket;
  auto work = [&] { return has_work(own.load(std::memory_order_relaxed)); };
  for (;;) {
    if (!spin_until(pool->idle, work)) {
      pthread_mutex_lock(&pool->mutex);
      pool->sleepers.fetch_add(1);
      while (!any_work(pool)) pthread_cond_wait(&pool->work, &pool->mutex);
      pool->sleepers.fetch_sub(1);
      pthread_mutex_unlock(&pool->mutex);
    }
    int64_t taken = take_parts(pool, thread);
    if (!taken) continue;
    pool->finished.fetch_add(taken);  // seq_cst: orders with the caller's `waiting`
    if (pool->waiting.load()) {
      pthread_mutex_lock(&pool->mutex);
      pthread_cond_signal(&pool->done);
      pthread_mutex_unlock(&pool->mutex);
    }
  }
  return nullptr;
}

void wake(Pool* pool, int64_t most) {
  int64_t asleep = pool->sleepers.load();
  if (asleep == 0) return;
  pthread_mutex_lock(&pool->mutex);
  if (most >= asleep) {
    pthread_cond_broadcast(&pool->work);
  } else {
    for (int64_t i = 0; i < most; i++) pthread_cond_signal(&pool->work);
  }
  pthread_mutex_unlock(&pool->mutex);
}

void pool_run(gc_pool* base, const gc_job* job) {
  Pool* pool = (Pool*)base;
  const int64_t chunk = job->chunk, range = job->range;
  int64_t begin = 0;
  // While another Session has the pool, this one goes on alone: it neither sleeps nor waits.
  while (pthread_mutex_trylock(&pool->turn)) {
    int64_t end = range - begin < chunk ? range : begin + chunk;
    gc_args args = {job->ptr, job->imm, job->scratch};
    int64_t start = job->trace ? nanoseconds() : 0;
    job->kernel(&args, begin, end);
    if (job->trace) record(job->trace, {job->step, 0, 1, start, nanoseconds(), begin, end});
    begin = end;
    if (begin >= range) return;
  }
  const int64_t chunks = (range - begin + chunk - 1) / chunk;
  const int64_t parts = chunks < pool->threads ? chunks : pool->threads;
  if (pool->scratch != job->scratch) pool->scratch = job->scratch;
  if (pool->stride != job->stride) pool->stride = job->stride;
  if (pool->trace != job->trace) pool->trace = job->trace;
  if (job->trace) pool->step = job->step;
  for (int64_t t = parts - 1; t >= 0; t--) {
    Part& part = pool->parts[t];
    part.kernel = job->kernel;
    part.ptr = job->ptr;
    part.imm = job->imm;
    part.first = begin;
    part.range = range;
    part.chunk = chunk;
    const uint64_t first = (uint64_t)(t * chunks / parts), last = (uint64_t)((t + 1) * chunks / parts);
    // chunk 0 is the caller's
    part.ticket.store(last << 32 | (t ? first : 1), std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the tickets before `sleepers`
  if (job->wake) wake(pool, chunks - 1);
  int64_t start = job->sample ? nanoseconds() : 0;
  run_chunk(pool, pool->parts[0], 0, 0);
  int64_t own = 1 + take_parts(pool, 0);
  int64_t end = job->sample ? nanoseconds() : 0;
  int64_t wanted = pool->wanted += chunks - own;
  auto done = [=] { return pool->finished.load(std::memory_order_acquire) == wanted; };
  bool waits = !done();
  if (waits && !spin_until(pool->join, done)) {
    pthread_mutex_lock(&pool->mutex);
    pool->waiting.store(1);
    while (pool->finished.load() != wanted) pthread_cond_wait(&pool->done, &pool->mutex);
    pool->waiting.store(0);
    pthread_mutex_unlock(&pool->mutex);
  }
  if (job->sample) *job->sample = {end - start, own * chunk, waits ? nanoseconds() - end : 0};
  pthread_mutex_unlock(&pool->turn);
}

}  // namespace

GC_EXPORT int64_t gc_pool_version() { return GC_POOL_VERSION; }

// A pool of `threads` threads, the caller of a run counted in; null if threads cannot be made.
// Pools live as long as the process.
GC_EXPORT gc_pool* gc_pool_create(int64_t threads) {
  void* memory = nullptr;
  const size_t bytes = sizeof(Pool) + (size_t)threads * sizeof(Part);
  if (posix_memalign(&memory, 128, bytes)) return nullptr;
  memset(memory, 0, bytes);
  Pool* pool = (Pool*)memory;
  pool->parts = (Part*)(pool + 1);
  pool->version = GC_POOL_VERSION;
  pool->threads = threads;
  pool->run = pool_run;
  // With more threads than cores, spinning only takes time from the thread one waits for.
  bool crowded = threads > sysconf(_SC_NPROCESSORS_ONLN);
  pool->idle = crowded ? 0 : IDLE_NS;
  pool->join = crowded ? 0 : JOIN_NS;
  pthread_mutex_init(&pool->turn, nullptr);
  pthread_mutex_init(&pool->mutex, nullptr);
  pthread_cond_init(&pool->work, nullptr);
  pthread_cond_init(&pool->done, nullptr);
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

enum Error { RUN = 0, UNDEFINED = 1, NO_MEMORY = 2, SCRATCH = 3, SKIP = 4 };

struct Buffer { int64_t kind, index, offset; };
struct Step { int64_t function, ptr, ptrs, imm, imms, range, grain, scratch; };
struct Pointer { int64_t buffer, offset; };

// A Step under the current symbols, for the run loop.
struct Ready {
  gc_kernel kernel;
  void** ptr;
  const int64_t* imm;
  int64_t range, grain, scratch;
  int64_t loose, loose_end;  // its pointers that each run finds anew, in Program::loose
  int64_t chunk;  // units a thread takes at a time; 0: the caller computes all of it
  int64_t rate;   // picoseconds a unit takes, as measured; 0: not yet
  int32_t until;  // runs until the next measurement alone
  int32_t code;   // RUN, SKIP or an Error
};

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
  Ready* ready;
  int64_t* loose;  // pointers to inputs, outputs, states and externals
  int64_t scratch;  // largest defined scratch of any step
  int64_t threads;  // `ready` is for so many; 0: to be made
  char *weights, *arena;  // what `ready` was made with
  int64_t balance, alone, backoff;  // nanoseconds, see `settle`
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
  p->threads = 0;
  for (int64_t i = 0; i < p->steps; i++) {
    const Step& s = p->step[i];
    Ready& r = p->ready[i];
    r.code = SKIP;
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
    if (!ok) r.code = UNDEFINED;
    else if (p->values[s.range] > 0) r.code = RUN;
    r.range = p->values[s.range];
    r.scratch = p->values[s.scratch];
    r.rate = 0;
    r.until = 0;
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
  gc_trace* trace;         // null, or where to record Steps and chunks
};

namespace {

// ---- work for one thread or for several. What a unit of the range costs is measured now and then
// while running: lowering knows it only roughly, and not at all for lengths that it does not know.

constexpr int64_t ALONE_NS = 4000;   // a Step shorter than this is not worth two threads
constexpr int64_t CHUNK_NS = 2500;   // no need to hand out less than this at a time
constexpr int64_t LONG_NS = 20000000;  // nor much more: for so long others may wait at the end
constexpr int64_t WAKE_NS = 20000;   // waking a thread costs microseconds
constexpr int32_t MEASURE_EVERY = 16;

// When other processes keep the cores busy, a caller may wait longer for a chunk whose thread was
// taken off its core than the chunk is worth. So each region is settled: what the others did of it,
// less the wait for them, goes to a balance; when that falls below zero by DEBT_NS, the Steps run
// alone for a while, longer each time until sharing pays again.
constexpr int64_t CREDIT_NS = 4000000;  // one time slice lost does not count against it
constexpr int64_t DEBT_NS = 500000;
constexpr int64_t BACKOFF_NS = 4000000, LONGEST_BACKOFF_NS = 128000000;

// Chooses `chunk` from the rate. Chunks are multiples of the grain, which keeps tiles whole.
void share(Ready& r, int64_t threads) {
  r.chunk = 0;
  if (threads < 2 || r.range <= r.grain) return;
  int64_t parts = CHUNKS * threads;
  if (r.rate) {
    double total = 1e-3 * (double)r.rate * (double)r.range;
    if (total < ALONE_NS) return;
    int64_t most = (int64_t)(total / CHUNK_NS) / threads * threads;
    if (most < parts) parts = most > threads ? most : threads;
    const int64_t least = (int64_t)(total / LONG_NS) / threads * threads;
    if (least > parts) parts = least < MOST_CHUNKS * threads ? least : MOST_CHUNKS * threads;
  }
  r.chunk = ((r.range + parts - 1) / parts + r.grain - 1) / r.grain * r.grain;
  if (r.chunk >= r.range) r.chunk = 0;
}

void learn(Ready& r, int64_t nanoseconds, int64_t units, int64_t threads) {
  int64_t rate = (int64_t)(1e3 * (double)nanoseconds / (double)units) + 1;
  // a high one may only mean that this thread was off its core
  r.rate = r.rate && rate > r.rate ? (15 * r.rate + (rate < 4 * r.rate ? rate : 4 * r.rate)) / 16
                                   : rate;
  share(r, threads);
}

void settle(Program* p, const Ready& r, const gc_sample& sample) {
  int64_t others = (int64_t)(1e-3 * (double)r.rate * (double)(r.range - sample.units));
  p->balance += (others > 0 ? others : 0) - sample.waited;
  if (p->balance > CREDIT_NS) {
    p->balance = CREDIT_NS;
    p->backoff = BACKOFF_NS;
  } else if (p->balance < -DEBT_NS) {
    p->balance = 0;
    p->alone = p->backoff;
    if (p->backoff < LONGEST_BACKOFF_NS) p->backoff *= 2;
  }
}

// Resolves what stays the same from run to run.
void prepare(Program* p, const gc_frame* frame, int64_t threads) {
  int64_t loose = 0;
  for (int64_t i = 0; i < p->steps; i++) {
    const Step& s = p->step[i];
    Ready& r = p->ready[i];
    if (s.function < 0) continue;
    r.kernel = (gc_kernel)p->functions[s.function];
    r.ptr = p->addresses + s.ptr;
    r.imm = p->imm_values + s.imm;
    r.grain = s.grain > 0 ? s.grain : 1;
    r.loose = loose;
    for (int64_t k = s.ptr; k < s.ptr + s.ptrs; k++) {
      const Buffer& b = p->buffer[p->pointer[k].buffer];
      if (b.kind == WEIGHT || b.kind == ARENA) {
        char* base = b.kind == WEIGHT ? frame->weights : frame->arena;
        if (!base && r.code == RUN) r.code = NO_MEMORY;
        p->addresses[k] = base + b.offset + p->ptr_offsets[k];
      } else {
        p->loose[loose++] = k;
      }
    }
    r.loose_end = loose;
    share(r, threads);
  }
  p->threads = threads;
  p->weights = frame->weights;
  p->arena = frame->arena;
}

// Runs a Step that several threads may share, or that is watched.
void run_shared(Program* p, const gc_frame* frame, Ready& r, int64_t i) {
  gc_sample sample = {0, 0, 0};
  const bool parallel = r.chunk && p->alone <= 0;
  // one that stays with the caller is measured now and then; the first runs of all meet cold memory
  const bool measured = !parallel && p->threads > 1 && r.range > r.grain && --r.until < 0;
  const bool watched = frame->times || frame->trace;
  const int64_t begin = watched || measured ? nanoseconds() : 0;
  if (parallel) {
    bool wake = !r.rate || 1e-3 * (double)r.rate * (double)r.range >= WAKE_NS;
    gc_job job = {r.kernel, r.ptr, r.imm, frame->scratch, frame->scratch_stride, r.range, r.chunk,
                  wake, &sample, frame->trace, i};
    frame->pool->run(frame->pool, &job);
  } else {
    gc_args args = {r.ptr, r.imm, frame->scratch};
    r.kernel(&args, 0, r.range);
  }
  const int64_t end = watched || measured ? nanoseconds() : 0;
  if (frame->times) frame->times[i] += end - begin;
  if (frame->trace) record(frame->trace, {i, 0, 0, begin, end, 0, r.range});
  if (sample.units) {
    learn(r, sample.nanoseconds, sample.units, p->threads);
    settle(p, r, sample);
  } else if (measured) {
    r.until = r.rate ? MEASURE_EVERY - 1 : 0;
    learn(r, end - begin, r.range, p->threads);
  }
  if (p->alone > 0) p->alone -= (int64_t)(1e-3 * (double)r.rate * (double)r.range);
}

}  // namespace

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

  size_t words = (size_t)(n + known + p->symbols + p->expressions + p->imms + 3 * p->ptrs) +
                 (size_t)p->steps * (sizeof(Ready) / 8);
  size_t bytes = (size_t)(2 * p->expressions);
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
  p->loose = take(p->ptrs);
  p->ready = (Ready*)take(p->steps * (int64_t)(sizeof(Ready) / 8));
  p->defined = (uint8_t*)at;
  p->constant = p->defined + p->expressions;
  p->balance = CREDIT_NS;
  p->backoff = BACKOFF_NS;
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
  int64_t threads = frame->pool ? frame->pool->threads : 1;
  if (p->threads != threads || p->weights != frame->weights || p->arena != frame->arena)
    prepare(p, frame, threads);
  bool watched = frame->times || frame->trace;
  for (int64_t i = first; i < last; i++) {
    Ready& r = p->ready[i];
    if (r.code != RUN) {
      if (r.code == SKIP) continue;
      return r.code + 8 * i;
    }
    if (r.scratch > frame->scratch_stride) return SCRATCH + 8 * i;
    for (int64_t l = r.loose; l < r.loose_end; l++) {
      int64_t k = p->loose[l];
      const Buffer& b = p->buffer[p->pointer[k].buffer];
      char* base = nullptr;
      switch (b.kind) {
        case INPUT: base = (char*)frame->inputs[b.index]; break;
        case OUTPUT: base = (char*)frame->outputs[b.index]; break;
        case STATE: base = (char*)frame->states[b.index]; break;
        default: base = (char*)frame->externals[p->pointer[k].buffer];
      }
      if (!base) return NO_MEMORY + 8 * i;
      p->addresses[k] = base + b.offset + p->ptr_offsets[k];
    }
    if (watched || (threads > 1 && r.range > r.grain)) {
      run_shared(p, frame, r, i);
    } else {
      gc_args args = {r.ptr, r.imm, frame->scratch};
      r.kernel(&args, 0, r.range);
    }
  }
  return 0;
}

// abi.h of the headers this library was compiled with
GC_EXPORT int64_t gc_abi_version() { return GC_ABI_VERSION; }
