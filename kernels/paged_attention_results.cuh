// From partial results to out and lse: merging of warps and splits, sinks, division by the denominator.
#pragma once
#include "paged_attention_scores.cuh"

constexpr int OCTET = 8;  // columns of the result that a thread writes at a time

// Eight columns of an output row, of which `exist` do.
template <typename T>
__device__ void store_octet(T* to, const float (&values)[OCTET], int exist, bool vector) {
  if (!vector) {
#pragma unroll
    for (int i = 0; i < OCTET; ++i)
      if (i < exist) to[i] = from_float<T>(values[i]);
  } else if constexpr (sizeof(T) == 4) {
    if (exist <= 0) return;
    store16(to, bit_cast<uint4>(make_float4(values[0], values[1], values[2], values[3])));
    store16(to + 4, bit_cast<uint4>(make_float4(values[4], values[5], values[6], values[7])));
  } else {
    if (exist <= 0) return;
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = bit_cast<unsigned>(from_floats<T>(values[2 * i], values[2 * i + 1]));
    store16(to, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

__device__ inline float weight_of(const State& state, float maximum) {
  return maximum == -kInfinity ? 0.0f : exp2f(state.maximum - maximum);
}

// Eight columns of a row summed over the key warps, whose results are `rows` rows of `stride` floats apart.
__device__ inline State merge_warps(const float* weighted, int stride, const State* states, int rows, int key_warps,
                                    float (&total)[OCTET]) {
  State merged = {-kInfinity, 0.0f};
#pragma unroll 1
  for (int w = 0; w < key_warps; ++w) merged.maximum = fmaxf(merged.maximum, states[w * rows].maximum);
#pragma unroll
  for (int j = 0; j < OCTET; ++j) total[j] = 0.0f;
#pragma unroll 1
  for (int w = 0; w < key_warps; ++w) {
    const float factor = weight_of(states[w * rows], merged.maximum);
    merged.sum += states[w * rows].sum * factor;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) total[j] += weighted[w * rows * stride + j] * factor;
  }
  return merged;
}

// Partial results: for each row of a sequence and KV head, and each of its splits, `columns` floats and a State.
struct Scratch {
  float* partials;
  State* states;
  long long token_slots, seq_slots, head_slots;  // before a token's, sequence's or KV head's
  int columns;

  __device__ long long slot(const Sequence& s, int seq, int kv_head, int split, int row) const {
    const long long first = s.token * token_slots + seq * seq_slots + kv_head * head_slots;
    return first + static_cast<long long>(split) * s.rows + row;
  }
};

// out [num_tokens, num_query_heads, head_size] and lse, contiguous; sinks of the query heads, or null.
template <typename T>
struct Results {
  T* out;
  float* lse;
  const float* sinks;
  long long sink_stride;
  int head_size;

  // Add the sink, divide by the denominator and write eight columns of `row`, and lse with the first.
  __device__ void finish(long long row, int head, int column, float (&total)[OCTET], State state) const {
    float lse_of_row = state.sum == 0.0f ? -kInfinity : state.maximum * kLn2 + logf(state.sum);
    float inverse = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
    if (sinks != nullptr) {
      const float sink = sinks[head * sink_stride];
      const float maximum = fmaxf(state.maximum, sink * kLog2e), factor = weight_of(state, maximum);
      const float sum = state.sum * factor + exp2f(sink * kLog2e - maximum);
      lse_of_row = factor == 0.0f ? sink : maximum * kLn2 + logf(sum);
      inverse = factor == 0.0f ? 0.0f : factor / sum;
    }
#pragma unroll
    for (int j = 0; j < OCTET; ++j) total[j] *= inverse;
    store_octet(out + row * head_size + column, total, head_size - column, head_size % OCTET == 0);
    if (column == 0) lse[row] = lse_of_row;
  }
};
