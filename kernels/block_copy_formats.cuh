// Rows of a KV cache, sixteen elements at a time: loads and stores as wide as the addresses allow, and the codes of
// quantised caches (fp8 e4m3fn, fp8 e5m2, int8), encoded and decoded without hardware support so that every GPU, and the
// CPU, computes the same bits.
#pragma once
#include "intrinsics.cuh"

constexpr int CHUNK = 16;  // elements of a thread: 16 bytes of an 8-bit cache, 32 or 64 of its rows

template <typename Word>
__device__ __forceinline__ Word load_word(const char* from) {
  return *reinterpret_cast<const Word*>(from);
}
template <>
__device__ __forceinline__ uint4 load_word<uint4>(const char* from) {
  return pb::load16(from);
}

template <typename Word>
__device__ __forceinline__ void store_word(char* to, Word word) {
  *reinterpret_cast<Word*>(to) = word;
}
template <>
__device__ __forceinline__ void store_word<uint4>(char* to, uint4 word) {
  pb::store16(to, word);
}

// Mirrors FORMATS in block_copy_write_cupy.py.
enum Format { E4M3 = 0, E5M2 = 1, INT8 = 2, HALF = 3, BFLOAT16 = 4, FLOAT = 5 };

// The same bytes as elements of the unsigned integer Raw and as words.
template <typename Raw>
union Chunk {
  uint4 words16[sizeof(Raw)];
  uint2 words8[2 * sizeof(Raw)];
  unsigned words4[4 * sizeof(Raw)];
  Raw elements[CHUNK];
};

// The first `count` elements. `word`: 16, 8 or 4 where they lie side by side, at multiples of so many bytes and in whole
// words; 0 where they lie `stride` elements apart.
template <typename Raw>
__device__ __forceinline__ void load_chunk(Chunk<Raw>& chunk, const Raw* from, long long stride, int count, int word) {
  const char* bytes = reinterpret_cast<const char*>(from);
  const int nbytes = count * static_cast<int>(sizeof(Raw));
  if (word == 16) {
#pragma unroll
    for (int i = 0; i < sizeof(Raw); ++i)
      if (16 * i < nbytes) chunk.words16[i] = pb::load16(bytes + 16 * i);
  } else if (word == 8) {
#pragma unroll
    for (int i = 0; i < 2 * sizeof(Raw); ++i)
      if (8 * i < nbytes) chunk.words8[i] = *reinterpret_cast<const uint2*>(bytes + 8 * i);
  } else if (word == 4) {
#pragma unroll
    for (int i = 0; i < 4 * sizeof(Raw); ++i)
      if (4 * i < nbytes) chunk.words4[i] = *reinterpret_cast<const unsigned*>(bytes + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
      if (i < count) chunk.elements[i] = from[i * stride];
  }
}

template <typename Raw>
__device__ __forceinline__ void store_chunk(Raw* to, const Chunk<Raw>& chunk, long long stride, int count, int word) {
  char* bytes = reinterpret_cast<char*>(to);
  const int nbytes = count * static_cast<int>(sizeof(Raw));
  if (word == 16) {
#pragma unroll
    for (int i = 0; i < sizeof(Raw); ++i)
      if (16 * i < nbytes) pb::store16(bytes + 16 * i, chunk.words16[i]);
  } else if (word == 8) {
#pragma unroll
    for (int i = 0; i < 2 * sizeof(Raw); ++i)
      if (8 * i < nbytes) *reinterpret_cast<uint2*>(bytes + 8 * i) = chunk.words8[i];
  } else if (word == 4) {
#pragma unroll
    for (int i = 0; i < 4 * sizeof(Raw); ++i)
      if (4 * i < nbytes) *reinterpret_cast<unsigned*>(bytes + 4 * i) = chunk.words4[i];
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
      if (i < count) to[i * stride] = chunk.elements[i];
  }
}

// The unsigned integer that holds a T.
template <typename T>
struct RawOf {
  using Type = unsigned short;
};
template <>
struct RawOf<float> {
  using Type = unsigned;
};

// x, which is finite or infinite, in a float8 format, to nearest even and saturating; NaN becomes 0x7F. Below the normal
// range the code counts steps, and adding 2^23 steps rounds to a whole number of them.
template <int kMantissa, int kBias>
__device__ __forceinline__ unsigned encode_float8(float x, float highest) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr unsigned kStepsBits = (127u + 24 - kBias - kMantissa) << 23;
  constexpr unsigned kSmallestNormal = (128u - kBias) << 23;
  const float magnitude = fminf(fabsf(x), highest);
  const unsigned bits = __float_as_uint(magnitude);
  const unsigned normal =
      ((bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1)) >> kDropped) - ((127u - kBias) << kMantissa);
  const unsigned subnormal = __float_as_uint(magnitude + __uint_as_float(kStepsBits)) - kStepsBits;
  const unsigned code = bits < kSmallestNormal ? subnormal : normal;
  return x != x ? 0x7F : code | (__float_as_uint(x) >> 24 & 0x80);
}

// To the nearest even integer in -128..127, NaN to 0: adding 1.5 * 2^23 leaves it in the low bits.
__device__ __forceinline__ unsigned encode_int8(float x) {
  const float clipped = fminf(fmaxf(x, -128.0f), 127.0f);
  return x != x ? 0 : __float_as_uint(clipped + 12582912.0f) & 0xFF;
}

template <int kFormat>
__device__ __forceinline__ unsigned encode(float x) {
  if constexpr (kFormat == E4M3) return encode_float8<3, 7>(x, 448.0f);
  if constexpr (kFormat == E5M2) return encode_float8<2, 15>(x, 57344.0f);
  return encode_int8(x);
}

__device__ __forceinline__ float highest(int format) {
  return format == E4M3 ? 448.0f : format == E5M2 ? 57344.0f : 127.0f;
}

// Exact. An e4m3 code lies in a half as a number 2^8 times smaller, subnormal numbers included.
template <int kFormat>
__device__ __forceinline__ float decode(unsigned raw) {
  if constexpr (kFormat == E4M3) {
    const unsigned short half = (raw & 0x80) << 8 | (raw & 0x7F) << 7;
    return (raw & 0x7F) == 0x7F ? pb::kNan : pb::to_float(pb::bit_cast<__half>(half)) * 256.0f;
  }
  if constexpr (kFormat == E5M2) return pb::to_float(pb::bit_cast<__half>(static_cast<unsigned short>(raw << 8)));
  if constexpr (kFormat == INT8) return static_cast<float>(static_cast<signed char>(raw));
  if constexpr (kFormat == HALF) return pb::to_float(pb::bit_cast<__half>(static_cast<unsigned short>(raw)));
  if constexpr (kFormat == BFLOAT16) return __uint_as_float(raw << 16);
  return __uint_as_float(raw);
}

// A scale: `value` where it is one number that the host knows, else that of [block, offset, head] in `array`.
struct Scale {
  float* array;
  float value;
  int in_array;
  long long block_stride, slot_stride, head_stride;

  __device__ __forceinline__ float* at(long long block, int offset, int head) const {
    return array + block * block_stride + offset * slot_stride + head * head_stride;
  }
};
