// What CUDA C++ has no function for, or NVRTC no name: vector loads with a cache hint, cp.async, ldmatrix, mma, and
// conversions that are one name for every 16-bit type.
//
// The only file that branches between a GPU and a CPU: on a GPU each wrapper is the PTX beside it, on a CPU the same data
// movement lane by lane, checked before it happens. Everything is in namespace `pb`.
//
// Compiled by NVRTC and nvcc for sm_80 and newer, and by kernels/cuda_host.py.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PB_ON_GPU 1
#define PB_AT_LINE
#else
#define PB_ON_GPU 0
#define PB_AT_LINE , int line = __builtin_LINE()  // of the call, for messages about lanes that never meet
#endif

namespace pb {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xFFFFFFFFu;
constexpr float kLog2e = 1.44269504088896340736f;  // log2(e): exp(x) = exp2(x * kLog2e)
constexpr float kLn2 = 0.69314718055994530942f;    // ln(2): log(x) = log2(x) * kLn2

// INFINITY and NAN need math.h, which NVRTC does not have.
constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000u);
constexpr float kLargestBfloat16 = __builtin_bit_cast(float, 0x7F7F0000u);
constexpr float kNan = __builtin_bit_cast(float, 0x7FFFFFFFu);

// ---- Conversions: exact to float, round to nearest even from it -----------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float2 to_float2(float2 x) { return x; }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }

template <typename T>
struct Convert;
template <>
struct Convert<float> {
  using Pair = float2;
  static __device__ __forceinline__ float from(float x) { return x; }
  static __device__ __forceinline__ float2 from(float x, float y) { return make_float2(x, y); }
};
template <>
struct Convert<__half> {
  using Pair = __half2;
  static __device__ __forceinline__ __half from(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ __half2 from(float x, float y) { return __floats2half2_rn(x, y); }
};
template <>
struct Convert<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static __device__ __forceinline__ __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ __nv_bfloat162 from(float x, float y) { return __floats2bfloat162_rn(x, y); }
};

// from_float<__half>(x): x rounded once. from_floats<__half>(x, y): the pair type, x in the low half.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return Convert<T>::from(x);
}
template <typename T>
__device__ __forceinline__ typename Convert<T>::Pair from_floats(float x, float y) {
  return Convert<T>::from(x, y);
}

// The same bits as another type of the same size: a pair of halves as the register of an mma fragment.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  union Bits {
    From from;
    To to;
    __device__ Bits() {}
  } bits;
  bits.from = from;
  return bits.to;
}

// ---- Global memory, 16 bytes at a time ------------------------------------------------------------------------------

// ld.global.v4.u32: 16 bytes at a multiple of 16, through all caches.
__device__ __forceinline__ uint4 load16(const void* global) {
#if PB_ON_GPU
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(global))
               : "memory");
  return v;
#else
  cuda_host::check_pointer(global, 16, 16, cuda_host::kLoad, cuda_host::kGlobal, cuda_host::here());
  return *static_cast<const uint4*>(global);
#endif
}

// ld.global.nc.L1::no_allocate.v4.u32: 16 bytes read once, and written by nobody during the launch (K and V blocks).
__device__ __forceinline__ uint4 load16_streaming(const void* global) {
#if PB_ON_GPU
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(__cvta_generic_to_global(global)));
  return v;
#else
  return load16(global);
#endif
}

// st.global.v4.u32: 16 bytes to a multiple of 16.
__device__ __forceinline__ void store16(void* global, uint4 v) {
#if PB_ON_GPU
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(global)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  cuda_host::check_pointer(global, 16, 16, cuda_host::kStore, cuda_host::kGlobal, cuda_host::here());
  *static_cast<uint4*>(global) = v;
#endif
}

// st.global.L1::no_allocate.v4.u32: 16 bytes that this kernel does not read again.
__device__ __forceinline__ void store16_streaming(void* global, uint4 v) {
#if PB_ON_GPU
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(global)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  store16(global, v);
#endif
}

// ---- cp.async: global to shared without registers -------------------------------------------------------------------

#if PB_ON_GPU
__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
#endif

// cp.async.cg.shared.global [shared], [global], 16, bytes: copies `bytes` (0 to 16) and fills the rest of the 16 with
// zeros. Both pointers are multiples of 16; with bytes = 0 nothing is read. The data is there for this thread after
// cp_async_wait, for others after a barrier behind it. On a CPU it lands at the wait, not before.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int bytes = 16) {
#if PB_ON_GPU
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
#else
  cuda_host::check_space(shared, 16, 16, cuda_host::kStore, cuda_host::kStaticShared, cuda_host::here());
  cuda_host::check_space(global, bytes, 16, cuda_host::kLoad, cuda_host::kGlobal, cuda_host::here());
  cuda_host::cp_async(shared, global, bytes);
#endif
}

// cp.async.commit_group: the copies since the last commit become one group.
__device__ __forceinline__ void cp_async_commit() {
#if PB_ON_GPU
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  cuda_host::cp_async_commit();
#endif
}

// cp.async.wait_group: waits until at most the newest `kGroups` groups of this thread are in flight.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
#if PB_ON_GPU
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#else
  cuda_host::cp_async_wait(kGroups);
