// The formats whose bytes run along the rows of the weight: FP8, INT8, pack-quantized, MXFP4, NVFP4, NF4 and FP4. GGUF's
// are in dequant_gguf.cuh, those packed across rows in dequant_columns.cuh.
//
// A format is a struct with `first_byte` and `last_byte`, where the weights from a column on begin and those before a
// column end in the bytes of a row, and `decode`: RUNS runs, one or all four of 32 weights, of eight weights each as float32.
// `tile` holds staged bytes, those of weights from a column on. The first run is number `run` of the four of 32 weights
// that begin `base` behind that column, base a multiple of 32, in `row` of the weight from `column` on: what depends on
// base alone is worked out, and loaded, once for several runs. Columns of a run beyond the row's end may decode to
// anything, and read no memory of their own.
#pragma once

#include "dequant_common.cuh"

namespace pb {

// ELEMENTS weights in BYTES bytes, the next ones right behind them.
template <int ELEMENTS, int BYTES>
struct Dense {
  static constexpr bool PAIRED = false;
  Params p;
  __device__ long long first_byte(long long row, long long column) const { return column / ELEMENTS * BYTES; }
  __device__ long long last_byte(long long row, long long column) const {
    return (column * BYTES + ELEMENTS - 1) / ELEMENTS;
  }
};

// The group of a run of the 32 columns from `column` on, and whether the whole run is in it, or all 32.
struct Group {
  long long index;
  bool whole, all;

