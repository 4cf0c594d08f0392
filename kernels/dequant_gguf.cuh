// The block formats of GGUF files, from ggml's `ggml-common.h` and `ggml-quants.c`: ELEMENTS weights along a row in BYTES
// bytes, without arrays of their own. Blocks are aligned to 2 bytes at best, so that no thread could load one in wide
// words from where it lies; staged, they are read in words at any alignment.
#pragma once

#include "dequant_common.cuh"

namespace pb {

// Self::decode_run decodes one run; what it does for the whole block alone, compilers do once for four.
template <typename Self, int ELEMENTS, int BYTES>
struct Gguf {
  static constexpr bool PAIRED = false;
  Params p;
  template <int RUNS>
  __device__ void decode(const Staged& tile, unsigned base, unsigned run, long long, long long,
                         float (&values)[RUNS][RUN]) const {
#pragma unroll
    for (int r = 0; r < RUNS; ++r) static_cast<const Self*>(this)->decode_run(tile, base, run + r, values[r]);
  }
  __device__ long long first_byte(long long row, long long column) const { return column / ELEMENTS * BYTES; }
  __device__ long long last_byte(long long row, long long column) const { return column / ELEMENTS * BYTES; }
  __device__ static Staged block(const Staged& tile, unsigned base) { return tile.from(base / ELEMENTS * BYTES); }
};

// 2^23 + the low (half 0) or high (half 1) nibbles of a run's eight bytes.
__device__ __forceinline__ void raised_nibbles(const unsigned (&bytes)[2], unsigned half, float (&values)[RUN]) {
#pragma unroll
  for (int i = 0; i < RUN; ++i) values[i] = raised_byte(bytes[i / 4] >> 4 * half & 0x0F0F0F0Fu, i % 4);
}

// d, qs[16]: byte j holds elements j and, high, j + 16. d * (q - 8), exact.
struct Q4Zero : Gguf<Q4Zero, 32, 18> {
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const float d = block.half(0);
    unsigned qs[2];
    block.read(2 + RUN * (run % 2), qs);
    raised_nibbles(qs, run / 2, values);
#pragma unroll
    for (int i = 0; i < RUN; ++i) values[i] = __fmul_rn(d, __fsub_rn(values[i], raised(8)));
  }
};

// d, m, qs[16]. d * q + m.
struct Q4One : Gguf<Q4One, 32, 20> {
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const float d = block.half(0), m = block.half(2);
    unsigned qs[2];
    block.read(4 + RUN * (run % 2), qs);
    raised_nibbles(qs, run / 2, values);
#pragma unroll
    for (int i = 0; i < RUN; ++i) values[i] = __fadd_rn(__fmul_rn(d, __fsub_rn(values[i], raised(0))), m);
  }
};

// d, qh[4], qs[16]; bit i of qh is the fifth bit of element i. d * (q - 16), exact.
struct Q5Zero : Gguf<Q5Zero, 32, 22> {
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const float d = block.half(0);
    const unsigned high = block.byte(2 + run);
    unsigned qs[2];
    block.read(6 + RUN * (run % 2), qs);
    const unsigned shift = 4 * (run / 2);
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const unsigned q = (byte_of(qs, i) >> shift & 15) | (high >> i & 1) << 4;
      values[i] = __fmul_rn(d, __fsub_rn(raised(q), raised(16)));
    }
  }
};

// d, qs[32] int8. d * q, exact.
struct Q8Zero : Gguf<Q8Zero, 32, 34> {
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const float d = block.half(0);
    unsigned qs[2];
    block.read(2 + RUN * run, qs);
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      values[i] = __fmul_rn(d, __fsub_rn(raised_byte(qs[i / 4] ^ 0x80808080u, i % 4), raised(128)));
  }
};

// d * scale and dmin * minimum of sub-block `sub` of a block that starts with d, dmin, scales[12]: six bits each, those of
// the first four sub-blocks in the low bits of bytes 0-3 and 4-7, of the others in bytes 8-11 and on top of the first.
struct MinScales {
  float factor, offset;

  __device__ MinScales(const Staged& block, unsigned sub) {
    const unsigned at = 4 + sub % 4;
    const unsigned first = block.byte(at), second = block.byte(at + 4), third = block.byte(at + 8);
    const unsigned scale = sub < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
    const unsigned minimum = sub < 4 ? second & 63 : third >> 4 | second >> 6 << 4;
    factor = __fmul_rn(block.half(0), __fsub_rn(raised(scale), raised(0)));
    offset = __fmul_rn(block.half(2), __fsub_rn(raised(minimum), raised(0)));
  }
  // The product is exact, of 17 and 5 bits, so that a multiply-add rounds where two operations would.
  __device__ float weight(float raised_q) const { return __fmaf_rn(factor, __fsub_rn(raised_q, raised(0)), -offset); }
};

