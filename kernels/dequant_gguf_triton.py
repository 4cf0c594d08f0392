"""Device functions of GGUF's block formats: see `dequant_tile_triton` for what a device function is, and
`reference/dequant_gguf.py` for the formats. Arithmetic is float32 in the format's order; only q4_1, q4_k and q5_k round
in it, and only once, so that a contracted multiplication and addition has the same bits.

Blocks of 18 to 210 bytes begin at even addresses, so two bytes are the widest load there is; those of q4_k and q5_k are
multiples of 16 bytes, and so are their loads. A warp's loads are dense either way.
"""

import triton
import triton.language as tl

from pagebench.kernels.dequant_tile_triton import bits_at, columns_of, first_row, half_at, load, rows_of

# What follows works on these axes: [rows, blocks, whatever cuts a block into runs of bytes, bytes of a run].


@triton.jit
def q4_0(packed, strides, at, HOW: tl.constexpr):
    """d * (q - 8). A byte holds two elements 16 apart: [rows, blocks, nibbles, bytes]."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 32, 18)
    d = half_at(block, step, live, HOW)[:, :, None, None]
    q = _nibbles(block + 2 * step, step, live, HOW)
    return tl.reshape(d * (q - 8).to(tl.float32), [HOW.rows, HOW.columns])


@triton.jit
def q4_1(packed, strides, at, HOW: tl.constexpr):
    """d * q + m."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 32, 20)
    d = half_at(block, step, live, HOW)[:, :, None, None]
    m = half_at(block + 2 * step, step, live, HOW)[:, :, None, None]
    q = _nibbles(block + 4 * step, step, live, HOW)
    return tl.reshape(d * q.to(tl.float32) + m, [HOW.rows, HOW.columns])


@triton.jit
def q5_0(packed, strides, at, HOW: tl.constexpr):
    """d * (q - 16); the fifth bits of a block's elements are the bits of a word, in order."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 32, 22)
    d = half_at(block, step, live, HOW)[:, :, None, None]
    high = bits_at(block + 2 * step, step, live, HOW) | (bits_at(block + 4 * step, step, live, HOW) << 16)
    element = tl.arange(0, 2)[None, None, :, None] * 16 + tl.arange(0, 16)[None, None, None, :]
    q = _nibbles(block + 6 * step, step, live, HOW) | (((high[:, :, None, None] >> element) & 1) << 4)
    return tl.reshape(d * (q - 16).to(tl.float32), [HOW.rows, HOW.columns])


@triton.jit
def q8_0(packed, strides, at, HOW: tl.constexpr):
    """d * q."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 32, 34)
    d = half_at(block, step, live, HOW)[:, :, None]
    q = load(block[:, :, None] + (2 + tl.arange(0, 32)[None, None, :]) * step, live[:, :, None], HOW)
    return tl.reshape(d * q.to(tl.int8, bitcast=True).to(tl.float32), [HOW.rows, HOW.columns])


@triton.jit
def q4_k(packed, strides, at, HOW: tl.constexpr):
    """d * scale * q - dmin * minimum. [rows, blocks, chunks, nibbles, bytes]: a chunk is two sub-blocks."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 256, 144)
    factor, offset = six_bit(block, step, live, HOW)
    q = _chunk_nibbles(block + 16 * step, step, live, HOW)
    return tl.reshape(factor * q.to(tl.float32) - offset, [HOW.rows, HOW.columns])


@triton.jit
def q5_k(packed, strides, at, HOW: tl.constexpr):
    """As q4_k; the fifth bit of element l of sub-block s is bit s of byte l of 32."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 256, 176)
    factor, offset = six_bit(block, step, live, HOW)
    byte = tl.arange(0, 32)[None, None, None, None, :]
    high = load(block[:, :, None, None, None] + (16 + byte) * step, live[:, :, None, None, None], HOW).to(tl.int32)
    q = _chunk_nibbles(block + 48 * step, step, live, HOW) | (((high >> _sub_block()) & 1) << 4)
    return tl.reshape(factor * q.to(tl.float32) - offset, [HOW.rows, HOW.columns])


