// The loops of one program over its tiles of keys: heads of up to 256 columns in a pipeline, longer ones piece by
// piece.
#pragma once
#include "paged_attention_keys.cuh"

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
    for (int row = threadIdx.x / PIECES; row < rows; row += Warp::THREADS / PIECES) {
      const T* from = data + (first + row) / group * token_stride + (first + row) % group * head_stride;
      const int elements = row < exist ? max(0, min(PIECE, head_size - at)) : 0;
      stage_piece(to + swizzled<T, Warp::HEAD>(row, piece), elements ? from + at * stride : data, stride, elements,
                  vector);
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
      state.absorb(dots, row, kv.value_tile(index) + from * Warp::HEAD, chunk_of(kv, range, index, from, plain),
                   scoring);
    }
    kv.note(index + 2, ahead);
  }
}

// The same for heads longer than HEAD, one chunk of a tile per key warp: `parts` times HEAD columns, of V those of
// `part`.
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
      state.absorb(dots, row, kv.value_tile(index) + from * Warp::HEAD, chunk_of(kv, range, index, from, plain),
                   scoring);
  }
}
