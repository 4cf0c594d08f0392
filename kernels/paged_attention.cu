// Attention of one query per sequence over a paged KV cache (decode), split over the keys.
//
// Work: one item per (sequence, split of its keys, KV head, tile of its query heads), the heads fastest, since heads
// of one key are neighbours in memory. The host does not know the lengths, only the block table's width, and a
// program per possible split would mostly start in vain: so a bounded number of programs count off the items that
// exist (`Finder`). A program loads each key and value of its split once, for all query heads of the tile:
//
//   block table -> slot offsets, two tiles ahead, in shared memory   (one division and table read for each key)
//   K and V     -> shared memory, one tile ahead, by cp.async        (16 bytes a thread)
//   four warps  -> scores, softmax, weighted values                  (paged_attention_warps.cuh)
//
// Warps share out the tile's rows (query heads) and then its keys; each keeps a softmax state of its own, and nothing
// but one barrier per tile joins them until the end, where they are merged in shared memory. A sequence of one split
// is finished there. Otherwise the partial result, weighted values and State, goes to scratch, and `reduce_splits`
// merges the splits.
//
// Splits depend on the sequence's own length alone, so its result does not depend, to the bit, on what it is batched
// with.
//
// Bytes moved: K and V of every sequence once (per tile of 64, for float32 16, query heads of a KV head), and for
// each split and query head 4 (D + 2) bytes of scratch, written and read: 1.6 % of K and V for 512 keys of
// Llama-3-8B.
//
// Caches and queries may have any strides. Where rows are contiguous, multiples of 16 bytes and aligned, `vector` is
// set; else elements are loaded one by one into the same shared tile.
//
// Code generation, NVRTC 13.2: see paged_attention_cupy.py.
//
// Never read: table entries behind the last used block, slots behind the sequence's end; their place in the tile is
// zero.
#include "paged_attention_splits.cuh"
#include "paged_attention_warps.cuh"

constexpr int STAGES = 2;  // tiles in shared memory: one in use, one in flight. More would cost programs per SM
constexpr int OCTET = 8;   // columns of the result that a thread writes at a time

// 16 bytes of a row to shared memory; the first `elements` exist, the others become zero.
template <typename T>
__device__ void stage_piece(T* to, const T* from, long long stride, int elements, bool vector) {
  if (vector) {
    cp_async16(to, from, elements * static_cast<int>(sizeof(T)));
  } else {
#pragma unroll 1  // the slow way need not be long as well
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

// Eight columns of a row summed over the key warps, whose results are `rows` rows apart.
template <typename Warp>
__device__ State merge_warps(const float* weighted, const State* states, int rows, int key_warps,
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
    for (int j = 0; j < OCTET; ++j) total[j] += weighted[w * rows * (Warp::HEAD + MERGE_PAD) + j] * factor;
  }
  return merged;
}

// Divide by the denominator and write eight columns of `row` of out, and lse with the first.
template <typename T>
__device__ void finish(T* out, float* lse, long long row, int column, int head_size, float (&total)[OCTET],
                       const State& state) {
  const float inverse = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
#pragma unroll
  for (int j = 0; j < OCTET; ++j) total[j] *= inverse;
  store_octet(out + row * head_size + column, total, head_size - column, head_size % OCTET == 0);
  if (column == 0) lse[row] = natural_log_sum(state.maximum, state.sum);
}

// Where the rows of K or V of one KV head lie, strides in elements.
template <typename T>
struct Cache {
  const T* data;
  long long block_stride, slot_stride, head_stride, stride;
  __device__ long long row(long long block, int slot) const { return block * block_stride + slot * slot_stride; }
};

// The keys of one item: element offsets of their K and V rows by the block table, and their tiles in shared memory.
template <typename Warp>
struct KeyTiles {
  using T = typename Warp::Element;
  static constexpr int D = Warp::HEAD, PIECE = 16 / sizeof(T), PIECES = D / PIECE, ROWS_AT_ONCE = THREADS / PIECES;
  static_assert(THREADS % PIECES == 0, "a thread stages the same piece of every row");

  Cache<T> keys, values;
  const int* table;  // the sequence's row
  long long entry_stride;
  int block_size, first, end, tile, elements;  // `elements` of this thread's piece exist
  bool vector;
  T* tiles;          // [STAGES][K, V][tile][D]
  longlong2* slots;  // [2][tile]

  __device__ int count() const { return (end - first + tile - 1) / tile; }
  __device__ T* key_tile(int index) const { return tiles + index % STAGES * 2 * tile * D; }
  __device__ T* value_tile(int index) const { return key_tile(index) + tile * D; }

  // The rows of this thread's key in a tile, -1 behind the end.
  __device__ longlong2 look_up(int index) const {
    const int behind = index * tile + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= tile || behind >= end - first) return make_longlong2(-1, -1);
    const int key = first + behind;
    const long long block = table[key / block_size * entry_stride];
    return make_longlong2(keys.row(block, key % block_size), values.row(block, key % block_size));
  }

  __device__ void note(int index, longlong2 slot) const {
    if (static_cast<int>(threadIdx.x) < tile) slots[index % 2 * tile + threadIdx.x] = slot;
  }

  __device__ void stage(int index) const {
    const int piece = threadIdx.x % PIECES;
    const T* key_piece = keys.data + piece * PIECE * keys.stride;
    const T* value_piece = values.data + piece * PIECE * values.stride;
    const auto stage_row = [&](int row) {
      const longlong2 slot = slots[index % 2 * tile + row];
      const int at = swizzled<T, D>(row, piece), exist = slot.x < 0 ? 0 : elements;
      stage_piece(key_tile(index) + at, exist ? key_piece + slot.x : keys.data, keys.stride, exist, vector);
      stage_piece(value_tile(index) + at, exist ? value_piece + slot.y : values.data, values.stride, exist, vector);
    };
    if (vector) {
#pragma unroll 4
      for (int row = threadIdx.x / PIECES; row < tile; row += ROWS_AT_ONCE) stage_row(row);
    } else {
#pragma unroll 1
      for (int row = threadIdx.x / PIECES; row < tile; row += ROWS_AT_ONCE) stage_row(row);
    }
    cp_async_commit();
  }
};