#endif
}

// cp.async.wait_all: waits for every copy of this thread, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
#if PB_ON_GPU
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  cuda_host::cp_async_wait(-1);
#endif
}

// ---- ldmatrix: 8x8 tiles of 16-bit numbers from shared memory to mma fragments ---------------------------------------
//
// Lane 8 m + r passes the address of row r (16 bytes, a multiple of 16) of matrix m; lanes beyond 8 * count are ignored, and
// may pass any address that is theirs to pass. Register m of lane l then holds elements 2 (l % 4) and 2 (l % 4) + 1 of row
// l / 4 of matrix m, the first in the low half; with _trans, of column l / 4. All 32 lanes take part.

#if !PB_ON_GPU
inline void ldmatrix(unsigned* r, const void* row, int count, bool trans, const void* pc, int line) {
  if (static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32 < 8 * count)
    cuda_host::check_space(row, 16, 16, cuda_host::kLoad, cuda_host::kStaticShared, pc);
  cuda_host::Ldmatrix payload{r, row, count, trans};
  cuda_host::collective(cuda_host::kLdmatrix, kFullMask, &payload, line);
}
#endif

// ldmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* shared_row PB_AT_LINE) {
#if PB_ON_GPU
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
#else
  ldmatrix(r, shared_row, 4, false, cuda_host::here(), line);
#endif
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared_row PB_AT_LINE) {
#if PB_ON_GPU
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
#else
  ldmatrix(r, shared_row, 4, true, cuda_host::here(), line);
#endif
}

// ldmatrix.sync.aligned.m8n8.x2.shared.b16: lanes 0-15 pass the rows.
__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* shared_row PB_AT_LINE) {
#if PB_ON_GPU
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
#else
  ldmatrix(r, shared_row, 2, false, cuda_host::here(), line);
#endif
}

// ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16: lanes 0-15 pass the rows.
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* shared_row PB_AT_LINE) {
#if PB_ON_GPU
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
#else
  ldmatrix(r, shared_row, 2, true, cuda_host::here(), line);
#endif
}

// ---- mma: D[16][8] = A[16][16] B[16][8] + C[16][8] on tensor cores ---------------------------------------------------
//
// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32 with T = f16 or bf16, products exact, sums in float32. With g = lane / 4 and
// t = lane % 4, the low half of a register first:
//   a[0] A[g][2t], A[g][2t+1]      a[1] A[g+8][2t], [2t+1]    a[2] A[g][2t+8], [2t+9]    a[3] A[g+8][2t+8], [2t+9]
//   b[0] B[2t][g], B[2t+1][g]      b[1] B[2t+8][g], B[2t+9][g]
//   c[0] C[g][2t]   c[1] C[g][2t+1]   c[2] C[g+8][2t]   c[3] C[g+8][2t+1]     (d alike; d may be c)
// A row-major tile in shared memory comes with ldmatrix_x4 (lane l passes row l % 16, columns 8 (l / 16) on); B from its
// transpose [n][k] with ldmatrix, from [k][n] with ldmatrix _trans. All 32 lanes take part.

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                             const float (&c)[4] PB_AT_LINE);

#if PB_ON_GPU
#define PB_MMA(T, NAME)                                                                                        \
  template <>                                                                                                  \
  __device__ __forceinline__ void mma_m16n8k16<T>(float(&d)[4], const unsigned(&a)[4], const unsigned(&b)[2],  \
                                                  const float(&c)[4]) {                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                        \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                     \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),     \
                   "f"(c[2]), "f"(c[3]));                                                                      \
  }
#else
#define PB_MMA(T, NAME)                                                                                        \
  template <>                                                                                                  \
  inline void mma_m16n8k16<T>(float(&d)[4], const unsigned(&a)[4], const unsigned(&b)[2], const float(&c)[4],  \
                              int line) {                                                                      \
    cuda_host::Mma payload{d, a, b, c, NAME[0] == 'f'};                                                        \
    cuda_host::collective(cuda_host::kMma, kFullMask, &payload, line);                                         \
  }
#endif
PB_MMA(__half, "f16")
PB_MMA(__nv_bfloat16, "bf16")
#undef PB_MMA

// ---- Arithmetic ------------------------------------------------------------------------------------------------------

// ex2.approx.ftz.f32: 2^x within 2 ulp, subnormal results flushed to 0; exp2_approx(-inf) = 0.
__device__ __forceinline__ float exp2_approx(float x) {
#if PB_ON_GPU
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// lg2.approx.ftz.f32: log2(x).
__device__ __forceinline__ float log2_approx(float x) {
#if PB_ON_GPU
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

// lop3.b32: any bitwise function of three words; kTable is its value on (0xF0, 0xCC, 0xAA): (a & b) | c is 0xEA.
template <int kTable>
__device__ __forceinline__ unsigned lop3(unsigned a, unsigned b, unsigned c) {
#if PB_ON_GPU
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return d;
#else
  unsigned d = 0;
  for (int i = 0; i < 8; ++i)
    if (kTable >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return d;
#endif
}

}  // namespace pb
