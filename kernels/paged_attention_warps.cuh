// What one warp does with a tile of keys and values in shared memory: scores, online softmax, weighted values.
//
// Two classes with one interface, chosen by the launcher:
//   MmaWarp<T, D>  16-bit T, 16 rows (query heads of one KV head), tensor cores (mma.m16n8k16). Rows without a head are
//                  zeros: their work is free, since the memory is what limits, and even a single row takes fewer
//                  instructions this way than with float32 arithmetic.
//   FmaWarp<D>     float32, 4 rows, IEEE multiply-adds.
// D is the head size padded to 64, 128 or 256. Both have
//   Element, HEAD, ROWS, CHUNK   the key tile is consumed CHUNK keys at a time
//   PROGRAMS_PER_SM              of four warps, that the registers must leave room for
//   attend                       one chunk: its rows begin at `row` of the query tile; `key` and `value` point at the
//                                chunk, of which `visible` keys exist; `scale` includes log2(e)
//   store                        results: weighted float [ROWS][HEAD + MERGE_PAD], states [ROWS]
//
// Scores are in base 2: weights are exp2(score - maximum). Sums are float32. The denominator adds unrounded weights.
#pragma once
#include "intrinsics.cuh"

using namespace pb;

// Sum of the weights relative to exp2(maximum); -inf and 0 before the first key.
struct State {
  float maximum, sum;
};

constexpr int MERGE_PAD = 8;  // floats: rows of partial results start eight banks apart

// A row of HEAD elements in shared memory lies in 16-byte pieces, permuted so that eight rows at one piece are in eight
// different groups of banks: ldmatrix, and eight lanes that each read a key, meet no conflict.
template <typename T, int HEAD>
__device__ int swizzled(int row, int piece) {
  constexpr int PIECE = 16 / sizeof(T);
  return row * HEAD + (piece ^ (row & 7)) * PIECE;
}

// The maximum after more scores, and the factor for what was summed relative to the old one. `reference` replaces a
// maximum of -inf, where nothing was seen, so that no infinities are subtracted.
struct Rescale {
  float maximum, reference, factor;
  __device__ Rescale(float old_maximum, float new_scores)
      : maximum(fmaxf(old_maximum, new_scores)),
        reference(maximum == -kInfinity ? 0.0f : maximum),
        factor(exp2f(old_maximum - reference)) {}
};

template <typename T>
constexpr bool IS_FLOAT16 = false;
template <>
constexpr bool IS_FLOAT16<__half> = true;

template <typename T, int D>
class MmaWarp {
 public:
  using Element = T;
  static constexpr int HEAD = D, ROWS = 16, CHUNK = 16, PROGRAMS_PER_SM = D > 128 ? 2 : D > 64 ? 3 : 4;

