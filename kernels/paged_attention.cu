// Attention of one query per sequence over a paged KV cache (decode), split over the keys.
//
// Grid: one program per (sequence, split of its keys, KV head, tile of its query heads), the heads fastest, since heads of
// one key are neighbours in memory. A program loads each key and value of its split once, for all query heads of the tile:
//
//   block table -> slot offsets, two tiles ahead, in shared memory     (a division and a table read per key, not per piece)
//   K and V     -> shared memory, one tile ahead, by cp.async          (16 bytes a thread, 8 to 64 lines in flight a warp)
//   four warps  -> scores, softmax, weighted values                    (paged_attention_warps.cuh)
//
// Warps share out the tile's rows (query heads) and then its keys; each keeps a softmax state of its own, and nothing but one
// barrier per tile joins them until the end, where they are merged in shared memory. A sequence of one split is finished
// there. Otherwise the partial result, weighted values and State, goes to scratch, and `reduce_splits` merges the splits.
//
// Splits depend on the sequence's own length alone, so its result does not depend, to the bit, on what it is batched with.
//
// Bytes moved: K and V of every sequence once (per tile of 64, for float32 16, query heads of a KV head), and for each split
// and query head 4 (D + 2) bytes of scratch, written and read: 0.8 % of K and V for 512 keys of Llama-3-8B.
//
// Caches and queries may have any strides. Where rows are contiguous, multiples of 16 bytes and aligned, `vector` is set;
// else elements are loaded one by one into the same shared tile.
//
// Never read: table entries behind the last used block, slots behind the sequence's end; their place in the tile is zero.
#include "paged_attention_warps.cuh"

constexpr int THREADS = 128, WARPS = THREADS / kWarpSize;
constexpr int STAGES = 2;  // tiles in shared memory: one in use, one in flight. More would cost programs per SM
constexpr int OCTET = 8;   // columns of the result that a thread writes at a time

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

// 16 bytes of a row to shared memory; the first `elements` exist, the others become zero.
template <typename T>
__device__ void stage_piece(T* to, const T* from, long long stride, int elements, bool vector) {
  if (vector) {
    cp_async16(to, from, elements * static_cast<int>(sizeof(T)));
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i)
      to[i] = i < elements ? from[i * stride] : from_float<T>(0.0f);
  }
}

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

__device__ float weight_of(const State& state, float maximum) {
  return maximum == -kInfinity ? 0.0f : exp2f(state.maximum - maximum);
}

__device__ float natural_log_sum(float maximum, float sum) {
  return sum == 0.0f ? -kInfinity : maximum * kLn2 + logf(sum);
}

