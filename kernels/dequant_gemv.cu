// y = x W^T straight from packed weights, whose bytes are read once for 16 rows of x.
//
// The formats are those of dequant.cu, decoded by the same device functions, so that with x = identity the columns of the
// dequantised weight come out. A lane decodes runs along k, eight weights of one output feature. For 16-bit types they are
// rounded to the type and go to tensor cores: mma m16n8k16 with x as A (16 rows, whatever m is) and W^T as B. Which k an
// mma's slot stands for is free as long as A and B agree: each lane of a row's four takes a run of its own in two mma, for
// its weights and its x alike. float32 takes IEEE multiply-adds instead, weights unrounded.
//
// `dequant_gemv_rows`: eight output features per program. Their packed bytes come through shared memory, tile by tile, by
//   16-byte cp.async, the next tile while this one is multiplied; warps take every fourth 128 columns of a tile. To half,
//   Q4_K's weights are scale * code, exact, and the minima a second weight: d and dmin of a block wait for the sums.
// `dequant_gemv_columns`: a warp takes 64 output features, eight rows by eight columns of codes per lane and step, and a
//   piece of k, whole groups of it, so that it changes groups seldom. It keeps its next steps in flight in a ring in shared
//   memory. Where rows name their groups, these are read once for all features of a program's warps.
//   Tensor cores multiply bare codes where 32 rows are of one group, whose scale and zero point its sums get: sum(w x) =
//   scale * (sum(code x) - zero * sum(x)). Rows of several groups are decoded one by one.
//
// The type of x and y says which of the two an instance does. The warps' sums are added in shared memory. Where there are too few
// output features to fill a GPU, k is split and `dequant_gemv_sum` adds the splits' sums up in order: y does not depend on
// timing.
//
// Code generation, NVRTC 13.2: see dequant_gemv_cupy.py.
#include "dequant_columns.cuh"
#include "dequant_formats.cuh"
#include "dequant_gguf.cuh"

using namespace pb;

constexpr int WARPS = 4;       // at most
constexpr int X_ROWS = 16;     // rows of x per program
constexpr int FEATURES = 8;    // output features of an mma
constexpr int STEP = 32;       // k of two mma: a run for each of four lanes
constexpr int RUNS = 4;        // of a lane side by side: the 32 weights that most formats' scales are for
constexpr int LANES_K = RUNS * STEP;
constexpr int PART = 2;        // rows of a lane's codes that are decoded at once in float32: more would spill
constexpr int STAGES = 4;      // of a warp's ring of columns: three steps of 1 KB in flight
template <typename T>
constexpr bool kMatrix = sizeof(T) == 2;  // whether tensor cores multiply
constexpr int CHUNK = 512;     // rows of a piece of k whose groups are in shared memory
constexpr int MIXED = -1;      // in place of the group of several rows, of several groups

// x [m, k] from row `first` on, of at most `rows` rows; strides in elements. wide: runs are 16-byte words. Zero beyond.
struct Input {
  const void* data;
  long long row_stride, column_stride, k;
  int wide, rows;

  // A run of 16-bit numbers, in pairs.
  __device__ void pairs(int row, long long column, unsigned (&out)[RUN / 2]) const {
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i) out[i] = 0;
    if (row >= rows || column >= k) return;
    const unsigned short* from = static_cast<const unsigned short*>(data) + row * row_stride;
    if (wide && column + RUN <= k) {
      const uint4 words = load16(from + column);
      out[0] = words.x, out[1] = words.y, out[2] = words.z, out[3] = words.w;
    } else {
#pragma unroll
      for (int i = 0; i < RUN; ++i)
        if (column + i < k) out[i / 2] |= static_cast<unsigned>(from[(column + i) * column_stride]) << 16 * (i % 2);
    }
  }
  // A row of 16-bit numbers, for what is a row's own: beyond the last, that one again.
  __device__ const unsigned short* any_row(int row) const {
    return static_cast<const unsigned short*>(data) + min(row, rows - 1) * row_stride;
  }
  __device__ void floats(int row, long long column, float (&out)[RUN]) const {
    const float* from = static_cast<const float*>(data) + row * row_stride;
#pragma unroll
    for (int i = 0; i < RUN; i += 4) {
      if (row < rows && wide && column + RUN <= k) {
        const uint4 words = load16(from + column + i);
        out[i] = __uint_as_float(words.x), out[i + 1] = __uint_as_float(words.y);
        out[i + 2] = __uint_as_float(words.z), out[i + 3] = __uint_as_float(words.w);
      } else {
#pragma unroll
        for (int j = i; j < i + 4; ++j)
          out[j] = row < rows && column + j < k ? from[(column + j) * column_stride] : 0.0f;
      }
    }
  }
  __device__ void two_floats(int row, long long column, float (&out)[2]) const {
    const float* from = static_cast<const float*>(data) + row * row_stride + column * column_stride;
    if (wide && column + 2 <= k) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      out[0] = pair.x, out[1] = pair.y;
    } else {
      out[0] = column < k ? from[0] : 0.0f;
      out[1] = column + 1 < k ? from[column_stride] : 0.0f;
    }
  }
};