// out, lse: contiguous. partials float [num_seqs, num_query_heads, max_splits, HEAD], states alike, of two floats.
// Dynamic shared memory: query tile, STAGES tiles of K and V, 2 * tile slots; at the end, the warps' partial results.
// `tile` is a multiple of CHUNK, at most THREADS; `row_warps` (1, 2, 4) warps share out the rows.
template <typename Warp, typename T = typename Warp::Element>
__global__ void __launch_bounds__(THREADS, Warp::PROGRAMS_PER_SM)
paged_attention(T* out, float* lse, float* partials, State* states, const T* query, long long query_token_stride,
                long long query_head_stride, long long query_stride, const T* keys, long long key_block_stride,
                long long key_slot_stride, long long key_head_stride, long long key_stride, const T* values,
                long long value_block_stride, long long value_slot_stride, long long value_head_stride,
                long long value_stride, const int* block_table, long long table_stride, long long entry_stride,
                const int* seq_lens, long long length_stride, const int* query_start, long long start_stride,
                float scale, int head_size, int block_size, int num_seqs, int num_kv_heads, int group, int row_tiles,
                int row_warps, int tile, int split_keys, int max_splits, int vector, int query_vector) {
  constexpr int D = Warp::HEAD, PIECE = KeyTiles<Warp>::PIECE, PIECES = KeyTiles<Warp>::PIECES;
  const Sequences sequences = {seq_lens, length_stride, query_start, start_stride, num_seqs, split_keys, max_splits};
  const int head_tiles = num_kv_heads * row_tiles, num_heads = num_kv_heads * group;
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  const int row_warp = warp % row_warps, key_warp = warp / row_warps, key_warps = WARPS / row_warps;
  const int rows = Warp::ROWS * row_warps;
  const int piece = thread % PIECES, elements = max(0, min(PIECE, head_size - piece * PIECE));

  extern __shared__ __align__(16) unsigned char shared[];
  T* query_tile = reinterpret_cast<T*>(shared);
  T* tiles = query_tile + rows * D;
  float* weighted = reinterpret_cast<float*>(shared);  // [WARPS][ROWS][D + MERGE_PAD], when the tiles are done with
  State* warp_states = reinterpret_cast<State*>(weighted + WARPS * Warp::ROWS * (D + MERGE_PAD));
  __shared__ Finder finder;

  for (int item = blockIdx.x; finder.find(sequences, item / head_tiles); item += gridDim.x) {
    const int seq = finder.seq, split = finder.split;
    const int kv_head = item % head_tiles / row_tiles, first_row = item % row_tiles * rows;
    const int first_head = kv_head * group + first_row, heads = min(rows, group - first_row);
    const long long token = sequences.token(seq);
    const int length = sequences.length(seq);
    const Splits splits = sequences.splits(seq);
    const int first = split * splits.keys, end = first + min(splits.keys, length - first);
    const KeyTiles<Warp> kv = {
        {keys + kv_head * key_head_stride, key_block_stride, key_slot_stride, key_head_stride, key_stride},
        {values + kv_head * value_head_stride, value_block_stride, value_slot_stride, value_head_stride, value_stride},
        block_table + seq * table_stride, entry_stride, block_size, first, end, tile, elements, vector != 0, tiles,
        reinterpret_cast<longlong2*>(tiles + STAGES * 2 * tile * D)};

    kv.note(0, kv.look_up(0));
    kv.note(1, kv.look_up(1));
#pragma unroll 1
    for (int row = thread / PIECES; row < rows; row += THREADS / PIECES) {
      const T* from = query + token * query_token_stride + (first_head + row) * query_head_stride;
      const int exist = row < heads ? elements : 0;
      stage_piece(query_tile + swizzled<T, D>(row, piece), exist ? from + piece * PIECE * query_stride : query,
                  query_stride, exist, query_vector != 0);
    }

    Warp state;
#pragma unroll 1
    for (int index = -1; index < kv.count(); ++index) {
      if (index >= 0) cp_async_wait<0>();
      __syncthreads();  // tile `index` is there for every warp, and every warp is done with the one before it
      if (index + 1 < kv.count()) kv.stage(index + 1);
      if (index < 0) continue;  // the first tile is on its way
      const longlong2 ahead = kv.look_up(index + 2);
      const int visible = end - first - index * tile;
#pragma unroll 1
      for (int chunk = key_warp * Warp::CHUNK; chunk < min(tile, visible); chunk += key_warps * Warp::CHUNK)
        state.attend(query_tile, row_warp * Warp::ROWS, kv.key_tile(index) + chunk * D,
                     kv.value_tile(index) + chunk * D, visible - chunk, scale);
      kv.note(index + 2, ahead);
    }

    cp_async_wait_all();  // where there was no key, the query is still on its way, to where the results go
    __syncthreads();
    state.store(weighted + warp * Warp::ROWS * (D + MERGE_PAD), warp_states + warp * Warp::ROWS);
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < heads * (D / OCTET); i += THREADS) {
      const int row = i / (D / OCTET), column = i % (D / OCTET) * OCTET;
      float total[OCTET];
      const float* from = weighted + row * (D + MERGE_PAD) + column;
      const State merged = merge_warps<Warp>(from, warp_states + row, rows, key_warps, total);
      const int head = first_head + row;
      if (splits.count > 1) {
        const long long at = (static_cast<long long>(seq) * num_heads + head) * max_splits + split;
        store_octet(partials + at * D + column, total, OCTET, true);
        if (column == 0) states[at] = merged;
      } else {
        finish(out, lse, token * num_heads + head, column, head_size, total, merged);
      }
    }
  }
}

