// Keys and values of one program on their way to shared memory: block table, tiles by cp.async, quantised codes.
//
//   block table -> slot offsets, two tiles ahead, in shared memory   (one division and table read for each key)
//   K and V     -> shared memory, one tile ahead, by cp.async        (16 bytes a thread)
//
// Of a quantised cache the codes come the same way, and when their tile is there they are decoded, exactly and in
// pairs, to a tile of the queries' type. Scales never touch them: a key's multiplies its scores, a value's its weights,
// so that no code times a scale has to fit into 16 bits.
#pragma once
#include "paged_attention_warps.cuh"

constexpr int STAGES = 2;        // tiles in shared memory: one in use, one in flight. More would cost programs per SM
constexpr int FACTOR_TILES = 3;  // tiles whose factors are kept: from two ahead to the one in use

enum Format { UNQUANTISED = 0, E4M3 = 1, E5M2 = 2, INT8 = 3 };

// 16 bytes of a row to shared memory; the first `elements` exist, the others become zero.
template <typename T>
__device__ void stage_piece(T* to, const T* from, long long stride, int elements, bool vector) {
  if (vector) {
    cp_async16(to, from, elements * static_cast<int>(sizeof(T)));
  } else {
#pragma unroll 1  // the slow way need not be long as well
    for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) to[i] = i < elements ? from[i * stride] : T();
  }
}

// Four codes, the first in the low byte. An e4m3 code lies in a half as a number 2^8 times smaller, subnormal numbers
// included; an int8 code plus 128 is the low byte of the half 1024 + 128 + code.
__device__ inline void decode4(unsigned codes, int format, __half2 (&pairs)[2]) {
  if (format == INT8) {
    const __half2 offset = __floats2half2_rn(1152.0f, 1152.0f);
    const unsigned bytes = codes ^ 0x80808080u;
    pairs[0] = __hsub2(bit_cast<__half2>(__byte_perm(bytes, 0x64646464u, 0x4140)), offset);
    pairs[1] = __hsub2(bit_cast<__half2>(__byte_perm(bytes, 0x64646464u, 0x4342)), offset);
    return;
  }
  unsigned halves[2] = {__byte_perm(codes, 0, 0x1404), __byte_perm(codes, 0, 0x3424)};
  if (format == E4M3) {
    const bool some_nan = ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned small = (halves[i] & 0x80008000u) | ((halves[i] & 0x7F007F00u) >> 1);
      const unsigned nan = some_nan ? (((halves[i] & 0x7F007F00u) + 0x01000100u) >> 15 & 0x00010001u) * 0x7E00u : 0;
      const __half2 number = __hmul2(bit_cast<__half2>(small), __floats2half2_rn(256.0f, 256.0f));
      halves[i] = bit_cast<unsigned>(number) | nan;
    }
  }
  pairs[0] = bit_cast<__half2>(halves[0]);
  pairs[1] = bit_cast<__half2>(halves[1]);
}

// The codes of one 16-byte piece of T, decoded; to bfloat16 where `in_bfloat16`, which holds them exactly as well.
template <typename T>
__device__ uint4 decode_piece(const unsigned char* codes, int format, bool in_bfloat16) {
  __half2 pairs[2];
  if constexpr (sizeof(T) == 4) {
    decode4(*reinterpret_cast<const unsigned*>(codes), format, pairs);
    const float2 low = to_float2(pairs[0]), high = to_float2(pairs[1]);
    return bit_cast<uint4>(make_float4(low.x, low.y, high.x, high.y));
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(codes);
    unsigned result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 0) decode4(i == 0 ? words.x : words.y, format, pairs);
      const float2 both = to_float2(pairs[i % 2]);
      result[i] = bit_cast<unsigned>(from_floats<T>(both.x, both.y));  // exact; from half to half, nothing
      if (in_bfloat16) result[i] = bit_cast<unsigned>(from_floats<__nv_bfloat16>(both.x, both.y));
    }
    return make_uint4(result[0], result[1], result[2], result[3]);
  }
}

// Scales of a quantised cache: null for 1; slot_stride and block_stride are 0 where they are of a head or of all.
struct Scales {
  const float* data;
  long long block_stride, slot_stride, head_stride;

  __device__ float of_head(int kv_head) const { return data == nullptr ? 1.0f : data[kv_head * head_stride]; }
  __device__ float of_slot(long long block, int slot, int kv_head) const {
    return data == nullptr ? 1.0f : data[block * block_stride + slot * slot_stride + kv_head * head_stride];
  }
};

// Where the rows of K or V of one KV head lie, strides in elements. `data` has the type that `format` says.
struct Cache {
  const void* data;
  long long block_stride, slot_stride, head_stride, stride;
  Scales scales;
  __device__ long long row(long long block, int slot, int kv_head) const {
    return block * block_stride + slot * slot_stride + kv_head * head_stride;
  }
};

// The keys of one item: element offsets of their K and V rows by the block table, and their tiles in shared memory.
template <typename Warp>
struct KeyTiles {
  using T = typename Warp::Element;
  using Code = unsigned char;
  static constexpr int D = Warp::HEAD, PIECE = 16 / sizeof(T), PIECES = D / PIECE, THREADS = Warp::THREADS;
  static_assert(THREADS % PIECES == 0, "a thread stages the same piece of every row");

  Cache keys, values;
  const int* table;  // the sequence's row
  long long entry_stride;
  int block_size, head_size, kv_head, format, first, end, tile;
  bool vector, slot_scales;
  unsigned char* room;  // [STAGES][K, V][tile][D] of T; or so many codes, then [K, V][tile][D] of T
  longlong2* slots;     // [2][tile]
  float2* factors;      // [FACTOR_TILES][tile]

