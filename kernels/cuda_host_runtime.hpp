// What a kernel compiled for the host and the runtime that runs it agree on. kernels/cuda_host.py mirrors the structs
// marked [ctypes]; kernels/cuda_host_runtime.cpp implements the functions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cuda_host {

constexpr int kMaxThreads = 1024;       // of a block
constexpr size_t kMaxShared = 232448;   // dynamic shared bytes of a block: 227 KiB, as on sm_90

// Where a barrier or a warp operation is called: its column (or 0) above its line.
constexpr int kLineBits = 20, kLineMask = (1 << kLineBits) - 1;

// The kinds of fault, in the order of FAULT_KINDS in cuda_host.py.
enum FaultKind : int32_t { kNone, kMemory, kReadOnly, kMisaligned, kDivergence, kIndex, kUndefined, kAborted, kSignal,
                           kTimeout, kRace, kUninitialised };
enum Access : int32_t { kLoad, kStore, kAtomic, kCopyInFlight };  // the last: cp.async not waited for, in a report only
enum Space : int32_t { kGlobal, kStaticShared, kDynamicShared, kStack, kModule };

// [ctypes] One dimension of a strided view; the stride is in bytes.
struct Dimension {
  uint64_t stride, count;
};

// [ctypes] Memory that the launch may touch: all of [lo, hi), or, with dims (outermost first), runs of `run` bytes.
struct Range {
  uintptr_t lo, hi;
  uint64_t writable, run, num_dims;
  const Dimension* dims;
};

// [ctypes] What the launch did to one buffer, as BufferTraffic in memory_trace.py.
struct Traffic {
  uint64_t loaded, stored, atomic, requests, sectors_requested, sectors;
};

// [ctypes] Memory that starts unwritten: for each byte of [lo, hi) 1 once it has been written, else 0.
struct Fresh {
  uintptr_t lo, hi;
  uint8_t* written;
};

// [ctypes] What a traced launch looks for; `traffic` (or null) has an entry for each buffer.
struct Trace {
  uint64_t races, uninitialised;
  const Fresh* fresh;
  uint64_t num_fresh;
  Traffic* traffic;
};

// [ctypes] One launch; `args[i]` points to the bytes of parameter i. The first `num_buffers` ranges are arrays, any more
// belong to the launch itself. trace: null when none is running.
struct Launch {
  void (*call)(void** args);
  void** args;
  const Range* ranges;
  uint64_t num_ranges, num_buffers;
  const Trace* trace;
  uint64_t dynamic_shared;
  double time_limit;    // seconds
  uint64_t descending;  // run blocks and threads from the last to the first
  uint32_t grid[3], block[3];
};

// [ctypes] Why a launch was abandoned. `pc` is an offset into the module, or 0 where `file` and `line` say it already.
struct Fault {
  FaultKind kind;
  Access access;
  Space space;
  uint32_t line;
  uint64_t address, size, pc;
  uint64_t object_lo, object_hi;  // the shared array or module variable nearest to the address, if any
  int64_t index;                  // kIndex: the index used
  uint32_t block[3], thread[3];
  uint64_t other_pc;              // kRace: the access that came before
  Access other_access;
  uint32_t other_block[3], other_thread[3];
  char object[128], file[256], message[1536];
};

// [ctypes] One kernel parameter: kind is one of p(ointer) i(nt) u(nsigned) b(ool) f(loat or double) h(alf) g (bfloat16)
// s(truct); `pointee` the same of what a pointer points to ('v' for void).
struct Param {
  uint32_t size, pointee_size;
  char kind, pointee;
  char padding[6];
};

// [ctypes]
struct Kernel {
  const char* name;
  void (*call)(void** args);
  const Param* params;
  uint64_t num_params;
};

// Source lines of a `__shared__` declaration: a variable registered from them is one block's shared memory.
struct SharedLines {
  const char* file;
  uint32_t first, last;
};

// The variables of the module that the runtime writes before a thread runs.
struct Coordinates {
  uint32_t *thread, *block, *block_dim, *grid_dim;
};

using Perform = void (*)(void* const* payloads, uint32_t mask);
struct Collective {
  const char* name;
  Perform perform;
};

struct Shuffle {
  uint64_t value;
  int32_t lane;  // source lane, delta or xor mask
  int32_t width;
  uint64_t bytes;
  uint64_t result;
};

struct Mma {  // m16n8k16, one lane's fragments; bf16 unless `half`
  float* d;
  const uint32_t *a, *b;
  const float* c;
  bool half;
};

struct Ldmatrix {
  uint32_t* r;
  const void* row;
  int32_t count;
  bool trans;
};

extern const Collective kShflIdx, kShflUp, kShflDown, kShflXor, kBallot, kAny, kAll, kSyncwarp, kMatchAny, kMatchAll,
    kReduceAdd, kReduceMin, kReduceMax, kReduceAddU, kReduceMinU, kReduceMaxU, kReduceAnd, kReduceOr, kReduceXor, kMma,
    kLdmatrix;

// Waits until every live lane of `mask` is at the same operation, performs it once, and returns.
void collective(const Collective& operation, uint32_t mask, void* payload, int line);
uint32_t active_mask(int line);

enum BarrierKind : int32_t { kSync, kCount, kAnd, kOr };
int barrier(BarrierKind kind, int predicate, int line);
void yield();

void check_access(const void* p, size_t size, Access access, const void* pc);
void check_atomic(const void* p, size_t size, bool reads, const void* pc);
// The pointer of an instruction that exists for one memory space only: check_pointer where g++ reports the access itself
// (ld.global), check_space where it does not (cp.async, ldmatrix).
void check_pointer(const void* p, size_t size, size_t align, Access access, Space space, const void* pc);
void check_space(const void* p, size_t size, size_t align, Access access, Space space, const void* pc);
[[noreturn]] void abort_kernel(const char* what, const char* file, int line);

void cp_async(void* shared, const void* global, int source_bytes);
void cp_async_commit();
void cp_async_wait(int groups);  // all but the newest `groups`; -1: uncommitted copies too

alignas(1024) extern unsigned char dynamic_shared[kMaxShared];

}  // namespace cuda_host
