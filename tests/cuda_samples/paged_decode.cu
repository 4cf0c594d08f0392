// A paged decode on tensor cores, as large kernels are written: dynamic shared memory carved by hand, cp.async, ldmatrix,
// mma, an online softmax over shuffles and a merge of the warps' partial results.
//
// One block per (sequence, KV head), kWarps warps; warp w takes key tiles w, w + kWarps, ... of 16 keys. The query heads of
// the group are the rows of a 16-row tile. Logits and sums are in base 2.
#include "intrinsics.cuh"

constexpr int kWarps = 4, kTile = 16;

struct DecodeShape {
  int num_kv_heads, group, block_size, max_blocks;
  float scale_log2;
};

template <typename T, int D>
__global__ void __launch_bounds__(kWarps * 32)
paged_decode(const T* __restrict__ query, const T* __restrict__ key_cache, const T* __restrict__ value_cache,
             const int* __restrict__ block_table, const int* __restrict__ seq_lens, T* out, float* lse, DecodeShape shape) {
  constexpr int kRow = D + 8;  // 16 bytes of padding: the rows of a tile start in different banks
  extern __shared__ __align__(16) unsigned char memory[];
  T* const q_tile = reinterpret_cast<T*>(memory);                                   // [16][kRow]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  T* const k_tile = q_tile + 16 * kRow * (1 + 2 * warp);                            // [16][kRow], this warp's
  T* const v_tile = k_tile + 16 * kRow;
  __shared__ float row_max[kWarps][16], row_sum[kWarps][16];

  const int seq = blockIdx.x, kv_head = blockIdx.y, length = seq_lens[seq];
  const int num_heads = shape.num_kv_heads * shape.group;
  for (int i = threadIdx.x; i < 16 * D / 8; i += blockDim.x) {
    const int row = i / (D / 8), column = i % (D / 8) * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < shape.group) v = pb::load16(query + (size_t(seq) * num_heads + kv_head * shape.group + row) * D + column);
    *reinterpret_cast<uint4*>(q_tile + row * kRow + column) = v;
  }
  __syncthreads();

  float acc[D / 8][4] = {}, m[2] = {-pb::kInfinity, -pb::kInfinity}, l[2] = {};
  for (int start = warp * kTile; start < length; start += kWarps * kTile) {
    __syncwarp();  // the previous tile has been read
    for (int i = lane; i < kTile * D / 8; i += 32) {
      const int row = i / (D / 8), column = i % (D / 8) * 8, position = start + row;
      const bool valid = position < length;
      const int block = valid ? block_table[seq * shape.max_blocks + position / shape.block_size] : 0;
      const size_t at = ((size_t(block) * shape.block_size + position % shape.block_size) * shape.num_kv_heads + kv_head) * D + column;
      pb::cp_async16(k_tile + row * kRow + column, key_cache + (valid ? at : 0), valid ? 16 : 0);
      pb::cp_async16(v_tile + row * kRow + column, value_cache + (valid ? at : 0), valid ? 16 : 0);
    }
    pb::cp_async_commit();
    pb::cp_async_wait<0>();
    __syncwarp();

    float s[2][4] = {};
    for (int d = 0; d < D; d += 16) {
      unsigned q[4], k[4];
      pb::ldmatrix_x4(q, q_tile + lane % 16 * kRow + d + 8 * (lane / 16));
      pb::ldmatrix_x4(k, k_tile + (lane % 8 + 8 * (lane / 16)) * kRow + d + 8 * (lane / 8 % 2));
      pb::mma_m16n8k16<T>(s[0], q, {k[0], k[1]}, s[0]);
      pb::mma_m16n8k16<T>(s[1], q, {k[2], k[3]}, s[1]);
    }
    float peak[2] = {m[0], m[1]};
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < 4; ++e) {
        const int position = start + 8 * n + 2 * t + (e & 1);
        s[n][e] = position < length ? s[n][e] * shape.scale_log2 : -pb::kInfinity;
        peak[e / 2] = fmaxf(peak[e / 2], s[n][e]);
      }
    for (int half = 0; half < 2; ++half) {
      for (int x = 1; x <= 2; x *= 2) peak[half] = fmaxf(peak[half], __shfl_xor_sync(pb::kFullMask, peak[half], x));
      const float shrink = pb::exp2_approx(m[half] - peak[half]);
      m[half] = peak[half];
      l[half] *= shrink;
      for (int j = 0; j < D / 8; ++j) acc[j][2 * half] *= shrink, acc[j][2 * half + 1] *= shrink;
    }
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < 4; ++e) {
        s[n][e] = pb::exp2_approx(s[n][e] - m[e / 2]);
        l[e / 2] += s[n][e];
      }
    const unsigned p[4] = {pb::bit_cast<unsigned>(pb::from_floats<T>(s[0][0], s[0][1])),
                           pb::bit_cast<unsigned>(pb::from_floats<T>(s[0][2], s[0][3])),
                           pb::bit_cast<unsigned>(pb::from_floats<T>(s[1][0], s[1][1])),
                           pb::bit_cast<unsigned>(pb::from_floats<T>(s[1][2], s[1][3]))};
    for (int j = 0; j < D / 16; ++j) {
      unsigned v[4];
      pb::ldmatrix_x4_trans(v, v_tile + lane % 16 * kRow + 16 * j + 8 * (lane / 16));
      pb::mma_m16n8k16<T>(acc[2 * j], p, {v[0], v[1]}, acc[2 * j]);
      pb::mma_m16n8k16<T>(acc[2 * j + 1], p, {v[2], v[3]}, acc[2 * j + 1]);
    }
  }

  for (int half = 0; half < 2; ++half) {
    for (int x = 1; x <= 2; x *= 2) l[half] += __shfl_xor_sync(pb::kFullMask, l[half], x);
    if (t == 0) row_max[warp][g + 8 * half] = m[half], row_sum[warp][g + 8 * half] = l[half];
  }
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(memory);  // [16][D], the tiles are no longer needed
  for (int i = threadIdx.x; i < 16 * D; i += blockDim.x) sums[i] = 0;
  __syncthreads();
  for (int half = 0; half < 2; ++half) {
    const int row = g + 8 * half;
    float peak = -pb::kInfinity, total = 0;
    for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, row_max[w][row]);
    for (int w = 0; w < kWarps; ++w) total += row_sum[w][row] * pb::exp2_approx(row_max[w][row] - peak);
    const float weight = peak == -pb::kInfinity ? 0.0f : pb::exp2_approx(m[half] - peak) / total;
    for (int j = 0; j < D / 8; ++j)
      for (int e = 0; e < 2; ++e) atomicAdd(&sums[row * D + 8 * j + 2 * t + e], acc[j][2 * half + e] * weight);
    if (warp == 0 && t == 0 && row < shape.group)
      lse[seq * num_heads + kv_head * shape.group + row] = (peak + log2f(total)) * pb::kLn2;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < shape.group * D; i += blockDim.x)
    out[(size_t(seq) * num_heads + kv_head * shape.group) * D + i] = pb::from_float<T>(sums[i]);
}