// out, lse: contiguous. partials float [num_seqs, num_query_heads, max_splits, HEAD], states alike, of two floats.
// Dynamic shared memory: query tile, STAGES tiles of K and V, 2 * tile slots; at the end, the warps' partial results.
// `tile` is a multiple of CHUNK, at most THREADS; `row_warps` (1, 2, 4) warps share out the rows.
template <typename Warp>
__global__ void __launch_bounds__(THREADS)
paged_attention(typename Warp::Element* out, float* lse, float* partials, State* states,
                const typename Warp::Element* query, long long query_token_stride, long long query_head_stride,
                long long query_stride, const typename Warp::Element* keys, long long key_block_stride,
                long long key_slot_stride, long long key_head_stride, long long key_stride,
                const typename Warp::Element* values, long long value_block_stride, long long value_slot_stride,
                long long value_head_stride, long long value_stride, const int* block_table, long long table_stride,
                long long entry_stride, const int* seq_lens, long long length_stride, const int* query_start,
                long long start_stride, float scale, int head_size, int block_size, int num_kv_heads, int group,
                int row_tiles, int row_warps, int tile, int split_keys, int max_splits, int vector, int query_vector) {
  using T = typename Warp::Element;
  constexpr int D = Warp::HEAD, PIECE = 16 / sizeof(T), PIECES = D / PIECE;
  static_assert(THREADS % PIECES == 0, "a thread stages the same piece of every row");

  const int head_tile = blockIdx.x % (num_kv_heads * row_tiles), unit = blockIdx.x / (num_kv_heads * row_tiles);
  const int kv_head = head_tile / row_tiles, seq = unit / max_splits, split = unit % max_splits;
  const long long token = query_start[seq * start_stride];
  if (query_start[(seq + 1) * start_stride] == token) return;
  const int length = seq_lens[seq * length_stride];
  const Splits splits(length, split_keys, max_splits);
  if (split >= max(splits.count, 1)) return;
  const int first = split * splits.keys;  // below 2^31: it is below `length`
  const int end = min(static_cast<long long>(length), static_cast<long long>(first) + splits.keys);

  const int thread = threadIdx.x, warp = thread / kWarpSize;
  const int row_warp = warp % row_warps, key_warp = warp / row_warps, key_warps = WARPS / row_warps;
  const int rows = Warp::ROWS * row_warps;
  const int first_row = head_tile % row_tiles * rows, heads = min(rows, group - first_row);
  const int first_head = kv_head * group + first_row;

  extern __shared__ __align__(16) unsigned char shared[];
  T* query_tile = reinterpret_cast<T*>(shared);
  T* tiles = query_tile + rows * D;  // [STAGES][K, V][tile][D]
  longlong2* slots = reinterpret_cast<longlong2*>(tiles + STAGES * 2 * tile * D);  // [2][tile]

  const int piece = thread % PIECES, piece_row = thread / PIECES;
  const int piece_elements = max(0, min(PIECE, head_size - piece * PIECE));
  const T* key_piece = keys + kv_head * key_head_stride + piece * PIECE * key_stride;
  const T* value_piece = values + kv_head * value_head_stride + piece * PIECE * value_stride;

  // Element offsets of the K and V row of a key, -1 behind the end.
  const auto slot_of = [&](int key) -> longlong2 {
    if (key >= end) return make_longlong2(-1, -1);
    const long long block = block_table[seq * table_stride + key / block_size * entry_stride], offset = key % block_size;
    return make_longlong2(block * key_block_stride + offset * key_slot_stride,
                          block * value_block_stride + offset * value_slot_stride);
  };
  const auto stage_tile = [&](int index) {
    T* key_tile = tiles + index % STAGES * 2 * tile * D;
    T* value_tile = key_tile + tile * D;
#pragma unroll 4
    for (int row = piece_row; row < tile; row += THREADS / PIECES) {
      const longlong2 slot = slots[index % 2 * tile + row];
      const int elements = slot.x < 0 ? 0 : piece_elements;
      const int at = swizzled<T, D>(row, piece);
      stage_piece(key_tile + at, elements ? key_piece + slot.x : keys, key_stride, elements, vector);
      stage_piece(value_tile + at, elements ? value_piece + slot.y : values, value_stride, elements, vector);
    }
    cp_async_commit();
  };

  const int num_tiles = (end - first + tile - 1) / tile;
  if (thread < tile) {
    slots[thread] = slot_of(first + thread);
    slots[tile + thread] = slot_of(min(static_cast<long long>(end), static_cast<long long>(first) + tile + thread));
  }
  for (int row = piece_row; row < rows; row += THREADS / PIECES) {
    const int elements = row < heads ? piece_elements : 0;
    const T* from = query + token * query_token_stride + (first_head + row) * query_head_stride + piece * PIECE * query_stride;
    stage_piece(query_tile + swizzled<T, D>(row, piece), elements ? from : query, query_stride, elements, query_vector);
  }
  __syncthreads();
  if (num_tiles > 0) stage_tile(0);

  Warp state;
  for (int index = 0; index < num_tiles; ++index) {
    cp_async_wait<0>();
    __syncthreads();  // tile `index` is there for every warp, and every warp is done with the one before it
    if (index + 1 < num_tiles) stage_tile(index + 1);
    longlong2 ahead = make_longlong2(-1, -1);
    if (index + 2 < num_tiles && thread < tile) ahead = slot_of(first + (index + 2) * tile + thread);

    const T* key_tile = tiles + index % STAGES * 2 * tile * D;
    const int visible = end - first - index * tile;
    for (int chunk = key_warp * Warp::CHUNK; chunk < min(tile, visible); chunk += key_warps * Warp::CHUNK)
      state.attend(query_tile, row_warp * Warp::ROWS, key_tile + chunk * D, key_tile + (tile + chunk) * D, visible - chunk,
                   scale);
    if (thread < tile) slots[index % 2 * tile + thread] = ahead;
  }

  // Merge the warps. `weighted` [WARPS][ROWS][D + MERGE_PAD] lies over the tiles, which nobody needs any more.
  cp_async_wait<0>();  // the query, where there was no tile
  __syncthreads();
  float* weighted = reinterpret_cast<float*>(shared);
  State* warp_states = reinterpret_cast<State*>(weighted + WARPS * Warp::ROWS * (D + MERGE_PAD));
  state.store(weighted + warp * Warp::ROWS * (D + MERGE_PAD), warp_states + warp * Warp::ROWS);
  __syncthreads();
  for (int i = thread; i < heads * (D / OCTET); i += THREADS) {
    const int row = i / (D / OCTET), column = i % (D / OCTET) * OCTET;
    const int source = row / Warp::ROWS * Warp::ROWS + row % Warp::ROWS;  // the row in the first of its warps
    float maximum = -kInfinity, sum = 0.0f, total[OCTET] = {};
    for (int w = 0; w < key_warps; ++w) maximum = fmaxf(maximum, warp_states[w * rows + source].maximum);
    for (int w = 0; w < key_warps; ++w) {
      const State part = warp_states[w * rows + source];
      const float factor = weight_of(part, maximum);
      const float* from = weighted + (w * rows + source) * (D + MERGE_PAD) + column;
      sum += part.sum * factor;
#pragma unroll
      for (int j = 0; j < OCTET; ++j) total[j] += from[j] * factor;
    }
    const int head = first_head + row, num_heads = num_kv_heads * group;
    if (splits.count <= 1) {
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int j = 0; j < OCTET; ++j) total[j] *= inverse;
      T* to = out + (token * num_heads + head) * head_size + column;
      store_octet(to, total, head_size - column, head_size % OCTET == 0);
      if (column == 0) lse[token * num_heads + head] = natural_log_sum(maximum, sum);
    } else {
      const long long at = (static_cast<long long>(seq) * num_heads + head) * max_splits + split;
      store_octet(partials + at * D + column, total, OCTET, true);
      if (column == 0) states[at] = {maximum, sum};
    }
  }
}

