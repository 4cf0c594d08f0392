// A few rows and eight keys at a time in IEEE float32: FmaWarp of paged_attention_warps.cuh.
#pragma once
#include "paged_attention_tile.cuh"

// The maxima of R rows, the same in every lane; of many rows each in one lane, which takes one register.
template <int R, bool IN_LANES = (R > 8)>
class Maxima {
 public:
  __device__ float operator[](int row) const {
    if constexpr (IN_LANES) return __shfl_sync(kFullMask, of_[0], row);
    return of_[IN_LANES ? 0 : row];
  }
  __device__ void set(int row, float maximum) {
    if (!IN_LANES || static_cast<int>(threadIdx.x) % kWarpSize == row) of_[IN_LANES ? 0 : row] = maximum;
  }

 private:
  float of_[IN_LANES ? 1 : R];
};

template <int D, int R = 4, bool IS_WIDE = false, int NUM_WARPS = 4>
class FmaWarp {
 public:
  using Element = float;
  static constexpr int HEAD = D, ROWS = R, CHUNK = 8, WARPS = NUM_WARPS, THREADS = WARPS * kWarpSize;
  static constexpr int PROGRAMS_PER_SM = (IS_WIDE || R > 4 ? 2 : 3) * 4 / WARPS;
  static constexpr bool WIDE = IS_WIDE;

  struct Dots {
    float of[ROWS];
    __device__ Dots() : of{} {}
  };

  __device__ explicit FmaWarp(bool) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      maxima_.set(r, -kInfinity);
      sums_[r / SHARED] = 0.0f;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) weighted_[r][i] = 0.0f;
    }
  }

  // Lane: key lane % 8, and every fourth piece of its row from lane / 8 on; its own part of the sum.
  __device__ static void add_dots(const float* query, int row, const float* key, Dots& dots) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll PIECES_AT_ONCE
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
      const Rescale rescale(maxima_[r], over_keys(score, fmaxf));
      weights[r] = exp2f(score - rescale.reference);
      maxima_.set(r, rescale.maximum);
      if (SHARED == 1 || lane / 8 == r % SHARED) sums_[r / SHARED] = sums_[r / SHARED] * rescale.factor + weights[r];
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
      const float maximum = maxima_[r], sum = over_keys(sums_[r / SHARED], [](float a, float b) { return a + b; });
      if (lane == r % SHARED * 8) states[r] = {maximum, sum};
    }
  }

 private:
  static constexpr int VECTOR = D / 32 < 4 ? D / 32 : 4;  // neighbouring columns of a lane
  static constexpr int SHARED = R > 8 ? 4 : 1;
  // Many rows are work enough to wait for, and loads ahead of it would take the registers of their sums.
  static constexpr int PIECES_AT_ONCE = R > 8 ? 1 : R > 4 ? 2 : 4, KEYS_AT_ONCE = R > 8 ? 1 : R > 4 ? 4 : 8;

  Maxima<ROWS> maxima_;
  float sums_[ROWS / SHARED];   // of this lane's key, lane % 8; where SHARED, of every fourth row from lane / 8 on
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
#pragma unroll KEYS_AT_ONCE
    for (int key = 0; key < CHUNK; ++key) {
      float v[D / 32];
#pragma unroll
      for (int i = 0; i < D / 32; i += VECTOR) {
        const int column = element(lane, i);
        const float* from = value + swizzled<float, D>(key, column / 4) + column % 4;
        if constexpr (VECTOR == 4) {
          const float4 x = *reinterpret_cast<const float4*>(from);
          v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        } else {
          const float2 x = *reinterpret_cast<const float2*>(from);
          v[i] = x.x, v[i + 1] = x.y;
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float weight = __shfl_sync(kFullMask, weights[r], key);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) weighted_[r][i] += weight * v[i];
      }
    }
  }
};
