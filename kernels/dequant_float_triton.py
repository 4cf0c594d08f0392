"""Device functions of FP8, MXFP4, NVFP4, NF4 and FP4: see `dequant_tile_triton` for what a device function is, and
`reference/dequant_float.py` for the formats. Arithmetic is float32, each operation rounding, in the format's order.
"""

import triton
import triton.language as tl

from pagebench.kernels.dequant_tile_triton import columns_of, e2m1, e4m3, e5m2, e8m0, first_row, load, rows_of


@triton.jit
def fp8_e4m3(packed, strides, at, HOW: tl.constexpr):
    """number * scale."""
    byte = _bytes(packed, strides, at, HOW)
    return _scaled(e4m3(byte), packed, strides, at, HOW)


@triton.jit
def fp8_e5m2(packed, strides, at, HOW: tl.constexpr):
    """number * scale."""
    byte = _bytes(packed, strides, at, HOW)
    return _scaled(e5m2(byte), packed, strides, at, HOW)


@triton.jit
def mxfp4(packed, strides, at, HOW: tl.constexpr):
    """number * 2^(e - 127). [rows, blocks, bytes]."""
    blocks, scales = packed
    row, row_live = rows_of(at, HOW, 1)
    block, block_live = columns_of(at, HOW, 32)
    pointer = first_row(blocks, row, strides, HOW) + block.to(tl.int64) * strides[1]
    byte = tl.arange(0, 16)[None, None, :] * strides[2]
    byte = load(pointer[:, :, None] + byte, (row_live & block_live)[:, :, None], HOW).to(tl.int32)
    code = (byte[:, :, :, None] >> (tl.arange(0, 2) * 4)[None, None, None, :]) & 15
    pointer = scales + row.to(tl.int64) * strides[3] + block.to(tl.int64) * strides[4]
    scale = e8m0(load(pointer, row_live & block_live, HOW))
    return tl.reshape(e2m1(code) * scale[:, :, None, None], [HOW.rows, HOW.columns])


@triton.jit
def nvfp4(packed, strides, at, HOW: tl.constexpr):
    """(number * scale) * global_scale."""
    value, common = _nvfp4(packed, strides, at, False, HOW)
    return value * common


@triton.jit
def nvfp4_ct(packed, strides, at, HOW: tl.constexpr):
    """(number * scale) / global_scale, rounded as IEEE says: `/` would multiply by an approximate reciprocal."""
    value, common = _nvfp4(packed, strides, at, False, HOW)
    return tl.div_rn(value, tl.full([HOW.rows, HOW.columns], 1.0, tl.float32) * common)


@triton.jit
def nvfp4_swizzled(packed, strides, at, HOW: tl.constexpr):
    """As nvfp4, the scales in tiles of 128 rows by 4 blocks."""
    value, common = _nvfp4(packed, strides, at, True, HOW)
    return value * common


