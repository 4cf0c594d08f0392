// Attention over a paged KV cache: decode, prefill, chunked prefill and mixed batches, split over the keys.
//
// Work: one item per (sequence, tile of its rows, split of the keys they see, KV head), the heads fastest, since heads of
// one key are neighbours in memory; the rows of a sequence are its queries times the group (paged_attention_splits.cuh).
// The host does not know the lengths, only the block table's width, and a program per possible item would mostly start in
// vain: so a bounded number of programs count off the items that exist (`Finder`). A program loads each key and value of
// its item once, for all rows of the tile (paged_attention_keys.cuh), and four warps make scores, softmax and weighted
// values of them (paged_attention_warps.cuh).
//
// Warps share out the tile's rows and then its keys; each keeps a softmax state of its own, and nothing but one barrier per
// tile of keys joins them until the end, where they are merged in shared memory. A tile of one split is finished there.
// Otherwise the partial result, weighted values and State, goes to scratch, and `reduce_splits` merges the splits.
//
// Features cost those who use them: a mask, soft cap, ALiBi or scales of slots lead to the general score, chunk by chunk,
// where a causal mask does so along the diagonal alone; elsewhere a score is the dot product times a number.
//
// Bytes moved: K and V of every tile of rows once (decode: of every sequence and KV head once, up to a group of 64, in
// float32 16), and for each split and row 4 (D + 2) bytes of scratch, written and read: 1.6 % of K and V for 512 keys of
// Llama-3-8B.
//
// Caches and queries may have any strides. Where rows are contiguous, multiples of 16 bytes and aligned, `vector` is
// set; else elements are loaded one by one into the same shared tile.
//
// A head longer than 256 is taken 256 columns at a time (`attend_wide`): an item is then for some columns of the result,
// and reads all columns of K for them. No serving model has such heads in this form; it is right, not fast.
//
// Code generation, NVRTC 13.2: see paged_attention_cupy.py.
//
// Never read: table entries behind the last used block and before the first, slots that no row of the tile sees; their
// place in the tile is zero.
#include "paged_attention_keys.cuh"
#include "paged_attention_results.cuh"

// The query rows of one KV head; strides in elements.
template <typename Warp>
struct Queries {
  using T = typename Warp::Element;
  const T* data;  // of the sequence's first query and the KV head's first query head
  long long token_stride, head_stride, stride;
  int group, head_size;
  bool vector;

  // Rows [first, first + rows) from `column` on, of which `exist` exist.
  __device__ void stage(T* to, int first, int rows, int exist, int column) const {
    constexpr int PIECE = 16 / sizeof(T), PIECES = Warp::HEAD / PIECE;
    const int piece = threadIdx.x % PIECES, at = column + piece * PIECE;
#pragma unroll 1
    for (int row = threadIdx.x / PIECES; row < rows; row += THREADS / PIECES) {
      const T* from = data + (first + row) / group * token_stride + (first + row) % group * head_stride;
      const int elements = row < exist ? max(0, min(PIECE, head_size - at)) : 0;
      stage_piece(to + swizzled<T, Warp::HEAD>(row, piece), elements ? from + at * stride : data, stride, elements, vector);
    }
  }
};

// The chunk of a tile that begins `from` keys behind the tile's first.
template <typename Warp>
__device__ Chunk chunk_of(const KeyTiles<Warp>& kv, const Range& range, int index, int from, bool plain) {
  Chunk chunk;
  chunk.first = kv.first + index * kv.tile + from;
  chunk.visible = kv.end - chunk.first;
  chunk.simple = plain && chunk.first >= range.all_first && min(chunk.first + Warp::CHUNK, kv.end) <= range.all_end;
  chunk.factors = kv.slot_scales ? kv.factor_tile(index) + from : nullptr;
  return chunk;
}

// A warp's rows from `row` on over the keys, every key_warps-th chunk of a tile from key_warp on.
template <typename Warp, typename T = typename Warp::Element>
__device__ void attend(Warp& state, const KeyTiles<Warp>& kv, T* query_tile, const Range& range, const Scoring& scoring,
                       bool plain, int row, int key_warp, int key_warps) {
  kv.note(0, kv.look_up(0));
  kv.note(1, kv.look_up(1));
#pragma unroll 1
  for (int index = -1; index < kv.count(); ++index) {
    if (index >= 0) cp_async_wait<0>();
    __syncthreads();  // tile `index` is there for every warp, and every warp is done with the one before it
    if (index + 1 < kv.count()) kv.start(index + 1, 0);
    if (index < 0) continue;  // the first tile is on its way
    const auto ahead = kv.look_up(index + 2);
    if (kv.format != UNQUANTISED) {
      kv.decode(index, true);
      __syncthreads();
    }
#pragma unroll 1
    for (int from = key_warp * Warp::CHUNK; from < min(kv.tile, kv.end - kv.first - index * kv.tile);
         from += key_warps * Warp::CHUNK) {
      typename Warp::Dots dots;
      Warp::add_dots(query_tile, row, kv.key_tile(index) + from * Warp::HEAD, dots);
      state.absorb(dots, row, kv.value_tile(index) + from * Warp::HEAD, chunk_of(kv, range, index, from, plain), scoring);
    }
    kv.note(index + 2, ahead);
  }
}

