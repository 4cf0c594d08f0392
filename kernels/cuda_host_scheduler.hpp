// Blocks, warps and barriers: who runs next, and who waits for whom. Included by cuda_host_runtime.cpp only.
#pragma once
#include "cuda_host_fibers.hpp"
#include "cuda_host_memory.hpp"
#include "cuda_host_runtime.hpp"
#include "cuda_host_trace.hpp"

namespace cuda_host {

enum State : uint8_t { kReady, kAtBarrier, kAtCollective, kAtActiveMask, kExited };

struct Copy {  // one cp.async that has not landed
  void* to;
  const void* from;
  int bytes;
  const void* pc;
};

struct Thread {
  Context context;
  char* stack;
  State state;
  bool started;
  uint32_t index[3];
  // What it waits for.
  int line, predicate;
  BarrierKind barrier_kind;
  const Collective* operation;
  uint32_t mask, active;
  void* payload;
  // cp.async: copies in order; `groups[i]` is the number of copies committed with the i-th group still in flight.
  std::vector<Copy> copies;
  std::vector<size_t> groups;
};

struct Warp {
  uint32_t live, waiting;  // lanes that have not exited; of these, lanes in a collective
};

static Thread threads[kMaxThreads];
static Warp warps[kMaxThreads / 32];
static Thread* current;
static Context scheduler;
static StackPool stacks;
static const Launch* launch;
static int num_threads, num_exited, num_at_barrier, barrier_result;
static uint32_t block_index[3];

static int thread_id(const Thread& t) { return static_cast<int>(&t - threads); }
static uint32_t lane_bit(const Thread& t) { return 1u << (thread_id(t) % 32); }
static Warp& warp_of(const Thread& t) { return warps[thread_id(t) / 32]; }

static void wait_in(State state, int line) {
  if (recording) recorder.find_unreported_stores();
  current->state = state;
  current->line = line;
  switch_context(current->context, scheduler);
}

void abandon() {
  memcpy(fault.block, block_index, sizeof block_index);
  if (current != nullptr) memcpy(fault.thread, current->index, sizeof fault.thread);
  Context dropped;
  switch_context(dropped, scheduler);
  __builtin_unreachable();
}

int barrier(BarrierKind kind, int predicate, int line) {
  current->barrier_kind = kind;
  current->predicate = predicate;
  ++num_at_barrier;
  wait_in(kAtBarrier, line);
  return barrier_result;
}

void yield() { wait_in(kReady, 0); }

// Performs the operation that t waits in if every live lane of its mask waits in it too.
static bool complete(Thread& t) {
  Warp& warp = warp_of(t);
  const uint32_t mask = t.mask & warp.live;
  if ((warp.waiting & mask) != mask) return false;
  Thread* lanes = &threads[thread_id(t) / 32 * 32];
  void* payloads[32] = {};
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (lanes[lane].operation != t.operation || lanes[lane].mask != t.mask) return false;
    payloads[lane] = lanes[lane].payload;
  }
  t.operation->perform(payloads, mask);
  if (recording) {
    if (t.operation == &kSyncwarp) recorder.sync_warp(thread_id(t) / 32, mask);
    if (mask == warp.live) recorder.converge(thread_id(t) / 32);
  }
  warp.waiting &= ~mask;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) lanes[__builtin_ctz(rest)].state = kReady;
  return true;
}

void collective(const Collective& operation, uint32_t mask, void* payload, int line) {
  Thread& t = *current;
  if (recording) recorder.find_unreported_stores();
  if (!(mask & lane_bit(t))) {
    fault.kind = kDivergence, fault.line = line & kLineMask;
    snprintf(fault.message, sizeof fault.message, "%s with mask 0x%08x, which does not name the calling lane %d",
             operation.name, mask, thread_id(t) % 32);
    abandon();
  }
  t.operation = &operation, t.mask = mask, t.payload = payload, t.line = line;
  t.state = kAtCollective;
  warp_of(t).waiting |= lane_bit(t);
  if (!complete(t)) switch_context(t.context, scheduler);
}