// Program: (sequence, query head). Threads share out the columns, OCTET each, and then the splits.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_splits(T* out, float* lse, const float* partials, const State* states, const int* seq_lens, long long length_stride,
              const int* query_start, long long start_stride, int head_size, int padded_head, int num_heads, int split_keys,
              int max_splits) {
  const int head = blockIdx.x % num_heads, seq = blockIdx.x / num_heads;
  const long long token = query_start[seq * start_stride];
  const Splits splits(seq_lens[seq * length_stride], split_keys, max_splits);
  if (splits.count <= 1 || query_start[(seq + 1) * start_stride] == token) return;

  const long long at = static_cast<long long>(blockIdx.x) * max_splits;
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  float maximum = -kInfinity, sum = 0.0f;
  for (int i = lane; i < splits.count; i += kWarpSize) maximum = fmaxf(maximum, states[at + i].maximum);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, lanes));
  for (int i = lane; i < splits.count; i += kWarpSize) sum += states[at + i].sum * weight_of(states[at + i], maximum);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kFullMask, sum, lanes);

  const int octets = padded_head / OCTET, ways = THREADS / octets;
  const int column = thread % octets * OCTET, way = thread / octets;
  float total[OCTET] = {};
#pragma unroll 4
  for (int i = way; i < splits.count; i += ways) {
    const float factor = weight_of(states[at + i], maximum);
    const float* from = partials + (at + i) * padded_head + column;
    const float4 low = bit_cast<float4>(load16(from)), high = bit_cast<float4>(load16(from + 4));
    total[0] += low.x * factor, total[1] += low.y * factor, total[2] += low.z * factor, total[3] += low.w * factor;
    total[4] += high.x * factor, total[5] += high.y * factor, total[6] += high.z * factor, total[7] += high.w * factor;
  }

  __shared__ float of_way[THREADS][OCTET + 1];
#pragma unroll
  for (int j = 0; j < OCTET; ++j) of_way[thread][j] = total[j];
  __syncthreads();
  if (way > 0) return;
  for (int w = 1; w < ways; ++w)
#pragma unroll
    for (int j = 0; j < OCTET; ++j) total[j] += of_way[w * octets + thread][j];
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int j = 0; j < OCTET; ++j) total[j] *= inverse;
  store_octet(out + (token * num_heads + head) * head_size + column, total, head_size - column, head_size % OCTET == 0);
  if (thread == 0) lse[token * num_heads + head] = natural_log_sum(maximum, sum);
}
