// Who does what: the splits of each sequence, and how programs that know no length until they run share them out.
#pragma once
#include "intrinsics.cuh"

using namespace pb;

constexpr int THREADS = 128, WARPS = THREADS / kWarpSize;

// Up to `most` splits of a multiple of `keys` keys.
struct Splits {
  int count, keys;
  __device__ Splits(int length, int split_keys, int most) {
    const int pieces = (length + split_keys - 1) / split_keys;
    const int pieces_each = (pieces + most - 1) / most;
    keys = split_keys * pieces_each;
    count = length == 0 ? 0 : (pieces + pieces_each - 1) / pieces_each;
  }
};

// The query ranges and lengths of the sequences, and who is to do what.
struct Sequences {
  const int* seq_lens;
  long long length_stride;
  const int* query_start;
  long long start_stride;
  int num_seqs, split_keys, max_splits;

  __device__ int token(int seq) const { return query_start[seq * start_stride]; }
  __device__ bool has_query(int seq) const { return query_start[(seq + 1) * start_stride] > token(seq); }
  __device__ int length(int seq) const { return seq_lens[seq * length_stride]; }
  __device__ Splits splits(int seq) const { return Splits(length(seq), split_keys, max_splits); }
};

// Finds the sequence and the split that come `unit`-th, counting the splits of each sequence with a query, of an
// empty one too. All threads call it together; false when there are fewer.
struct Finder {
  int warp_totals[WARPS], seq, split;

  __device__ bool find(const Sequences& sequences, int unit) {
    const int thread = threadIdx.x, lane = thread % kWarpSize;
    int before = 0;  // splits of the sequences below `first`
#pragma unroll 1
    for (int first = 0; first < sequences.num_seqs; first += THREADS) {
      const int own = first + thread;
      const bool counts = own < sequences.num_seqs && sequences.has_query(own);
      const int count = counts ? max(sequences.splits(own).count, 1) : 0;
      int upto = count;
#pragma unroll
      for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
        const int below = __shfl_up_sync(kFullMask, upto, lanes);
        if (lane >= lanes) upto += below;
      }
      if (lane == kWarpSize - 1) warp_totals[thread / kWarpSize] = upto;
      __syncthreads();
      int start = before + upto - count;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < thread / kWarpSize) start += warp_totals[warp];
        before += warp_totals[warp];
      }
      if (start <= unit && unit < start + count) seq = own, split = unit - start;
      __syncthreads();
      if (unit < before) return true;
    }
    return false;
  }
};
