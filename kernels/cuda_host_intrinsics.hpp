// Barriers, warp-wide operations and atomics. Included by cuda_host.hpp.
#pragma once

namespace cuda_host {

// Where a call stands: its line, and its column, since two barriers on one line are two.
constexpr int site(const std::source_location& at = std::source_location::current()) {
  return static_cast<int>((at.column() & 0x7FF) << kLineBits | (at.line() & kLineMask));
}

}  // namespace cuda_host

#define CUDA_HOST_LINE int line = cuda_host::site(std::source_location::current())

inline void __syncthreads(CUDA_HOST_LINE) { cuda_host::barrier(cuda_host::kSync, 0, line); }
inline int __syncthreads_count(int predicate, CUDA_HOST_LINE) { return cuda_host::barrier(cuda_host::kCount, predicate, line); }
inline int __syncthreads_and(int predicate, CUDA_HOST_LINE) { return cuda_host::barrier(cuda_host::kAnd, predicate, line); }
inline int __syncthreads_or(int predicate, CUDA_HOST_LINE) { return cuda_host::barrier(cuda_host::kOr, predicate, line); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { cuda_host::yield(); }
inline unsigned __activemask(CUDA_HOST_LINE) { return cuda_host::active_mask(line); }

namespace cuda_host {

template <class T>
inline uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
inline T shuffle(const Collective& operation, unsigned mask, T value, int lane, int width, int line) {
  Shuffle payload{to_bits(value), lane, width, sizeof(T), 0};
  collective(operation, mask, &payload, line);
  return from_bits<T>(payload.result);
}

inline uint32_t vote(const Collective& operation, unsigned mask, uint64_t value, int line) {
  Shuffle payload{value, 0, 32, 4, 0};
  collective(operation, mask, &payload, line);
  return static_cast<uint32_t>(payload.result);
}

}  // namespace cuda_host

#define CUDA_HOST_SHUFFLES(T)                                                                        \
  inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUDA_HOST_LINE) {           \
    return cuda_host::shuffle(cuda_host::kShflIdx, mask, value, lane, width, line);                  \
  }                                                                                                  \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_HOST_LINE) {  \
    return cuda_host::shuffle(cuda_host::kShflUp, mask, value, int(delta), width, line);             \
  }                                                                                                  \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_HOST_LINE) {\
    return cuda_host::shuffle(cuda_host::kShflDown, mask, value, int(delta), width, line);           \
  }                                                                                                  \
  inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUDA_HOST_LINE) {      \
    return cuda_host::shuffle(cuda_host::kShflXor, mask, value, lanes, width, line);                 \
  }
CUDA_HOST_SHUFFLES(int)
CUDA_HOST_SHUFFLES(unsigned)
CUDA_HOST_SHUFFLES(long)
CUDA_HOST_SHUFFLES(unsigned long)
CUDA_HOST_SHUFFLES(long long)
CUDA_HOST_SHUFFLES(unsigned long long)
CUDA_HOST_SHUFFLES(float)
CUDA_HOST_SHUFFLES(double)
CUDA_HOST_SHUFFLES(__half)
CUDA_HOST_SHUFFLES(__half2)
CUDA_HOST_SHUFFLES(__nv_bfloat16)
CUDA_HOST_SHUFFLES(__nv_bfloat162)
#undef CUDA_HOST_SHUFFLES

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_HOST_LINE) {
  return cuda_host::vote(cuda_host::kBallot, mask, predicate != 0, line);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_HOST_LINE) {
  return int(cuda_host::vote(cuda_host::kAny, mask, predicate != 0, line));
}
inline int __all_sync(unsigned mask, int predicate, CUDA_HOST_LINE) {
  return int(cuda_host::vote(cuda_host::kAll, mask, predicate != 0, line));
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, CUDA_HOST_LINE) {
  cuda_host::vote(cuda_host::kSyncwarp, mask, 0, line);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, CUDA_HOST_LINE) {
  return cuda_host::vote(cuda_host::kMatchAny, mask, cuda_host::to_bits(value), line);
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all, CUDA_HOST_LINE) {
  const unsigned same = cuda_host::vote(cuda_host::kMatchAll, mask, cuda_host::to_bits(value), line);
  *all = same != 0;
  return same;
}
#define CUDA_HOST_REDUCE(NAME, T, OPERATION)                                          \
  inline T NAME(unsigned mask, T value, CUDA_HOST_LINE) {                              \
    return T(cuda_host::vote(cuda_host::OPERATION, mask, uint64_t(uint32_t(value)), line)); \
  }
