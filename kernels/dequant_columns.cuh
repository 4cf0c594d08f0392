// The formats packed across the rows of [k, n] or along n, with scales per group of k: GPTQ and AWQ int4.
//
// A format is a struct that loads eight rows by eight columns of codes at once, all wide loads before the first use;
// `row` decodes the eight columns of one of its rows, and loads scales and zero points when the group changes: the same
// rows, and so the same groups, for every thread of a warp. Scale * (q - zero) is exact: 11 significant bits times 5.
#pragma once

#include "dequant_common.cuh"

namespace pb {

constexpr int ROWS = 8;  // of a thread's codes

// Arrays: qzeros int32 [groups, n/8], scales 16-bit [groups, n], g_idx int32 [1, k]. mode: 1 if rows are loaded in
// 16-byte words, 2 to add 1 to stored zero points.
struct GroupScales {
  const Params& p;
  float scale[RUN], raised_zero[RUN];
  long long loaded, column;

  __device__ GroupScales(const Params& p, long long column) : p(p), loaded(-1), column(column) {}

  // slot(j): which nibble of a word of zero points is column j's.
  template <typename Slot>
  __device__ void load(long long group, Slot slot) {
    if (group == loaded) return;
    loaded = group;
    const unsigned zeros = static_cast<unsigned>(p.arrays.at<int>(0, group, column / 8));
    unsigned halves[RUN / 2];
    if (p.mode & 1) {
      const uint4 words = load16(p.arrays.address<unsigned short>(1, group, column));
      halves[0] = words.x, halves[1] = words.y, halves[2] = words.z, halves[3] = words.w;
    } else {
#pragma unroll
      for (int j = 0; j < RUN; j += 2)
        halves[j / 2] = p.arrays.at<unsigned short>(1, group, column + j) |
                        static_cast<unsigned>(p.arrays.at<unsigned short>(1, group, column + j + 1)) << 16;
    }
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
      const unsigned short bits = static_cast<unsigned short>(halves[j / 2] >> 16 * (j % 2));
      scale[j] = p.scale_kind == kHalf ? to_float(bit_cast<__half>(bits)) : to_float(bit_cast<__nv_bfloat16>(bits));
      raised_zero[j] = raised(((zeros >> 4 * slot(j)) + (p.mode >> 1 & 1)) & 15);
    }
  }
  __device__ float weight(unsigned q, int j) const { return __fmul_rn(scale[j], __fsub_rn(raised(q), raised_zero[j])); }
};

// qweight int32 [k/8, n]: element k of a column in bits 4 (k % 8) of row k / 8.
struct Gptq {
  GroupScales scales;
  unsigned words[RUN];
  int groups[ROWS];

  __device__ Gptq(const Params& p, const int* codes, long long row_stride, long long column_stride, long long row,
                  long long column, long long columns)
      : scales(p, column) {
    if (column >= columns) return;
    const int* from = codes + row / 8 * row_stride + column * column_stride;
    if (p.mode & 1) {
      const int* ids = p.arrays.address<int>(2, 0, row);
      const uint4 loaded[4] = {load16(from), load16(from + 4), load16(ids), load16(ids + 4)};
      const unsigned* flat = reinterpret_cast<const unsigned*>(loaded);
#pragma unroll
      for (int i = 0; i < RUN; ++i) words[i] = flat[i], groups[i] = static_cast<int>(flat[RUN + i]);
    } else {
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        words[i] = static_cast<unsigned>(from[i * column_stride]);
        groups[i] = p.arrays.at<int>(2, 0, row + i);
      }
    }
  }
  __device__ void row(int i, float (&values)[RUN]) {
    scales.load(groups[i], [](int j) { return j; });
#pragma unroll
    for (int j = 0; j < RUN; ++j) values[j] = scales.weight(words[j] >> 4 * i & 15, j);
  }
};

// Four lanes exchange four words each: word j of lane i becomes word i of lane j. All lanes of the warp take part.
__device__ __forceinline__ void transpose4(unsigned (&v)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & bit)) {
        const bool upper = lane & bit;
        const unsigned got = __shfl_xor_sync(kFullMask, upper ? v[i] : v[i | bit], bit);
        v[i] = upper ? got : v[i];
        v[i | bit] = upper ? v[i | bit] : got;
      }
}

// qweight int32 [k, n/8]: bits 4 i of word c hold column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; qzeros likewise. Wide: four
// neighbours in a warp load four words of a row each for all of them, and exchange.
struct Awq {
  GroupScales scales;
  unsigned words[ROWS];
  unsigned first_row;

  __device__ Awq(const Params& p, const int* codes, long long row_stride, long long column_stride, long long row,
                 long long column, long long columns)
      : scales(p, column), first_row(static_cast<unsigned>(row)) {
    const long long rows = p.k;
    if (p.mode & 1) {
      const int lane = threadIdx.x % 4;
      const long long word = column / 8 - lane;  // the four's first
#pragma unroll
      for (int i = 0; i < ROWS; i += 4) {
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (column < columns && row + i + lane < rows) loaded = load16(codes + (row + i + lane) * row_stride + word);
        unsigned exchanged[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        transpose4(exchanged);
#pragma unroll
        for (int j = 0; j < 4; ++j) words[i + j] = exchanged[j];
      }
    } else if (column < columns) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (row + i < rows)
          words[i] = static_cast<unsigned>(codes[(row + i) * row_stride + column / 8 * column_stride]);
    }
  }
  __device__ void row(int i, float (&values)[RUN]) {
    const auto slot = [](int j) { return j / 2 + j % 2 * 4; };
    scales.load((first_row + i) / static_cast<unsigned>(scales.p.group), slot);
#pragma unroll
    for (int j = 0; j < RUN; ++j) values[j] = scales.weight(words[i] >> 4 * slot(j) & 15, j);
  }
};

}  // namespace pb