  __device__ int count() const { return (end - first + tile - 1) / tile; }
  __device__ T* key_tile(int index) const {
    const int tiles = 2 * tile * D, whole = tiles * static_cast<int>(sizeof(T));
    return reinterpret_cast<T*>(room + (format == UNQUANTISED ? index % STAGES * whole : STAGES * tiles));
  }
  __device__ T* value_tile(int index) const { return key_tile(index) + tile * D; }
  __device__ Code* code_tile(int index) const { return room + index % STAGES * 2 * tile * D; }
  __device__ float2* factor_tile(int index) const { return factors + index % FACTOR_TILES * tile; }

  struct Slot {
    long long key, value;  // rows; -1 behind the end
    float2 factors;
  };

  // This thread's key in a tile.
  __device__ Slot look_up(int index) const {
    const int behind = index * tile + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= tile || behind >= end - first) return {-1, -1, {0.0f, 0.0f}};
    const int key = first + behind, slot = key % block_size;
    const long long block = table[key / block_size * entry_stride];
    Slot found = {keys.row(block, slot, kv_head), values.row(block, slot, kv_head), {1.0f, 1.0f}};
    if (slot_scales)
      found.factors = {keys.scales.of_slot(block, slot, kv_head), values.scales.of_slot(block, slot, kv_head)};
    return found;
  }

  __device__ void note(int index, const Slot& slot) const {
    if (static_cast<int>(threadIdx.x) >= tile) return;
    slots[index % 2 * tile + threadIdx.x] = make_longlong2(slot.key, slot.value);
    if (slot_scales) factor_tile(index)[threadIdx.x] = slot.factors;
  }

  // Elements of a row that exist in 16 bytes of it from `column` on.
  template <typename Element>
  __device__ int existing(int column) const {
    return max(0, min(static_cast<int>(16 / sizeof(Element)), head_size - column));
  }

  // One tile of K, and of V where wanted, as they are, `column` of a row first.
  __device__ void stage(int index, int column, bool with_values) const {
    const int piece = threadIdx.x % PIECES, elements = existing<T>(column + piece * PIECE);
    const T* key_data = static_cast<const T*>(keys.data);
    const T* value_data = static_cast<const T*>(values.data);
    const T* key_piece = key_data + (column + piece * PIECE) * keys.stride;
    const T* value_piece = value_data + (column + piece * PIECE) * values.stride;
    T* key_to = key_tile(index);
    T* value_to = value_tile(index);
    const auto stage_row = [&](int row) {
      const longlong2 slot = slots[index % 2 * tile + row];
      const int at = swizzled<T, D>(row, piece), exist = slot.x < 0 ? 0 : elements;
      stage_piece(key_to + at, exist ? key_piece + slot.x : key_data, keys.stride, exist, vector);
      if (with_values)
        stage_piece(value_to + at, exist ? value_piece + slot.y : value_data, values.stride, exist, vector);
    };
    if (vector) {
#pragma unroll 4
      for (int row = threadIdx.x / PIECES; row < tile; row += THREADS / PIECES) stage_row(row);
    } else {
#pragma unroll 1
      for (int row = threadIdx.x / PIECES; row < tile; row += THREADS / PIECES) stage_row(row);
    }
  }

  // The same of a quantised cache: its codes, in rows that are not swizzled.
  __device__ void stage_codes(int index, int column, bool with_values) const {
    constexpr int CODE_PIECES = D / 16;
    const int piece = threadIdx.x % CODE_PIECES, elements = existing<Code>(column + piece * 16);
    const Code* key_data = static_cast<const Code*>(keys.data);
    const Code* value_data = static_cast<const Code*>(values.data);
    const Code* key_piece = key_data + (column + piece * 16) * keys.stride;
    const Code* value_piece = value_data + (column + piece * 16) * values.stride;
    Code* to = code_tile(index) + piece * 16;
#pragma unroll 1
    for (int row = threadIdx.x / CODE_PIECES; row < tile; row += THREADS / CODE_PIECES) {
      const longlong2 slot = slots[index % 2 * tile + row];
      const int exist = slot.x < 0 ? 0 : elements;
      stage_piece(to + row * D, exist ? key_piece + slot.x : key_data, keys.stride, exist, vector);
      if (with_values)
        stage_piece(to + (tile + row) * D, exist ? value_piece + slot.y : value_data, values.stride, exist, vector);
    }
  }

  // The codes of K that are there, and of V where wanted, to T; 16-bit V to bfloat16 where slots have scales, which a
  // weight times such a scale needs. A barrier must come before and after.
  __device__ void decode(int index, bool with_values) const {
    const Code* codes = code_tile(index);
    T* to = key_tile(index);
#pragma unroll 2
    for (int i = threadIdx.x; i < (with_values ? 2 : 1) * tile * PIECES; i += THREADS) {
      const int row = i / PIECES, piece = i % PIECES;  // K has a multiple of eight rows: V is swizzled as if alone
      *reinterpret_cast<uint4*>(to + swizzled<T, D>(row, piece)) =
          decode_piece<T>(codes + row * D + piece * PIECE, format, slot_scales && row >= tile);
    }
  }

  __device__ void start(int index, int column, bool with_values = true) const {
    if (format == UNQUANTISED) {
      stage(index, column, with_values);
    } else {
      stage_codes(index, column, with_values);
    }
    cp_async_commit();
  }
};
