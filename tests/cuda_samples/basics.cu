// Ordinary kernels, one for each thing that the host run supplies.
#include "intrinsics.cuh"

extern "C" __global__ void vector_add(const float* x, const float* y, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}

// out[b] = sum of row b of in[gridDim.x][n]; static shared memory in a template, shuffles, a barrier.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) row_sums(const T* in, float* out, long long row_stride, int n) {
  __shared__ float partial[kThreads / 32];
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) sum += pb::to_float(in[blockIdx.x * row_stride + i]);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(pb::kFullMask, sum, d);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int w = 0; w < kThreads / 32; ++w) total += partial[w];
    out[blockIdx.x] = total;
  }
}

// Reverses each block's part of in; dynamic shared memory.
template <typename T>
__global__ void reverse_blocks(const T* in, T* out) {
  alignas(16) extern __shared__ unsigned char memory[];
  T* tile = reinterpret_cast<T*>(memory);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = in[i];
  __syncthreads();
  out[i] = tile[blockDim.x - 1 - threadIdx.x];
}

// The same without its barrier: right when the threads happen to run in a favourable order.
__global__ void shift_racing(const int* in, int* out) {
  __shared__ int tile[64];
  tile[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = threadIdx.x == 0 ? 0 : tile[threadIdx.x - 1];
}

// out[0..2] = coordinates of the last thread, out[3..] = all extents.
__global__ void coordinates(int* out, int* visits) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  visits[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + blockIdx.z * 100 + threadIdx.z * 10;
  out[0] = gridDim.x, out[1] = gridDim.y, out[2] = gridDim.z, out[3] = warpSize;
}

// Counts and bounds of a histogram of bytes; the last block to finish sums it up (threadfence pattern).
__global__ void histogram(const unsigned char* in, int n, unsigned* bins, float* sums, int* extremes, unsigned* ticket, unsigned* total) {
  __shared__ bool last;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&bins[in[i] % 8], 1u);
    atomicAdd(&sums[in[i] % 8], float(in[i]));
    atomicMax(&extremes[0], int(in[i]));
    atomicMin(&extremes[1], int(in[i]));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x < 8) atomicAdd(total, bins[threadIdx.x]);
}

// A spin lock per block: every thread adds 1 under it.
__global__ void locked_count(int* lock, int* count) {
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  const int seen = *count;
  __nanosleep(20);
  *count = seen + 1;
  atomicExch(lock, 0);
}

// Each table entry is an array of its own; a null entry is skipped.
template <typename T>
__global__ void scale_many(T* const* arrays, const int* lengths, int num_arrays, T factor) {
  const int a = blockIdx.x;
  if (a >= num_arrays || arrays[a] == nullptr) return;
  for (int i = threadIdx.x; i < lengths[a]; i += blockDim.x) arrays[a][i] *= factor;
}

struct Affine {
  double scale;
  int offset[3];
  bool negate;
};

__global__ void affine(const int* in, int* out, Affine f, int n) {
  const int i = threadIdx.x;
  if (i < n) out[i] = int(in[i] * f.scale) * (f.negate ? -1 : 1) + f.offset[i % 3];
}

// One warp, lanes 20-31 leave early: the collectives of the rest name all 32 lanes.
__global__ void partial_warp(unsigned* out) {
  const int lane = threadIdx.x;
  if (lane >= 20) return;
  out[lane * 8 + 0] = __ballot_sync(pb::kFullMask, lane % 3 == 0);
  out[lane * 8 + 1] = __any_sync(pb::kFullMask, lane == 19) + 2 * __all_sync(pb::kFullMask, lane < 20);
  out[lane * 8 + 2] = __shfl_xor_sync(pb::kFullMask, lane, 1);
  out[lane * 8 + 3] = __shfl_sync(pb::kFullMask, lane, lane + 5, 4);
  out[lane * 8 + 4] = __shfl_up_sync(pb::kFullMask, lane, 2, 8);
  out[lane * 8 + 5] = __activemask();
  out[lane * 8 + 6] = lane % 2 ? __reduce_add_sync(0xAAAAAAAA, unsigned(lane)) : __activemask();
  out[lane * 8 + 7] = __match_any_sync(pb::kFullMask, lane / 7);
}

