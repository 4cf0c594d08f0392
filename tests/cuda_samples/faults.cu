// Kernels that each do one thing wrong. `i` says where.
#include "intrinsics.cuh"

enum Fault {
  kLoad, kStore, kAtomic, kSharedLoad, kSharedStore, kDynamicLoad, kDynamicStore, kMisalignedLoad, kMisalignedStore,
  kLocalArray, kMemcpyFrom, kMemcpyTo, kDivision, kOverflow, kAssert, kTrap, kTable, kDeviceStore, kConstantStore,
  kEndless, kRecursion, kVectorLoad, kNullStore, kWrapperShared, kCopyAsync, kMatrixRow, kShift, kToInteger,
  kLaunderedLoad, kLaunderedStore, kUnsignedIndex, kCachedLoad,
};

__device__ float device_values[4];
__device__ const float constant_values[4] = {1, 2, 3, 4};

__device__ int recurse(int depth, volatile int* out) {
  volatile int frame[512];
  frame[depth % 512] = depth;
  return depth == 0 ? frame[0] : recurse(depth - 1, out) + frame[depth % 512];
}

__global__ void faulty(float* data, float* const* table, long long i, int count, int kind) {
  __shared__ float before[32];
  __shared__ __align__(16) float tile[64];
  extern __shared__ float dynamic[];
  const int t = threadIdx.x;
  before[t % 32] = tile[t % 64] = 1;
  dynamic[t % 32] = 1;
  if (kind == kMatrixRow) {
    unsigned r[4];
    pb::ldmatrix_x4(r, &tile[t == 5 ? i : 4 * (t % 16)]);
    data[t] = r[0];
  }
  if (t != 5) return;
  float sum = 0;
  if (kind == kLoad) sum = data[i];
  if (kind == kStore) data[i] = 1;
  if (kind == kAtomic) atomicAdd(data + i, 1.0f);
  if (kind == kSharedLoad) sum = (&tile[0])[i];
  if (kind == kSharedStore) (&tile[0])[i] = 1;
  if (kind == kDynamicLoad) sum = dynamic[i];
  if (kind == kDynamicStore) dynamic[i] = 1;
  if (kind == kMisalignedLoad) sum = reinterpret_cast<const float4*>(data + i)->x;
  if (kind == kMisalignedStore) *reinterpret_cast<uint4*>(data + i) = make_uint4(1, 2, 3, 4);
  if (kind == kVectorLoad) sum = reinterpret_cast<const float4*>(data)[i].x;
  if (kind == kLocalArray) {
    float local[4] = {1, 2, 3, 4};
    sum = local[i];
    local[i] = data[0];
    sum += local[count % 4];
  }
  if (kind == kLaunderedLoad || kind == kLaunderedStore) {
    float local[4] = {1, 2, 3, data[0]};
    float* p = local;
    p += i;
    if (kind == kLaunderedLoad) sum = *p;
    if (kind == kLaunderedStore) *p = data[0], sum = local[count % 4];
  }
  if (kind == kUnsignedIndex) {
    float local[4] = {1, 2, 3, data[0]};
    sum = local[unsigned(t) - 5 + unsigned(i)];
  }
  if (kind == kCachedLoad) sum = __ldg(reinterpret_cast<const float4*>(data + i)).x;
  if (kind == kShift) sum = 1 << i;
  if (kind == kToInteger) sum = int(1024.0f * i);
  if (kind == kMemcpyFrom) memcpy(tile, data + i, count);
  if (kind == kMemcpyTo) memcpy(data + i, tile, count);
  if (kind == kDivision) sum = 7 / int(i);
  if (kind == kOverflow) sum = count + int(i);
  if (kind == kAssert) assert(i == 0);
  if (kind == kTrap) __trap();
  if (kind == kTable) sum = table[1][i];
  if (kind == kDeviceStore) (&device_values[0])[i] = 1;
  if (kind == kConstantStore) const_cast<float*>(&constant_values[0])[i] = 1;
  if (kind == kEndless) while (true) if (count == 12345) break;
  if (kind == kRecursion) sum = recurse(count, &count);
  if (kind == kNullStore) table = nullptr, *const_cast<float**>(table) = data;
  if (kind == kWrapperShared) sum = pb::load16(tile).x;
  if (kind == kCopyAsync) pb::cp_async16(tile, data + i, 16);
  data[0] = sum;
}

// A local variable of one thread read by another.
__global__ void foreign_stack(float* data) {
  __shared__ float* leaked;
  float mine[2] = {data[0], data[1]};
  if (threadIdx.x == 0) leaked = mine;
  __syncthreads();
  data[threadIdx.x] = leaked[threadIdx.x % 2] + mine[1];
  __syncthreads();
}

enum Divergence { kBranches, kOtherBarrier, kMissingLane, kOutsideMask, kExitAndBranches, kEarlyExit, kOnlyHalf, kOneLine,
                  kExitedSource, kUnnamedSource, kNoFault };

__global__ void divergent(int* out, int kind) {
  const int t = threadIdx.x;
  if (kind == kEarlyExit) {
    if (t == 40) return;
    __syncthreads();
  }
  if (kind == kExitAndBranches && t == 40) return;
  if (kind == kBranches || kind == kExitAndBranches) {
    if (t < 32) {
      __syncthreads();
    } else {
      out[t] = 1;
      __syncthreads();
    }
  }
  if (kind == kOnlyHalf && t < 32) __syncthreads();
  if (kind == kMissingLane) {
    if (t != 3) out[t] = __shfl_sync(pb::kFullMask, t, 0);
    __syncthreads();
  }
  if (kind == kOutsideMask) out[t] = __shfl_sync(0x0000FFFF, t, 0);
  if (kind == kOneLine) { if (t < 32) __syncthreads(); else __syncthreads(); }
  if (kind == kExitedSource) {
    if (t == 3) return;
    out[t] = __shfl_sync(pb::kFullMask, t, 3);
  }
  if (kind == kUnnamedSource && t < 16) out[t] = __shfl_down_sync(0x0000FFFF, t, 8);
  if (kind == kOtherBarrier) t < 32 ? void(__syncthreads_or(1)) : __syncthreads();
  if (kind == kNoFault) __syncthreads();
  out[t] = t;
}