@triton.jit
def bits4(packed, strides, at, HOW: tl.constexpr):
    """table[code] * absmax, where bytes and blocks run through the flat weight. The last array is the table."""
    row, row_live = rows_of(at, HOW, 1)
    start = row.to(tl.int64) * at[3]
    if HOW.form.endswith("odd"):  # rows of odd length: every second one begins in the middle of a byte
        column, live = columns_of(at, HOW, 1)
        element = start + column
        byte = load(packed[0] + (element >> 1) * strides[1], row_live & live, HOW).to(tl.int32)
        code = (byte >> (4 - 4 * (element & 1)).to(tl.int32)) & 15
    else:
        pair, live = columns_of(at, HOW, 2)
        half = row.to(tl.int64) * (at[3] // HOW.unit) * (HOW.unit // 2)  # of `start`, and visibly a multiple
        byte = load(packed[0] + (half + pair) * strides[1], row_live & live, HOW).to(tl.int32)
        code = (byte[:, :, None] >> (4 - 4 * tl.arange(0, 2))[None, None, :]) & 15

    span, live = columns_of(at, HOW, HOW.span)
    absmax = _absmax(packed, strides, (start + span * HOW.span) // HOW.group, row_live & live, HOW)
    table = tl.load(packed[len(packed) - 1] + tl.arange(0, 16))
    value = tl.gather(table, tl.reshape(code, [HOW.rows * HOW.columns]), 0)  # from shared memory
    value = tl.reshape(value, [HOW.rows, HOW.columns // HOW.span, HOW.span])
    return tl.reshape(value * absmax[:, :, None], [HOW.rows, HOW.columns])


@triton.jit
def _absmax(packed, strides, block, live, HOW: tl.constexpr):
    """float32 like `block`: absmax, or code2[absmax_q] * absmax2 + offset, which rounds twice: not to be contracted."""
    if HOW.form.startswith("nested"):
        outer = load(packed[2] + (block // 256) * strides[5], live, HOW)
        code = load(packed[1] + block * strides[3], live, HOW).to(tl.int32)
        return tl.load(packed[4] + code * strides[9]) * outer + tl.load(packed[3])
    else:
        return load(packed[1] + block * strides[3], live, HOW)


@triton.jit
def _bytes(packed, strides, at, HOW: tl.constexpr):
    """uint8 [rows, columns]: the first array, a byte for each weight."""
    row, row_live = rows_of(at, HOW, 1)
    column, live = columns_of(at, HOW, 1)
    return load(first_row(packed[0], row, strides, HOW) + column.to(tl.int64) * strides[1], row_live & live, HOW)


@triton.jit
def _scaled(value, packed, strides, at, HOW: tl.constexpr):
    """value * scale of the second array: one for all, one for each row, or one for each block of 128 x 128."""
    row, row_live = rows_of(at, HOW, 1)
    if HOW.form == "tensor":
        return value * tl.load(packed[1])
    elif HOW.form == "channel":
        return value * load(packed[1] + row.to(tl.int64) * strides[3], row_live, HOW)
    else:
        span, live = columns_of(at, HOW, HOW.span)
        block = (span * HOW.span // 128).to(tl.int64)
        pointer = packed[1] + (row // 128).to(tl.int64) * strides[2] + block * strides[3]
        scale = load(pointer, row_live & live, HOW)
        value = tl.reshape(value, [HOW.rows, HOW.columns // HOW.span, HOW.span])
        return tl.reshape(value * scale[:, :, None], [HOW.rows, HOW.columns])


@triton.jit
def _nvfp4(packed, strides, at, SWIZZLED: tl.constexpr, HOW: tl.constexpr):
    """number * scale, exact, and the global scale."""
    weight, scales, common = packed
    row, row_live = rows_of(at, HOW, 1)
    byte, live = columns_of(at, HOW, 2)
    pointer = first_row(weight, row, strides, HOW) + byte.to(tl.int64) * strides[1]
    pair = load(pointer, row_live & live, HOW).to(tl.int32)
    code = (pair[:, :, None] >> (tl.arange(0, 2) * 4)[None, None, :]) & 15

    block, live = columns_of(at, HOW, 16)
    scale_row, scale_column = row.to(tl.int64), block.to(tl.int64)
    if SWIZZLED:
        scale_row, scale_column = swizzled_place(row, block, at[3])
    scale = e4m3(load(scales + scale_row * strides[2] + scale_column * strides[3], row_live & live, HOW))
    value = tl.reshape(e2m1(code), [HOW.rows, HOW.columns // 16, 16]) * scale[:, :, None]
    return tl.reshape(value, [HOW.rows, HOW.columns]), tl.load(common)


@triton.jit
def swizzled_place(row, block, columns):
    """int64 row and column, in an array of (columns + 63) // 64 * 4 columns, of a row's block's scale."""
    wide, width = row.to(tl.int64), (columns + 63) // 64 * 4
    place = ((wide // 128) * (width // 4) + block // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
    return place // width, place % width
