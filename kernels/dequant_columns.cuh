// The formats packed across the rows of [k, n] or along n, with scales per group of k: GPTQ and AWQ int4.
//
// A format is a struct with `Codes`, eight rows by eight columns of them, which a thread loads at once, `StagedCodes`, which
// it reads from what its warp staged, and `row`, which decodes the eight columns of one row of codes. Scales and zero points
// are loaded when the group changes. Scale * (q - zero) is exact: 11 significant bits times 5.
//
// `stage` copies the codes of 32 rows by 64 columns to a warp's STAGE_WORDS of shared memory; they are there after
// cp_async_wait and __syncwarp. What lies beyond the weight is not copied, and must not be read.
//
// For tensor cores `pairs` gives the bare codes of a column, in units of `unit`, where all 32 rows are of one group: scale
// and zero point wait for the sum of the group's products, and for the sum of its x. Else `code` gives one code, and
// `group` the group of its row.
#pragma once

#include "dequant_common.cuh"

namespace pb {

constexpr int ROWS = 8;  // of a thread's codes
constexpr int STAGE_WORDS = 32 * 8;

// Of a group, scales and zero points of eight output features as they are stored, in five registers.
struct StoredScales {
  unsigned scales[RUN / 2], zeros;

  __device__ void load(const Params& p, int group, long long column) {
    zeros = static_cast<unsigned>(p.arrays.at<int>(0, group, column >> 3));
    if (p.mode & 1) {
      const uint4 words = load16(p.arrays.address<unsigned short>(1, group, column));
      scales[0] = words.x, scales[1] = words.y, scales[2] = words.z, scales[3] = words.w;
    } else {
#pragma unroll
      for (int j = 0; j < RUN; j += 2)
        scales[j / 2] = p.arrays.at<unsigned short>(1, group, column + j) |
                        static_cast<unsigned>(p.arrays.at<unsigned short>(1, group, column + j + 1)) << 16;
    }
  }
  // Of column j, whose zero point is nibble `slot`.
  template <typename Scale>
  __device__ float scale(int j) const {
    return to_float(bit_cast<Scale>(static_cast<unsigned short>(scales[j / 2] >> 16 * (j % 2))));
  }
  __device__ float scale(const Params& p, int j) const {
    return p.scale_kind == kHalf ? scale<__half>(j) : scale<__nv_bfloat16>(j);
  }
  __device__ float raised_zero(const Params& p, int slot) const {
    return raised(((zeros >> 4 * slot) + (p.mode >> 1 & 1)) & 15);
  }
};

// Arrays: qzeros int32 [groups, n/8], scales 16-bit [groups, n], g_idx int32 [1, k]. mode: 1 if rows are loaded in
// 16-byte words, 2 to add 1 to stored zero points.
struct GroupScales {
  const Params& p;
  float scale[RUN], raised_zero[RUN];
  int loaded;
  long long column;

  __device__ GroupScales(const Params& p, long long column) : p(p), loaded(-1), column(column) {}

  // slot(j): which nibble of a word of zero points is column j's.
  template <typename Slot>
  __device__ void load(int group, Slot slot) {
    loaded = group;
    StoredScales stored;
    stored.load(p, group, column);
#pragma unroll
    for (int j = 0; j < RUN; ++j) scale[j] = stored.scale(p, j), raised_zero[j] = stored.raised_zero(p, slot(j));
  }
  __device__ float weight(unsigned q, int j) const { return __fmul_rn(scale[j], __fsub_rn(raised(q), raised_zero[j])); }
};

// Two codes from bits 4 i and 16 + 4 i of a word, as T. half: the bits of a code, as they are, are so many of its smallest
// subnormals, which tensor cores multiply exactly, whatever x; bfloat16's are too small for float32's range.
template <typename T>
constexpr float kCodeUnit = kIsHalf<T> ? 0x1p-24f : 1.0f;
template <typename T>
__device__ __forceinline__ unsigned code_pair(unsigned word, int i) {
  const unsigned code = word >> 4 * i & 0x000F000Fu;
  if (kIsHalf<T>) return code;
  const __nv_bfloat162 raised = bit_cast<__nv_bfloat162>(code | 0x43004300u);  // 128 + q
  return bit_cast<unsigned>(__hsub2_rn(raised, bit_cast<__nv_bfloat162>(0x43004300u)));
}
// Two ones in its unit.
template <typename T>
constexpr unsigned kOnes = kIsHalf<T> ? 0x00010001u : 0x3F803F80u;

// The codes' array, [rows, columns] of words, and the weight's columns. What lies beyond its rows or columns is not loaded.
struct CodeArray {
  const int* data;
  long long row_stride, column_stride, columns;
};

// qweight int32 [k/8, n]: element k of a column in bits 4 (k % 8) of row k / 8.
struct Gptq {
  static constexpr bool BY_ROW = true;  // array 2 names the group of each row