  __device__ Group(const Params& p, long long column, unsigned run) {
    index = 0, whole = all = true;
    if (p.group == 0) return;
    index = of(p, column);  // of all four, as a rule
    all = column + 32 <= (index + 1) * p.group;
    if (all) return;
    index = of(p, column + RUN * run);
    whole = column + RUN * run + RUN <= (index + 1) * p.group;
  }
  __device__ static long long of(const Params& p, long long column) {
    if (column >> 32) return column / p.group;  // slow, and rows as long are rare
    return static_cast<unsigned>(column) / static_cast<unsigned>(p.group);
  }
};

// e4m3fn and e5m2 are the upper bits of a half: with three bits of significand moved to its ten, e4m3fn's exponent is too
// small by 8. Subnormals come out right, as half subnormals; NaN of e4m3fn would be 480.
__device__ __forceinline__ float e4m3(unsigned byte) {
  const unsigned short bits = static_cast<unsigned short>((byte & 0x80) << 8 | (byte & 0x7F) << 7);
  const float value = __fmul_rn(to_float(bit_cast<__half>(bits)), 256.0f);
  return (byte & 0x7F) == 0x7F ? kNan : value;
}
__device__ __forceinline__ float e5m2(unsigned byte) {
  return to_float(bit_cast<__half>(static_cast<unsigned short>(byte << 8)));
}

// e2m1 set into a float's exponent and significand is 2^126 too small; its subnormal, 0.5, is one there too.
__device__ __forceinline__ float e2m1(unsigned nibble) {
  return __fmul_rn(__uint_as_float((nibble & 7) << 22 | (nibble & 8) << 28), 0x1p126f);
}

// 2^(e - 127); 255 is NaN, and 2^-127 a subnormal.
__device__ __forceinline__ float e8m0(unsigned byte) {
  if (byte == 255) return kNan;
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

// The scale and zero point that a thread used last: of a whole row, where a channel has one.
struct Known {
  long long group = -1;
  float scale, raised_zero;
};

// weight uint8 [n, k], scale float32. number * scale. mode: 1 for e5m2.
struct Fp8 : Dense<1, 1> {
  Known known;
  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                         float (&values)[RUNS][RUN]) {
    const Group group(p, column, 0);  // 128 columns, or all
    if (group.index != known.group) {
      known.group = group.index;
      known.scale = p.arrays.at<float>(0, row >> p.row_shift, group.index);
    }
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      unsigned bytes[2];
      tile.read(base + RUN * (run + r), bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned word = bytes[half];
        if (!p.mode && (((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u)) {  // e4m3's NaN among them
#pragma unroll
          for (int i = 0; i < 4; ++i) values[r][4 * half + i] = __fmul_rn(e4m3(word >> 8 * i & 255), known.scale);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned upper = __byte_perm(word, 0, i ? 0x3424 : 0x1404);  // as upper bytes of halves
          const unsigned pair = p.mode ? upper : (upper & 0x80008000u) | (upper >> 1 & 0x3F803F80u);
          const float2 numbers = to_float2(bit_cast<__half2>(pair));
          const float unit = p.mode ? 1.0f : 256.0f;
          values[r][4 * half + 2 * i] = __fmul_rn(__fmul_rn(numbers.x, unit), known.scale);
          values[r][4 * half + 2 * i + 1] = __fmul_rn(__fmul_rn(numbers.y, unit), known.scale);
        }
      }
    }
  }
};

// scale * (q - zero), where values hold 2^23 + q + `bias` and `zero` gives a zero point. A scale is loaded when the group
// changes; all of a thread's runs are of one row.
template <int RUNS, typename Zero>
__device__ __forceinline__ void affine(const Params& p, Known& known, long long row, long long column, unsigned run,
                                       int bias, bool to_odd, float (&values)[RUNS][RUN], Zero zero) {
  const auto load = [&](long long group) {
    if (group == known.group) return;
    known.group = group;
    known.scale = p.arrays.number(0, row, group, p.scale_kind), known.raised_zero = raised(zero(group) + bias);
  };
  const auto weight = [&](float raised_q) {
    const float q = __fsub_rn(raised_q, known.raised_zero);
    return to_odd ? multiply_to_odd(known.scale, q) : __fmul_rn(known.scale, q);
  };
  const Group first(p, column, run);
#pragma unroll
  for (int r = 0; r < RUNS; ++r) {
    const Group group = RUNS == 1 || first.all ? first : Group(p, column, run + r);
    if (group.whole) {
      if (r == 0 || !first.all) load(group.index);
#pragma unroll
      for (int i = 0; i < RUN; ++i) values[r][i] = weight(values[r][i]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      load(Group::of(p, min(column + RUN * (run + r) + i, p.k - 1)));
      values[r][i] = weight(values[r][i]);
    }
  }
}

// weight int8 [n, k], scale float32, zero_point int8 like it or absent. mode: 1 with zero points, 2 to round to odd.
struct Int8 : Dense<1, 1> {
  Known known;
  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                         float (&values)[RUNS][RUN]) {
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      unsigned bytes[2];
      tile.read(base + RUN * (run + r), bytes);
#pragma unroll
      for (int i = 0; i < RUN; ++i) values[r][i] = raised_byte(bytes[i / 4] ^ 0x80808080u, i % 4);  // q + 128
    }
    affine(p, known, row, column, run, 128, p.mode & 2, values,
           [&](long long group) { return p.mode & 1 ? p.arrays.at<signed char>(1, row, group) : 0; });
  }
};

// weight_packed int32 [n, words], weight_scale, weight_zero_point packed along n or absent. mode: bits of a field, + 16
// with zero points, + 32 to round to odd.
struct PackQuantized {
  static constexpr bool PAIRED = false;
  Params p;
  Known known;
  __device__ int bits() const { return p.mode & 15; }
  __device__ long long first_byte(long long row, long long column) const { return column / 8 * bits(); }
  __device__ long long last_byte(long long row, long long column) const { return (column * bits() + 7) / 8; }

  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                         float (&values)[RUNS][RUN]) {
    const unsigned mask = (1u << bits()) - 1;
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      unsigned words[2];
      tile.read((base / RUN + run + r) * bits(), words);
      unsigned long long string = static_cast<unsigned long long>(words[1]) << 32 | words[0];
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        values[r][i] = raised(static_cast<unsigned>(string) & mask);
        string >>= bits();
      }
    }
    affine(p, known, row, column, run, 0, p.mode & 32, values, [&](long long group) { return zero(row, group); });
  }

  __device__ int zero(long long row, long long group) const {
    if (!(p.mode & 16)) return 1 << (bits() - 1);
    const long long bit = row * bits();
    const int shift = static_cast<int>(bit & 31);
    unsigned field = static_cast<unsigned>(p.arrays.at<int>(1, bit >> 5, group)) >> shift;
    if (shift + bits() > 32) field |= static_cast<unsigned>(p.arrays.at<int>(1, (bit >> 5) + 1, group)) << (32 - shift);
    return static_cast<int>(field & ((1u << bits()) - 1));
  }
};