  __device__ MmaWarp() : state_{{-kInfinity, 0.0f}, {-kInfinity, 0.0f}} {
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) weighted_[i][j] = 0.0f;
  }

  __device__ void attend(const T* query, int row, const T* key, const T* value, int visible, float scale) {
    const int lane = threadIdx.x % kWarpSize;
    float scores[2][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      unsigned q[4], k[4];
      ldmatrix_x4(q, query + swizzled<T, D>(row + lane % 16, 2 * i + lane / 16));
      ldmatrix_x4(k, key + swizzled<T, D>(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
      mma_m16n8k16<T>(scores[0], q, {k[0], k[1]}, scores[0]);
      mma_m16n8k16<T>(scores[1], q, {k[2], k[3]}, scores[1]);
    }

    unsigned weights[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) weigh(half, lane, scores, visible, scale, weights);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      unsigned v[4];
      ldmatrix_x4_trans(v, value + swizzled<T, D>(lane % 16, 2 * i + lane / 16));
      mma_m16n8k16<T>(weighted_[2 * i], weights, {v[0], v[1]}, weighted_[2 * i]);
      mma_m16n8k16<T>(weighted_[2 * i + 1], weights, {v[2], v[3]}, weighted_[2 * i + 1]);
    }
  }

  __device__ void store(float* weighted, State* states) const {
    const int lane = threadIdx.x % kWarpSize, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        *reinterpret_cast<float2*>(weighted + row * (D + MERGE_PAD) + 8 * i + column) =
            make_float2(weighted_[i][2 * half] / WEIGHT_SCALE, weighted_[i][2 * half + 1] / WEIGHT_SCALE);
      const float sum = over_row(state_[half].sum, [](float a, float b) { return a + b; });
      if (column == 0) states[row] = {state_[half].maximum, sum};
    }
  }

 private:
  // A weight is at most 1, and float16 has no number between 0 and 2^-24: raised by 2^15 before it is rounded, a
  // weight keeps its relative precision down to 2^-29.
  static constexpr float WEIGHT_SCALE = IS_FLOAT16<T> ? 32768.0f : 1.0f;

  State state_[2];              // rows lane / 4 and lane / 4 + 8; the sum is this lane's part of it
  float weighted_[D / 8][4];    // accumulators of mma: columns 8 i + ...

  template <typename Operation>
  __device__ static float over_row(float x, Operation operation) {  // a row's columns are in four neighbouring lanes
    x = operation(x, __shfl_xor_sync(kFullMask, x, 1));
    return operation(x, __shfl_xor_sync(kFullMask, x, 2));
  }

  // Scores of row lane / 4 + 8 * half to weights, as registers `half` and `half + 2` of the A operand.
  __device__ void weigh(int half, int lane, const float (&scores)[2][4], int visible, float scale,
                        unsigned (&weights)[4]) {
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = i / 2 * 8 + lane % 4 * 2 + i % 2;
      s[i] = key < visible ? scores[i / 2][2 * half + i % 2] * scale : -kInfinity;
    }
    const float highest = over_row(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), fmaxf);
    const Rescale rescale(state_[half].maximum, highest);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2f(s[i] - rescale.reference);
    state_[half] = {rescale.maximum, state_[half].sum * rescale.factor + ((s[0] + s[1]) + (s[2] + s[3]))};
    weights[half] = bit_cast<unsigned>(from_floats<T>(s[0] * WEIGHT_SCALE, s[1] * WEIGHT_SCALE));
    weights[half + 2] = bit_cast<unsigned>(from_floats<T>(s[2] * WEIGHT_SCALE, s[3] * WEIGHT_SCALE));
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      weighted_[i][2 * half] *= rescale.factor;
      weighted_[i][2 * half + 1] *= rescale.factor;
    }
  }
};

template <int D>
class FmaWarp {
 public:
  using Element = float;
  static constexpr int HEAD = D, ROWS = 4, CHUNK = 8, PROGRAMS_PER_SM = 3;

  __device__ FmaWarp() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      state_[r] = {-kInfinity, 0.0f};
#pragma unroll
      for (int i = 0; i < D / 32; ++i) weighted_[r][i] = 0.0f;
    }
  }

  __device__ void attend(const float* query, int row, const float* key, const float* value, int visible, float scale) {
    const int lane = threadIdx.x % kWarpSize;
    float weights[ROWS];
    scores(query, row, key, lane, weights);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float score = lane % 8 < visible ? weights[r] * scale : -kInfinity;
      const Rescale rescale(state_[r].maximum, over_keys(score, fmaxf));
      weights[r] = exp2f(score - rescale.reference);
      state_[r] = {rescale.maximum, state_[r].sum * rescale.factor + weights[r]};
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

  // Lane: key lane % 8, and every fourth piece of its row from lane / 8 on. dots[r] is the same in a key's four lanes.
  __device__ static void scores(const float* query, int row, const float* key, int lane, float (&dots)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) dots[r] = 0.0f;
#pragma unroll 4
    for (int piece = lane / 8; piece < D / 4; piece += 4) {
      const float4 k = *reinterpret_cast<const float4*>(key + swizzled<float, D>(lane % 8, piece));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(query + swizzled<float, D>(row + r, piece));
        dots[r] += q.x * k.x;
        dots[r] += q.y * k.y;
        dots[r] += q.z * k.z;
        dots[r] += q.w * k.w;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      dots[r] += __shfl_xor_sync(kFullMask, dots[r], 8);
      dots[r] += __shfl_xor_sync(kFullMask, dots[r], 16);
    }
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