// d, dmin, scales[12], qs[128]: bytes 32c ... hold sub-block 2c and, high, 2c + 1. d * scale * q - dmin * minimum.
struct Q4K : Gguf<Q4K, 256, 144> {
  // For tensor cores, of the 128 weights from `base` on what lane t of four takes: from weight 64 (t / 2) + 16 (t % 2) on
  // 16 in bytes' low nibbles, runs 0 and 1, and 32 behind them 16 in high ones. scale * q comes in pairs side by side, in
  // units of 2^-24, half's smallest subnormal, which tensor cores multiply exactly, and so do minima, twice the same. What
  // is left to the sums, d and dmin, is the block's first word.
  static constexpr float UNIT = 0x1p-24f;
  __device__ static constexpr unsigned first(unsigned t, unsigned run) {
    return 64 * (t / 2) + 16 * (t % 2) + 32 * (run / 2) + RUN * (run % 2);
  }
  __device__ void products(const Staged& tile, unsigned base, unsigned t, unsigned (&out)[4][RUN / 2],
                           unsigned (&minima)[2], unsigned& left) const {
    const Staged block = this->block(tile, base);
    unsigned header[4], qs[4];
    block.read(0, header);
    block.read(16 + base % 256 / 2 + 32 * (t / 2) + 16 * (t % 2), qs);
    left = header[0];
    const bool second = base % 256;  // half of the block, whose scales are in several pieces
    const unsigned scales = second ? (header[3] & 0x0F0F0F0Fu) | (header[1] >> 2 & 0x30303030u) : header[1] & 0x3F3F3F3Fu;
    const unsigned offsets =
        second ? (header[3] >> 4 & 0x0F0F0F0Fu) | (header[2] >> 2 & 0x30303030u) : header[2] & 0x3F3F3F3Fu;
    const unsigned own = t / 2 * 0x0202u;  // sub-blocks 2 (t / 2) and, next, 2 (t / 2) + 1 of the four
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      minima[high] = __byte_perm(offsets, 0, (high ? 0x4141 : 0x4040) + own);
      // 1024 + scale, and the scale; of high nibbles, which stay where they are, a 16th of it.
      const __half2 raised = bit_cast<__half2>(__byte_perm(scales, 0x64646464u, (high ? 0x4141 : 0x4040) + own));
      const __half2 scale = high ? __hfma2(raised, bit_cast<__half2>(0x2C002C00u), bit_cast<__half2>(0xD400D400u))
                                 : __hsub2_rn(raised, bit_cast<__half2>(0x64006400u));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const unsigned q = __byte_perm(qs[i], 0, pair ? 0x4342 : 0x4140) & (high ? 0x00F000F0u : 0x000F000Fu);
          out[2 * high + i / 2][i % 2 * 2 + pair] = bit_cast<unsigned>(__hmul2_rn(bit_cast<__half2>(q), scale));
        }
    }
  }
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const unsigned sub = base % 256 / 32;
    const MinScales scales(block, sub);
    unsigned qs[2];
    block.read(16 + sub / 2 * 32 + RUN * run, qs);
    raised_nibbles(qs, sub % 2, values);
#pragma unroll
    for (int i = 0; i < RUN; ++i) values[i] = scales.weight(values[i]);
  }
};

// d, dmin, scales[12], qh[32], qs[128]: as Q4_K, and bit s of qh[l] is the fifth bit of element l of sub-block s.
struct Q5K : Gguf<Q5K, 256, 176> {
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const unsigned sub = base % 256 / 32;
    const MinScales scales(block, sub);
    unsigned qs[2], qh[2];
    block.read(48 + sub / 2 * 32 + RUN * run, qs);
    block.read(16 + RUN * run, qh);
#pragma unroll
    for (int w = 0; w < 2; ++w) qs[w] = (qs[w] >> 4 * (sub % 2) & 0x0F0F0F0Fu) | (qh[w] >> sub & 0x01010101u) << 4;
#pragma unroll
    for (int i = 0; i < RUN; ++i) values[i] = scales.weight(raised_byte(qs[i / 4], i % 4));
  }
};

// ql[128], qh[64], scales[16] int8, d. d * scale * (q - 32), exact. Element 32g + l of a half of 128: the low (g < 2) or
// high nibble of ql[32 * (g % 2) + l], and above it bits 2g and 2g + 1 of qh[l].
struct Q6K : Gguf<Q6K, 256, 210> {
  __device__ void decode_run(const Staged& tile, unsigned base, unsigned run, float (&values)[RUN]) const {
    const Staged block = this->block(tile, base);
    const unsigned half = base % 256 / 128, g = base % 128 / 32;
    const unsigned scale = block.byte(192 + base % 256 / 16 + run / 2) ^ 128;
    const float factor = __fmul_rn(block.half(208), __fsub_rn(raised(scale), raised(128)));
    unsigned ql[2], qh[2];
    block.read(64 * half + 32 * (g % 2) + RUN * run, ql);
    block.read(128 + 32 * half + RUN * run, qh);
#pragma unroll
    for (int w = 0; w < 2; ++w) ql[w] = (ql[w] >> 4 * (g / 2) & 0x0F0F0F0Fu) | (qh[w] >> 2 * g & 0x03030303u) << 4;
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      values[i] = __fmul_rn(factor, __fsub_rn(raised_byte(ql[i / 4], i % 4), raised(32)));
  }
};

}  // namespace pb
