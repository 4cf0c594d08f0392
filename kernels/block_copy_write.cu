// Write rows of new keys and values into their slots of a paged cache.
//
// Row i of key and value [tokens, heads, head_size] goes to slot slots[i] = block * block_size + offset of key_cache and
// value_cache [num_blocks, block_size, heads, head_size]; a negative slot is skipped. Any strides.
//
// `write_kv`: a cache of the rows' type. Rows are words of up to 16 bytes, as wide as all four arrays allow; a thread has
//   four loads in flight before its first store, neighbours move neighbouring words, and a program takes several tokens
//   where rows are short.
// `quantise_kv`: an 8-bit cache. A power of two of lanes takes a row of one head, sixteen elements to a lane: two or four
//   16-byte loads, one 16-byte store. Where scales are computed, the lanes share the row's largest magnitude by shuffles,
//   and the row stays in registers meanwhile unless it has more than 512 elements.
//
// Bytes moved: each written row once in and once out; 8 bytes of slot mapping per row, which all threads of a row read.
//
// Code generation, NVRTC 13.2: see block_copy_write_cupy.py.
#include "block_copy_formats.cuh"

constexpr int WORDS_PER_THREAD = 4;

// Program (x, y): tokens from x * tokens_each on, slice y of their words. Strides in bytes; `words` in a head's row.
template <typename Word>
__global__ void write_kv(const void* key, long long key_token, long long key_head, long long key_word,
                         const void* value, long long value_token, long long value_head, long long value_word,
                         void* key_cache, long long key_block, long long key_slot, long long key_cache_head,
                         long long key_cache_word, void* value_cache, long long value_block, long long value_slot,
                         long long value_cache_head, long long value_cache_word, const long long* slots,
                         long long slot_stride, int num_tokens, int heads, int words, int block_size,
                         int tokens_each) {
  const unsigned row_words = static_cast<unsigned>(heads) * words;
  const unsigned end = 2 * row_words * tokens_each;
  const unsigned first = blockIdx.y * WORDS_PER_THREAD * blockDim.x + threadIdx.x;
  Word held[WORDS_PER_THREAD];
  char* to[WORDS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < WORDS_PER_THREAD; ++i) {
    const unsigned index = first + i * blockDim.x;
    to[i] = nullptr;
    const unsigned of_tokens = index / row_words;  // keys and values of a token one after the other
    const long long token = static_cast<long long>(blockIdx.x) * tokens_each + of_tokens / 2;
    if (index >= end || token >= num_tokens) continue;
    const long long slot = slots[token * slot_stride];
    if (slot < 0) continue;
    const unsigned in_row = index - of_tokens * row_words, head = in_row / words, word = in_row - head * words;
    const long long block = slot / block_size, offset = slot - block * block_size;
    const char* from;
    if (of_tokens % 2) {
      from = static_cast<const char*>(value) + token * value_token + head * value_head + word * value_word;
      to[i] = static_cast<char*>(value_cache) + block * value_block + offset * value_slot + head * value_cache_head +
              word * value_cache_word;
    } else {
      from = static_cast<const char*>(key) + token * key_token + head * key_head + word * key_word;
      to[i] = static_cast<char*>(key_cache) + block * key_block + offset * key_slot + head * key_cache_head +
              word * key_cache_word;
    }
    held[i] = load_word<Word>(from);
  }
#pragma unroll
  for (int i = 0; i < WORDS_PER_THREAD; ++i)
    if (to[i]) store_word<Word>(to[i], held[i]);
}

template <int kFormat, typename T, typename Raw>
__device__ __forceinline__ void encode_chunk(Chunk<unsigned char>& codes, const Chunk<Raw>& chunk, float scale) {
#pragma unroll
  for (int i = 0; i < CHUNK; i += 4) {
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      word |= encode<kFormat>(__fdiv_rn(pb::to_float(pb::bit_cast<T>(chunk.elements[i + j])), scale)) << 8 * j;
    codes.words4[i / 4] = word;
  }
}