// ---- pairs of 16 bits, for tensor cores ------------------------------------------------------------------------------
//
// A format may have `pairs<T>` beside `decode`: the runs' weights in T, a pair being weights i and i + 4, so that one mask
// takes both from a word; and `finish`, what is left to do to a sum of products.

// e2m1 set into the last bits of T's exponent and the first of its significand, signs in place: 2^-14 (half) or 2^-126
// (bfloat16) times the number, its subnormal 0.5 too.
template <typename T>
__device__ __forceinline__ void e2m1_pairs(unsigned word, unsigned (&out)[RUN / 2]) {
  if constexpr (kIsHalf<T>) {  // all of them in the upper byte: four at once, weights 0, 2, 4 and 6, and the others
    const unsigned even = (word << 4 & 0x80808080u) | (word << 1 & 0x0E0E0E0Eu);
    const unsigned odd = (word & 0x80808080u) | (word >> 3 & 0x0E0E0E0Eu);
    out[0] = __byte_perm(even, 0, 0x2404), out[2] = even & 0xFF00FF00u;
    out[1] = __byte_perm(odd, 0, 0x2404), out[3] = odd & 0xFF00FF00u;
    return;
  }
#pragma unroll
  for (int i = 0; i < RUN / 2; ++i) {
    const int up = 6 - 4 * i;
    const unsigned magnitude = (up < 0 ? word >> -up : word << up) & 0x01C001C0u;
    out[i] = (word << (12 - 4 * i) & 0x80008000u) | magnitude;
  }
}

// Both halves times a number of T, each product rounded once.
template <typename T>
__device__ __forceinline__ void scale_pairs(unsigned (&pairs)[RUN / 2], float scale) {
  using Pair = typename Convert<T>::Pair;
  const Pair both = from_floats<T>(scale, scale);
#pragma unroll
  for (int i = 0; i < RUN / 2; ++i) pairs[i] = bit_cast<unsigned>(__hmul2_rn(bit_cast<Pair>(pairs[i]), both));
}

template <typename T>
__device__ __forceinline__ void round_pairs(const float (&values)[RUN], unsigned (&out)[RUN / 2]) {
#pragma unroll
  for (int i = 0; i < RUN / 2; ++i) out[i] = bit_cast<unsigned>(from_floats<T>(values[i], values[i + RUN / 2]));
}

// blocks uint8 [n, k/32, 16], scales uint8 [n, k/32]. number * scale, exact.
struct Mxfp4 : Dense<2, 1> {
  static constexpr bool PAIRED = true;
  __device__ float finish(float sum) const { return sum; }