// Shuffles of every type keep all bits.
__global__ void shuffle_types(const double* d, const long long* l, const __half* h, const __nv_bfloat162* b, double* out) {
  const int i = threadIdx.x;
  out[i] = __shfl_xor_sync(pb::kFullMask, d[i], 3) + double(__shfl_xor_sync(pb::kFullMask, l[i], 3)) +
           pb::to_float(__shfl_xor_sync(pb::kFullMask, h[i], 3)) +
           pb::to_float2(__shfl_xor_sync(pb::kFullMask, b[i], 3)).y;
}

__global__ void block_votes(int* out) {
  const int i = threadIdx.x;
  out[i * 3] = __syncthreads_count(i % 5 == 0);
  out[i * 3 + 1] = __syncthreads_and(i < 70);
  out[i * 3 + 2] = __syncthreads_or(i == 69);
}

__constant__ float table[4] = {0.5f, -1.0f, 2.0f, pb::kInfinity};
__device__ int launches;

// What shared memory holds before anybody wrote to it, constants, and a __device__ variable that outlives the launch.
__global__ void module_state(unsigned* shared_bits, float* constants, int* count) {
  __shared__ unsigned fresh[32];
  extern __shared__ unsigned dynamic[];
  if (threadIdx.x == 0 && blockIdx.x == 0) *count = ++launches;
  shared_bits[blockIdx.x * 32 + threadIdx.x] = fresh[threadIdx.x] & dynamic[threadIdx.x];
  fresh[threadIdx.x] = dynamic[threadIdx.x] = 0;
  constants[threadIdx.x % 4] = table[threadIdx.x % 4];
}

// Integer and conversion intrinsics; each out[i] against NumPy in the test.
__global__ void intrinsics(unsigned x, unsigned y, float f, long long* out) {
  out[0] = __popc(x), out[1] = __clz(x), out[2] = __ffs(x), out[3] = __brev(x);
  out[4] = __byte_perm(x, y, 0x7610), out[5] = __funnelshift_r(x, y, 8), out[6] = __umulhi(x, y);
  out[7] = __float2int_rn(f), out[8] = __float2int_rz(1e20f), out[9] = __float_as_uint(f), out[10] = min(3, 5u);
  out[11] = __dp4a(int(x), int(y), 7), out[12] = __half_as_ushort(__hfma(__float2half(f), __float2half(3.0f), __float2half(1e-3f)));
}

// Conversions of numbers that an integer type has no room for, and shifts by 32: PTX saturates.
__global__ void saturating(float nan, float big, long long* out) {
  out[0] = __float2int_rn(nan), out[1] = __float2int_rz(big), out[2] = __float2int_rd(-big), out[3] = __float2uint_ru(-big);
  out[4] = __float2ll_rn(nan), out[5] = __float2ll_rz(big), out[6] = __double2int_rn(nan), out[7] = __double2ll_rd(-2.5);
  out[8] = __float2int_ru(-2.5f), out[9] = __float2int_rd(-2.5f), out[10] = __float2uint_rz(nan);
  out[11] = __float2ull_rz(big), out[12] = int(__float2half(nan)), out[13] = __half2int_rn(__float2half(2.5f));
  out[14] = __funnelshift_lc(1u, 2u, 40), out[15] = __funnelshift_rc(1u, 2u, 40), out[16] = __funnelshift_lc(1u, 2u, 31);
}

// Words that nvcc and NVRTC know.
__device__ __noinline__ int twice(int x) { return 2 * x; }
__device__ __forceinline__ int thrice(const int* __restrict__ x) { return 3 * *x; }
__device__ __inline_hint__ int negated(int x) { return -x; }
__global__ void __maxnreg__(64) keywords(const __grid_constant__ int n, int* __restrict__ out) {
  __builtin_assume(n > 0);
#pragma unroll
  for (int i = 0; i < 1; ++i) out[threadIdx.x] = twice(n) + thrice(&n) + negated(n);
}