// The numbers 4 half ... of a run, as pairs, of x's rows g and g + 8; and of the weights.
template <typename T>
__device__ __forceinline__ void multiply(float (&acc)[4], const unsigned (&low)[RUN / 2], const unsigned (&high)[RUN / 2],
                                         int half, unsigned first, unsigned second) {
  const unsigned a[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
  const unsigned b[2] = {first, second};
  mma_m16n8k16<T>(acc, a, b, acc);
}

// From numbers 2 i and 2 i + 1 of a run to i and i + 4.
__device__ __forceinline__ void split_pairs(unsigned (&pairs)[RUN / 2]) {
  const unsigned a = pairs[0], b = pairs[1], c = pairs[2], d = pairs[3];
  pairs[0] = __byte_perm(a, c, 0x5410), pairs[1] = __byte_perm(a, c, 0x7632);
  pairs[2] = __byte_perm(b, d, 0x5410), pairs[3] = __byte_perm(b, d, 0x7632);
}

template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  return bit_cast<unsigned>(from_floats<T>(low, high));
}

// Formats that leave to the sums what all weights of a step have in common: `products`.
template <typename Format>
constexpr bool kFactored = false;
template <>
constexpr bool kFactored<Q4K> = true;

// SPLIT: a pair is numbers i and i + 4 of its run, else 2 i and 2 i + 1.
template <typename T, bool SPLIT>
__device__ __forceinline__ void multiply_runs(float (&acc)[4], const Input& input, int g, long long column,
                                              const unsigned (&weights)[RUNS][RUN / 2]) {
  const bool whole = input.wide && column + RUNS * RUN <= input.k && input.rows <= 8;
  const unsigned short* from = input.any_row(g) + column;
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    unsigned low[RUN / 2], high[RUN / 2] = {};
    if (whole) {
      const uint4 words = load16(from + RUN * run);
      low[0] = words.x, low[1] = words.y, low[2] = words.z, low[3] = words.w;
    } else {
      input.pairs(g, column + RUN * run, low);
      input.pairs(g + 8, column + RUN * run, high);
    }
    if (SPLIT) split_pairs(low), split_pairs(high);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      multiply<T>(acc, low, high, half, weights[run][2 * half], weights[run][2 * half + 1]);
  }
}

// Where a program's sums go: y [m, n] of `kind`, or of float32 [splits, m, n].
struct Output {
  void* y;
  int kind;
  long long m, n;

  __device__ void store(long long row, long long feature, float value) const {
    if (row < m && feature < n) store_number(y, gridDim.y == 1 ? kind : kFloat, (blockIdx.y * m + row) * n + feature, value);
  }
};

