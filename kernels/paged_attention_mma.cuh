// Sixteen rows and sixteen keys at a time on tensor cores: MmaWarp of paged_attention_warps.cuh.
#pragma once
#include "paged_attention_tile.cuh"

template <typename T>
constexpr bool IS_FLOAT16 = false;
template <>
constexpr bool IS_FLOAT16<__half> = true;

template <typename T, int D, bool IS_WIDE = false, int NUM_WARPS = 4>
class MmaWarp {
 public:
  using Element = T;
  static constexpr int HEAD = D, ROWS = 16, CHUNK = 16, WARPS = NUM_WARPS, THREADS = WARPS * kWarpSize;
  static constexpr int PROGRAMS_PER_SM = (D > 128 ? 2 : D > 64 ? 3 : 4) * 4 / WARPS;
  static constexpr bool WIDE = IS_WIDE;

  struct Dots {
    float of[2][4];  // accumulators of mma
    __device__ Dots() : of{} {}
    __device__ float at(int half, int i) const { return of[i / 2][2 * half + i % 2]; }
  };

  // factors: chunks will have some.
  __device__ explicit MmaWarp(bool factors)
      : state_{{-kInfinity, 0.0f}, {-kInfinity, 0.0f}}, unit_(factors ? 1.0f : 1.0f / WEIGHT_SCALE) {
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) weighted_[i][j] = 0.0f;
  }

  __device__ static void add_dots(const T* query, int row, const T* key, Dots& dots) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      unsigned q[4], k[4];
      ldmatrix_x4(q, query + swizzled<T, D>(row + lane % 16, 2 * i + lane / 16));
      ldmatrix_x4(k, key + swizzled<T, D>(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
      mma_m16n8k16<T>(dots.of[0], q, {k[0], k[1]}, dots.of[0]);
      mma_m16n8k16<T>(dots.of[1], q, {k[2], k[3]}, dots.of[1]);
    }
  }

  __device__ void absorb(const Dots& dots, int row, const T* value, const Chunk& chunk, const Scoring& scoring) {
    const int lane = threadIdx.x % kWarpSize;
    float s[2][4];  // of rows lane / 4 and lane / 4 + 8
    if (chunk.simple) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[half][i] = key_of(lane, i) < chunk.visible ? dots.at(half, i) * scoring.scale : -kInfinity;
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[half][i] = scoring.score(dots.at(half, i), key_of(lane, i), chunk, scoring.rows[row + lane / 4 + 8 * half]);
    }
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = weigh(state_[half], s[half]);
    if (chunk.factors != nullptr) apply_factors(lane, chunk.factors, s);

    const bool in_two = IS_FLOAT16<T> && chunk.factors != nullptr;
    unsigned weights[4];
    if (in_two) {
      take_weights<__nv_bfloat16>(s, 1.0f, weights);
    } else {
      take_weights<T>(s, WEIGHT_SCALE, weights);
    }
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) weighted_[i][j] *= factor[j / 2];
    if (in_two) {
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        add_values<__nv_bfloat16>(lane, weights, value);
        take_weights<__nv_bfloat16>(s, 1.0f, weights);
      }
    } else {
      add_values<T>(lane, weights, value);
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
            make_float2(weighted_[i][2 * half] * unit_, weighted_[i][2 * half + 1] * unit_);
      const float sum = over_row(state_[half].sum, [](float a, float b) { return a + b; });
      if (column == 0) states[row] = {state_[half].maximum, sum};
    }
  }

 private:
  // A weight is at most 1, and float16 has no number between 0 and 2^-24: raised by 2^15 before it is rounded, a
  // weight keeps its relative precision down to 2^-29.
  static constexpr float WEIGHT_SCALE = IS_FLOAT16<T> ? 32768.0f : 1.0f;

  State state_[2];              // rows lane / 4 and lane / 4 + 8; the sum is this lane's part of it
  float unit_;                  // of weighted_
  float weighted_[D / 8][4];    // accumulators of mma: columns 8 i + ...

  template <typename Operation>
  __device__ static float over_row(float x, Operation operation) {  // a row's columns are in four neighbouring lanes
    x = operation(x, __shfl_xor_sync(kFullMask, x, 1));
    return operation(x, __shfl_xor_sync(kFullMask, x, 2));
  }

  __device__ static int key_of(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

  // A row's scores to weights, added to its state; returns the factor for what was summed before.
  __device__ static float weigh(State& state, float (&s)[4]) {
    const Rescale rescale(state.maximum, over_row(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), fmaxf));
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2f(s[i] - rescale.reference);
    state = {rescale.maximum, state.sum * rescale.factor + ((s[0] + s[1]) + (s[2] + s[3]))};
    return rescale.factor;
  }

  // Weights times the factors of their values, which may be anything that float32 holds. So they are rounded to
  // bfloat16, which is what values then are too (`decode`); for queries in float16, which are more precise, to the sum
  // of two numbers of it.
  __device__ static void apply_factors(int lane, const float2* factors, float (&s)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& weight = s[i / 4][i % 4];
      weight = fminf(weight * factors[key_of(lane, i % 4)].y, kLargestBfloat16);  // the largest would become infinite
    }
  }

  // `unit` times weights, rounded to V, as the left operand of mma; what is rounded off stays, for who wants it.
  template <typename V>
  __device__ static void take_weights(float (&s)[2][4], float unit, unsigned (&weights)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* pair = s[i % 2] + i / 2 * 2;
      const auto rounded = from_floats<V>(pair[0] * unit, pair[1] * unit);
      weights[i] = bit_cast<unsigned>(rounded);
      const float2 taken = to_float2(rounded);
      pair[0] -= taken.x, pair[1] -= taken.y;
    }
  }

  // Adds the values, numbers of V, times weights.
  template <typename V>
  __device__ void add_values(int lane, const unsigned (&weights)[4], const T* value) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      unsigned v[4];
      ldmatrix_x4_trans(v, value + swizzled<T, D>(lane % 16, 2 * i + lane / 16));
      mma_m16n8k16<V>(weighted_[2 * i], weights, {v[0], v[1]}, weighted_[2 * i]);
      mma_m16n8k16<V>(weighted_[2 * i + 1], weights, {v[2], v[3]}, weighted_[2 * i + 1]);
    }
  }
};
