// What a launch may touch, and the check before every access. Included by cuda_host_runtime.cpp only.
//
// `on_access` sees each load and store of every thread, with its address and size, and while a trace is running passes
// it on to `record`.
#pragma once
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda_host_runtime.hpp"
#include "cuda_host_views.hpp"

extern "C" const cuda_host::Coordinates cuda_host_coordinates;
extern "C" const cuda_host::SharedLines cuda_host_shared_lines[];

namespace cuda_host {

alignas(1024) unsigned char dynamic_shared[kMaxShared];

// A variable of the module that g++ registered: a __shared__ array, a __device__ or __constant__ variable.
struct Global {
  uintptr_t lo, hi, redzone_end;
  const char* name;
  bool shared, writable;
};

// The same as GCC describes it (libsanitizer's __asan_global).
struct RegisteredGlobal {
  uintptr_t lo;
  size_t size, size_with_redzone;
  const char *name, *module;
  uintptr_t dynamic_init;
  const struct { const char* file; uint32_t line, column; } * location;
  uintptr_t odr_indicator;
};

struct Registered {
  const RegisteredGlobal* globals;
  size_t count;
};
constexpr int kMaxRegistered = 16;  // one for each file of the module
static Registered registered[kMaxRegistered];
static int num_registered;

struct Memory {
  std::vector<Global> globals;    // sorted by lo
  Views views;                    // what this launch may touch besides stacks
  std::vector<Region> read_only;  // segments of the module that hold code and constants
  uintptr_t module_base = 0, module_lo = 0, module_hi = 0;
  uint64_t dynamic_bytes = 0;
};

// Outside a launch the whole address space is allowed, for the module's own static initialisers.
static uintptr_t stack_lo = 0, stack_bytes = UINTPTR_MAX;
constexpr int kNumRecent = 2;
static Span recent[kNumRecent];
static bool recording;
static bool exchanging;  // the access is an atomicExch
static Memory memory;
static Fault fault;
static int atomics_in_a_row;
[[noreturn]] void abandon();  // the scheduler's
static void record(uintptr_t p, size_t size, Access access, const void* pc, const Span& span);  // the trace's

static void set_text(char* to, size_t size, const char* text) {
  snprintf(to, size, "%s", text == nullptr ? "" : text);
}

static bool is_coordinate(const Global& g) {  // threadIdx and its like
  const auto& c = cuda_host_coordinates;
  for (const uint32_t* p : {c.thread, c.block, c.block_dim, c.grid_dim})
    if (g.lo == reinterpret_cast<uintptr_t>(p)) return true;
  return false;
}

static uintptr_t dynamic_lo() { return reinterpret_cast<uintptr_t>(dynamic_shared); }

static const Global* global_at_or_before(uintptr_t p) {
  auto after = std::upper_bound(memory.globals.begin(), memory.globals.end(), p,
                                [](uintptr_t address, const Global& g) { return address < g.lo; });
  return after == memory.globals.begin() ? nullptr : &*(after - 1);
}

// The name in the source: cuda_host_source.py adds to that of a shared variable.
static void set_name(char* to, size_t size, const char* name) {
  set_text(to, size, name);
  if (char* added = strstr(to, "__hidden")) *added = 0;
}

// Names the shared array or module variable that an access into the module was aimed at: the nearest one.
static void describe_object(uintptr_t p) {
  if (p < memory.module_lo || p >= memory.module_hi) return;
  uintptr_t nearest = UINTPTR_MAX;
  auto consider = [&](uintptr_t lo, uintptr_t hi, uintptr_t reach, const char* name, Space space) {
    const uintptr_t distance = p < lo ? lo - p : p < reach ? 0 : p - reach + 1;
    if (distance >= nearest) return;
    nearest = distance;
    fault.space = space, fault.object_lo = lo, fault.object_hi = hi;
    set_name(fault.object, sizeof fault.object, name);
  };
  for (const Global& g : memory.globals)
    if (!is_coordinate(g)) consider(g.lo, g.hi, g.redzone_end, g.name, g.shared ? kStaticShared : kModule);
  if (p >= dynamic_lo() && p < dynamic_lo() + kMaxShared) nearest = UINTPTR_MAX;  // whatever lies beside it
  if (memory.dynamic_bytes > 0 || nearest == UINTPTR_MAX)
    consider(dynamic_lo(), dynamic_lo() + memory.dynamic_bytes, dynamic_lo() + kMaxShared, "dynamic shared memory", kDynamicShared);
}

[[noreturn]] static void fail(FaultKind kind, uintptr_t p, size_t size, Access access, const void* pc) {
  fault.kind = kind, fault.address = p, fault.size = size, fault.access = access;
  fault.pc = pc == nullptr ? 0 : reinterpret_cast<uint64_t>(pc) - memory.module_base;
  describe_object(p);
  abandon();
}

static const Span& remember(const Span& span) {
  for (int i = kNumRecent; --i > 0;) recent[i] = recent[i - 1];
  return recent[0] = span;
}

__attribute__((noinline, cold)) static void check_slowly(uintptr_t p, size_t size, Access access, const void* pc) {
  bool read_only = false;
  const Span span = memory.views.find(p, size, access != kLoad, read_only);
  if (span.lo < span.hi) {
    remember(span);
    if (recording) record(p, size, access, pc, span);
    return;
  }
  if (read_only) fail(kReadOnly, p, size, access, pc);
  // Constants that g++ does not register (string literals, tables of inline functions) may be read.
  const Global* g = global_at_or_before(p);
  if (access == kLoad && (g == nullptr || p >= g->redzone_end))
    for (const Region& r : memory.read_only)
      if (p >= r.lo && p + size <= r.hi) return;
  fail(kMemory, p, size, access, pc);
}

inline void on_access(uintptr_t p, size_t size, Access access, const void* pc) {
  if (p - stack_lo < stack_bytes) {
    if (p - stack_lo <= stack_bytes - size) return;
    fail(kMemory, p, size, access, pc);
  }
  for (const Span& span : recent)
    if (span.holds(p, size) && (access == kLoad || span.writable)) {
      if (__builtin_expect(recording, false)) record(p, size, access, pc, span);
      return;
    }
  check_slowly(p, size, access, pc);
}

void check_access(const void* p, size_t size, Access access, const void* pc) {
  on_access(reinterpret_cast<uintptr_t>(p), size, access, pc);
}

void check_atomic(const void* pointer, size_t size, bool reads, const void* pc) {
  const uintptr_t p = reinterpret_cast<uintptr_t>(pointer);
  if (p % size != 0) {
    fault.index = static_cast<int64_t>(size);
    fail(kMisaligned, p, size, kAtomic, pc);
  }
  exchanging = !reads;
  on_access(p, size, kAtomic, pc);
  exchanging = false;
  if (++atomics_in_a_row >= 1000) yield();  // it may be spinning on a lock that another thread of the block holds
}

void check_pointer(const void* pointer, size_t size, size_t align, Access access, Space space, const void* pc) {
  const uintptr_t p = reinterpret_cast<uintptr_t>(pointer);
  if (p % align != 0) {
    fault.index = static_cast<int64_t>(align);
    fail(kMisaligned, p, size, access, pc);
  }
  if (size == 0) return;
  const Global* g = global_at_or_before(p);
  const bool shared = (p >= dynamic_lo() && p < dynamic_lo() + kMaxShared) || (g != nullptr && p < g->redzone_end && g->shared);
  const bool local = p - stack_lo < stack_bytes;
  if (shared == (space != kGlobal) && !local) return;
  if (!shared && !local && space != kGlobal) on_access(p, size, access, pc);  // where it is outside everything, say so
  set_text(fault.message, sizeof fault.message,
           space == kGlobal ? "the instruction needs a pointer to global memory" : "the instruction needs a pointer to shared memory");
  fail(kMemory, p, size, access, pc);
}

void check_space(const void* pointer, size_t size, size_t align, Access access, Space space, const void* pc) {
  check_pointer(pointer, size, align, access, space, pc);
  if (size > 0) on_access(reinterpret_cast<uintptr_t>(pointer), size, access, pc);
}

void abort_kernel(const char* what, const char* file, int line) {
  fault.kind = kAborted, fault.line = line;
  set_text(fault.message, sizeof fault.message, what);
  set_text(fault.file, sizeof fault.file, file);
  abandon();
}

static int find_module(dl_phdr_info* info, size_t, void*) {
  uintptr_t lo = UINTPTR_MAX, hi = 0;
  std::vector<Region> read_only;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + segment.p_vaddr, stop = start + segment.p_memsz;
    if (segment.p_type == PT_LOAD) lo = std::min(lo, start), hi = std::max(hi, stop);
    // Constants with addresses in them are in a writable segment, which the loader protects once they are filled in.
    if ((segment.p_type == PT_LOAD && !(segment.p_flags & PF_W)) || segment.p_type == PT_GNU_RELRO)
      read_only.push_back({start, stop, false});
  }
  if (dynamic_lo() < lo || dynamic_lo() >= hi) return 0;
  memory.module_base = info->dlpi_addr, memory.module_lo = lo, memory.module_hi = hi;
  memory.read_only = read_only;
  for (Global& g : memory.globals)
    for (const Region& r : read_only)
      if (g.lo >= r.lo && g.lo < r.hi) g.writable = false;
  return 1;
}

