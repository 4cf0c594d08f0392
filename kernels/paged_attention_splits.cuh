// Who does what: how a sequence's rows and keys are cut up, and how programs that know no length until they run share
// the pieces out.
//
// The rows of a sequence and KV head are its queries times the group: row r is query r / group and query head r % group
// of that KV head. A tile of rows is what one program takes; the keys that its queries see are split. All of it depends
// on the sequence alone, so that its result does not depend, to the bit, on what it is batched with.
#pragma once
#include "intrinsics.cuh"

using namespace pb;

constexpr unsigned NO_WINDOW = 0x80000000u;  // more than any distance

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

// The keys [first, end) that some row of a tile sees, of which every row sees [all_first, all_end).
struct Range {
  int first, end, all_first, all_end;
};

// One sequence. A tile has tile_rows rows, shared out by row_warps warps; each tile's keys have up to most_splits
// splits.
struct Sequence {
  int token, queries, length, rows, row_warps, tile_rows, tiles, most_splits;
};

// All sequences. row_warps: 1, 2, 4 or 8, or 0 for as many of four as a sequence has rows for. max_splits: of a single
// tile of one warp's rows; more rows are as many more programs, so that there need not be as many splits, and their
// scratch is bounded.
struct Sequences {
  const int* seq_lens;
  long long length_stride;
  const int* query_start;
  long long start_stride;
  int num_seqs, group, warp_rows, row_warps, split_keys, max_splits;
  bool causal;
  unsigned window;

  __device__ Sequence operator[](int seq) const {
    Sequence s;
    s.token = query_start[seq * start_stride];
    s.queries = query_start[(seq + 1) * start_stride] - s.token;
    s.length = seq_lens[seq * length_stride];
    s.rows = s.queries * group;
    s.row_warps = row_warps > 0 ? row_warps : s.rows <= warp_rows ? 1 : s.rows <= 2 * warp_rows ? 2 : 4;
    s.tile_rows = warp_rows * s.row_warps;
    s.tiles = (s.rows + s.tile_rows - 1) / s.tile_rows;
    s.most_splits = max(1, max_splits / (max(1, s.tiles) * s.row_warps));
    return s;
  }

  __device__ Range range(const Sequence& s, int tile) const {
    if (!causal) return {0, s.length, 0, s.length};
    const int offset = s.length - s.queries;
    const int first = offset + tile * s.tile_rows / group;  // positions of the tile's first and last query
    const int last = offset + (min((tile + 1) * s.tile_rows, s.rows) - 1) / group;
    Range r = {0, max(last + 1, 0), 0, first + 1};
    if (window < NO_WINDOW) {
      r.first = min(max(first - static_cast<int>(window) + 1, 0), r.end);
      r.all_first = max(last - static_cast<int>(window) + 1, 0);
    }
    return r;
  }

  __device__ Splits splits(const Sequence& s, const Range& r) const {
    return Splits(r.end - r.first, split_keys, s.most_splits);
  }

  // Splits of each tile, or more where the tiles differ; 1 where there is no key.
  __device__ int splits_each(const Sequence& s) const {
    if (s.tiles == 1) return max(splits(s, range(s, 0)).count, 1);
    int keys = s.length;
    if (window < NO_WINDOW) keys = static_cast<int>(min(static_cast<unsigned>(keys), window + s.tile_rows));
    return max(min((keys + split_keys - 1) / split_keys, s.most_splits), 1);
  }

  __device__ int units(int seq) const {
    const Sequence s = (*this)[seq];
    return s.queries == 0 ? 0 : s.tiles * splits_each(s);
  }

  // Rows whose splits are to be merged.
  __device__ int split_rows(int seq) const {
    const Sequence s = (*this)[seq];
    return s.queries == 0 || splits_each(s) == 1 ? 0 : s.rows;
  }
};

// Finds the sequence, and which of its units, comes `unit`-th; `count(seq)` says how many units a sequence has. All
// threads call it together, and between two calls nothing they wrote to shared memory is in use; false when there are
// fewer.
template <int THREADS>
struct Finder {
  static constexpr int WARPS = THREADS / kWarpSize;
  int warp_totals[WARPS], seq, index;

  template <typename Count>
  __device__ bool find(int num_seqs, int unit, Count count_of) {
    const int thread = threadIdx.x, lane = thread % kWarpSize;
    int before = 0;  // units of the sequences below `first`
#pragma unroll 1
    for (int first = 0; first < num_seqs; first += THREADS) {
      const int own = first + thread;
      const int count = own < num_seqs ? count_of(own) : 0;
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
      if (start <= unit && unit < start + count) seq = own, index = unit - start;
      __syncthreads();
      if (unit < before) return true;
    }
    return false;
  }
};