// A lane of the current thread's warp reads one that takes no part: what it gets is undefined on a GPU.
[[noreturn]] static void report_missing_source(int lane, int source) {
  current = &threads[thread_id(*current) / 32 * 32 + lane];  // who is to blame
  const Thread& t = *current;
  fault.kind = kDivergence, fault.line = t.line & kLineMask;
  snprintf(fault.message, sizeof fault.message, "%s with mask 0x%08x: lane %d reads lane %d, which %s", t.operation->name,
           t.mask, lane, source, t.mask >> source & 1 ? "has exited" : "the mask does not name");
  abandon();
}

uint32_t active_mask(int line) {
  wait_in(kAtActiveMask, line);
  return current->active;
}

static void finish_thread() {
  Thread& t = *current;
  if (recording) recorder.find_unreported_stores();
  t.state = kExited;
  ++num_exited;
  warp_of(t).live &= ~lane_bit(t);
  if (recording && warp_of(t).live == 0) recorder.converge(thread_id(t) / 32);
  Thread* warp = &threads[thread_id(t) / 32 * 32];
  for (int lane = 0; lane < 32; ++lane)  // some may have waited for this lane only
    if (warp + lane < threads + num_threads && warp[lane].state == kAtCollective) complete(warp[lane]);
}

static void run_thread() {
  launch->call(launch->args);
  finish_thread();
  Context dropped;
  switch_context(dropped, scheduler);
}

static void resume(Thread& t) {
  if (!t.started) {
    t.started = true;
    t.stack = stacks.take();
    make_context(t.context, t.stack + kStackBytes, run_thread);
  }
  current = &t;
  memcpy(cuda_host_coordinates.thread, t.index, sizeof t.index);
  recorder.thread = thread_id(t);
  stack_lo = reinterpret_cast<uintptr_t>(t.stack);
  atomics_in_a_row = 0;
  switch_context(scheduler, t.context);
  if (t.state == kExited) stacks.give(t.stack);
}

// __activemask: the lanes that reached the same line while nothing else in the warp can run.
static bool answer_active_mask(int first, int last) {
  uint32_t mask = 0;
  int line = -1;
  for (int i = first; i < last; ++i) {
    if (threads[i].state != kAtActiveMask || (line >= 0 && threads[i].line != line)) continue;
    line = threads[i].line;
    mask |= lane_bit(threads[i]);
  }
  for (int i = first; i < last; ++i)
    if (threads[i].state == kAtActiveMask && threads[i].line == line) threads[i].active = mask, threads[i].state = kReady;
  return mask != 0;
}

static bool run_warp(int first) {
  const int last = std::min(first + 32, num_threads);
  bool progress = false;
  for (;;) {
    bool ran = false;
    for (int n = 0; n < last - first; ++n) {
      Thread& t = threads[launch->descending ? last - 1 - n : first + n];
      if (t.state != kReady) continue;
      resume(t);
      if (fault.kind != kNone) return false;
      progress = true;
      ran |= t.state != kReady || num_threads <= 32;  // one that yielded lets other warps run too
    }
    if (!ran && !answer_active_mask(first, last)) return progress;
  }
}

static const char* barrier_name(BarrierKind kind) {
  return kind == kCount ? "__syncthreads_count" : kind == kAnd ? "__syncthreads_and" : kind == kOr ? "__syncthreads_or" : "__syncthreads";
}

static const char* place(const Thread& t, char* to, size_t size) {
  if (t.state == kExited) snprintf(to, size, "exited");
  else if (t.state == kAtBarrier) snprintf(to, size, "wait at %s, line %d", barrier_name(t.barrier_kind), t.line & kLineMask);
  else snprintf(to, size, "wait in %s with mask 0x%08x, line %d", t.operation->name, t.mask, t.line & kLineMask);
  return to;
}

