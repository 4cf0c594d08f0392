// Kernels for the memory trace: each correct as it stands, and with one thing wrong where `fault` says so.
#include "intrinsics.cuh"

enum Fault { kNone, kNoBarrier, kTwoBlocks, kNoWait, kNoAtomic, kSharedNotWritten, kNoSyncwarp, kOtherBlocksResult,
             kAtomicAndPlain, kNoSecondBarrier };

// Sums 64 numbers per block by a tree in shared memory, and adds the sums up in total[0].
__global__ void tree_sum(const float* x, float* sums, float* total, int fault) {
  __shared__ float tile[64];
  const int t = threadIdx.x;
  if (fault != kSharedNotWritten || t != 9) tile[t] = x[64 * blockIdx.x + t];
  if (fault != kNoBarrier) __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (t < half) tile[t] += tile[t + half];
    __syncthreads();
  }
  if (t != 0) return;
  sums[fault == kTwoBlocks ? blockIdx.x / 2 : blockIdx.x] = tile[0];
  if (fault == kNoAtomic) total[0] += tile[0];
  else if (fault == kAtomicAndPlain && blockIdx.x == 1) total[0] = tile[0];
  else atomicAdd(&total[0], tile[0]);
}

// A launch that fills scratch memory, all but element `skip`, and one that reads it.
__global__ void fill(float* scratch, int n, int skip) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && i != skip) scratch[i] = i;
}
__global__ void reverse(const float* scratch, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[n - 1 - i] = scratch[i];
}

// Rows of 32 threads x 4 floats to shared memory by cp.async, two stages, and their neighbour's numbers back out.
__global__ void staged(const float* x, float* out, int rows, int fault) {
  __shared__ __align__(16) float stage[2][128];
  const int t = threadIdx.x;
  const auto fetch = [&](int row) {
    if (row < rows) pb::cp_async16(&stage[row % 2][4 * t], x + 128 * row + 4 * t);
    pb::cp_async_commit();
  };
  fetch(0);
  for (int row = 0; row < rows; ++row) {
    fetch(row + 1);
    if (fault != kNoWait) pb::cp_async_wait<1>();
    __syncthreads();
    for (int i = 0; i < 4; ++i) out[128 * row + t + 32 * i] = stage[row % 2][t + 32 * i];
    if (fault != kNoSecondBarrier) __syncthreads();
  }
}

// Lanes of one warp exchange numbers through shared memory, in two halves with masks of their own.
__global__ void exchange(int* out, int fault) {
  __shared__ int box[32];
  const int t = threadIdx.x;
  const unsigned half = t < 16 ? 0x0000FFFFu : 0xFFFF0000u;
  box[t] = t;
  if (fault == kNoSyncwarp) __shfl_sync(half, t, 0);
  else __syncwarp(half);
  const int other = box[t ^ 1];
  __syncwarp();
  box[t] = other;
  __syncwarp();
  out[t] = box[31 - t];
}

// Block b passes on what block b - 1 wrote, which nothing orders.
__global__ void chain(int* values, int fault) {
  const int b = blockIdx.x;
  values[b + 1] = fault == kOtherBlocksResult ? values[b] + 1 : b + 1;
}

// Threads of a block hand numbers over in global memory.
__global__ void shift(int* out, int fault) {
  const int t = threadIdx.x, first = 64 * blockIdx.x;
  out[first + t] = t;
  if (fault != kNoBarrier) __syncthreads();
  const int next = out[first + (t + 1) % 64];
  __syncthreads();
  out[first + t] = next;
}

// Accesses whose traffic is known: rows of 32 floats, `stride` floats apart, read by a warp, one lane a float; row sums.
__global__ void row_sums(const float* x, float* sums, int rows, int stride) {
  for (int row = threadIdx.x / 32; row < rows; row += blockDim.x / 32) {
    float sum = x[row * stride + threadIdx.x % 32];
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(pb::kFullMask, sum, lanes);
    if (threadIdx.x % 32 == 0) sums[row] = sum;
  }
}

// Each lane takes every `step`-th float; all read table[0]; lane 0 counts.
__global__ void strided(const float* x, const float* table, float* out, unsigned* count, int step) {
  const int t = threadIdx.x;
  out[t] = x[step * t] * table[0];
  if (t % 32 == 0) atomicAdd(count, 1u);
}

// Shared memory at constant indices only, and a struct.
struct Pair {
  int first, second;
};
__global__ void constants(int* out, int fault) {
  __shared__ int two[2];
  __shared__ Pair pair;
  if (threadIdx.x == 33) two[0] = 1, two[1] = 2, pair.second = 3;
  if (fault != kNoBarrier) __syncthreads();
  out[threadIdx.x] = two[0] + two[1] + pair.second;
  if (fault == kSharedNotWritten) out[threadIdx.x] += pair.first;
}

// Lanes add up their numbers by atomicCAS; only behind the barrier is the sum read plainly.
__global__ void add_by_cas(unsigned* sums, unsigned* seen) {
  __shared__ unsigned total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (unsigned old = atomicAdd(&total, 0u), assumed = ~old; old != assumed;) {
    assumed = old;
    old = atomicCAS(&total, assumed, assumed + threadIdx.x);
  }
  __syncthreads();
  seen[threadIdx.x] = total;
  atomicExch(&sums[0], total);  // an atomic store: what was there does not matter
}

// Element i of a view is written, or read into another view.
__global__ void touch(float* view, float* other, long long i, int store) {
  if (store) view[i] = 1;
  else other[0] = view[i];
}

// Waits for what no thread of a launch here will do.
__global__ void spin(const volatile int* flag) {
  while (flag[threadIdx.x] == 0) {
  }
}

// The store to `x` follows a load of the same address.
__global__ void increment(int* x) { x[threadIdx.x] += 1; }

// Thread by thread and step by step what `ops` [steps, blocks, threads] says: 16 * place + Operation.
enum Operation { kNothing, kLoadShared, kStoreShared, kAtomicShared, kLoadGlobal, kStoreGlobal, kAtomicGlobal, kBarrier,
                 kSyncWarp, kSyncHalf };
__global__ void script(const int* ops, int steps, int* memory, int* out) {
  __shared__ int box[4];
  const int t = threadIdx.x;
  int sum = 0;
  for (int i = 0; i < steps; ++i) {
    const int op = ops[(i * gridDim.x + blockIdx.x) * blockDim.x + t], place = op / 16;
    switch (op % 16) {
      case kLoadShared: sum += box[place]; break;
      case kStoreShared: box[place] = i; break;
      case kAtomicShared: atomicAdd(&box[place], 1); break;
      case kLoadGlobal: sum += memory[place]; break;
      case kStoreGlobal: memory[place] = i; break;
      case kAtomicGlobal: atomicAdd(&memory[place], 1); break;
      case kBarrier: __syncthreads(); break;
      case kSyncWarp: __syncwarp(); break;
      case kSyncHalf: __syncwarp(t % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u); break;
    }
  }
  out[blockIdx.x * blockDim.x + t] = sum;
}