// Program: (sequence, query head). Threads share out the columns, OCTET each, and then the splits.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_splits(T* out, float* lse, const float* partials, const State* states, const int* seq_lens,
              long long length_stride, const int* query_start, long long start_stride, int head_size, int padded_head,
              int num_seqs, int num_heads, int split_keys, int max_splits) {
  const Sequences sequences = {seq_lens, length_stride, query_start, start_stride, num_seqs, split_keys, max_splits};
  const int head = blockIdx.x % num_heads, seq = blockIdx.x / num_heads;
  const int count = sequences.splits(seq).count;
  if (count <= 1 || !sequences.has_query(seq)) return;

  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const State* parts = states + static_cast<long long>(blockIdx.x) * max_splits;
  State merged = {-kInfinity, 0.0f};
#pragma unroll 1
  for (int i = lane; i < count; i += kWarpSize) merged.maximum = fmaxf(merged.maximum, parts[i].maximum);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    merged.maximum = fmaxf(merged.maximum, __shfl_xor_sync(kFullMask, merged.maximum, lanes));
#pragma unroll 1
  for (int i = lane; i < count; i += kWarpSize) merged.sum += parts[i].sum * weight_of(parts[i], merged.maximum);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) merged.sum += __shfl_xor_sync(kFullMask, merged.sum, lanes);

  const int octets = padded_head / OCTET, ways = THREADS / octets;
  const int column = thread % octets * OCTET, way = thread / octets;
  const float* columns = partials + static_cast<long long>(blockIdx.x) * max_splits * padded_head + column;
  float total[OCTET] = {};
#pragma unroll 4
  for (int i = way; i < count; i += ways) {
    const float factor = weight_of(parts[i], merged.maximum);
    const float4 low = bit_cast<float4>(load16(columns + static_cast<long long>(i) * padded_head));
    const float4 high = bit_cast<float4>(load16(columns + static_cast<long long>(i) * padded_head + 4));
    total[0] += low.x * factor, total[1] += low.y * factor, total[2] += low.z * factor, total[3] += low.w * factor;
    total[4] += high.x * factor, total[5] += high.y * factor, total[6] += high.z * factor, total[7] += high.w * factor;
  }

  __shared__ float of_way[THREADS][OCTET + 1];
#pragma unroll
  for (int j = 0; j < OCTET; ++j) of_way[thread][j] = total[j];
  __syncthreads();
  if (way > 0) return;
#pragma unroll 1
  for (int w = 1; w < ways; ++w)
#pragma unroll
    for (int j = 0; j < OCTET; ++j) total[j] += of_way[w * octets + thread][j];
  const long long row = static_cast<long long>(sequences.token(seq)) * num_heads + head;
  finish(out, lse, row, column, head_size, total, merged);
}
