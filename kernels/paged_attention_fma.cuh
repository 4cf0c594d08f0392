// Four rows and eight keys at a time in IEEE float32: FmaWarp of paged_attention_warps.cuh.
#pragma once
#include "paged_attention_tile.cuh"

template <int D, bool IS_WIDE = false>
class FmaWarp {
 public:
  using Element = float;
  static constexpr int HEAD = D, ROWS = 4, CHUNK = 8, PROGRAMS_PER_SM = IS_WIDE ? 2 : 3;
  static constexpr bool WIDE = IS_WIDE;

  struct Dots {
    float of[ROWS];
    __device__ Dots() : of{} {}
  };

  __device__ explicit FmaWarp(bool) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      state_[r] = {-kInfinity, 0.0f};
#pragma unroll
      for (int i = 0; i < D / 32; ++i) weighted_[r][i] = 0.0f;
    }
  }

  // Lane: key lane % 8, and every fourth piece of its row from lane / 8 on; its own part of the sum.
  __device__ static void add_dots(const float* query, int row, const float* key, Dots& dots) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 4
    for (int piece = lane / 8; piece < D / 4; piece += 4) {
      const float4 k = *reinterpret_cast<const float4*>(key + swizzled<float, D>(lane % 8, piece));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(query + swizzled<float, D>(row + r, piece));
        dots.of[r] += q.x * k.x;
        dots.of[r] += q.y * k.y;
        dots.of[r] += q.z * k.z;
        dots.of[r] += q.w * k.w;
      }
    }
  }

  __device__ void absorb(const Dots& dots, int row, const float* value, const Chunk& chunk, const Scoring& scoring) {
    const int lane = threadIdx.x % kWarpSize, key = lane % 8;
    float weights[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float dot = dots.of[r] + __shfl_xor_sync(kFullMask, dots.of[r], 8);
      dot += __shfl_xor_sync(kFullMask, dot, 16);
      float score = key < chunk.visible ? dot * scoring.scale : -kInfinity;
      if (!chunk.simple) score = scoring.score(dot, key, chunk, scoring.rows[row + r]);
      const Rescale rescale(state_[r].maximum, over_keys(score, fmaxf));
      weights[r] = exp2f(score - rescale.reference);
      state_[r] = {rescale.maximum, state_[r].sum * rescale.factor + weights[r]};
      if (chunk.factors != nullptr) weights[r] *= chunk.factors[key].y;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) weighted_[r][i] *= rescale.factor;
    }
    add_values(value, lane, weights);
  }

  __device__ void store(float* weighted, State* states) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) weighted[r * (D + MERGE_PAD) + element(lane, i)] = weighted_[r][i];
      const float sum = over_keys(state_[r].sum, [](float a, float b) { return a + b; });
      if (lane == 0) states[r] = {state_[r].maximum, sum};
    }
  }

 private:
  static constexpr int VECTOR = D / 32 < 4 ? D / 32 : 4;  // neighbouring columns of a lane

  State state_[ROWS];           // the sum is that of this lane's key, lane % 8
  float weighted_[ROWS][D / 32];

  // Column of weighted_[.][i]: vectors of neighbouring lanes are neighbours.
  __device__ static int element(int lane, int i) { return (i / VECTOR * 32 + lane) * VECTOR + i % VECTOR; }

  template <typename Operation>
  __device__ static float over_keys(float x, Operation operation) {
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) x = operation(x, __shfl_xor_sync(kFullMask, x, lanes));
    return x;
  }

  __device__ void add_values(const float* value, int lane, const float (&weights)[ROWS]) {
#pragma unroll
    for (int key = 0; key < CHUNK; ++key) {
      float weight[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) weight[r] = __shfl_sync(kFullMask, weights[r], key);
#pragma unroll
      for (int i = 0; i < D / 32; i += VECTOR) {
        const int column = element(lane, i);
        const float* from = value + swizzled<float, D>(key, column / 4) + column % 4;
        float v[VECTOR];
        if constexpr (VECTOR == 4) {
          const float4 x = *reinterpret_cast<const float4*>(from);
          v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        } else {
          const float2 x = *reinterpret_cast<const float2*>(from);
          v[0] = x.x, v[1] = x.y;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) weighted_[r][i + j] += weight[r] * v[j];
      }
    }
  }
};
