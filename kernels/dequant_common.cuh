// What dequantisation and the fused product share: packed arrays, staged bytes, and results of three types.
//
// A run is eight consecutive weights: 16 bytes of a 16-bit type. A format decodes runs to float32 with the rounding that
// its contract names; __fmul_rn and its like are never contracted to a multiply-add.
#pragma once

#include "intrinsics.cuh"

namespace pb {

constexpr int RUN = 8;

enum Kind : int { kHalf, kBfloat16, kFloat };  // of the result, in the order of KINDS in dequant_layouts.py

// The arrays beside the packed bytes, [rows, columns] each, strides in elements; 0 along what an array lacks.
struct Arrays {
  const void* data[4];
  long long row_stride[4], column_stride[4];

  template <typename T>
  __device__ const T* address(int i, long long row, long long column) const {
    return static_cast<const T*>(data[i]) + row * row_stride[i] + column * column_stride[i];
  }
  template <typename T>
  __device__ T at(int i, long long row, long long column) const {
    return *address<T>(i, row, column);
  }
  // An element of 16 bits, or of 32: to_float of what `kind` says it is.
  __device__ float number(int i, long long row, long long column, int kind) const {
    if (kind == kFloat) return at<float>(i, row, column);
    const unsigned short bits = at<unsigned short>(i, row, column);
    return kind == kHalf ? to_float(bit_cast<__half>(bits)) : to_float(bit_cast<__nv_bfloat16>(bits));
  }
};

// What a decoder knows beside the arrays. k: weights of a row. group: consecutive weights of a row under one scale, 0 for
// all.// row_shift: a scale serves 2^row_shift rows. mode: the format's own flags. scale_kind: type of scales that have several.
struct Params {
  Arrays arrays;
  long long k;
  int group, row_shift, mode, scale_kind;
};

template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<__half> = true;

// ---- results --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned pack_pair(int kind, float low, float high) {
  return kind == kHalf ? bit_cast<unsigned>(from_floats<__half>(low, high))
                       : bit_cast<unsigned>(from_floats<__nv_bfloat16>(low, high));
}

__device__ __forceinline__ void store_number(void* out, int kind, long long index, float value) {
  if (kind == kHalf) static_cast<__half*>(out)[index] = from_float<__half>(value);
  if (kind == kBfloat16) static_cast<__nv_bfloat16*>(out)[index] = from_float<__nv_bfloat16>(value);
  if (kind == kFloat) static_cast<float*>(out)[index] = value;
}

// A run from element `index`: whole and on a 16-byte boundary, or its first `count` numbers one by one.
__device__ __forceinline__ void store_run(void* out, int kind, long long index, int count, bool wide,
                                          const float (&values)[RUN]) {
  if (!wide || count < RUN) {
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      if (i < count) store_number(out, kind, index + i, values[i]);
  } else if (kind == kFloat) {
    float* to = static_cast<float*>(out) + index;
#pragma unroll
    for (int i = 0; i < RUN; i += 4)
      store16_streaming(to + i, make_uint4(__float_as_uint(values[i]), __float_as_uint(values[i + 1]),
                                           __float_as_uint(values[i + 2]), __float_as_uint(values[i + 3])));
  } else {
    store16_streaming(static_cast<unsigned short*>(out) + index,
                      make_uint4(pack_pair(kind, values[0], values[1]), pack_pair(kind, values[2], values[3]),
                                 pack_pair(kind, values[4], values[5]), pack_pair(kind, values[6], values[7])));
  }
}

// ---- packed bytes in shared memory ----------------------------------------------------------------------------------

constexpr int STAGE_PAD = 48;  // bytes beside a staged segment: 15 before it, 16 of zeros behind it, and rounding

// The packed bytes [rows, bytes of a row]: byte j of a row lies j / 2^inner * outer_stride + j % 2^inner * byte_stride
// behind its beginning. dense: that is j.
struct Bytes {
  const unsigned char* data;
  long long row_stride, outer_stride, byte_stride;
  int inner, dense;

  __device__ const unsigned char* address(long long row, long long byte) const {
    const unsigned char* start = data + row * row_stride;
    if (dense) return start + byte;
    return start + (byte >> inner) * outer_stride + (byte & ((1LL << inner) - 1)) * byte_stride;
  }

