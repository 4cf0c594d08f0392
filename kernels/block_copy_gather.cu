// Gather sequences out of a paged cache into dense keys and values.
//
// Row p of sequence s lies in block block_table[s][p / block_size] of key_cache and value_cache [num_blocks, block_size,
// heads, head_size], any strides, and goes to row seq_lens[0] + ... + seq_lens[s - 1] + p of key and value [rows, heads,
// head_size], contiguous. Programs beyond a sequence's end return at once; the others add up the lengths before theirs,
// 4 bytes a sequence from the L2 cache.
//
// `gather_kv`: rows of the cache's type, moved as words of up to 16 bytes, four in flight per thread.
// `dequantise_kv`: RN(RN32(x * scale)), sixteen elements to a thread, 16 bytes of an 8-bit cache in one load.
//
// Bytes moved: each row once in and once out, 4 bytes of block table per row and program.
//
// Code generation, NVRTC 13.2: see block_copy_gather_cupy.py.
#include "block_copy_formats.cuh"

constexpr int WORDS_PER_THREAD = 4;

// The sum of seq_lens[0 .. seq - 1], for all threads of the program.
__device__ __forceinline__ long long rows_before(const int* seq_lens, long long stride, int seq) {
  __shared__ long long sums[32];
  long long sum = 0;
  for (int i = threadIdx.x; i < seq; i += blockDim.x) sum += seq_lens[i * stride];
  for (int distance = pb::kWarpSize / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(pb::kFullMask, sum, distance);
  if (threadIdx.x % pb::kWarpSize == 0) sums[threadIdx.x / pb::kWarpSize] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < blockDim.x / pb::kWarpSize; ++i) sum += sums[i];
  return sum;
}

// Program (x, y): sequence x / tiles, its tokens from x % tiles * tokens_each on, slice y of their words.
// Strides of caches and words in bytes; `words` in a head's row.
template <typename Word>
__global__ void gather_kv(void* key, void* value, const void* key_cache, long long key_block, long long key_slot,
                          long long key_head, long long key_word, const void* value_cache, long long value_block,
                          long long value_slot, long long value_head, long long value_word, const int* block_table,
                          long long table_seq, long long table_entry, const int* seq_lens, long long len_stride,
                          int heads, int words, int block_size, int tokens_each, int tiles) {
  const int seq = blockIdx.x / tiles;
  const int position = (blockIdx.x - seq * tiles) * tokens_each;
  const int length = seq_lens[seq * len_stride];
  if (position >= length) return;
  const long long start = rows_before(seq_lens, len_stride, seq);
  const unsigned row_words = static_cast<unsigned>(heads) * words;
  const unsigned end = 2 * row_words * min(tokens_each, length - position);
  const unsigned first = blockIdx.y * WORDS_PER_THREAD * blockDim.x + threadIdx.x;
  Word held[WORDS_PER_THREAD];
  char* to[WORDS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < WORDS_PER_THREAD; ++i) {
    const unsigned index = first + i * blockDim.x;
    to[i] = nullptr;
    if (index >= end) continue;
    const unsigned of_tokens = index / row_words;  // keys and values of a token one after the other
    const unsigned in_row = index - of_tokens * row_words, head = in_row / words, word = in_row - head * words;
    const int token = position + static_cast<int>(of_tokens / 2);
    const long long block = block_table[seq * table_seq + token / block_size * table_entry];
    const int offset = token % block_size;
    const long long out = ((start + token) * row_words + in_row) * static_cast<long long>(sizeof(Word));
    const char* from;
    if (of_tokens % 2) {
      from = static_cast<const char*>(value_cache) + block * value_block + offset * value_slot + head * value_head +
             word * value_word;
      to[i] = static_cast<char*>(value) + out;
    } else {
      from = static_cast<const char*>(key_cache) + block * key_block + offset * key_slot + head * key_head +
             word * key_word;
      to[i] = static_cast<char*>(key) + out;
    }
    held[i] = load_word<Word>(from);
  }
#pragma unroll
  for (int i = 0; i < WORDS_PER_THREAD; ++i)
    if (to[i]) store_word<Word>(to[i], held[i]);
}