static bool together(const Thread& a, const Thread& b) {
  return a.state == b.state &&
         (a.state == kExited || (a.line == b.line && (a.state == kAtBarrier ? a.barrier_kind == b.barrier_kind
                                                                            : a.operation == b.operation && a.mask == b.mask)));
}

// Says which threads of the block are where: "threads 0-31 wait at ...; threads 32-63 exited".
static void report_divergence() {
  fault.kind = kDivergence;
  size_t used = 0;
  char where[160];
  for (int i = 0, parts = 0; i < num_threads; ++parts) {
    int end = i + 1;
    while (end < num_threads && together(threads[i], threads[end])) ++end;
    if (parts == 8) {
      snprintf(fault.message + used, sizeof fault.message - used, "; ...");
      break;
    }
    used += snprintf(fault.message + used, sizeof fault.message - used, "%sthreads %d-%d %s", parts ? "; " : "", i, end - 1,
                     place(threads[i], where, sizeof where));
    i = end;
  }
  for (int i = 0; i < num_threads; ++i) {
    if (threads[i].state == kExited) continue;
    memcpy(fault.thread, threads[i].index, sizeof fault.thread);
    fault.line = threads[i].line & kLineMask;
    break;
  }
  memcpy(fault.block, block_index, sizeof block_index);
}

// Every thread that has not exited waits: since sm_70 a barrier waits for these alone (CUDA's programming guide). They
// must be at the same one; the exited do not vote.
static void release_barrier() {
  const Thread* first = nullptr;
  int count = 0, waiting = 0;
  for (int i = 0; i < num_threads; ++i) {
    const Thread& t = threads[i];
    if (t.state == kExited) continue;
    if (first == nullptr) first = &t;
    if (!together(t, *first)) return report_divergence();
    count += t.predicate != 0;
    ++waiting;
  }
  const BarrierKind kind = first->barrier_kind;
  barrier_result = kind == kAnd ? count == waiting : kind == kOr ? count > 0 : count;
  num_at_barrier = 0;
  if (recording) recorder.barrier((num_threads + 31) / 32);
  for (int i = 0; i < num_threads; ++i)
    if (threads[i].state == kAtBarrier) threads[i].state = kReady;
}

static void start_block(uint64_t number) {
  poison_shared();
  if (recording) recorder.begin_block(number, num_threads);
  num_exited = num_at_barrier = 0;
  memset(warps, 0, sizeof warps);
  for (int i = 0; i < num_threads; ++i) {
    Thread& t = threads[i];
    t.state = kReady;
    warp_of(t).live |= lane_bit(t);
    t.started = false;
    t.copies.clear();
    t.groups.clear();
    const uint32_t x = launch->block[0], y = launch->block[1];
    t.index[0] = i % x, t.index[1] = i / x % y, t.index[2] = i / (x * y);
  }
  memcpy(cuda_host_coordinates.block, block_index, sizeof block_index);
}

static void run_block(uint64_t number) {
  start_block(number);
  while (num_exited < num_threads) {
    bool progress = false;
    const int num_warps = (num_threads + 31) / 32;
    for (int w = 0; w < num_warps; ++w) {
      progress |= run_warp(32 * (launch->descending ? num_warps - 1 - w : w));
      if (fault.kind != kNone) return;
    }
    if (num_at_barrier > 0 && num_at_barrier + num_exited == num_threads) release_barrier();
    else if (!progress) report_divergence();
    if (fault.kind != kNone) return;
  }
  if (recording) recorder.report_unwritten();
}

static void run_grid() {
  const uint64_t x = launch->grid[0], y = launch->grid[1], blocks = x * y * launch->grid[2];
  for (uint64_t n = 0; n < blocks && fault.kind == kNone; ++n) {
    const uint64_t i = launch->descending ? blocks - 1 - n : n;
    block_index[0] = i % x, block_index[1] = i / x % y, block_index[2] = i / (x * y);
    run_block(i);
  }
}

}  // namespace cuda_host
