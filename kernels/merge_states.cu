// Merging two partial results of attention over disjoint keys.
//
// Per row and head: lse = log(exp(lse_a) + exp(lse_b)), and out is the mean of out_a and out_b with the weights
// exp(lse_a - lse) and exp(lse_b - lse). outs [num_tokens, num_heads, head_size] and lses [num_tokens, num_heads], all
// but the results of any strides. A side whose lse is -inf is not read, and the other comes back as the bits it is.
//
// A thread takes 16 bytes of each side where rows allow it, one element otherwise; neighbours take neighbouring pieces.
//
// Bytes moved: each state once in, the result once out; the lses of a row are read by each of its threads, through L1.
#include "intrinsics.cuh"

using namespace pb;

struct Side {
  float lse, weight;
  __device__ bool empty() const { return lse == -kInfinity; }
};

template <typename T>
__device__ __forceinline__ T merged(T a, T b, const Side& of_a, const Side& of_b) {
  if (of_a.empty()) return of_b.empty() ? from_float<T>(0.0f) : b;
  if (of_b.empty()) return a;
  return from_float<T>(to_float(a) * of_a.weight + to_float(b) * of_b.weight);
}

// `pieces` to a head; strides in elements.
template <typename T, bool kVector>
__global__ void merge_states(const T* out_a, long long a_token, long long a_head, long long a_dim, const T* out_b,
                             long long b_token, long long b_head, long long b_dim, const float* lse_a,
                             long long la_token, long long la_head, const float* lse_b, long long lb_token,
                             long long lb_head, T* out, float* lse, long long rows, int num_heads, int pieces) {
  constexpr int kWidth = kVector ? 16 / sizeof(T) : 1;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= rows * pieces) return;
  const long long row = thread / pieces, token = row / num_heads;
  const int piece = static_cast<int>(thread - row * pieces), head = static_cast<int>(row - token * num_heads);
  Side a = {lse_a[token * la_token + head * la_head], 0.0f}, b = {lse_b[token * lb_token + head * lb_head], 0.0f};
  float log = a.empty() ? b.lse : a.lse;
  if (!a.empty() && !b.empty()) {
    const float top = fmaxf(a.lse, b.lse);
    a.weight = expf(a.lse - top);
    b.weight = expf(b.lse - top);
    const float sum = a.weight + b.weight, inverse = 1.0f / sum;
    a.weight *= inverse;
    b.weight *= inverse;
    log = top + logf(sum);
  }
  if (piece == 0) lse[row] = log;
  const T* from_a = out_a + token * a_token + head * a_head + piece * (kVector ? kWidth : a_dim);
  const T* from_b = out_b + token * b_token + head * b_head + piece * (kVector ? kWidth : b_dim);
  T* to = out + thread * kWidth;
  if constexpr (kVector) {
    struct Words {
      T elements[kWidth];
    };
    const Words of_a = bit_cast<Words>(a.empty() ? make_uint4(0, 0, 0, 0) : load16(from_a));
    const Words of_b = bit_cast<Words>(b.empty() ? make_uint4(0, 0, 0, 0) : load16(from_b));
    Words result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.elements[i] = merged(of_a.elements[i], of_b.elements[i], a, b);
    store16(to, bit_cast<uint4>(result));
  } else {
    const T zero = from_float<T>(0.0f);
    *to = merged(a.empty() ? zero : *from_a, b.empty() ? zero : *from_b, a, b);
  }
}
