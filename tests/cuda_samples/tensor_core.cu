// Tensor-core and asynchronous-copy samples: every wrapper of intrinsics.cuh that moves data between lanes.
#include "intrinsics.cuh"

// out[16][8] = a[16][16] b[16][8] + c[16][8], one warp; fragments filled by hand from the documented layout.
template <typename T>
__global__ void mma_from_registers(const T* a, const T* b, const float* c, float* out) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  auto pair = [](T low, T high) {
    T both[2] = {low, high};
    return pb::bit_cast<unsigned>(reinterpret_cast<typename pb::Convert<T>::Pair&>(both));
  };
  unsigned fa[4], fb[2];
  for (int r = 0; r < 4; ++r) {
    const T* row = a + (g + 8 * (r & 1)) * 16 + 2 * t + 8 * (r >> 1);
    fa[r] = pair(row[0], row[1]);
  }
  for (int r = 0; r < 2; ++r) fb[r] = pair(b[(2 * t + 8 * r) * 8 + g], b[(2 * t + 8 * r + 1) * 8 + g]);
  float fc[4], d[4];
  for (int e = 0; e < 4; ++e) fc[e] = c[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)];
  pb::mma_m16n8k16<T>(d, fa, fb, fc);
  for (int e = 0; e < 4; ++e) out[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)] = d[e];
}

// The same product through shared memory: cp.async in, ldmatrix for A, ldmatrix.trans for B (stored [k][n]).
template <typename T>
__global__ void mma_from_shared(const T* a, const T* b, float* out) {
  __shared__ __align__(16) T sa[16][16 + 8];
  __shared__ __align__(16) T sb[16][8];
  const int lane = threadIdx.x;
  pb::cp_async16(&sa[lane / 2][8 * (lane % 2)], a + 8 * lane);
  if (lane < 16) pb::cp_async16(&sb[lane][0], b + 8 * lane);
  pb::cp_async_commit();
  pb::cp_async_wait<0>();
  __syncthreads();
  unsigned fa[4], fb[2];
  pb::ldmatrix_x4(fa, &sa[lane % 16][8 * (lane / 16)]);
  pb::ldmatrix_x2_trans(fb, &sb[lane % 16][0]);
  float d[4] = {};
  pb::mma_m16n8k16<T>(d, fa, fb, d);
  for (int e = 0; e < 4; ++e) out[(lane / 4 + 8 * (e >> 1)) * 8 + 2 * (lane % 4) + (e & 1)] = d[e];
}

// Rows of ldmatrix with and without .trans, as they arrive: tile [32][8], out [32 lanes][4] words.
template <bool kTrans>
__global__ void ldmatrix_tile(const unsigned short* tile, unsigned* out) {
  __shared__ __align__(16) unsigned short rows[32][8];
  for (int j = 0; j < 8; ++j) rows[threadIdx.x][j] = tile[threadIdx.x * 8 + j];
  __syncthreads();
  unsigned r[4];
  if (kTrans) pb::ldmatrix_x4_trans(r, rows[threadIdx.x]);
  else pb::ldmatrix_x4(r, rows[threadIdx.x]);
  for (int m = 0; m < 4; ++m) out[threadIdx.x * 4 + m] = r[m];
}

// Sums `tiles` tiles of 128 floats through a pipeline of kStages; the last tile may be partial. With kForget the wait is missing.
template <int kStages, bool kForget>
__global__ void pipeline(const float* in, float* out, int n) {
  __shared__ __align__(16) float stage[kStages][128];
  const int tiles = (n + 127) / 128, lane = threadIdx.x;
  auto fetch = [&](int tile) {
    const int left = n - (tile * 128 + 4 * lane);
    const int bytes = tile < tiles ? 4 * max(0, min(4, left)) : 0;
    pb::cp_async16(&stage[tile % kStages][4 * lane], bytes > 0 ? in + tile * 128 + 4 * lane : in, bytes);
    pb::cp_async_commit();
  };
  for (int tile = 0; tile < kStages - 1; ++tile) fetch(tile);
  float sum = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    if (!kForget) pb::cp_async_wait<kStages - 2>();
    __syncthreads();
    fetch(tile + kStages - 1);
    for (int i = lane; i < 128; i += 32) sum += stage[tile % kStages][i];
  }
  pb::cp_async_wait_all();
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(pb::kFullMask, sum, d);
  if (lane == 0) out[0] = sum;
}

// Vector copies, and the arithmetic wrappers: out[0..1] = exp2 and log2, bits[0] = lop3.
__global__ void scalar_wrappers(const uint4* in, uint4* copy, const float* x, float* out, unsigned* bits) {
  pb::store16(copy + threadIdx.x, pb::load16(in + threadIdx.x));
  pb::store16_streaming(copy + 32 + threadIdx.x, pb::load16_streaming(in + threadIdx.x));
  if (threadIdx.x == 0) {
    out[0] = pb::exp2_approx(x[0]);
    out[1] = pb::log2_approx(x[1]);
    out[2] = pb::exp2_approx(-pb::kInfinity);
    out[3] = pb::to_float(pb::from_float<__half>(x[2]));
    out[4] = pb::to_float(pb::from_float<__nv_bfloat16>(x[2]));
    bits[0] = pb::lop3<0xEA>(bits[1], bits[2], bits[3]);
  }
}