static bool is_shared(const RegisteredGlobal& g) {
  if (g.location == nullptr) return false;
  for (auto* lines = cuda_host_shared_lines; lines->file != nullptr; ++lines)
    if (g.location->line >= lines->first && g.location->line <= lines->last && strcmp(g.location->file, lines->file) == 0)
      return true;
  return false;
}

// Takes stock of the module's variables, once.
static void find_globals() {
  if (memory.module_hi != 0) return;
  for (int i = 0; i < num_registered; ++i)
    for (size_t j = 0; j < registered[i].count; ++j) {
      const RegisteredGlobal& g = registered[i].globals[j];
      memory.globals.push_back({g.lo, g.lo + g.size, g.lo + g.size_with_redzone, g.name, is_shared(g), true});
    }
  std::sort(memory.globals.begin(), memory.globals.end(), [](const Global& a, const Global& b) { return a.lo < b.lo; });
  dl_iterate_phdr(find_module, nullptr);
}

// What this launch may touch: its ranges, shared memory, the module's own variables.
static void set_views(const Launch& launch) {
  find_globals();
  memory.dynamic_bytes = launch.dynamic_shared;
  Views& views = memory.views;
  views.clear();
  for (uint64_t i = 0; i < launch.num_ranges; ++i) {
    const Range& r = launch.ranges[i];
    const int owner = i < launch.num_buffers ? static_cast<int>(i) : kUnrecorded;
    views.add({r.lo, r.hi, r.writable != 0, owner, r.run, r.num_dims, r.dims});
  }
  for (const Global& g : memory.globals) {
    const int owner = g.shared ? kSharedMemory : is_coordinate(g) ? kUnrecorded : kModuleVariable;
    views.add({g.lo, g.hi, g.writable, owner});
  }
  views.add({dynamic_lo(), dynamic_lo() + launch.dynamic_shared, true, kSharedMemory});
  views.sort();
  for (Span& span : recent) span = {0, 0, false, kUnrecorded};
}

static uint64_t static_shared_bytes() {
  find_globals();
  uint64_t bytes = 0;
  for (const Global& g : memory.globals) bytes += g.shared ? g.hi - g.lo : 0;
  return bytes;
}

static void poison_shared() {  // 0xFF bytes: NaN as float, half or bf16, -1 as an integer
  memset(dynamic_shared, 0xFF, memory.dynamic_bytes);
  for (const Global& g : memory.globals)
    if (g.shared) memset(reinterpret_cast<void*>(g.lo), 0xFF, g.hi - g.lo);
}

}  // namespace cuda_host