  template <typename T, int RUNS>
  __device__ void pairs(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                        unsigned (&out)[RUNS][RUN / 2]) const {
    const unsigned e = p.arrays.at<unsigned char>(0, row, column >> 5);
    if (e < 99 || e > 128) {  // 2^(e - 127) times what e2m1_pairs lacks is no normal number of half
      float values[RUNS][RUN];
      decode<RUNS>(tile, base, run, row, column, values);
#pragma unroll
      for (int r = 0; r < RUNS; ++r) round_pairs<T>(values[r], out[r]);
      return;
    }
    const float scale = __uint_as_float((e + (kIsHalf<T> ? 14 : 126)) << 23);
    unsigned words[RUNS];
    tile.read(base / 2 + RUN / 2 * run, words);
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      e2m1_pairs<T>(words[r], out[r]);
      scale_pairs<T>(out[r], scale);
    }
  }
  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                         float (&values)[RUNS][RUN]) const {
    const float scale = e8m0(p.arrays.at<unsigned char>(0, row, column >> 5));
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      const unsigned word = tile.word(base / 2 + RUN / 2 * (run + r));
#pragma unroll
      for (int i = 0; i < RUN; ++i) values[r][i] = __fmul_rn(e2m1(word >> 4 * i & 15), scale);
    }
  }
};

// weight_packed uint8 [n, k/2], weight_scale e4m3 [n, k/16], global_scale float32. (number * scale) * global, the first
// product exact. mode: 1 to divide, 2 for swizzled scales, 4 for number * (scale * global).
struct Nvfp4 : Dense<2, 1> {
  static constexpr bool PAIRED = true;

  // The global scale, left out of the pairs, which are 2^-7 times number * scale: exact, and in range.
  __device__ float finish(float sum) const {
    return p.mode & 4 ? sum : together(__fmul_rn(sum, 128.0f), p.arrays.at<float>(1, 0, 0));
  }

  template <typename T, int RUNS>
  __device__ void pairs(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                        unsigned (&out)[RUNS][RUN / 2]) const {
    if (p.mode & 4) {
      float values[RUNS][RUN];
      decode<RUNS>(tile, base, run, row, column, values);
#pragma unroll
      for (int r = 0; r < RUNS; ++r) round_pairs<T>(values[r], out[r]);
      return;
    }
    unsigned words[RUNS];
    tile.read(base / 2 + RUN / 2 * run, words);
    float scale = 0;
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      if (r % 2 == 0) {
        const float stored = e4m3(block_scale(row, (column >> 4) + (run + r) / 2));
        scale = __fmul_rn(stored, kIsHalf<T> ? 0x1p7f : 0x1p119f);
      }
      e2m1_pairs<T>(words[r], out[r]);
      scale_pairs<T>(out[r], scale);
    }
  }
  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                         float (&values)[RUNS][RUN]) const {
    const float common = p.arrays.at<float>(1, 0, 0);
    float scale = 0;
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      const unsigned word = tile.word(base / 2 + RUN / 2 * (run + r));
      if (r % 2 == 0) {  // two runs share a scale, and `run` is even where there are several
        scale = e4m3(block_scale(row, (column >> 4) + (run + r) / 2));
        if (p.mode & 4) scale = together(scale, common);
      }
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        values[r][i] = __fmul_rn(e2m1(word >> 4 * i & 15), scale);
        if (!(p.mode & 4)) values[r][i] = together(values[r][i], common);
      }
    }
  }
  __device__ float together(float value, float common) const {
    return p.mode & 1 ? __fdiv_rn(value, common) : __fmul_rn(value, common);
  }
  // Swizzled: tiles of 128 rows by 4 blocks, each 32 x 16 bytes with the rows r, r + 32, r + 64, r + 96 side by side. As
  // many bytes as 128 rows of the array hold a row of tiles.
  __device__ unsigned block_scale(long long row, long long block) const {
    if (!(p.mode & 2)) return p.arrays.at<unsigned char>(0, row, block);
    const unsigned r = static_cast<unsigned>(row & 127), c = static_cast<unsigned>(block);
    const unsigned columns = static_cast<unsigned>((p.k + 63) / 64) * 4;
    const unsigned place = c / 4 * 512 + r % 32 * 16 + r / 32 * 4 + c % 4;
    return p.arrays.at<unsigned char>(0, (row & ~127LL) + place / columns, place % columns);
  }
};