  __device__ static void stage(const Params& p, const CodeArray& codes, int row, long long column, unsigned* to,
                               int lane) {
    const int* from = codes.data + (row >> 3) * codes.row_stride + column * codes.column_stride;
    const int rows = min((static_cast<int>(p.k) - row) >> 3, 4);
    const int columns = static_cast<int>(min(codes.columns - column, 64LL));
    if (p.mode & 1) {
#pragma unroll
      for (int i = lane; i < 64; i += kWarpSize)
        if (i / 16 < rows && i % 16 * 4 < columns) cp_async16(to + 4 * i, from + i / 16 * codes.row_stride + i % 16 * 4);
    } else {
      for (int i = lane; i < 256; i += kWarpSize)
        if (i / 64 < rows && i % 64 < columns)
          to[i] = static_cast<unsigned>(from[i / 64 * codes.row_stride + i % 64 * codes.column_stride]);
    }
  }

  struct Codes {
    unsigned words[RUN];
    int groups[ROWS];

    __device__ void load(const Params& p, const CodeArray& codes, long long row, long long column) {
      if (row >= p.k || column >= codes.columns) return;
      const int* from = codes.data + row / 8 * codes.row_stride + column * codes.column_stride;
      if (p.mode & 1) {
        const int* ids = p.arrays.address<int>(2, 0, row);
        const uint4 loaded[4] = {load16(from), load16(from + 4), load16(ids), load16(ids + 4)};
        const unsigned* flat = reinterpret_cast<const unsigned*>(loaded);
#pragma unroll
        for (int i = 0; i < RUN; ++i) words[i] = flat[i], groups[i] = static_cast<int>(flat[RUN + i]);
      } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
          words[i] = static_cast<unsigned>(from[i * codes.column_stride]);
          groups[i] = p.arrays.at<int>(2, 0, row + i);
        }
      }
    }
  };

  struct StagedCodes {
    unsigned words[RUN];
    const int* groups;  // stay in shared memory

    // Those of rows 8 t ... and columns 8 g ... of what is staged; row_groups: of the 32 rows.
    __device__ void read(const unsigned* staged, const int* row_groups, int t, int g, int) {
      const uint4* from = reinterpret_cast<const uint4*>(staged) + 16 * t + 2 * g;
      const uint4 loaded[2] = {from[0], from[1]};
      const unsigned* flat = reinterpret_cast<const unsigned*>(loaded);
#pragma unroll
      for (int i = 0; i < RUN; ++i) words[i] = flat[i];
      groups = row_groups + 8 * t;
    }
  };

  GroupScales scales;
  __device__ Gptq(const Params& p, long long column) : scales(p, column) {}

  // Column j: pairs of rows i and i + 4.
  template <typename T>
  __device__ static void pairs(const StagedCodes& codes, int j, unsigned (&out)[RUN / 2]) {
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i) out[i] = code_pair<T>(codes.words[j], i);
  }
  __device__ static int slot(int j) { return j; }
  __device__ static unsigned code(const StagedCodes& codes, int i, int j) { return codes.words[j] >> 4 * i & 15; }
  __device__ static int group(const Params&, const StagedCodes& codes, int i, int) { return codes.groups[i]; }
  template <typename T>
  __device__ static constexpr float unit(int) {
    return kCodeUnit<T>;
  }

  template <typename SomeCodes>
  __device__ void row(const SomeCodes& codes, int i, int, float (&values)[RUN]) {
    const int group = codes.groups[i];
    if (group != scales.loaded) scales.load(group, [](int j) { return j; });
#pragma unroll
    for (int j = 0; j < RUN; ++j) values[j] = scales.weight(codes.words[j] >> 4 * i & 15, j);
  }
};

// Four neighbouring lanes exchange four words each: word j of the i-th becomes word i of the j-th. All lanes of the warp
// take part.
__device__ __forceinline__ void transpose4(int own, unsigned (&v)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & bit)) {
        const bool upper = own & bit;
        const unsigned got = __shfl_xor_sync(kFullMask, upper ? v[i] : v[i | bit], bit);
        v[i] = upper ? got : v[i];
        v[i | bit] = upper ? v[i | bit] : got;
      }
}

