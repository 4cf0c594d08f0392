// Unpack quantised weights to 16- or 32-bit floats, bit for bit as the format's contract says.
//
// Two kernels hold the tiling, the tails and the stores, each written once; a format adds a struct with its decoding.
//
// `dequantize_columns`: formats packed in words across the rows of [k, n] (GPTQ: one int32 holds eight k of one n). The
//   output is [k, n], whose transpose is the weight. A thread takes eight columns and some rows of words: 16-byte loads
//   of words and scales, one int32 of zero points, and one 16-byte store per row of its word (two for float32). A
//   warp's stores are 512 contiguous bytes of a row. Each packed byte is read once, except the scales and zero points
//   of a group that several programs share.
//
// `dequantize_blocks`: formats that are a sequence of small byte blocks, GGUF's. Blocks are 2-byte aligned at best
// (Q8_0:
//   34 bytes), so no thread could load its block in wide words. But eight blocks of an even size are a multiple of 16
//   bytes: a program copies a tile of blocks to shared memory as it lies, in 16-byte words, and decodes from there. A
//   thread decodes eight elements: one 16-byte store, a warp's being contiguous. Each byte is read once.
//
// Arithmetic is float32 without contraction across roundings: a product that the contract calls exact is exact, and the
// conversion to the output rounds once. Denormals are kept, in and out.
//
// Code generation, NVRTC 13.2: see dequant_cupy.py.
#include "intrinsics.cuh"

using namespace pb;

constexpr int RUN = 8;  // consecutive outputs of a thread: 16 bytes of a 16-bit type

// A packed array [rows, columns] (or [columns]), strides in elements; WIDE: rows are contiguous and in 16-byte words.
template <typename T, bool WIDE>
struct Packed {
  const T* data;
  long long row_stride, column_stride;

  __device__ T at(long long row, long long column) const { return data[row * row_stride + column * column_stride]; }

  // COUNT elements from a column that is a multiple of COUNT.
  template <int COUNT>
  __device__ void load(long long row, long long column, T (&out)[COUNT]) const {
    constexpr int WORDS = COUNT * sizeof(T) / 16;
    if constexpr (WIDE) {
      const T* from = data + row * row_stride + column;
      uint4 words[WORDS];
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = load16(from + i * (16 / sizeof(T)));
#pragma unroll
      for (int i = 0; i < COUNT; ++i) out[i] = reinterpret_cast<const T*>(words)[i];
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) out[i] = at(row, column + i);
    }
  }
};