// Grid: features / 8, splits, m / 16. Dynamic shared memory: two stages of FEATURES rows of `pitch` bytes.
template <typename Format, typename T>
__global__ void __launch_bounds__(128, kMatrix<T> ? 4 : 3)
dequant_gemv_rows(void* y, int kind, long long m, long long n, const void* x, long long x_row,
                  long long x_column, int x_wide, int tile, int split_tiles, int pitch, long long k, int group,
                  int row_shift, int mode, int scale_kind, const unsigned char* bytes, long long row_stride,
                  long long outer_stride, long long byte_stride, int inner, int dense, const void* data0, long long row0,
                  long long column0, const void* data1, long long row1, long long column1, const void* data2,
                  long long row2, long long column2, const void* data3, long long row3, long long column3) {
  extern __shared__ __align__(16) unsigned char staged[];
  __shared__ float sums[WARPS][X_ROWS][FEATURES];
  Format format;
  format.p = {{{data0, data1, data2, data3}, {row0, row1, row2, row3}, {column0, column1, column2, column3}},
              k, group, row_shift, mode, scale_kind};
  const Bytes packed{bytes, row_stride, outer_stride, byte_stride, inner, dense};
  const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const long long feature0 = blockIdx.x * static_cast<long long>(FEATURES);
  const long long x_row0 = blockIdx.z * static_cast<long long>(X_ROWS);
  const int rows = static_cast<int>(min(m - x_row0, static_cast<long long>(X_ROWS)));
  const long long x_offset = x_row0 * x_row * (kMatrix<T> ? 2 : 4);
  const Input input{static_cast<const char*>(x) + x_offset, x_row, x_column, k, x_wide, rows};
  const long long begin = blockIdx.y * static_cast<long long>(split_tiles) * tile;
  const long long end = min(k, begin + static_cast<long long>(split_tiles) * tile);

  const auto stage = [&](long long from, int buffer) {
    const long long to = min(from + tile, end);
    for (int i = warp; i < FEATURES; i += warps)
      if (from < to && feature0 + i < n)
        packed.stage(staged + (buffer * FEATURES + i) * pitch + 16, feature0 + i, format.first_byte(feature0 + i, from),
                     format.last_byte(feature0 + i, to), lane, kWarpSize);
    cp_async_commit();
  };

  float acc[kMatrix<T> ? 4 : X_ROWS] = {};  // of an mma, or one for each row of x
  int buffer = 0;
  stage(begin, 0);
  for (long long from = begin; from < end; from += tile, buffer ^= 1) {
    stage(from + tile, buffer ^ 1);
    cp_async_wait<1>();
    __syncthreads();
    const int count = static_cast<int>(min(static_cast<long long>(tile), end - from));
    const long long row = feature0 + g;
    const bool live = row < n;
    const unsigned start = live ? packed.offset(row, format.first_byte(row, from)) : 0;
    const Staged segment{reinterpret_cast<const unsigned*>(staged), static_cast<unsigned>((buffer * FEATURES + g) * pitch + 16) + start};
    for (int step = warp; step * LANES_K < count; step += warps) {
      if constexpr (kIsHalf<T> && kFactored<Format>) {
        const unsigned base = step * LANES_K;
        unsigned products[RUNS][RUN / 2] = {}, minima[2] = {}, left = 0;
        if (live) format.products(segment, base, t, products, minima, left);
        float of_products[4] = {}, of_minima[4] = {};
        const long long column = from + base + Format::first(t, 0);  // a step is whole: so are blocks
        if (input.wide && input.rows <= 8) {
          // No rows g + 8: their place in A takes every other pair of row g, and a run stays in the registers it came in.
          const unsigned short* const own_x = input.any_row(g) + column;
          float others[4] = {};
#pragma unroll
          for (int run = 0; run < RUNS; ++run) {
            const uint4 words = load16(own_x + Format::first(0, run));
            const unsigned a[4] = {words.x, words.y, words.z, words.w};
            const unsigned even[2] = {products[run][0], products[run][2]}, odd[2] = {products[run][1], products[run][3]};
            const unsigned both[2] = {minima[run / 2], minima[run / 2]};
            mma_m16n8k16<T>(of_products, a, even, of_products);
            mma_m16n8k16<T>(others, a, odd, others);
            mma_m16n8k16<T>(of_minima, a, both, of_minima);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) of_products[i] += others[i + 2], of_minima[i] += of_minima[i + 2];
        } else {
#pragma unroll
          for (int run = 0; run < RUNS; ++run) {
            unsigned low[RUN / 2], high[RUN / 2];
            input.pairs(g, column + Format::first(0, run), low);
            input.pairs(g + 8, column + Format::first(0, run), high);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              multiply<T>(of_products, low, high, half, products[run][2 * half], products[run][2 * half + 1]);
              multiply<T>(of_minima, low, high, half, minima[run / 2], minima[run / 2]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned word = __shfl_sync(kFullMask, left, 4 * (2 * t + i));  // from a lane of feature 2 t + i
          const float2 factors = to_float2(bit_cast<__half2>(word));
          const float d = __fmul_rn(factors.x, 1 / Format::UNIT), dmin = __fmul_rn(factors.y, 1 / Format::UNIT);
#pragma unroll
          for (int high = 0; high < 4; high += 2)
            acc[i + high] = __fmaf_rn(d, of_products[i + high], __fmaf_rn(-dmin, of_minima[i + high], acc[i + high]));
        }
        continue;
      }
      const int at = (step * 4 + t) * RUNS * RUN;
      const bool whole = live && at + RUNS * RUN <= count;
      if constexpr (kMatrix<T> && Format::PAIRED) {
        unsigned weights[RUNS][RUN / 2] = {};
        if (whole) {
          format.template pairs<T, RUNS>(segment, at, 0, row, from + at, weights);
        } else {  // in whole runs
#pragma unroll
          for (int run = 0; run < RUNS; ++run) {
            unsigned some[1][RUN / 2] = {};
            if (live && at + RUN * run < count) format.template pairs<T, 1>(segment, at, run, row, from + at, some);
#pragma unroll
            for (int i = 0; i < RUN / 2; ++i) weights[run][i] = some[0][i];
          }
        }
        multiply_runs<T, true>(acc, input, g, from + at, weights);
        continue;
      }
      float values[RUNS][RUN];
      if (whole) {
        format.template decode<RUNS>(segment, at, 0, row, from + at, values);
      } else {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
          float some[1][RUN] = {};
          const int first = at + RUN * run;
          if (live && first < count) format.template decode<1>(segment, at, run, row, from + at, some);
#pragma unroll
          for (int i = 0; i < RUN; ++i) values[run][i] = first + i < count ? some[0][i] : 0.0f;
        }
      }
      if constexpr (kMatrix<T>) {
        unsigned weights[RUNS][RUN / 2];
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
#pragma unroll
          for (int i = 0; i < RUN / 2; ++i) weights[run][i] = pack<T>(values[run][2 * i], values[run][2 * i + 1]);
        multiply_runs<T, false>(acc, input, g, from + at, weights);
      } else {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
#pragma unroll
          for (int r = 0; r < X_ROWS; ++r) {
            if (r < rows) {
              float numbers[RUN];
              input.floats(r, from + at + RUN * run, numbers);
#pragma unroll
              for (int i = 0; i < RUN; ++i) acc[r] = __fmaf_rn(values[run][i], numbers[i], acc[r]);
            }
          }
        }
      }
    }
    __syncthreads();
  }

  if constexpr (!kMatrix<T>) {
#pragma unroll
    for (int r = 0; r < X_ROWS; ++r) {
      acc[r] += __shfl_xor_sync(kFullMask, acc[r], 1);
      acc[r] += __shfl_xor_sync(kFullMask, acc[r], 2);
      if (t == 0) sums[warp][r][g] = acc[r];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][g + i / 2 * 8][2 * t + i % 2] = acc[i];
  }
  __syncthreads();
  const Output output{y, kind, m, n};
  for (int i = threadIdx.x; i < X_ROWS * FEATURES; i += blockDim.x) {
    const int r = i / FEATURES, feature = i % FEATURES;
    float sum = sums[0][r][feature];
    for (int w = 1; w < warps; ++w) sum += sums[w][r][feature];
    if constexpr (kMatrix<T> && Format::PAIRED) sum = format.finish(sum);
    output.store(x_row0 + r, feature0 + feature, sum);
  }
}