CUDA_HOST_REDUCE(__reduce_add_sync, int, kReduceAdd)
CUDA_HOST_REDUCE(__reduce_min_sync, int, kReduceMin)
CUDA_HOST_REDUCE(__reduce_max_sync, int, kReduceMax)
CUDA_HOST_REDUCE(__reduce_add_sync, unsigned, kReduceAddU)
CUDA_HOST_REDUCE(__reduce_min_sync, unsigned, kReduceMinU)
CUDA_HOST_REDUCE(__reduce_max_sync, unsigned, kReduceMaxU)
CUDA_HOST_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
CUDA_HOST_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
CUDA_HOST_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef CUDA_HOST_REDUCE

namespace cuda_host {

// One read-modify-write. Not instrumented: the access is checked here, as one atomic. `reads`: what was there matters.
template <class T, class Combine>
__attribute__((noinline, no_sanitize_address, no_sanitize_undefined)) T atomic(T* p, Combine combine, bool reads = true) {
  check_atomic(p, sizeof(T), reads, __builtin_return_address(0));
  const T old = *p;
  *p = combine(old);
  return old;
}

}  // namespace cuda_host

#define CUDA_HOST_ATOMIC(NAME, T, EXPRESSION)                                 \
  inline T NAME(T* p, T value) {                                              \
    return cuda_host::atomic(p, [=](T old) -> T { return EXPRESSION; });      \
  }
// Often an atomic store, whose result nobody uses: not a read of what was there.
#define CUDA_HOST_EXCHANGE(T)                                                 \
  inline T atomicExch(T* p, T value) {                                        \
    return cuda_host::atomic(p, [=](T) -> T { return value; }, false);        \
  }
#define CUDA_HOST_ATOMIC_INTEGERS(T)                                          \
  CUDA_HOST_ATOMIC(atomicMin, T, old < value ? old : value)                   \
  CUDA_HOST_ATOMIC(atomicMax, T, old > value ? old : value)                   \
  CUDA_HOST_EXCHANGE(T)                                                       \
  CUDA_HOST_ATOMIC(atomicAnd, T, old & value)                                 \
  CUDA_HOST_ATOMIC(atomicOr, T, old | value)                                  \
  CUDA_HOST_ATOMIC(atomicXor, T, old ^ value)                                 \
  inline T atomicCAS(T* p, T compare, T value) {                              \
    return cuda_host::atomic(p, [=](T old) -> T { return old == compare ? value : old; }); \
  }
CUDA_HOST_ATOMIC_INTEGERS(int)
CUDA_HOST_ATOMIC_INTEGERS(unsigned)
CUDA_HOST_ATOMIC_INTEGERS(unsigned long long)
CUDA_HOST_ATOMIC(atomicMin, long long, old < value ? old : value)
CUDA_HOST_ATOMIC(atomicMax, long long, old > value ? old : value)
CUDA_HOST_ATOMIC(atomicAdd, int, int(unsigned(old) + unsigned(value)))
CUDA_HOST_ATOMIC(atomicAdd, unsigned, old + value)
CUDA_HOST_ATOMIC(atomicAdd, unsigned long long, old + value)
CUDA_HOST_ATOMIC(atomicAdd, float, old + value)
CUDA_HOST_ATOMIC(atomicAdd, double, old + value)
CUDA_HOST_ATOMIC(atomicAdd, __half, __hadd(old, value))
CUDA_HOST_ATOMIC(atomicAdd, __half2, __hadd2(old, value))
CUDA_HOST_ATOMIC(atomicAdd, __nv_bfloat16, __hadd(old, value))
CUDA_HOST_ATOMIC(atomicAdd, __nv_bfloat162, __hadd2(old, value))
CUDA_HOST_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(value)))
CUDA_HOST_ATOMIC(atomicSub, unsigned, old - value)
CUDA_HOST_EXCHANGE(float)
CUDA_HOST_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1)
CUDA_HOST_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
inline unsigned short atomicCAS(unsigned short* p, unsigned short compare, unsigned short value) {
  return cuda_host::atomic(p, [=](unsigned short old) -> unsigned short { return old == compare ? value : old; });
}
#undef CUDA_HOST_ATOMIC_INTEGERS
#undef CUDA_HOST_EXCHANGE
#undef CUDA_HOST_ATOMIC