template <typename Out>
__device__ void store_run(Out* to, const float (&values)[RUN]) {
  constexpr int PER_WORD = 4 / sizeof(Out), WORDS = RUN / PER_WORD;
  unsigned words[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if constexpr (PER_WORD == 2) {
      words[i] = bit_cast<unsigned>(from_floats<Out>(values[2 * i], values[2 * i + 1]));
    } else {
      words[i] = __float_as_uint(values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < WORDS; i += 4)
    store16_streaming(reinterpret_cast<unsigned*>(to) + i,
                      make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
}

// --- formats packed across rows ------------------------------------------------------------------------------------
//
// A format has WORD_ROWS, the rows of [k, n] that a word covers. `fetch` starts to load eight columns of a row of words,
// `take` makes that row the current one, and `row` decodes the eight columns of one of the word's rows. `arrays` are the
// packed arrays in the order of the format's registration in dequant_cupy.py. WIDE is a template's: code that a program
// runs through once should not be twice as long for the sake of arrays that cannot be loaded in wide words.

struct Arrays {
  const void* data[4];
  long long row_stride[4], column_stride[4];

  template <typename T, bool WIDE>
  __device__ Packed<T, WIDE> get(int i) const {
    return {static_cast<const T*>(data[i]), row_stride[i], column_stride[i]};
  }
};

// qweight int32 [k/8, n], qzeros int32 [groups, n/8], scales 16-bit [groups, n], g_idx int32 [1, k]; Scale is their
// type. scale * (q - zero): 11 significant bits times 5. An integer below 2^23 set into the last bits of 2^23 is
// their sum as a float: one logic instruction in place of a slow conversion, and the differences are exact.
template <typename Scale, bool WIDE>
struct GptqV2 {
  static constexpr int WORD_ROWS = 8;
  Packed<int, WIDE> qweight, qzeros, g_idx;
  Packed<unsigned short, WIDE> scales;
  int words[RUN], groups[WORD_ROWS], next_words[RUN], next_groups[WORD_ROWS];
  float scale[RUN], raised_zero[RUN];  // 2^23 + zero
  int loaded_group;
  long long column;

  __device__ GptqV2(const Arrays& arrays, long long column)
      : qweight(arrays.get<int, WIDE>(0)),
        qzeros(arrays.get<int, WIDE>(1)),
        g_idx(arrays.get<int, WIDE>(3)),
        scales(arrays.get<unsigned short, WIDE>(2)),
        loaded_group(-1),
        column(column) {}

  __device__ void fetch(long long word_row) {
    qweight.load(word_row, column, next_words);
    g_idx.load(0, word_row * WORD_ROWS, next_groups);
  }

  __device__ void take() {
#pragma unroll
    for (int i = 0; i < RUN; ++i) words[i] = next_words[i];
#pragma unroll
    for (int i = 0; i < WORD_ROWS; ++i) groups[i] = next_groups[i];
  }

  __device__ void row(int i, float (&values)[RUN]) {
    if (groups[i] != loaded_group) load_group(groups[i]);  // the same for every thread of the program
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
      const unsigned raised = raised_bits(static_cast<unsigned>(words[j]) >> (4 * i) & 15);
      values[j] = scale[j] * (__uint_as_float(raised) - raised_zero[j]);
    }
  }

  __device__ void load_group(int group) {
    loaded_group = group;
    const unsigned zeros = static_cast<unsigned>(qzeros.at(group, column / 8));
    unsigned short bits[RUN];
    scales.load(group, column, bits);
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
      scale[j] = to_float(bit_cast<Scale>(bits[j]));
      raised_zero[j] = __uint_as_float(raised_bits(zeros >> (4 * j) & 15));
    }
  }

  __device__ static unsigned raised_bits(unsigned small) { return 0x4B000000u | small; }
};

// One program: `rows_each` of the `word_rows` rows of words, and RUN columns per thread; the next row of words is on its
// way while one is decoded. out [k, columns], contiguous.
template <typename Format, typename Out>
__global__ void __launch_bounds__(128)
dequantize_columns(Out* out, long long columns, int column_tiles, int word_rows, int rows_each, const void* data0,
                   long long row0, long long column0, const void* data1, long long row1, long long column1,
                   const void* data2, long long row2, long long column2, const void* data3, long long row3,
                   long long column3) {
  const Arrays arrays = {{data0, data1, data2, data3}, {row0, row1, row2, row3}, {column0, column1, column2, column3}};
  const int row_tile = blockIdx.x / column_tiles;
  const long long tile = blockIdx.x - static_cast<long long>(row_tile) * column_tiles;
  const long long column = (tile * blockDim.x + threadIdx.x) * RUN;
  if (column >= columns) return;

  const int first = row_tile * rows_each, end = min(first + rows_each, word_rows);
  Format format(arrays, column);
  format.fetch(first);
#pragma unroll 1
  for (int word_row = first; word_row < end; ++word_row) {
    format.take();
    if (word_row + 1 < end) format.fetch(word_row + 1);
    Out* to = out + static_cast<long long>(word_row) * Format::WORD_ROWS * columns + column;
#pragma unroll
    for (int i = 0; i < Format::WORD_ROWS; ++i) {
      float values[RUN];
      format.row(i, values);
      store_run(to + i * columns, values);
    }
  }
}

// --- formats of byte blocks ----------------------------------------------------------------------------------------
//
// A format has ELEMENTS and BYTES of a block, and `decode`: eight elements of a block in shared memory, from `first`, a
// multiple of eight. The block is 2-byte aligned.

// d fp16, then 32 int8. q * d: 8 significant bits times 11.
struct Q8Zero {
  static constexpr int ELEMENTS = 32, BYTES = 34;

  __device__ static void decode(const unsigned char* block, int first, float (&values)[RUN]) {
    const unsigned short* words = reinterpret_cast<const unsigned short*>(block);
    const float d = to_float(*reinterpret_cast<const __half*>(block));
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i) {
      const unsigned pair = words[1 + first / 2 + i];
      values[2 * i] = d * static_cast<float>(static_cast<signed char>(pair & 255));
      values[2 * i + 1] = d * static_cast<float>(static_cast<signed char>(pair >> 8));
    }
  }
};

// One program: `tile` blocks (a multiple of eight) of row blockIdx.x / tiles. blocks uint8, strides in bytes; out
// [rows, row_blocks * ELEMENTS], contiguous. Rows of a contiguous array are one long row to the launcher.
template <typename Format, typename Out>
__global__ void __launch_bounds__(128)
dequantize_blocks(Out* out, const unsigned char* blocks, long long row_stride, long long byte_stride,
                  long long row_blocks, int tiles, int tile, int vector) {
  extern __shared__ __align__(16) unsigned char staged[];
  const long long row = blockIdx.x / tiles;
  const long long first_block = (blockIdx.x - row * tiles) * tile;
  const int count = static_cast<int>(min(static_cast<long long>(tile), row_blocks - first_block));
  const int nbytes = count * Format::BYTES;
  const unsigned char* from = blocks + row * row_stride + first_block * Format::BYTES * byte_stride;

  const int words = vector ? nbytes / 16 : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    reinterpret_cast<uint4*>(staged)[i] = load16_streaming(from + 16 * i);
  for (int i = words * 16 + threadIdx.x; i < nbytes; i += blockDim.x) staged[i] = from[i * byte_stride];
  __syncthreads();

  constexpr int RUNS = Format::ELEMENTS / RUN;
  Out* to = out + (row * row_blocks + first_block) * Format::ELEMENTS;
#pragma unroll 4
  for (int i = threadIdx.x; i < count * RUNS; i += blockDim.x) {
    float values[RUN];
    Format::decode(staged + i / RUNS * Format::BYTES, i % RUNS * RUN, values);
    store_run(to + static_cast<long long>(i) * RUN, values);
  }
}
