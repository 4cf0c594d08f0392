"""Device functions of the fused product in float16: codes for the tensor cores, and scales to multiply their sums with.

A tensor core adds up products of 16-bit numbers exactly enough (float32), so it is given the codes, not the weights:
that saves each weight a conversion and a multiplication. A device function

    codes(packed, strides, at, HOW) -> (float16 [rows, blocks, span], scale, offset)

takes what those of `dequant_tile_triton` take. A weight is code * scale - offset, of float32 [rows, blocks] and save
for what `finish` multiplies the sum with. float16's subnormal numbers count, so that the bits of a small integer are a
number already, 2^-24 times itself.

Two codes are cut out of a word at once, half a word apart, and are the two that a tensor core wants in one register:
no instruction packs or moves them. So a block's codes are out of order; `in_order` puts x into the same.
"""

import triton
import triton.language as tl

from pagebench.kernels.dequant_float_triton import swizzled_place
from pagebench.kernels.dequant_gguf_triton import blocks_of, six_bit
from pagebench.kernels.dequant_tile_triton import columns_of, e4m3, e8m0, first_row, load, rows_of


@triton.jit
def in_order(x, BLOCKS: tl.constexpr, SPAN: tl.constexpr, PER: tl.constexpr):
    """x [rows, k] as [blocks, span, rows], each block in the order of the codes of words of PER along k."""
    if PER > 1:
        LANES: tl.constexpr = min(4, SPAN // PER)  # that hold a word each
        WORDS: tl.constexpr = SPAN // PER // LANES
        x = tl.reshape(x, [x.shape[0], BLOCKS * WORDS, LANES, 2, PER // 2])
        x = tl.permute(x, [0, 1, 4, 2, 3])
    return tl.permute(tl.reshape(x, [x.shape[0], BLOCKS, SPAN]), [1, 2, 0])


@triton.jit
def mxfp4(packed, strides, at, HOW: tl.constexpr):
    """number * 2^(e - 127)."""
    row, row_live = rows_of(at, HOW, 1)
    block, block_live = columns_of(at, HOW, 32)
    live = row_live & block_live
    pointer = packed[1] + row.to(tl.int64) * strides[3] + block.to(tl.int64) * strides[4]
    scale = e8m0(load(pointer, live, HOW))
    return _e2m1(_words(packed, strides, at, 32, 8, HOW)), scale, scale


@triton.jit
def nvfp4(packed, strides, at, HOW: tl.constexpr):
    """number * scale."""
    return _nvfp4(packed, strides, at, False, HOW)


@triton.jit
def nvfp4_swizzled(packed, strides, at, HOW: tl.constexpr):
    """As nvfp4, the scales in tiles."""
    return _nvfp4(packed, strides, at, True, HOW)


@triton.jit
def _nvfp4(packed, strides, at, SWIZZLED: tl.constexpr, HOW: tl.constexpr):
    row, row_live = rows_of(at, HOW, 1)
    block, block_live = columns_of(at, HOW, 16)
    scale_row, scale_column = row.to(tl.int64), block.to(tl.int64)
    if SWIZZLED:
        scale_row, scale_column = swizzled_place(row, block, at[3])
    pointer = packed[1] + scale_row * strides[2] + scale_column * strides[3]
    scale = e4m3(load(pointer, row_live & block_live, HOW))
    return _e2m1(_words(packed, strides, at, 16, 8, HOW)), scale, scale


@triton.jit
def fp8_e4m3(packed, strides, at, HOW: tl.constexpr):
    """2^-8 times the number: its bits where float16 has its own. NaN is carried up into the highest exponent."""
    word = _pairs_of_bytes(packed, strides, at, HOW)
    number = (word & 0x7F007F00) >> 1
    number |= (number + 0x00800080) & 0x40004000
    scale = _block_scale(packed, strides, at, HOW)
    return _halves(number | (word & -0x7FFF8000), HOW), scale, scale


@triton.jit
def fp8_e5m2(packed, strides, at, HOW: tl.constexpr):
    """The number: the upper half of a float16."""
    word = _pairs_of_bytes(packed, strides, at, HOW)
    scale = _block_scale(packed, strides, at, HOW)
    return _halves(word & -0x00FF0100, HOW), scale, scale


@triton.jit
def q4_k(packed, strides, at, HOW: tl.constexpr):
    """d * scale * q - dmin * minimum. Words of four bytes: two sub-blocks of low and of high nibbles."""
    BLOCKS: tl.constexpr = HOW.columns // 256
    step = strides[1]
    block, live = blocks_of(packed, strides, at, HOW, 256, 144)
    factor, offset = six_bit(block, step, live, HOW)
    word = (block + 16 * step).to(tl.pointer_type(tl.int32), bitcast=True)[:, :, None, None, None]
    word += tl.arange(0, 4)[None, None, :, None, None] * 8 + tl.arange(0, 2)[None, None, None, :, None] * 4
    word = load(word + tl.arange(0, 4)[None, None, None, None, :], live[:, :, None, None, None], HOW)
    # [rows, blocks, chunks, nibbles, words, bytes, lanes]
    nibble = tl.arange(0, 2)[None, None, None, :, None, None, None] * 4
    byte = tl.arange(0, 2)[None, None, None, None, None, :, None] * 8
    q = whole((word[:, :, :, None, :, None, :] >> (nibble + byte)) & 0x000F000F)
    q = tl.reshape(join(q), [HOW.rows, BLOCKS * 8, 32])
    factor = tl.reshape(factor, [HOW.rows, BLOCKS * 8]) * 16777216.0  # 2^24
    return q, factor, tl.reshape(offset, [HOW.rows, BLOCKS * 8])


@triton.jit
def awq(packed, strides, at, HOW: tl.constexpr):
    """scales[g, n] * (q - zero). A word holds eight columns of one k: two k are put side by side, 4 columns at once.

    Columns come as [8 words, slot % 4, slot // 4, word]: words, the last, lie side by side in a warp, and slots in its
    threads' registers. Odd slots are not shifted down; their codes are 16 times as large, and their scale 1 / 16.
    """
    SPAN: tl.constexpr = min(HOW.span, 32)
    FEW: tl.constexpr = min(HOW.columns // 8, 8)
    row, row_live = rows_of(at, HOW, 1)
    word_column, live = columns_of(at, HOW, 8)
    word = load(
        first_row(packed[0], row, strides, HOW) + word_column.to(tl.int64) * strides[1], row_live & live, HOW
    ).to(tl.uint32, bitcast=True)
    first, second = tl.split(tl.permute(tl.reshape(word, [HOW.rows // 2, 2, HOW.columns // 8]), [0, 2, 1]))
    pair = tl.join((first & 0xFFFF) | (second << 16), (first >> 16) | (second & 0xFFFF0000))
    slot = tl.arange(0, 4)
    shift = (slot // 2 * 8).to(tl.uint32)
    mask = tl.where(slot % 2 == 0, 0x000F000F, 0x00F000F0).to(tl.uint32)
    pair = whole(pair[:, :, :, None] >> shift & mask)
    code = tl.reshape(join(pair), [HOW.rows // SPAN, SPAN // 2, HOW.columns // 8 // FEW, FEW, 2, 4, 2])
    code = tl.reshape(tl.permute(code, [2, 5, 4, 3, 0, 1, 6]), [HOW.columns, HOW.rows // SPAN, SPAN])

    span, span_live = rows_of(at, HOW, HOW.span)
    group = (span * HOW.span // HOW.group if HOW.group > 0 else span * 0).to(tl.int64)
    zero = load(packed[1] + group * strides[2] + word_column.to(tl.int64) * strides[3], span_live & live, HOW)
    half = (tl.arange(0, 2) * 16).to(tl.uint32)[:, None]
    zero = zero.to(tl.uint32, bitcast=True)[:, :, None, None] >> (half + shift[None, :]) & (mask & 0xFF)
    column, live = columns_of(at, HOW, 1)
    scale = load(packed[2] + group * strides[4] + column.to(tl.int64) * strides[5], span_live & live, HOW)
    scale = tl.reshape(scale.to(tl.float32), [HOW.rows // HOW.span, HOW.columns // 8, 4, 2])
    scale = tl.permute(scale * tl.where(slot % 2 == 0, 1.0, 0.0625)[:, None], [0, 1, 3, 2])
    offset = zero.to(tl.int32).to(tl.float32) * 5.960464477539063e-08 * scale  # 2^-24
    return code, _of_columns(scale, SPAN, FEW, HOW), _of_columns(offset, SPAN, FEW, HOW)


@triton.jit
def _of_columns(value, SPAN: tl.constexpr, FEW: tl.constexpr, HOW: tl.constexpr):
    """[columns, blocks] of [groups, words, halves, slots], the columns in `awq`'s order."""
    SAME: tl.constexpr = HOW.span // SPAN
    value = tl.reshape(value, [HOW.rows // HOW.span, 1, HOW.columns // 8 // FEW, FEW, 2, 4])
    value = tl.broadcast_to(value, [HOW.rows // HOW.span, SAME, HOW.columns // 8 // FEW, FEW, 2, 4])
    return tl.reshape(tl.permute(value, [2, 5, 4, 3, 0, 1]), [HOW.columns, HOW.rows // SPAN])


@triton.jit
def finish_awq(total, packed, strides, at, HOW: tl.constexpr):
    FEW: tl.constexpr = min(HOW.columns // 8, 8)
    total = tl.reshape(total, [HOW.columns // 8 // FEW, 4, 2, FEW, total.shape[1]])
    total = tl.permute(total, [0, 3, 1, 2, 4])
    return tl.reshape(total, [HOW.columns, total.shape[4]]) * 16777216.0  # 2^24


@triton.jit
def finish_nothing(total, packed, strides, at, HOW: tl.constexpr):
    return total


@triton.jit
def finish_mxfp4(total, packed, strides, at, HOW: tl.constexpr):
    return total * 16384.0


@triton.jit
def finish_nvfp4(total, packed, strides, at, HOW: tl.constexpr):
    return total * 16384.0 * tl.load(packed[2])


@triton.jit
def finish_nvfp4_ct(total, packed, strides, at, HOW: tl.constexpr):
    return tl.div_rn(total * 16384.0, tl.zeros_like(total) + tl.load(packed[2]))


@triton.jit
def finish_fp8_e4m3(total, packed, strides, at, HOW: tl.constexpr):
    return _finish_fp8(total * 256.0, packed, strides, at, HOW)


@triton.jit
def finish_fp8_e5m2(total, packed, strides, at, HOW: tl.constexpr):
    return _finish_fp8(total, packed, strides, at, HOW)


@triton.jit
def _finish_fp8(total, packed, strides, at, HOW: tl.constexpr):
    if HOW.form == "tensor":
        return total * tl.load(packed[1])
    elif HOW.form == "channel":
        row, live = rows_of(at, HOW, 1)
        return total * load(packed[1] + row.to(tl.int64) * strides[3], live, HOW)
    else:
        return total


@triton.jit
def _words(packed, strides, at, SPAN: tl.constexpr, PER: tl.constexpr, HOW: tl.constexpr):
    """int32 [rows, blocks, words, 1, lanes]: rows of the first array, dense, in words of PER codes."""
    LANES: tl.constexpr = min(4, SPAN // PER)
    row, row_live = rows_of(at, HOW, 1)
    word, live = columns_of(at, HOW, PER)
    pointer = first_row(packed[0], row, strides, HOW).to(tl.pointer_type(tl.int32), bitcast=True)
    word = load(pointer + word.to(tl.int64), row_live & live, HOW)
    return tl.reshape(word, [HOW.rows, HOW.columns // SPAN, SPAN // PER // LANES, 1, LANES])


@triton.jit
def _e2m1(word):
    """float16 [rows, blocks, span]: 2^-14 times the numbers, subnormal ones included."""
    pair = word >> (tl.arange(0, 4) * 4)[None, None, None, :, None]
    pair = ((pair << 12) & -0x7FFF8000) | ((pair << 9) & 0x0E000E00)
    return tl.reshape(join(pair), [word.shape[0], word.shape[1], word.shape[2] * word.shape[4] * 8])


@triton.jit
def _pairs_of_bytes(packed, strides, at, HOW: tl.constexpr):
    """int32 [rows, blocks, words, 2, lanes]: a word's bytes 0 and 2, or 1 and 3, in the upper bytes of its halves."""
    word = _words(packed, strides, at, HOW.span, 4, HOW)
    return word << (8 - tl.arange(0, 2) * 8)[None, None, None, :, None]


@triton.jit
def _halves(pair, HOW: tl.constexpr):
    """float16 [rows, blocks, span]."""
    return tl.reshape(join(pair), [HOW.rows, HOW.columns // HOW.span, HOW.span])


@triton.jit
def join(pair):
    """float16 [..., 2]: the lower half of each word, and the upper one. It takes no instruction."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True))


@triton.jit
def whole(pair):
    """The pair, as a word that the compiler does not take apart to mask each half for itself: it cannot know that the
    grid has one row of programs only, so that what is set is 0. It comes with the mask, in one instruction.
    """
    return pair | (0 - tl.program_id(2)).to(pair.dtype, bitcast=True)


@triton.jit
def _block_scale(packed, strides, at, HOW: tl.constexpr):
    """float32 [rows, blocks] of FP8's blocks of 128 x 128; ones where `finish` has the scale."""
    if HOW.form == "block":
        row, row_live = rows_of(at, HOW, 1)
        span, live = columns_of(at, HOW, HOW.span)
        block = (span * HOW.span // 128).to(tl.int64)
        pointer = packed[1] + (row // 128).to(tl.int64) * strides[2] + block * strides[3]
        return load(pointer, row_live & live, HOW)
    else:
        return tl.full([HOW.rows, HOW.columns // HOW.span], 1.0, tl.float32)