__device__ const float kBits4Codes[32] = {
    // NF4, QLoRA appendix E
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
    // bitsandbytes' FP4
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f, -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f,
    -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

// packed uint8 [ceil(n*k/2)], the first weight in the high nibble, and absmax float32 [blocks] of 2^group weights of the
// flat weight; nested: absmax_q uint8 [blocks], absmax2 [ceil(blocks/256)], offset, code2 [256]. table[code] * absmax.
// mode: 1 for FP4, 2 for nested.
struct Bits4 {
  static constexpr bool PAIRED = false;
  static constexpr int MAX_SCALES = 1024;  // of a tile: 32768 weights in blocks of 32
  Params p;
  const float* scales = nullptr;  // absmax of the blocks from first_block on, where `share_scales` was called
  long long first_block = 0;
  __device__ long long first_byte(long long row, long long column) const { return (row * p.k + column) / 2; }
  __device__ long long last_byte(long long row, long long column) const { return (row * p.k + column + 1) / 2; }

  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                         float (&values)[RUNS][RUN]) const {
#pragma unroll
    for (int r = 0; r < RUNS; ++r) decode_run(tile, base, run + r, row, column, values[r]);
  }
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, long long row, long long column,
                             float (&values)[RUN]) const {
    const unsigned first = base + RUN * run;
    const long long flat = row * p.k + column + RUN * run;
    const unsigned nibble = first + static_cast<unsigned>((flat - first) & 1);  // the tile begins with a whole byte
    unsigned words[2];
    tile.read(nibble / 2, words);
    const float* table = kBits4Codes + (p.mode & 1) * 16;
    long long block = flat >> p.group;
    float scale = absmax(block);
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      if (flat + i >> p.group != block && column + RUN * run + i < p.k) scale = absmax(block = flat + i >> p.group);
      const unsigned at = (nibble & 1) + i;
      const unsigned byte = words[0] >> 8 * (at / 2 % 4) & 255;  // at most 4 bytes and a half
      const unsigned last = at == RUN ? words[1] & 255 : byte;
      values[i] = __fmul_rn(table[at % 2 ? last & 15 : last >> 4], scale);
    }
  }
  __device__ float absmax(long long block) const {
    if (scales) return scales[block - first_block];
    if (!(p.mode & 2)) return p.arrays.at<float>(0, 0, block);
    return nested_absmax(block, p.arrays.at<float>(3, 0, p.arrays.at<unsigned char>(0, 0, block)));
  }
  __device__ float nested_absmax(long long block, float code) const {
    return __fadd_rn(__fmul_rn(code, p.arrays.at<float>(1, 0, block >> 8)), p.arrays.at<float>(2, 0, 0));
  }
};

// Called by all threads of a program before they decode `count` weights from (row, column) on: what the format's scales
// have in common is read once for all of them. Most formats have nothing of the kind.
template <typename Format>
__device__ void share_scales(Format&, long long row, long long column, int count) {}

// Nested: every block looks its scale up in code2, 1 KB, which a program reads once instead of 4 bytes for each block.
__device__ inline void share_scales(Bits4& format, long long row, long long column, int count) {
  __shared__ float code2[256];
  __shared__ float scales[Bits4::MAX_SCALES + 1];  // a tile may begin inside a block
  const Params& p = format.p;
  if (!(p.mode & 2)) return;
  for (int i = threadIdx.x; i < 256; i += blockDim.x) code2[i] = p.arrays.at<float>(3, 0, i);
  __syncthreads();
  const long long flat = row * p.k + column;
  format.first_block = flat >> p.group;
  const int blocks = static_cast<int>((flat + count - 1 >> p.group) - format.first_block) + 1;
  for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
    const long long block = format.first_block + i;
    scales[i] = format.nested_absmax(block, code2[p.arrays.at<unsigned char>(0, 0, block)]);
  }
  format.scales = scales;
  __syncthreads();
}

}  // namespace pb
