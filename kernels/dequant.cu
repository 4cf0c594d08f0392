// Unpack quantised weights to 16- or 32-bit floats, bit for bit as the format's contract says.
//
// Two kernels hold the tiling, the tails and the stores, each written once; a format adds a struct with its decoding, in
// one of the headers below, and a line in dequant_layouts.py.
//
// `dequantize_rows`: formats whose bytes run along a row. A program copies the bytes of a tile of one row to shared
//   memory as they lie, 16 bytes at a time by cp.async, and decodes from there. A thread decodes runs of eight weights:
//   one 16-byte store (two for float32), a warp's being contiguous, whatever the width of the codes. Each packed byte is
//   read once; a scale is one narrow load per run, which neighbours share, or one of a table that the program shares.
//
// `dequantize_columns`: formats packed across rows of [k, n], or along n with scales per group of k. The output is
//   [k, n], whose transpose is the weight. A thread takes eight rows by eight columns: 16-byte loads of codes and
//   scales, and one 16-byte store per row. A warp's stores are 512 contiguous bytes of a row. Each packed byte is read
//   once, except scales and zero points, which come from the L2 cache when other rows share their group.
//
// The type of the result is an argument, not a template's: it only decides, for a whole launch alike, how eight finished
// numbers are rounded and stored, and one instance per format keeps compilation short.
//
// Code generation, NVRTC 13.2: see dequant_cupy.py.
#include "dequant_columns.cuh"
#include "dequant_formats.cuh"
#include "dequant_gguf.cuh"

using namespace pb;

// out [rows, k] of `kind`, contiguous; wide: k is a multiple of 8. A program takes `tile` columns, a multiple of 256, of
// row blockIdx.x / tiles. Bytes and Arrays as in dequant_common.cuh.
template <typename Format>
__global__ void __launch_bounds__(128, 6)
dequantize_rows(void* out, int kind, int wide, long long k, int tiles, int tile, int group, int row_shift, int mode,
                int scale_kind, const unsigned char* bytes, long long row_stride, long long outer_stride,
                long long byte_stride, int inner, int dense, const void* data0, long long row0, long long column0,
                const void* data1, long long row1, long long column1, const void* data2, long long row2,
                long long column2, const void* data3, long long row3, long long column3) {
  extern __shared__ __align__(16) unsigned char staged[];
  Format format;
  format.p = {{{data0, data1, data2, data3}, {row0, row1, row2, row3}, {column0, column1, column2, column3}},
              k, group, row_shift, mode, scale_kind};
  const Bytes packed{bytes, row_stride, outer_stride, byte_stride, inner, dense};
  const long long row = blockIdx.x / static_cast<unsigned>(tiles);
  const long long begin = (blockIdx.x % static_cast<unsigned>(tiles)) * static_cast<long long>(tile);
  const int count = static_cast<int>(min(static_cast<long long>(tile), k - begin));
  const long long first = format.first_byte(row, begin);
  packed.stage(staged + 16, row, first, format.last_byte(row, begin + count), threadIdx.x, blockDim.x);
  share_scales(format, row, begin, count);
  cp_async_wait_all();
  __syncthreads();

  const Staged bytes_of_tile{reinterpret_cast<const unsigned*>(staged), 16u + packed.offset(row, first)};
#pragma unroll 2
  for (int run = threadIdx.x; run * RUN < count; run += blockDim.x) {
    const int i = run * RUN;
    float values[1][RUN];
    format.template decode<1>(bytes_of_tile, run / 4u * 32, run % 4, row, begin + i / 32 * 32, values);
    store_run(out, kind, row * k + begin + i, count - i, wide, values[0]);
  }
}

// out [k, columns] of `kind`, contiguous. One program: `rows_each` times eight rows, and RUN columns per thread. Scales and
// zero points stay in registers while their group lasts; the next codes are on their way while some are decoded.
template <typename Format>
__global__ void __launch_bounds__(128, 5)
dequantize_columns(void* out, int kind, long long k, long long columns, int column_tiles, int rows_each, int group,
                   int mode, int scale_kind, const int* codes, long long row_stride, long long column_stride, const void* data0,
                   long long row0, long long column0, const void* data1, long long row1, long long column1,
                   const void* data2, long long row2, long long column2) {
  const Params p{{{data0, data1, data2, nullptr}, {row0, row1, row2, 0}, {column0, column1, column2, 0}},
                 k, group, 0, mode, scale_kind};
  const long long first = blockIdx.x / static_cast<unsigned>(column_tiles) * static_cast<long long>(rows_each * ROWS);
  const long long end = min(first + rows_each * ROWS, k);
  const long long tile = blockIdx.x % static_cast<unsigned>(column_tiles);
  const long long column = (tile * blockDim.x + threadIdx.x) * RUN;

  const CodeArray array{codes, row_stride, column_stride, columns};
  typename Format::Codes loaded, next;
  next.load(p, array, first, column);
  Format format(p, column);
#pragma unroll 1
  for (long long row = first; row < end; row += ROWS) {
    loaded = next;
    if (row + ROWS < end) next.load(p, array, row + ROWS, column);  // every lane of a warp: some exchange what they load
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (column >= columns || row + i >= end) break;
      float values[RUN];
      format.row(loaded, i, static_cast<int>(row) + i, values);
      store_run(out, kind, (row + i) * columns + column, RUN, true, values);
    }
  }
}