// The same for heads longer than HEAD, one chunk of a tile per key warp: `parts` times HEAD columns, of V those of `part`.
template <typename Warp, typename T = typename Warp::Element>
__device__ void attend_wide(Warp& state, const KeyTiles<Warp>& kv, T* query_tile, const Queries<Warp>& queries,
                            int first_row, int rows, int exist, int parts, int part, const Range& range,
                            const Scoring& scoring, bool plain, int row, int key_warp) {
#pragma unroll 1
  for (int index = 0; index < kv.count(); ++index) {
    typename Warp::Dots dots;
    const int from = key_warp * Warp::CHUNK;
    const bool some = from < min(kv.tile, kv.end - kv.first - index * kv.tile);
    kv.note(index, kv.look_up(index));
#pragma unroll 1
    for (int step = 1; step <= parts; ++step) {  // the result's own columns last, with their values
      const int column = (part + step) % parts * Warp::HEAD;
      __syncthreads();
      queries.stage(query_tile, first_row, rows, exist, column);
      kv.start(index, column, step == parts);
      cp_async_wait_all();
      __syncthreads();
      if (kv.format != UNQUANTISED) {
        kv.decode(index, step == parts);
        __syncthreads();
      }
      if (some) Warp::add_dots(query_tile, row, kv.key_tile(index) + from * Warp::HEAD, dots);
    }
    if (some)
      state.absorb(dots, row, kv.value_tile(index) + from * Warp::HEAD, chunk_of(kv, range, index, from, plain), scoring);
  }
}