  // Where `stage` puts byte `first` of a row: as far behind a multiple of 16 as it lies in global memory.
  __device__ int offset(long long row, long long first) const {
    return dense ? static_cast<int>(reinterpret_cast<unsigned long long>(address(row, first)) & 15) : 0;
  }

  // Copies bytes [first, last) of a row to `to` + offset, 16 at a time where they are dense, by `threads` threads. Done
  // after cp_async_wait and a barrier.
  __device__ void stage(unsigned char* to, long long row, long long first, long long last, int thread,
                        int threads) const {
    const int count = static_cast<int>(last - first), start = offset(row, first);
    const int head = dense ? min(count, -start & 15) : 0;
    const int words = dense ? (count - head) / 16 : 0;
    const unsigned char* from = address(row, first);
#pragma unroll 4
    for (int i = thread; i < words; i += threads)
      cp_async16(to + start + head + 16 * i, from + head + 16 * static_cast<long long>(i));
    for (int i = thread; i < count - 16 * words; i += threads) {
      const int byte = i < head ? i : i + 16 * words;
      to[start + byte] = *address(row, first + byte);
    }
    // Words are read whole, and runs too.
    if (thread < 16) to[start + count + thread] = 0;
    if (thread < (start & 3)) to[start - 1 - thread] = 0;
  }
};

// Staged bytes from some byte on, at any alignment: shared memory is read in words, and shifted.
struct Staged {
  const unsigned* words;
  unsigned start;

  __device__ Staged from(unsigned offset) const { return {words, start + offset}; }
  __device__ unsigned byte(unsigned offset) const {
    return reinterpret_cast<const unsigned char*>(words)[start + offset];
  }
  template <int COUNT>
  __device__ void read(unsigned offset, unsigned (&out)[COUNT]) const {
    const unsigned at = start + offset;
    const unsigned* word = words + at / 4;
    if constexpr (COUNT == 4) {
      if ((at & 15) == 0) {
        const uint4 whole = *reinterpret_cast<const uint4*>(word);
        out[0] = whole.x, out[1] = whole.y, out[2] = whole.z, out[3] = whole.w;
        return;
      }
    }
    if constexpr (COUNT == 2) {
      if ((at & 7) == 0) {
        const uint2 whole = *reinterpret_cast<const uint2*>(word);
        out[0] = whole.x, out[1] = whole.y;
        return;
      }
    }
    unsigned low = word[0];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const unsigned high = word[i + 1];
      out[i] = __funnelshift_r(low, high, 8 * (at & 3));
      low = high;
    }
  }
  __device__ unsigned word(unsigned offset) const {
    unsigned out[1];
    read(offset, out);
    return out[0];
  }
  __device__ float half(unsigned offset) const {
    return to_float(bit_cast<__half>(static_cast<unsigned short>(word(offset))));
  }
};

// ---- small integers as floats ---------------------------------------------------------------------------------------

// 2^23 + i for an integer i below 2^23: it is set into the last bits, one logic instruction in place of a slow
// conversion. Differences of two such are exact.
__device__ __forceinline__ float raised(unsigned i) { return __uint_as_float(0x4B000000u | i); }

// 2^23 + byte i of a word: one permutation.
__device__ __forceinline__ float raised_byte(unsigned word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 | i));
}

// Byte i of a run that was read as two words.
__device__ __forceinline__ unsigned byte_of(const unsigned (&words)[2], int i) {
  return words[i / 4] >> 8 * (i % 4) & 255;
}

// scale * q rounded to odd: rounding the result again to 16 bits gives what a single rounding would. q is an integer, so
// that what the product loses is a float itself.
__device__ __forceinline__ float multiply_to_odd(float scale, float q) {
  const float product = __fmul_rn(scale, q), lost = __fmaf_rn(scale, q, -product);
  unsigned bits = __float_as_uint(product);
  if ((bits & 0x7F800000u) == 0x7F800000u || lost == 0) return product;
  if ((lost < 0) != (product < 0)) --bits;  // rounded away from zero
  return __uint_as_float(bits | 1);
}

}  // namespace pb
