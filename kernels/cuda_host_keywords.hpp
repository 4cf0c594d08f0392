// Words of CUDA C++ that the C++ library's own headers would stumble over: included after them, before the module.
#pragma once

#define __noinline__ __attribute__((noinline))  // the library writes __attribute__((__noinline__))
#define __builtin_assume(condition) ((condition) ? void(0) : __builtin_unreachable())
#define __assume(condition) __builtin_assume(condition)

// A kernel has no heap here: a call of these that is left after optimisation does not compile.
#define CUDA_HOST_NO_HEAP __attribute__((error("device-side malloc and new are not supported on the host")))
extern "C" {
CUDA_HOST_NO_HEAP void* malloc(size_t) noexcept;
CUDA_HOST_NO_HEAP void* calloc(size_t, size_t) noexcept;
CUDA_HOST_NO_HEAP void* realloc(void*, size_t) noexcept;
}
CUDA_HOST_NO_HEAP void* operator new(std::size_t);
CUDA_HOST_NO_HEAP void* operator new[](std::size_t);
#undef CUDA_HOST_NO_HEAP
