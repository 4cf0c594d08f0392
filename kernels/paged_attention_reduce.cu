// Merges what the splits of a row left in scratch (paged_attention.cu) to out and lse.
//
// Bytes moved: 4 (D + 2) for each split and row. Rows of one split are finished already, and sequences that have no
// others are not counted when programs share out the rows, so that a batch of long prompts costs a launch and no more.
#include "paged_attention_results.cuh"

constexpr int THREADS = 128;

// Program: (sequence, query head, query), as many as have splits. Threads share out the columns, OCTET each, and then
// the splits.
template <typename T>
__global__ void __launch_bounds__(THREADS, 8)
reduce_splits(T* out, float* lse, const float* partials, const State* states, const int* seq_lens,
              long long length_stride, const int* query_start, long long start_stride, const float* sinks,
              long long sink_stride, long long token_slots, long long seq_slots, long long head_slots, unsigned window,
              int flags, int head_size, int columns, int num_seqs, int num_kv_heads, int group, int warp_rows,
              int row_warps, int split_keys, int max_splits) {
  const Sequences sequences = {seq_lens,  length_stride, query_start, start_stride, num_seqs,         group,
                               warp_rows, row_warps,     split_keys,  max_splits,   (flags & 1) != 0, window};
  const Scratch scratch = {nullptr, nullptr, token_slots, seq_slots, head_slots, columns};
  const Results<T> results = {out, lse, flags & 4 ? sinks : nullptr, sink_stride, head_size};
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  __shared__ Finder<THREADS> finder;
  __shared__ float of_way[THREADS][OCTET + 1];

  for (int item = blockIdx.x;
       finder.find(num_seqs, item / num_kv_heads, [&](int seq) { return sequences.split_rows(seq); });
       item += gridDim.x) {
    const int seq = finder.seq, kv_head = item % num_kv_heads, row = finder.index;
    const Sequence sequence = sequences[seq];
    const int count = sequences.splits(sequence, sequences.range(sequence, row / sequence.tile_rows)).count;
    if (count <= 1) continue;
    const long long first = scratch.slot(sequence, seq, kv_head, 0, row);
    const State* parts = states + first;
    const long long stride = sequence.rows;  // from one split to the next

    State merged = {-kInfinity, 0.0f};
#pragma unroll 1
    for (int i = lane; i < count; i += kWarpSize) merged.maximum = fmaxf(merged.maximum, parts[i * stride].maximum);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      merged.maximum = fmaxf(merged.maximum, __shfl_xor_sync(kFullMask, merged.maximum, lanes));
#pragma unroll 1
    for (int i = lane; i < count; i += kWarpSize)
      merged.sum += parts[i * stride].sum * weight_of(parts[i * stride], merged.maximum);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) merged.sum += __shfl_xor_sync(kFullMask, merged.sum, lanes);

    const int octets = min(columns / OCTET, 256 / OCTET), ways = THREADS / octets;
    const int way = thread / octets, octet = thread % octets;
    const int head = kv_head * group + row % group;
    const long long out_row = static_cast<long long>(sequence.token + row / group) * num_kv_heads * group + head;
#pragma unroll 1
    for (int column = octet * OCTET; column - octet * OCTET < columns; column += octets * OCTET) {
      const float* from = partials + first * columns + column;
      float total[OCTET] = {};
#pragma unroll 4
      for (int i = way; i < count; i += ways) {
        const float factor = weight_of(parts[i * stride], merged.maximum);
        const float4 low = bit_cast<float4>(load16(from + i * stride * columns));
        const float4 high = bit_cast<float4>(load16(from + i * stride * columns + 4));
        total[0] += low.x * factor, total[1] += low.y * factor;
        total[2] += low.z * factor, total[3] += low.w * factor;
        total[4] += high.x * factor, total[5] += high.y * factor;
        total[6] += high.z * factor, total[7] += high.w * factor;
      }
      __syncthreads();  // the columns before these are written
#pragma unroll
      for (int j = 0; j < OCTET; ++j) of_way[thread][j] = total[j];
      __syncthreads();
      if (way > 0) continue;
#pragma unroll 1
      for (int w = 1; w < ways; ++w)
#pragma unroll
        for (int j = 0; j < OCTET; ++j) total[j] += of_way[w * octets + octet][j];
      results.finish(out_row, head, column, total, merged);
    }
  }
}