// `lanes` threads a row, a row per (token, key or value, head), in this order. Strides in elements. row_word and
// cache_word as `word` of load_chunk. compute: the scales are outputs, else inputs.
template <typename T>
__global__ void quantise_kv(const void* key, long long key_token, long long key_head, long long key_dim,
                            const void* value, long long value_token, long long value_head, long long value_dim,
                            void* key_cache, long long key_block, long long key_slot, long long key_cache_head,
                            long long key_cache_dim, void* value_cache, long long value_block, long long value_slot,
                            long long value_cache_head, long long value_cache_dim, const long long* slots,
                            long long slot_stride, float* key_scales, float key_scale, int key_scale_in_array,
                            long long key_scale_block, long long key_scale_slot, long long key_scale_head,
                            float* value_scales, float value_scale, int value_scale_in_array,
                            long long value_scale_block, long long value_scale_slot, long long value_scale_head,
                            int num_tokens, int heads, int head_size, int block_size, int format, int compute,
                            int lanes, int row_word, int cache_word) {
  using Raw = typename RawOf<T>::Type;
  const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / lanes) + threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;
  const bool within = row < 2LL * heads * num_tokens;
  const long long token = within ? row / (2 * heads) : 0;
  const int which = static_cast<int>(row - token * 2 * heads);
  const bool is_value = which >= heads;
  const int head = within ? which - (is_value ? heads : 0) : 0;
  const long long slot = within ? slots[token * slot_stride] : -1;
  const bool live = slot >= 0;
  const long long block = live ? slot / block_size : 0;
  const int offset = live ? static_cast<int>(slot - block * block_size) : 0;

  const Raw* from = is_value ? static_cast<const Raw*>(value) + token * value_token + head * value_head
                             : static_cast<const Raw*>(key) + token * key_token + head * key_head;
  const long long dim = is_value ? value_dim : key_dim;
  const Scale scales = is_value ? Scale{value_scales, value_scale, value_scale_in_array, value_scale_block,
                                        value_scale_slot, value_scale_head}
                                : Scale{key_scales, key_scale, key_scale_in_array, key_scale_block, key_scale_slot,
                                        key_scale_head};
  const int step = lanes * CHUNK;
  const bool held = compute && head_size <= step;  // the one chunk of each lane
  Chunk<Raw> chunk;
  float scale = scales.value;
  if (compute) {
    float largest = 0;
    for (int first = lane * CHUNK; live && first < head_size; first += step) {
      const int count = min(CHUNK, head_size - first);
      load_chunk(chunk, from + first * dim, dim, count, row_word);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i)
        if (i < count) largest = fmaxf(largest, fabsf(pb::to_float(pb::bit_cast<T>(chunk.elements[i]))));
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(pb::kFullMask, largest, distance));
    scale = largest == 0 ? 1.0f : __fdiv_rn(largest, highest(format));
    if (live && lane == 0) *scales.at(block, offset, head) = scale;
  } else if (live && scales.in_array) {
    scale = *scales.at(block, offset, head);
  }
  if (!live) return;

  unsigned char* to = is_value ? static_cast<unsigned char*>(value_cache) + block * value_block + offset * value_slot +
                                     head * value_cache_head
                               : static_cast<unsigned char*>(key_cache) + block * key_block + offset * key_slot +
                                     head * key_cache_head;
  const long long to_dim = is_value ? value_cache_dim : key_cache_dim;
  for (int first = lane * CHUNK; first < head_size; first += step) {
    const int count = min(CHUNK, head_size - first);
    if (!held) load_chunk(chunk, from + first * dim, dim, count, row_word);
    Chunk<unsigned char> codes;
    if (format == E4M3)
      encode_chunk<E4M3, T>(codes, chunk, scale);
    else if (format == E5M2)
      encode_chunk<E5M2, T>(codes, chunk, scale);
    else
      encode_chunk<INT8, T>(codes, chunk, scale);
    store_chunk(to + first * to_dim, codes, to_dim, count, cache_word);
  }
}