// qweight int32 [k, n/8]: bits 4 i of word c hold column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; qzeros likewise. Wide: the four
// threads of 32 columns load four words of a row each for all of them, and exchange.
struct Awq {
  static constexpr bool BY_ROW = false;

  __device__ static void stage(const Params& p, const CodeArray& codes, int row, long long column, unsigned* to,
                               int lane) {
    const int* from = codes.data + row * codes.row_stride + (column >> 3) * codes.column_stride;
    const int rows = min(static_cast<int>(p.k) - row, 32);
    const int columns = static_cast<int>(min((codes.columns - column) >> 3, 8LL));
    if (p.mode & 1) {
#pragma unroll
      for (int i = lane; i < 64; i += kWarpSize)
        if (i / 2 < rows && i % 2 * 4 < columns) cp_async16(to + 4 * i, from + i / 2 * codes.row_stride + i % 2 * 4);
    } else {
      for (int i = lane; i < 256; i += kWarpSize)
        if (i / 8 < rows && i % 8 < columns)
          to[i] = static_cast<unsigned>(from[i / 8 * codes.row_stride + i % 8 * codes.column_stride]);
    }
  }

  struct Codes {
    unsigned words[ROWS];

    // Those of rows 8 t ..., of which there are `rows`, and columns 8 g ... of what is staged.
    __device__ void read(const unsigned* staged, const int*, int t, int g, int rows) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (i < rows) words[i] = staged[(8 * t + i) * 8 + g];
    }

    __device__ void load(const Params& p, const CodeArray& codes, long long row, long long column) {
      if (p.mode & 1) {
        const int own = static_cast<int>(column / 8 % 4);
        const long long word = column / 8 - own;  // the four's first
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
          uint4 loaded = make_uint4(0, 0, 0, 0);
          if (column < codes.columns && row + i + own < p.k)
            loaded = load16(codes.data + (row + i + own) * codes.row_stride + word);
          unsigned exchanged[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
          transpose4(own, exchanged);
#pragma unroll
          for (int j = 0; j < 4; ++j) words[i + j] = exchanged[j];
        }
      } else if (column < codes.columns) {
        const int* from = codes.data + column / 8 * codes.column_stride;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
          if (row + i < p.k) words[i] = static_cast<unsigned>(from[(row + i) * codes.row_stride]);
      }
    }
  };

  using StagedCodes = Codes;

  GroupScales scales;
  unsigned start, span;  // rows of the group whose scales are loaded
  __device__ Awq(const Params& p, long long column) : scales(p, column), start(0), span(0) {}

  __device__ static int slot(int j) { return j / 2 + j % 2 * 4; }
  __device__ static unsigned code(const Codes& codes, int i, int j) { return codes.words[i] >> 4 * slot(j) & 15; }
  __device__ static int group(const Params& p, const Codes&, int, int row) { return p.group ? row / p.group : 0; }

  // Loads what row `row` is decoded with.
  __device__ void reach(int row) {
    if (static_cast<unsigned>(row) - start < span) return;
    const unsigned size = static_cast<unsigned>(scales.p.group), group = size ? static_cast<unsigned>(row) / size : 0;
    start = group * size, span = size ? size : ~0u;
    scales.load(group, slot);
  }
  __device__ void row(const Codes& codes, int i, int row, float (&values)[RUN]) {
    reach(row);
#pragma unroll
    for (int j = 0; j < RUN; ++j) values[j] = scales.weight(codes.words[i] >> 4 * slot(j) & 15, j);
  }

  // Column j: pairs of rows i and i + 4. A half's four bits may lie one nibble higher, where every code is 16 times as much.
  template <typename T>
  __device__ static void pairs(const Codes& codes, int j, unsigned (&out)[RUN / 2]) {
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i) {
      const unsigned both = __byte_perm(codes.words[i], codes.words[i + 4], j % 2 ? 0x7632 : 0x5410);
      const unsigned from = kIsHalf<T> ? both >> j / 4 * 8 : both;
      out[i] = kIsHalf<T> ? from & (j / 2 % 2 ? 0x00F000F0u : 0x000F000Fu) : code_pair<T>(from, j / 2);
    }
  }
  template <typename T>
  __device__ static constexpr float unit(int j) {
    return kCodeUnit<T> * (kIsHalf<T> && j / 2 % 2 ? 16.0f : 1.0f);
  }
};

}  // namespace pb