// partials, states: Scratch. Dynamic shared memory: query tile, tiles of K and V, 2 * tile slots, factors; at the end, the
// warps' partial results. tile1, 2, 4: keys of a tile where 1, 2 or 4 warps share out the rows, multiples of 16, at most
// THREADS. cap: in base 2, 0 for none. window: NO_WINDOW for none. alibi_slopes, sinks, key_scales and value_scales are
// null where the flags say so: bits 0 to 5 of `flags` are causal, ALiBi, sinks, scales of K, of V, and scales per slot;
// 6 and 7 are 16-byte accesses of the caches and of the query.
template <typename Warp, typename T = typename Warp::Element>
__global__ void __launch_bounds__(THREADS, Warp::PROGRAMS_PER_SM)
paged_attention(T* out, float* lse, float* partials, State* states, const int* seq_lens, long long length_stride,
                const int* query_start, long long start_stride, const float* sinks, long long sink_stride,
                const T* query, long long query_token_stride, long long query_head_stride, long long query_stride,
                const void* keys, long long key_block_stride, long long key_slot_stride, long long key_head_stride,
                long long key_stride, const void* values, long long value_block_stride, long long value_slot_stride,
                long long value_head_stride, long long value_stride, const int* block_table, long long table_stride,
                long long entry_stride, const float* alibi_slopes, long long slope_stride, const float* key_scales,
                long long key_scale_block, long long key_scale_slot, long long key_scale_head, const float* value_scales,
                long long value_scale_block, long long value_scale_slot, long long value_scale_head,
                long long token_slots, long long seq_slots, long long head_slots, float scale, float cap,
                unsigned window, int flags, int format, int head_size, int block_size, int num_seqs, int num_kv_heads,
                int group, int row_warps, int split_keys, int max_splits, int parts, int tile1, int tile2, int tile4) {
  constexpr int D = Warp::HEAD, MERGED = D + MERGE_PAD;
  const Sequences sequences = {seq_lens,   length_stride, query_start, start_stride, num_seqs,         group,
                               Warp::ROWS, row_warps,     split_keys,  max_splits,   (flags & 1) != 0, window};
  const Scratch scratch = {partials, states, token_slots, seq_slots, head_slots, Warp::WIDE ? parts * D : D};
  const Results<T> results = {out, lse, flags & 4 ? sinks : nullptr, sink_stride, head_size};
  const bool slopes = flags & 2, slot_scales = flags & 32;
  const int thread = threadIdx.x, warp = thread / kWarpSize, num_heads = num_kv_heads * group;
  const int part_count = Warp::WIDE ? parts : 1, each_unit = num_kv_heads * part_count;

  extern __shared__ __align__(16) unsigned char shared[];
  T* query_tile = reinterpret_cast<T*>(shared);
  float* weighted = reinterpret_cast<float*>(shared);  // [WARPS][ROWS][MERGED], when the tiles are done with
  State* warp_states = reinterpret_cast<State*>(weighted + WARPS * Warp::ROWS * MERGED);
  __shared__ Finder finder;
  __shared__ Row tile_rows[WARPS * Warp::ROWS];

  for (int item = blockIdx.x;
       finder.find(num_seqs, item / each_unit, [&](int seq) { return sequences.units(seq); }); item += gridDim.x) {
    const int seq = finder.seq, kv_head = item % each_unit / part_count, part = item % part_count;
    const Sequence sequence = sequences[seq];
    const int split = finder.index / sequence.tiles;
    const int row_tile = sequence.tiles - 1 - finder.index % sequence.tiles;  // the last see most keys
    const Range range = sequences.range(sequence, row_tile);
    const Splits splits = sequences.splits(sequence, range);
    if (split >= max(splits.count, 1)) continue;
    const int rows = sequence.tile_rows, first_row = row_tile * rows, exist = min(rows, sequence.rows - first_row);
    const int row_warp = warp % sequence.row_warps, key_warp = warp / sequence.row_warps;
    const int key_warps = WARPS / sequence.row_warps, row = row_warp * Warp::ROWS;
    const int most_keys = sequence.row_warps == 1 ? tile1 : sequence.row_warps == 2 ? tile2 : tile4;
    const int tile = Warp::WIDE ? min(most_keys, key_warps * Warp::CHUNK) : most_keys;
    const int first = range.first + split * splits.keys;
    unsigned char* room = shared + rows * D * sizeof(T);
    longlong2* slots = reinterpret_cast<longlong2*>(room + STAGES * 2 * tile * D * sizeof(T));

    const KeyTiles<Warp> kv = {
        {keys, key_block_stride, key_slot_stride, key_head_stride, key_stride,
         {flags & 8 ? key_scales : nullptr, key_scale_block, key_scale_slot, key_scale_head}},
        {values, value_block_stride, value_slot_stride, value_head_stride, value_stride,
         {flags & 16 ? value_scales : nullptr, value_scale_block, value_scale_slot, value_scale_head}},
        block_table + seq * table_stride, entry_stride, block_size, head_size, kv_head, format, first,
        min(first + splits.keys, range.end), tile, (flags & 64) != 0, slot_scales, room, slots,
        reinterpret_cast<float2*>(slots + 2 * tile)};
    const float key_scale = slot_scales ? 1.0f : kv.keys.scales.of_head(kv_head);
    const Scoring scoring = {scale * key_scale, cap, window, slopes, tile_rows};
    const bool plain = cap == 0 && !slopes && !slot_scales;
    const Queries<Warp> queries = {
        query + sequence.token * query_token_stride + kv_head * group * query_head_stride,
        query_token_stride, query_head_stride, query_stride, group, head_size, (flags & 128) != 0};

    if (thread < exist) {
      const int i = (first_row + thread) / group, head = kv_head * group + (first_row + thread) % group;
      tile_rows[thread] = {static_cast<long long>(sequence.token + i) * num_heads + head,
                           flags & 1 ? sequence.length - sequence.queries + i : 0x7FFFFFFF,
                           slopes ? alibi_slopes[head * slope_stride] * kLog2e : 0.0f};
    } else if (thread < rows) {
      tile_rows[thread] = {0, 0x7FFFFFFF, 0.0f};
    }

    Warp state(slot_scales);
    if constexpr (Warp::WIDE) {
      attend_wide(state, kv, query_tile, queries, first_row, rows, exist, parts, part, range, scoring, plain, row, key_warp);
    } else {
      queries.stage(query_tile, first_row, rows, exist, 0);
      attend(state, kv, query_tile, range, scoring, plain, row, key_warp, key_warps);
    }

    cp_async_wait_all();  // where there was no key, the query is still on its way, to where the results go
    __syncthreads();
    state.store(weighted + warp * Warp::ROWS * MERGED, warp_states + warp * Warp::ROWS);
    __syncthreads();
    const float value_scale = slot_scales ? 1.0f : kv.values.scales.of_head(kv_head);
#pragma unroll 1
    for (int i = thread; i < exist * (D / OCTET); i += THREADS) {
      const int own = i / (D / OCTET), column = i % (D / OCTET) * OCTET;
      float total[OCTET];
      const State merged = merge_warps(weighted + own * MERGED + column, MERGED, warp_states + own, rows, key_warps, total);
#pragma unroll
      for (int j = 0; j < OCTET; ++j) total[j] *= value_scale;
      if (splits.count > 1) {
        const long long at = scratch.slot(sequence, seq, kv_head, split, first_row + own);
        store_octet(scratch.partials + at * scratch.columns + part * D + column, total, OCTET, true);
        if (part + column == 0) scratch.states[at] = merged;
      } else {
        const int head = kv_head * group + (first_row + own) % group;
        results.finish(tile_rows[own].out, head, part * D + column, total, merged);
      }
    }
  }
}

// Program: (sequence, query head, query), as many as have splits. Threads share out the columns, OCTET each, and then the
// splits.
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
  __shared__ Finder finder;
  __shared__ float of_way[THREADS][OCTET + 1];

  for (int item = blockIdx.x;
       finder.find(num_seqs, item / num_kv_heads, [&](int seq) { return sequences.split_rows(seq); }); item += gridDim.x) {
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
        total[0] += low.x * factor, total[1] += low.y * factor, total[2] += low.z * factor, total[3] += low.w * factor;
        total[4] += high.x * factor, total[5] += high.y * factor, total[6] += high.z * factor, total[7] += high.w * factor;
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