@triton.jit
def q6_k(packed, strides, at, HOW: tl.constexpr):
    """d * scale * (q - 32). Element 32 * (2 * nibble + part) + 16 * scale + byte of a half of 128."""
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 256, 210)
    d = half_at(block + 208 * step, step, live, HOW)[:, :, None, None, None, None, None]
    block, live = block[:, :, None, None, None, None, None], live[:, :, None, None, None, None, None]
    half = tl.arange(0, 2)[None, None, :, None, None, None, None]
    nibble = tl.arange(0, 2)[None, None, None, :, None, None, None]
    part = tl.arange(0, 2)[None, None, None, None, :, None, None]
    scale = tl.arange(0, 2)[None, None, None, None, None, :, None]
    byte = tl.arange(0, 16)[None, None, None, None, None, None, :]
    low = load(block + (64 * half + 32 * part + 16 * scale + byte) * step, live, HOW).to(tl.int32)
    high = load(block + (128 + 32 * half + 16 * scale + byte) * step, live, HOW).to(tl.int32)
    factor = load(block + (192 + 8 * half + 4 * nibble + 2 * part + scale) * step, live, HOW)
    q = ((low >> (4 * nibble)) & 15) | (((high >> (4 * nibble + 2 * part)) & 3) << 4)
    value = d * factor.to(tl.int8, bitcast=True).to(tl.float32) * (q - 32).to(tl.float32)
    return tl.reshape(value, [HOW.rows, HOW.columns])


@triton.jit
def blocks_of(packed, strides, at, HOW: tl.constexpr, ELEMENTS: tl.constexpr, NBYTES: tl.constexpr):
    """Pointers to the first byte of each block of the tile, and which blocks there are, both [rows, blocks]."""
    row, row_live = rows_of(at, HOW, 1)
    block, block_live = columns_of(at, HOW, ELEMENTS)
    pointer = first_row(packed[0], row, strides, HOW) + block.to(tl.int64) * NBYTES * strides[1]
    return pointer, row_live & block_live


@triton.jit
def _nibbles(pointer, step, live, HOW: tl.constexpr):
    """int32 [rows, blocks, 2, 16] of 16 bytes of each block: their low nibbles, then the high ones."""
    byte = load(pointer[:, :, None, None] + tl.arange(0, 16)[None, None, None, :] * step, live[:, :, None, None], HOW)
    return (byte.to(tl.int32) >> (tl.arange(0, 2)[None, None, :, None] * 4)) & 15


@triton.jit
def _chunk_nibbles(pointer, step, live, HOW: tl.constexpr):
    """int32 [rows, blocks, 4, 2, 32] of 128 bytes of each block: from each 32 the low nibbles, then the high ones."""
    place = tl.arange(0, 4)[None, None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    byte = load(pointer[:, :, None, None, None] + place * step, live[:, :, None, None, None], HOW)
    return (byte.to(tl.int32) >> (tl.arange(0, 2)[None, None, None, :, None] * 4)) & 15


@triton.jit
def _sub_block():
    """int32 [1, 1, 4, 2, 1]: the sub-block of each chunk's nibbles."""
    return tl.arange(0, 4)[None, None, :, None, None] * 2 + tl.arange(0, 2)[None, None, None, :, None]


@triton.jit
def six_bit(block, step, live, HOW: tl.constexpr):
    """d * scale and dmin * minimum, float32 [rows, blocks, 4, 2, 1], of blocks that begin with d, dmin, scales[12]."""
    d = half_at(block, step, live, HOW)[:, :, None, None, None]
    dmin = half_at(block + 2 * step, step, live, HOW)[:, :, None, None, None]
    sub, live = _sub_block(), live[:, :, None, None, None]
    pointer = block[:, :, None, None, None] + (4 + (sub & 3)) * step
    first = load(pointer, live, HOW).to(tl.int32)
    second = load(pointer + 4 * step, live, HOW).to(tl.int32)
    third = load(pointer + 8 * step, live, HOW).to(tl.int32)
    scale = tl.where(sub < 4, first & 63, (third & 15) | ((first >> 6) << 4))
    minimum = tl.where(sub < 4, second & 63, (third >> 4) | ((second >> 6) << 4))
    return d * scale.to(tl.float32), dmin * minimum.to(tl.float32)