template <int kFormat, typename T, typename Raw>
__device__ __forceinline__ void decode_chunk(Chunk<typename RawOf<T>::Type>& out, const Chunk<Raw>& chunk,
                                             float scale) {
#pragma unroll
  for (int i = 0; i < CHUNK; ++i)
    out.elements[i] = pb::bit_cast<typename RawOf<T>::Type>(
        pb::from_float<T>(__fmul_rn(decode<kFormat>(chunk.elements[i]), scale)));
}

// As gather_kv, with a chunk of a head's row per thread. Raw: an unsigned integer of the cache's element size. Strides in
// elements. cache_word and out_word as `word` of load_chunk.
template <typename T, typename Raw>
__global__ void dequantise_kv(void* key, void* value, const void* key_cache, long long key_block, long long key_slot,
                              long long key_head, long long key_dim, const void* value_cache, long long value_block,
                              long long value_slot, long long value_head, long long value_dim, const int* block_table,
                              long long table_seq, long long table_entry, const int* seq_lens, long long len_stride,
                              float* key_scales, float key_scale, int key_scale_in_array, long long key_scale_block,
                              long long key_scale_slot, long long key_scale_head, float* value_scales,
                              float value_scale, int value_scale_in_array, long long value_scale_block,
                              long long value_scale_slot, long long value_scale_head, int heads, int head_size,
                              int block_size, int format, int tokens_each, int tiles, int cache_word, int out_word) {
  using Out = typename RawOf<T>::Type;
  const int seq = blockIdx.x / tiles;
  const int position = (blockIdx.x - seq * tiles) * tokens_each;
  const int length = seq_lens[seq * len_stride];
  if (position >= length) return;
  const long long start = rows_before(seq_lens, len_stride, seq);
  const unsigned chunks = (static_cast<unsigned>(head_size) + CHUNK - 1) / CHUNK, row_chunks = heads * chunks;
  const unsigned index = blockIdx.y * blockDim.x + threadIdx.x;
  if (index >= 2 * row_chunks * min(tokens_each, length - position)) return;
  const unsigned of_tokens = index / row_chunks;
  const unsigned in_row = index - of_tokens * row_chunks;
  const int head = in_row / chunks, first = (in_row - head * chunks) * CHUNK;
  const int count = min(CHUNK, head_size - first);
  const int token = position + static_cast<int>(of_tokens / 2);
  const long long block = block_table[seq * table_seq + token / block_size * table_entry];
  const int offset = token % block_size;
  const bool is_value = of_tokens % 2;

  const Raw* from = is_value ? static_cast<const Raw*>(value_cache) + block * value_block + offset * value_slot +
                                   head * value_head + first * value_dim
                             : static_cast<const Raw*>(key_cache) + block * key_block + offset * key_slot +
                                   head * key_head + first * key_dim;
  Chunk<Raw> chunk;
  load_chunk(chunk, from, is_value ? value_dim : key_dim, count, cache_word);
  const Scale scales = is_value ? Scale{value_scales, value_scale, value_scale_in_array, value_scale_block,
                                        value_scale_slot, value_scale_head}
                                : Scale{key_scales, key_scale, key_scale_in_array, key_scale_block, key_scale_slot,
                                        key_scale_head};
  const float scale = scales.in_array ? *scales.at(block, offset, head) : scales.value;
  Chunk<Out> out;
  if constexpr (sizeof(Raw) == 1) {
    if (format == E4M3)
      decode_chunk<E4M3, T>(out, chunk, scale);
    else if (format == E5M2)
      decode_chunk<E5M2, T>(out, chunk, scale);
    else
      decode_chunk<INT8, T>(out, chunk, scale);
  } else if constexpr (sizeof(Raw) == 2) {
    if (format == HALF)
      decode_chunk<HALF, T>(out, chunk, scale);
    else
      decode_chunk<BFLOAT16, T>(out, chunk, scale);
  } else {
    decode_chunk<FLOAT, T>(out, chunk, scale);
  }
  Out* to = static_cast<Out*>(is_value ? value : key) + ((start + token) * heads + head) * head_size + first;
  store_chunk(to, out, 1, count, out_word);
}
