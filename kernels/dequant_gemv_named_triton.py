"""The fused product in Triton of up to 16 rows of float16 with GPTQ's weights, whose rows of k name their groups.

Tensor cores take bare codes where all rows of a tile are of the group that they lie in, k // group: these make sums for
a whole group, which get its scale and zero point when it is over,

    sum(w x) = scale * (sum(code x) - zero * sum(x)),

all of it exact where one product is. Scale and zero point are loaded when a group begins, and wait as they are stored.
A tile with a row of another group is decoded row by row, to float16, and has sums of its own.
"""

import triton
import triton.language as tl

from pagebench.kernels.dequant_codes_triton import in_order, join, whole
from pagebench.kernels.dequant_integer_triton import gptq_scales, gptq_words
from pagebench.kernels.dequant_tile_triton import columns_of, load, rows_of

UNIT = tl.constexpr(16777216.0)  # 2^24: a code is as many of float16's smallest subnormal number


@triton.jit
def named_kernel(
    out,
    x,
    x_row_stride,
    x_column_stride,
    packed,
    strides,
    m,
    rows,
    columns,
    tiles,
    steps,
    ADDED: tl.constexpr,
    HOW: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    PER_WARP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `dequant_gemv_triton.gemv_kernel`, for all rows of x at once. A group is whole tiles; a split is whole groups.

    ADDED: to zero points as they are stored. PER_WARP: features; a product for each warp, as of a batch, is one that
    takes its operands from registers. FEW: HOW of the few rows that are decoded at once where groups are mixed.
    """
    WARPS: tl.constexpr = HOW.columns // PER_WARP
    N: tl.constexpr = HOW.columns
    K: tl.constexpr = HOW.rows
    OF_GROUP: tl.constexpr = HOW.group // K  # tiles; 0 where all rows are of one group
    WIDE: tl.constexpr = max(ROWS, 8)  # a row of x fills a matrix instruction's eight
    n, k = columns, rows
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    total = tl.zeros([WARPS, PER_WARP, WIDE], tl.float32)
    sums = tl.zeros([WARPS, PER_WARP, WIDE], tl.float32)
    x_sums = tl.zeros([ROWS, K], tl.float32)
    ordered_tiles, mixed_tiles = split * 0, split * 0
    begin, end = split * steps, tl.minimum(split * steps + steps, tl.cdiv(k, K))
    scale, zero = _none(packed, HOW)
    for step in tl.range(begin, end, num_stages=STAGES):
        at = (step, tile, rows, columns)
        row_of_k, live = rows_of(at, HOW, 1)
        group = load(packed[3] + row_of_k.to(tl.int64) * strides[7], live, HOW)
        ordered = _ordered(group, live, step, HOW)
        word = gptq_words(packed, strides, at, HOW, ordered)  # others are loaded where they are decoded
        feature = step * K + tl.arange(0, K)
        pointer = x + row[:, None].to(tl.int64) * x_row_stride + feature[None, :].to(tl.int64) * x_column_stride
        some = tl.load(pointer, mask=(row[:, None] < m) & (feature[None, :] < k), other=0.0)

        if step % OF_GROUP == 0 if OF_GROUP else step == begin:
            scale, zero = _stored(packed, strides, at, HOW)
        kept = tl.where(ordered, some, 0.0)
        sums = _dot(_codes(word, HOW), in_order(kept, K // 32, 32, 8), sums)
        x_sums += kept.to(tl.float32)
        ordered_tiles += ordered.to(tl.int32)
        mixed_tiles += 1 - ordered.to(tl.int32)
        if (step + 1 == end) | (step % OF_GROUP == OF_GROUP - 1 if OF_GROUP else False):
            if ordered_tiles > 0:  # else the group may have no finite scale
                total = _with_group(total, sums, x_sums, scale, zero, ADDED, HOW)
            sums = tl.zeros([WARPS, PER_WARP, WIDE], tl.float32)
            x_sums = tl.zeros([ROWS, K], tl.float32)
            ordered_tiles = split * 0
    if mixed_tiles > 0:
        for step in range(begin * (K // FEW.rows), tl.minimum(end * (K // FEW.rows), tl.cdiv(k, FEW.rows))):
            at = (step, tile, rows, columns)
            row_of_k, live = rows_of((step // (K // FEW.rows), tile, rows, columns), HOW, 1)
            group = load(packed[3] + row_of_k.to(tl.int64) * strides[7], live, HOW)
            if not _ordered(group, live, step // (K // FEW.rows), HOW):
                feature = step * FEW.rows + tl.arange(0, FEW.rows)
                pointer = x + row[:, None].to(tl.int64) * x_row_stride + feature[None, :].to(tl.int64) * x_column_stride
                some = tl.load(pointer, mask=(row[:, None] < m) & (feature[None, :] < k), other=0.0)
                weight = _weights(packed, strides, at, ADDED, FEW)
                total = _dot(tl.trans(weight), tl.trans(some), total)
    column = tl.reshape(tile * N + tl.arange(0, N), [WARPS, PER_WARP, 1])
    row = tl.arange(0, WIDE)[None, None, :]
    pointer = out + (split.to(tl.int64) * m + row) * n + column
    tl.store(pointer, total.to(out.dtype.element_ty), mask=(row < m) & (column < n))


@triton.jit
def _codes(word, HOW: tl.constexpr):
    """float16 [columns, rows], each block of 32 rows in the order of `in_order`."""
    word = tl.reshape(word, [HOW.rows // 32, 1, 4, HOW.columns])
    pair = whole((word >> (tl.arange(0, 4) * 4)[None, :, None, None]) & 0x000F000F)
    code = tl.permute(join(pair), [3, 0, 1, 2, 4])  # [columns, blocks, fields, words, 2]
    return tl.reshape(code, [HOW.columns, HOW.rows])


@triton.jit
def _dot(weight, x, total):
    """total [warps, features, x's rows or more] + weight [columns, rows] x of k [rows, x's rows] in any shape."""
    K: tl.constexpr = weight.numel // (total.shape[0] * total.shape[1])
    ROWS: tl.constexpr = x.numel // K
    x = tl.broadcast_to(tl.reshape(x, [1, K, ROWS]), [total.shape[0], K, total.shape[2]])
    return tl.dot(tl.reshape(weight, [total.shape[0], total.shape[1], K]), x, total)


@triton.jit
def _stored(packed, strides, at, HOW: tl.constexpr):
    """Scale and word of zero points of each column, as they are stored, of the group in which a tile's rows lie."""
    group = (at[0] * HOW.rows // HOW.group if HOW.group else at[0] * 0).to(tl.int64)
    column, live = columns_of(at, HOW, 1)
    scale = load(packed[2] + group * strides[4] + column.to(tl.int64) * strides[5], live, HOW)
    word = load(packed[1] + group * strides[2] + (column >> 3).to(tl.int64) * strides[3], live, HOW)
    return scale, word


@triton.jit
def _none(packed, HOW: tl.constexpr):
    """Zeros in place of what `_stored` loads."""
    N: tl.constexpr = HOW.columns
    scale = tl.zeros([1, N], packed[2].dtype.element_ty)
    word = tl.zeros([1, N], tl.int32)
    return scale, word


@triton.jit
def _with_group(total, sums, x_sums, scale, word, ADDED: tl.constexpr, HOW: tl.constexpr):
    """total + scale * (sums - zero * x_sums)."""
    column = tl.arange(0, HOW.columns)[None, :]
    zero = ((word >> ((column & 7) * 4)) + ADDED) & 15
    of_x = tl.broadcast_to(tl.sum(x_sums, 1)[None, None, :], total.shape)
    zero = _of_columns(zero.to(tl.float32), total)
    scale = _of_columns(scale.to(tl.float32), total)
    return tl.fma(scale, tl.fma(-zero, of_x, sums * UNIT), total)


@triton.jit
def _of_columns(value, total):
    """[1, columns] like total [warps, features, x's rows]."""
    return tl.broadcast_to(tl.reshape(value, [total.shape[0], total.shape[1], 1]), total.shape)


@triton.jit
def _ordered(group, live, step, HOW: tl.constexpr):
    """Whether a tile's rows [rows, 1] are all of the group in which they lie."""
    own = step * HOW.rows // HOW.group if HOW.group else 0
    return tl.max(((group != own) & live).to(tl.int32)) == 0


@triton.jit
def _weights(packed, strides, at, ADDED: tl.constexpr, HOW: tl.constexpr):
    """float16 [rows, columns]: scale * (code - zero), of the group that each row names."""
    row, live = rows_of(at, HOW, 1)
    group = load(packed[3] + row.to(tl.int64) * strides[7], live, HOW)
    scale, zero = gptq_scales(group.to(tl.int64), packed, strides, at, ADDED, HOW)
    code = (gptq_words(packed, strides, at, HOW)[:, None, :] >> (tl.arange(0, 8) * 4)[None, :, None]) & 15
    weight = (tl.reshape(code, [HOW.rows, HOW.columns]) - zero).to(tl.float32) * scale
    if not HOW.even:  # zeros of x do not cancel the scales of rows that are not there
        weight = tl.where(live, weight, 0.0)
    return weight.to(tl.float16)