// Grid: features / 64 / tiles, splits of `split` rows (a multiple of 32), m / 16; a program's warps are `pieces` of its rows
// for each of its tiles. Dynamic shared memory: the warps' rings, their sums of 8 or 16 rows of x (float32's take the place
// of the rings), and the groups of CHUNK rows and their steps for each piece.
// float32 has 16 sums for each of a lane's eight columns in registers, so that it too reads the codes once for 16 rows of x.
template <typename Format, typename T>
__global__ void __launch_bounds__(256, kMatrix<T> ? 2 : 1)
dequant_gemv_columns(void* y, int kind, long long m, long long n, const void* x, long long x_row,
                     long long x_column, int x_wide, int split, int pieces, long long k, int group, int mode,
                     int scale_kind, const int* codes, long long row_stride, long long column_stride, const void* data0,
                     long long row0, long long column0, const void* data1, long long row1, long long column1,
                     const void* data2, long long row2, long long column2) {
  const Params p{{{data0, data1, data2, nullptr}, {row0, row1, row2, 0}, {column0, column1, column2, 0}},
                 k, group, 0, mode, scale_kind};
  const CodeArray array{codes, row_stride, column_stride, n};
  const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int tiles = warps / pieces, own_piece = warp % pieces;
  const long long feature0 = (blockIdx.x * static_cast<long long>(tiles) + warp / pieces) * (FEATURES * RUN);
  const long long column = feature0 + RUN * g;
  const long long x_row0 = blockIdx.z * static_cast<long long>(X_ROWS);
  const int rows = static_cast<int>(min(m - x_row0, static_cast<long long>(X_ROWS)));
  const long long x_offset = x_row0 * x_row * (kMatrix<T> ? 2 : 4);
  const Input input{static_cast<const char*>(x) + x_offset, x_row, x_column, k, x_wide, rows};

  const int first = blockIdx.y * split, last = static_cast<int>(min(k, static_cast<long long>(first) + split));
  const int piece = ((last - first + STEP - 1) / STEP + pieces - 1) / pieces * STEP;  // of k
  const int begin = first + own_piece * piece, end = min(last, begin + piece);

  extern __shared__ __align__(16) unsigned char staged[];
  unsigned* const ring = reinterpret_cast<unsigned*>(staged) + warp * STAGES * STAGE_WORDS;
  // Behind the rings the warps' sums where tensor cores multiply, pairs of a lane's own side by side, and the groups.
  constexpr int WIDTH = FEATURES * RUN, HALF_SUMS = X_ROWS / 2 * WIDTH;  // of eight rows of x
  const int warp_sums = m > X_ROWS / 2 ? 2 * HALF_SUMS : HALF_SUMS;
  float* const sums = reinterpret_cast<float*>(staged) + warps * STAGES * STAGE_WORDS;
  float2* const own_sums = reinterpret_cast<float2*>(sums + warp * warp_sums) + lane;
  int* const groups = reinterpret_cast<int*>(sums + (kMatrix<T> ? warps * warp_sums : 0)) + own_piece * (CHUNK + CHUNK / STEP);
  int* const step_groups = groups + CHUNK;  // of all rows of a step, or MIXED
  const auto stage = [&](int from, int slot) {
    if (from < end && feature0 < n) Format::stage(p, array, from, feature0, ring + slot * STAGE_WORDS, lane);
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stage(begin + i * STEP, i);

  Format format(p, column);  // for float32
  constexpr int ACCUMULATORS = kMatrix<T> ? 4 : X_ROWS;
  float acc[RUN][ACCUMULATORS] = {};  // of each column of a lane's eight
  // On tensor cores these are of the group that a warp is in: sums of codes * x, and of x. Where its rows are of several,
  // group MIXED, they are of weights * x. They belong to features 16 t + 8 (i % 2) + j.
  int of_group = MIXED;
  StoredScales stored[2];
  float x_sums[4] = {};
  const auto add_sums = [&](auto weighted) {
#pragma unroll
    for (int j = 0; j < RUN; ++j)
#pragma unroll
      for (int high = 0; high < 2; ++high)
        if (!high || rows > 8) {
          float2* const to = own_sums + (high * RUN + j) * kWarpSize;
          const float2 total = *to;
          *to = make_float2(weighted(j, 2 * high, 0, total.x), weighted(j, 2 * high, 1, total.y));
          acc[j][2 * high] = acc[j][2 * high + 1] = 0;
        }
  };
  const auto add_group = [&](auto scale_type) {
    add_sums([&](int j, int i, int side, float total) {
      const float unit = Format::template unit<T>(j);
      const float zero = __fsub_rn(stored[side].raised_zero(p, Format::slot(j)), raised(0)) * (unit / kCodeUnit<T>);
      const float sum = __fmaf_rn(-zero, x_sums[i], acc[j][i + side]);
      return __fmaf_rn(stored[side].template scale<decltype(scale_type)>(j) * (1 / unit), sum, total);
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) x_sums[i] = 0;
  };
  const auto finish_group = [&] {
    if (of_group == MIXED)
      add_sums([&](int j, int i, int side, float total) { return total + acc[j][i + side]; });
    else if (scale_kind == kHalf)
      add_group(__half{});
    else
      add_group(__nv_bfloat16{});
  };
  if (kMatrix<T>)
    for (int i = 0; i < warp_sums / 2; i += kWarpSize) own_sums[i] = make_float2(0, 0);
  // The group of all rows of the step from `from` on, or MIXED.
  unsigned span_start = 0, span = 0;
  int span_group = 0;
  const auto group_of_step = [&](int from, int done) -> int {
    if (Format::BY_ROW) return step_groups[done % CHUNK / STEP];
    if (static_cast<unsigned>(from) - span_start >= span) {
      const unsigned size = static_cast<unsigned>(group), index = size ? static_cast<unsigned>(from) / size : 0;
      span_group = static_cast<int>(index), span_start = index * size, span = size ? size : ~0u;
    }
    return static_cast<unsigned>(from) - span_start + STEP <= span ? span_group : MIXED;
  };
  int slot = 0;
  for (int done = 0; done < piece; done += STEP) {
    if (Format::BY_ROW && done % CHUNK == 0) {
      __syncthreads();
      const int count = min(CHUNK, end - begin - done);
      for (int i = kWarpSize * (warp / pieces); i < count; i += kWarpSize * tiles) {
        const int of_row = i + lane < count ? p.arrays.at<int>(2, 0, begin + done + i + lane) : MIXED;
        groups[i + lane] = of_row;
        const bool same = __all_sync(kFullMask, of_row == __shfl_sync(kFullMask, of_row, 0));
        if (lane == 0) step_groups[i / STEP] = same ? of_row : MIXED;
      }
      __syncthreads();
    }
    const int from = begin + done;
    stage(from + (STAGES - 1) * STEP, (slot + STAGES - 1) % STAGES);
    cp_async_wait<STAGES - 1>();
    __syncwarp();
    const int row = from + RUN * t, left = column < n ? min(end - row, ROWS) : 0;
    const unsigned* const codes_of_step = ring + slot * STAGE_WORDS;
    const int* const row_groups = groups + done % CHUNK;
    slot = (slot + 1) % STAGES;
    typename Format::StagedCodes loaded;
    if constexpr (!kMatrix<T>) {
      if (left > 0) loaded.read(codes_of_step, row_groups, t, g, left);
#pragma unroll
      for (int part = 0; part < ROWS; part += PART) {
        float values[PART][RUN];
#pragma unroll
        for (int i = 0; i < PART; ++i) {
#pragma unroll
          for (int j = 0; j < RUN; ++j) values[i][j] = 0;
          if (part + i < left) format.row(loaded, part + i, row + part + i, values[i]);
        }
#pragma unroll
        for (int r = 0; r < X_ROWS; ++r) {
          if (r < rows) {
            float numbers[PART];
            input.two_floats(r, row + part, numbers);
#pragma unroll
            for (int i = 0; i < PART; ++i)
#pragma unroll
              for (int j = 0; j < RUN; ++j) acc[j][r] = __fmaf_rn(values[i][j], numbers[i], acc[j][r]);
          }
        }
      }
    } else {
      if (from >= end || feature0 >= n) continue;
      const int of_step = end - from >= STEP ? group_of_step(from, done) : MIXED;
      if (of_step != of_group) {
        finish_group();
        of_group = of_step;
        if (of_step != MIXED)
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const long long first = feature0 + RUN * (2 * t + side);
            stored[side].load(p, of_step, first < n ? first : 0);
          }
      }
      unsigned low[RUN / 2], high[RUN / 2] = {};
      input.pairs(g, row, low);
      if (rows > 8) input.pairs(g + 8, row, high);
      split_pairs(low), split_pairs(high);
      if (of_step != MIXED) {
        loaded.read(codes_of_step, row_groups, t, column < n ? g : 0, ROWS);
#pragma unroll
        for (int j = 0; j < RUN; ++j) {
          unsigned pairs[RUN / 2];
          Format::template pairs<T>(loaded, j, pairs);
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply<T>(acc[j], low, high, half, pairs[2 * half], pairs[2 * half + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) multiply<T>(x_sums, low, high, half, kOnes<T>, kOnes<T>);
      } else {
        if (left > 0) loaded.read(codes_of_step, row_groups, t, g, left);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // four rows at once: more would spill
          unsigned weights[RUN][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float values[2][RUN] = {};
#pragma unroll
            for (int other = 0; other < 2; ++other) {
              const int r = 2 * half + i + RUN / 2 * other;
              if (r >= left) continue;
              StoredScales of_row;
              of_row.load(p, Format::group(p, loaded, r, row + r), column);
#pragma unroll
              for (int j = 0; j < RUN; ++j) {
                const float difference = __fsub_rn(raised(Format::code(loaded, r, j)), of_row.raised_zero(p, Format::slot(j)));
                values[other][j] = __fmul_rn(of_row.scale(p, j), difference);
              }
            }
#pragma unroll
            for (int j = 0; j < RUN; ++j) weights[j][i] = pack<T>(values[0][j], values[1][j]);
          }
          __syncwarp();  // an mma takes all lanes
#pragma unroll
          for (int j = 0; j < RUN; ++j) multiply<T>(acc[j], low, high, half, weights[j][0], weights[j][1]);
        }
      }
    }
    __syncwarp();
  }

  cp_async_wait_all();
  if constexpr (kMatrix<T>) {
    finish_group();
  } else {
    static_assert(STAGES * STAGE_WORDS == X_ROWS * WIDTH, "a warp's sums take the place of its ring");
    __syncthreads();
    float* const to = reinterpret_cast<float*>(staged) + warp * X_ROWS * WIDTH;
#pragma unroll
    for (int j = 0; j < RUN; ++j)
#pragma unroll
      for (int i = 0; i < X_ROWS; ++i) {
        acc[j][i] += __shfl_xor_sync(kFullMask, acc[j][i], 1);
        acc[j][i] += __shfl_xor_sync(kFullMask, acc[j][i], 2);
        if (t == 0) to[i * WIDTH + RUN * g + j] = acc[j][i];
      }
  }
  __syncthreads();
  const Output output{y, kind, m, n};
  for (int i = threadIdx.x; i < rows * tiles * WIDTH; i += blockDim.x) {
    const int r = i / (tiles * WIDTH), feature = i % (tiles * WIDTH), f = feature % WIDTH;
    const float* of_piece = kMatrix<T> ? sums : reinterpret_cast<const float*>(staged);
    const int stride = kMatrix<T> ? warp_sums : X_ROWS * WIDTH;
    of_piece += feature / WIDTH * pieces * stride;
    if (kMatrix<T>)  // as mma leave them: j = f % 8, lane 4 (r % 8) + f / 16
      of_piece += ((r / 8 * RUN + f % RUN) * kWarpSize + r % 8 * 4 + f / (2 * RUN)) * 2 + f / RUN % 2;
    else
      of_piece += r * WIDTH + f;
    float sum = of_piece[0];
    for (int w = 1; w < pieces; ++w) sum += of_piece[w * stride];
    output.store(x_row0 + r, blockIdx.x * static_cast<long long>(tiles * WIDTH) + feature, sum);
  }
}

// y [count] = the sum over the first axis of scratch [splits, count], in order.
extern "C" __global__ void dequant_gemv_sum(void* y, int kind, const float* scratch, int splits, long long count) {
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  float sum = scratch[i];
  for (int split = 1; split < splits; ++split) sum += scratch[split * count + i];
  store_number(y, kind, i, sum);
}
