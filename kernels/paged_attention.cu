// Attention over a paged KV cache: decode, prefill, chunked prefill and mixed batches, split over the keys.
//
// Work: one item per (sequence, tile of its rows, split of the keys they see, KV head), the heads fastest, since heads
// of one key are neighbours in memory; the rows of a sequence are its queries times the group
// (paged_attention_splits.cuh). The host does not know the lengths, only the block table's width, and a program per
// possible item would mostly start in vain: so a bounded number of programs count off the items that exist (`Finder`).
// A program loads each key and value of its item once, for all rows of the tile (paged_attention_keys.cuh), and four
// warps make scores, softmax and weighted values of them (paged_attention_warps.cuh).
//
// Warps share out the tile's rows and then its keys; each keeps a softmax state of its own, and nothing but one barrier
// per tile of keys joins them until the end, where they are merged in shared memory. A tile of one split is finished
// there. Otherwise the partial result, weighted values and State, goes to scratch, and paged_attention_reduce.cu merges
// the splits.
//
// Features cost those who use them: a mask, soft cap, ALiBi or scales of slots lead to the general score, chunk by
// chunk, where a causal mask does so along the diagonal alone; elsewhere a score is the dot product times a number.
//
// Bytes moved: K and V of every tile of rows once (decode: of every sequence and KV head once, up to a group of 128),
// and for each split and row 4 (D + 2) bytes of scratch, written and read: 1.6 % of K and V for 512 keys
// of Llama-3-8B.
//
// Caches and queries may have any strides. Where rows are contiguous, multiples of 16 bytes and aligned, `vector` is
// set; else elements are loaded one by one into the same shared tile.
//
// A head longer than 256 is taken 256 columns at a time (`attend_wide`): an item is then for some columns of the
// result, and reads all columns of K for them. Right, but not fast: who serves such heads (MLA) shares K with V.
//
// Code generation, NVRTC 13.2: see paged_attention_cupy.py.
//
// Never read: table entries behind the last used block and before the first, slots that no row of the tile sees; their
// place in the tile is zero.
#include "paged_attention_loops.cuh"
#include "paged_attention_results.cuh"

constexpr int MERGED_WARPS = 4;  // whose results are in shared memory at a time

// partials, states: Scratch. Dynamic shared memory: query tile, tiles of K and V, 2 * tile slots, factors; at the end,
// the warps' partial results. tile1, 2, 4: keys of a tile where 1, 2 or more warps share out the rows, multiples of 16,
// at most THREADS. scale, value_factor: of all scores and values. cap, inverse_cap: as in Scoring. window: NO_WINDOW
// for none.
// Bits of `flags`: 0 causal; 1 to 4 whether alibi_slopes, sinks, key_scales, value_scales are there to be read; 5 some
// scale is of a slot; 6 the caches, 7 the query are accessed 16 bytes at a time.
template <typename Warp, typename T = typename Warp::Element>
__global__ void __launch_bounds__(Warp::THREADS, Warp::PROGRAMS_PER_SM)
paged_attention(T* out, float* lse, float* partials, State* states, const int* seq_lens, long long length_stride,
                const int* query_start, long long start_stride, const float* sinks, long long sink_stride,
                const T* query, long long query_token_stride, long long query_head_stride, long long query_stride,
                const void* keys, long long key_block_stride, long long key_slot_stride, long long key_head_stride,
                long long key_stride, const void* values, long long value_block_stride, long long value_slot_stride,
                long long value_head_stride, long long value_stride, const int* block_table, long long table_stride,
                long long entry_stride, const float* alibi_slopes, long long slope_stride, const float* key_scales,
                long long key_scale_block, long long key_scale_slot, long long key_scale_head,
                const float* value_scales, long long value_scale_block, long long value_scale_slot,
                long long value_scale_head, long long token_slots, long long seq_slots, long long head_slots,
                float scale, float value_factor, float cap, float inverse_cap, unsigned window, int flags, int format,
                int head_size, int block_size, int num_seqs, int num_kv_heads, int group, int row_warps, int split_keys,
                int max_splits, int parts, int tile1, int tile2, int tile4) {
  constexpr int D = Warp::HEAD, MERGED = D + MERGE_PAD, THREADS = Warp::THREADS;
  const Sequences sequences = {seq_lens,   length_stride, query_start, start_stride, num_seqs,         group,
                               Warp::ROWS, row_warps,     split_keys,  max_splits,   (flags & 1) != 0, window};
  const Scratch scratch = {partials, states, token_slots, seq_slots, head_slots, Warp::WIDE ? parts * D : D};
  const Results<T> results = {out, lse, flags & 4 ? sinks : nullptr, sink_stride, head_size};
  const bool slopes = flags & 2, slot_scales = flags & 32;
  const int thread = threadIdx.x, warp = thread / kWarpSize, num_heads = num_kv_heads * group;
  const int part_count = Warp::WIDE ? parts : 1, each_unit = num_kv_heads * part_count;

  extern __shared__ __align__(16) unsigned char shared[];
  T* query_tile = reinterpret_cast<T*>(shared);
  float* weighted = reinterpret_cast<float*>(shared);  // [MERGED_WARPS][ROWS][MERGED], when the tiles are done with
  State* warp_states = reinterpret_cast<State*>(weighted + MERGED_WARPS * Warp::ROWS * MERGED);
  __shared__ Finder<THREADS> finder;
  __shared__ Row tile_rows[Warp::WARPS * Warp::ROWS];

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
    const int key_warps = Warp::WARPS / sequence.row_warps, row = row_warp * Warp::ROWS;
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
    const Scoring scoring = {scale * key_scale, cap, inverse_cap, window, slopes, tile_rows};
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
      attend_wide(state, kv, query_tile, queries, first_row, rows, exist, parts, part, range, scoring, plain, row,
                  key_warp);
    } else {
      queries.stage(query_tile, first_row, rows, exist, 0);
      attend(state, kv, query_tile, range, scoring, plain, row, key_warp, key_warps);
    }

    const float value_scale = value_factor * (slot_scales ? 1.0f : kv.values.scales.of_head(kv_head));
    cp_async_wait_all();  // where there was no key, the query is still on its way, to where the results go
    for (int merging = 0; merging < Warp::WARPS; merging += MERGED_WARPS) {
      const int above = merging * Warp::ROWS;  // eight warps have all shared out the rows
      __syncthreads();
      if (merging <= warp && warp < merging + MERGED_WARPS)
        state.store(weighted + (warp - merging) * Warp::ROWS * MERGED, warp_states + (warp - merging) * Warp::ROWS);
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < min(exist - above, MERGED_WARPS * Warp::ROWS) * (D / OCTET); i += THREADS) {
        const int own = i / (D / OCTET), column = i % (D / OCTET) * OCTET, row_of_tile = above + own;
        float total[OCTET];
        const State merged =
            merge_warps(weighted + own * MERGED + column, MERGED, warp_states + own, rows, key_warps, total);
#pragma unroll
        for (int j = 0; j < OCTET; ++j) total[j] *= value_scale;
        if (splits.count > 1) {
          const long long at = scratch.slot(sequence, seq, kv_head, split, first_row + row_of_tile);
          store_octet(scratch.partials + at * scratch.columns + part * D + column, total, OCTET, true);
          if (part + column == 0) scratch.states[at] = merged;
        } else {
          const int head = kv_head * group + (first_row + row_of_tile) % group;
          results.finish(tile_rows[row_of_tile].out, head, part * D + column, total, merged);
        }
      }
    }
  }
}
