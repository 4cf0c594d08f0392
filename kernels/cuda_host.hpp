// The CUDA C++ language for g++: what the compiler and cuda_runtime.h supply on a GPU. Precompiled and put before every
// module by kernels/cuda_host.py; kernels include nothing of it themselves.
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <source_location>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda_host_runtime.hpp"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __launch_bounds__
#undef __grid_constant__
#undef __maxnreg__
#undef __cluster_dims__
#undef __block_size__
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __shared__ static  // one block runs at a time; cuda_host.py tells the runtime which lines declare shared memory
#define __constant__
#define __managed__
#define __launch_bounds__(...)
#define __grid_constant__
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __block_size__(...)

#undef assert
#define assert(condition) \
  ((condition) ? void(0) : cuda_host::abort_kernel("assertion failed: " #condition, __builtin_FILE(), __builtin_LINE()))
#define __trap() cuda_host::abort_kernel("__trap()", __builtin_FILE(), __builtin_LINE())

// memcpy and its kin of variable size are not instrumented, so their calls go to functions that check.
extern "C" {
void* memcpy(void*, const void*, size_t) noexcept __asm__("cuda_host_memcpy");
void* memmove(void*, const void*, size_t) noexcept __asm__("cuda_host_memmove");
void* memset(void*, int, size_t) noexcept __asm__("cuda_host_memset");
}

namespace cuda_host {

// An address in the code that calls, for the source line of a fault.
__attribute__((noinline)) inline const void* here() { return __builtin_return_address(0); }

// A shared variable, as memory of which g++ does not know that it is the variable.
template <class T>
__attribute__((always_inline)) inline T& hidden(T& variable) {
  T* address = &variable;
  asm("" : "+r"(address));
  return *address;
}

}  // namespace cuda_host

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#include "cuda_host_intrinsics.hpp"
#include "cuda_host_math.hpp"

namespace cuda_host {

template <class T>
constexpr char kind_of() {
  if constexpr (std::is_void_v<T>) return 'v';
  else if constexpr (std::is_pointer_v<T>) return 'p';
  else if constexpr (std::is_same_v<T, bool>) return 'b';
  else if constexpr (std::is_enum_v<T>) return 'i';
  else if constexpr (std::is_integral_v<T>) return std::is_signed_v<T> ? 'i' : 'u';
  else if constexpr (std::is_floating_point_v<T>) return 'f';
  else if constexpr (std::is_same_v<T, __half>) return 'h';
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return 'g';
  else return 's';
}

template <class T>
constexpr uint32_t size_of() {
  if constexpr (std::is_void_v<T>) return 0;
  else return sizeof(T);
}

template <class T>
constexpr Param describe_param() {
  static_assert(std::is_trivially_copyable_v<T>, "a kernel parameter is passed as bytes");
  using Pointee = std::remove_cv_t<std::remove_pointer_t<T>>;
  if constexpr (std::is_pointer_v<T>) return {sizeof(T), size_of<Pointee>(), 'p', kind_of<Pointee>(), {}};
  else return {sizeof(T), 0, kind_of<T>(), 0, {}};
}

template <auto kernel>
struct Describe;

template <class... Args, void (*kernel)(Args...)>
struct Describe<kernel> {
  static constexpr Param params[sizeof...(Args) + 1] = {describe_param<std::remove_cv_t<Args>>()..., {}};
  template <size_t... I>
  static inline __attribute__((always_inline)) void pass(void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Args>*>(args[I])...);
  }
  static void call(void** args) { pass(args, std::index_sequence_for<Args...>{}); }
  static constexpr Kernel named(const char* name) { return {name, call, params, sizeof...(Args)}; }
};

}  // namespace cuda_host
