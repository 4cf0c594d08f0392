"""The fused product in Triton: y [m, n] = x [m, k] W^T straight from packed weights, for every format of `dequantize`.

A program takes a tile of output features and one split of k. It walks over k in tiles that the format's device function
decodes (`dequant_tile_triton`), the next two on their way meanwhile (cp.async), multiplies them with as many rows of x
as there are, and adds up in float32; so each packed byte is read once for all rows of x. Splits, fixed by the weight's
shape, are what keeps every SM busy where n is small; they leave partial sums in scratch, and a second launch adds these
up, always in the same order.

Up to 16 rows of float16 go through the tensor cores with the codes, whose sums the scales multiply, in the formats that
have such codes (`dequant_codes_triton`), and up to 8 with GPTQ's (`dequant_gemv_named_triton`, which reads the codes of
tiles that are not in order twice). Else one row is multiplied on the floating-point units,
as decoded: a product of float32 numbers with x. More rows go through the tensor cores in 16 bits, for which each weight
is rounded to x's dtype. Rows of float32 stay float32 (no TF32), one to a program, which share the packed bytes through
the L2 cache.

Traffic: packed bytes once per 256 rows of x (64 for the formats of 256-element blocks, whose steps are longer); x once
per tile of n, from the L2 cache; y once.

Code generation (Triton 3.9, sm_90, 14336 x 4096, fp16), nothing run; no kernel of up to 16 rows of x spills, nor GPTQ's
of more. Instructions of the loop for each weight, beside those that an H200 issues while it reads one at 75 % of its
bandwidth; GPTQ's as if a group began and ended with every step, which it does with every other:

                m = 1: registers, programs per SM, instructions     m = 8: instructions     affordable
    fp8_e4m3           80         6          4.6                            4.8                8.2
    int8               79         6          5.4                            6.0                8.2
    awq               158         3          2.7                            3.8                4.3
    gptq_v2           128         2          4.4                            4.4                4.3
    mxfp4              89         5          3.6                            3.6                4.4
    nvfp4             128         4          6.0                            6.2                4.6
    q4_k              110         4          3.8                            3.8                4.6
    q8_0              117         4          6.7                            7.8                8.8
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from pagebench.kernels.dequant_codes_triton import in_order
from pagebench.kernels.dequant_formats_triton import Weight, rejects
from pagebench.kernels.dequant_gemv_named_triton import named_kernel
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.dtypes import FLOAT16, FLOAT32

__all__ = ["dequant_gemv", "rejects", "variants"]

TILE = 4096  # weights per step, as for `dequantize`
FEATURES = {False: 8, True: 128}  # output features of a tile, by whether the weight is [k, n]: long rows are read
DOT_FEATURES = {False: 64, True: 128}  # with several rows of x: what tensor cores take at once
MAX_ROWS = 256  # rows of x that share one read of the weights, as long as their tile of x is small enough:
X_BYTES = 32 << 10  # three of these, in flight, and a tile of weights leave an SM of any kind some shared memory
# Where rows of k name their groups, which is read for each tile of features: the most of these that leave so many
# programs, two for nearly each SM. With 512 features the names add 1.6 % to the packed bytes.
NAMED_FEATURES = (512, 256, 128)
NAMED_PROGRAMS = 256
PROGRAMS = 1024  # wanted of a launch, of 4 warps: some 8 for each of an H200's 132 SMs
CODES_ROWS = 16  # of x at most
CODES_TILE = 8192  # weights per step, 64 to a thread
CODES_FEATURES = 64
# Registers per thread, at most: left alone the assembler aims at 128, and spills.
CODES_REGISTERS = 168
CODES_PROGRAMS = 528  # wanted of a launch: 4 for each SM, each with 8 KB of packed bytes on their way
NAMED_ROWS = 8  # of x that are multiplied with codes where rows of k name their groups: 16 would spill
NAMED_REGISTERS = 128  # per thread, so that two programs fit an SM
NAMED_STAGES = 3
MIN_STEPS = 2  # per split: fewer cost more in partial sums than they hide


@triton.jit
def gemv_kernel(
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
    DECODE: tl.constexpr,
    HOW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    ONWARD: tl.constexpr,
):
    """ROWS rows of x with one of `tiles` tiles of features: out [splits, m, n], of y's dtype or float32.

    ONWARD: DECODE takes what it gave with the last tile along k; see `dequant_integer_triton.gptq_v2_onward`.
    """
    N: tl.constexpr = HOW.columns if TRANSPOSED else HOW.rows
    K: tl.constexpr = HOW.rows if TRANSPOSED else HOW.columns
    n, k = (columns, rows) if TRANSPOSED else (rows, columns)
    tile, split = tl.program_id(0) % tiles, tl.program_id(1)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    TOTAL_ROWS: tl.constexpr = HOW.rows if ROWS == 1 else ROWS
    TOTAL_COLUMNS: tl.constexpr = HOW.columns if ROWS == 1 else N
    total = tl.zeros([TOTAL_ROWS, TOTAL_COLUMNS], tl.float32)
    known = tl.full([], -1, tl.int32)
    scale = tl.zeros([1, N], tl.float32)
    zero = tl.zeros([1, N], tl.float32)
    for step in tl.range(split * steps, tl.minimum(split * steps + steps, tl.cdiv(k, K)), num_stages=3):
        at = (step, tile, rows, columns) if TRANSPOSED else (tile, step, rows, columns)
        if ONWARD:
            value, known, scale, zero = DECODE(packed, strides, at, known, scale, zero, HOW)
        else:
            value = DECODE(packed, strides, at, HOW)
        feature = step * K + tl.arange(0, K)
        pointer = x + row[:, None].to(tl.int64) * x_row_stride + feature[None, :].to(tl.int64) * x_column_stride
        some = tl.load(pointer, mask=(row[:, None] < m) & (feature[None, :] < k), other=0.0)
        if not HOW.even:  # zeros of x do not cancel what a format makes of bytes that are not there
            beyond = feature[:, None] >= k if TRANSPOSED else feature[None, :] >= k
            value = tl.where(beyond, 0.0, value)
        if ROWS == 1:
            along = tl.reshape(some, [K, 1] if TRANSPOSED else [1, K]).to(tl.float32)
            total = tl.fma(value, tl.broadcast_to(along, [HOW.rows, HOW.columns]), total)
        else:
            weight = value.to(x.dtype.element_ty)
            total = tl.dot(some, weight if TRANSPOSED else tl.trans(weight), total, input_precision="ieee")
    if ROWS == 1:
        total = tl.reshape(tl.sum(total, 0 if TRANSPOSED else 1), [1, N])
    column = tile * N + tl.arange(0, N)
    pointer = out + (split.to(tl.int64) * m + row[:, None]) * n + column[None, :]
    tl.store(pointer, total.to(out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


@triton.jit
def codes_kernel(
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
    CODES: tl.constexpr,
    FINISH: tl.constexpr,
    HOW: tl.constexpr,
    PER: tl.constexpr,
    SPAN: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """As gemv_kernel, for all rows of x at once: sums of codes, each block's multiplied with its scale."""
    N: tl.constexpr = HOW.columns if TRANSPOSED else HOW.rows
    K: tl.constexpr = HOW.rows if TRANSPOSED else HOW.columns
    n, k = (columns, rows) if TRANSPOSED else (rows, columns)
    BLOCKS: tl.constexpr = K // SPAN
    WIDE: tl.constexpr = max(ROWS, 8)  # a row of x fills a matrix instruction's eight
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCKS, N, WIDE], tl.float32)
    ones = tl.full([BLOCKS, N, SPAN], 1.0, x.dtype.element_ty)
    for step in tl.range(split * steps, tl.minimum(split * steps + steps, tl.cdiv(k, K)), num_stages=3):
        at = (step, tile, rows, columns) if TRANSPOSED else (tile, step, rows, columns)
        code, scale, offset = CODES(packed, strides, at, HOW)
        feature = step * K + tl.arange(0, K)
        pointer = x + row[:, None].to(tl.int64) * x_row_stride + feature[None, :].to(tl.int64) * x_column_stride
        some = tl.load(pointer, mask=(row[:, None] < m) & (feature[None, :] < k), other=0.0)
        some = tl.broadcast_to(in_order(some, BLOCKS, SPAN, PER), [BLOCKS, SPAN, WIDE])
        sums = tl.dot(tl.permute(code, [1, 0, 2]), some)
        total = tl.fma(sums, tl.broadcast_to(tl.trans(scale)[:, :, None], [BLOCKS, N, WIDE]), total)
        if OFFSET:
            sums = tl.dot(ones, some)
            total = tl.fma(sums, tl.broadcast_to(-tl.trans(offset)[:, :, None], [BLOCKS, N, WIDE]), total)
    at = (0, tile, rows, columns) if TRANSPOSED else (tile, 0, rows, columns)
    y = FINISH(tl.sum(total, 0), packed, strides, at, HOW)
    column = (tile * N + tl.arange(0, N))[:, None]
    row = tl.arange(0, WIDE)[None, :]
    pointer = out + (split.to(tl.int64) * m + row) * n + column
    tl.store(pointer, y.to(out.dtype.element_ty), mask=(row < m) & (column < n))


@triton.jit
def add_splits_kernel(out, parts, count, splits, TILE: tl.constexpr):
    """out [count] = sum of parts [splits, count], first to last."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * count + place, mask=place < count, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


def dequant_gemv(
    problem: DequantGemv,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    tile: int | None = None,
    features: int | None = None,
    max_rows: int = MAX_ROWS,
    programs: int | None = None,
    num_warps: int | None = None,
) -> Any:
    """y [m, n] of the problem's dtype, from a problem with device arrays. `empty(shape, dtype)` makes it, and scratch.

    tile: weights per step; features: of them side by side in n; max_rows: rows of x to a program, at least 16. All
    powers of two. programs: how many programs splits are made for.
    """
    (n, k), m = problem.shape, problem.x.shape[0]
    weight = Weight(problem, flat=False)
    if weight.words and problem.dtype == FLOAT16 and m <= CODES_ROWS:
        if weight.format.rows_named and weight.group % 32 == 0 and m <= NAMED_ROWS:
            return _from_named(problem, empty, weight, tile, features, programs, num_warps)
        if weight.format.codes and not (weight.format.transposed and weight.group % 32):
            return _from_codes(problem, empty, weight, tile, features, programs, num_warps)
    programs, transposed = programs or PROGRAMS, weight.format.transposed
    x_rows = 1 if m == 1 or problem.dtype == FLOAT32 else min(max(triton.next_power_of_2(m), 16), max_rows)
    tile = tile or (TILE // 2 if weight.format.rows_named and x_rows > 32 else TILE)  # else sm_80 spills
    warps = max(4, x_rows // 32)
    if weight.format.rows_named and x_rows == 1 and features is None:
        features = _named_features(n, triton.cdiv(k, _together(weight)) * m)
        tile *= max(features // 256, 1)  # 16 rows for 512, whose 16 warps have 128 registers
        warps = features // 32
    height, width = _tile(weight, x_rows, tile, features)
    num_warps = num_warps or warps
    n_tile, k_tile = (width, height) if transposed else (height, width)
    if x_rows > 16:
        x_rows = max(min(x_rows, X_BYTES // (k_tile * problem.dtype.itemsize)), 16)
    tiles, k_tiles, x_tiles = triton.cdiv(n, n_tile), triton.cdiv(k, k_tile), triton.cdiv(m, x_rows)
    how = weight.how(height, width)
    onward = weight.format.onward if x_rows == 1 and (weight.format.rows_named or how.span == height) else None
    steps = max(triton.cdiv(k_tiles * tiles * x_tiles * num_warps, 4 * programs), min(MIN_STEPS, k_tiles))
    if onward:  # whole groups
        together = max(_together(weight) // k_tile, 1)
        steps = max(steps // together, 1) * together
    return _launched(
        gemv_kernel,
        (tiles, x_tiles, triton.cdiv(k_tiles, steps)),
        problem,
        empty,
        weight,
        steps,
        DECODE=onward or weight.format.decode,
        HOW=how,
        TRANSPOSED=transposed,
        ROWS=x_rows,
        ONWARD=onward is not None,
        num_warps=num_warps,
        maxnreg=weight.format.registers if x_rows == 16 else None,  # one row spills nothing, and more take more
    )


def _from_codes(
    problem: DequantGemv,
    empty: Callable[[tuple[int, ...], Any], Any],
    weight: Weight,
    tile: int | None,
    features: int | None,
    programs: int | None,
    num_warps: int | None,
) -> Any:
    """y where the tensor cores take codes."""
    (n, k), m, codes = problem.shape, problem.x.shape[0], weight.format.codes
    assert codes is not None
    rows = 1 if m == 1 else 8 if m <= 8 else 16
    transposed = weight.format.transposed
    tile, features = tile or CODES_TILE, features or CODES_FEATURES
    if rows > 8 and codes.span == 16:  # sums of each block: with longer tiles more than the registers hold
        tile = max(tile // 2, 512)
    if transposed:
        if rows == 1:
            features, tile = 2 * features, 2 * tile
        _, width = weight.tile(1, features)
        width = max(width, 16)
        height = max(weight.tile(tile // width, width)[0], 32)
    else:
        _, width = weight.tile(1, max(tile // features, codes.span, 32))
        height = max(weight.tile(max(tile // width, 1), width)[0], 16)
    n_tile, k_tile = (width, height) if transposed else (height, width)
    tiles, k_tiles = triton.cdiv(n, n_tile), triton.cdiv(k, k_tile)
    steps = max(triton.cdiv(k_tiles * tiles, programs or CODES_PROGRAMS), min(MIN_STEPS, k_tiles))
    how = weight.how(height, width)
    return _launched(
        codes_kernel,
        (tiles, 1, triton.cdiv(k_tiles, steps)),
        problem,
        empty,
        weight,
        steps,
        CODES=codes.decode,
        FINISH=codes.finish,
        HOW=how,
        PER=codes.per,
        SPAN=codes.span or how.span,
        OFFSET=codes.offset,
        ROWS=rows,
        TRANSPOSED=transposed,
        num_warps=num_warps or 4,
        maxnreg=CODES_REGISTERS,
    )


def _launched(
    kernel: Any,
    grid: tuple[int, int, int],
    problem: DequantGemv,
    empty: Callable[[tuple[int, ...], Any], Any],
    weight: Weight,
    steps: int,
    **options: Any,
) -> Any:
    """y, by `kernel` over (tiles of n, tiles of rows of x, splits), and by a second launch that adds up the splits."""
    (n, _), m, (tiles, x_tiles, splits) = problem.shape, problem.x.shape[0], grid
    y = empty((m, n), problem.dtype)
    out = y if splits == 1 else empty((splits, m, n), np.dtype(np.float32))
    kernel[(tiles * x_tiles, splits)](
        out,
        problem.x,
        *problem.x.stride(),
        weight.arrays,
        weight.strides,
        m,
        weight.rows,
        weight.columns,
        tiles,
        steps,
        **options,
        enable_fp_fusion=False,  # as in `dequantize`; a sum's own is asked for
    )
    if splits > 1:
        add_splits_kernel[(triton.cdiv(m * n, 256),)](y, out, m * n, splits, TILE=256, num_warps=2)
    return y


def _from_named(
    problem: DequantGemv,
    empty: Callable[[tuple[int, ...], Any], Any],
    weight: Weight,
    tile: int | None,
    features: int | None,
    programs: int | None,
    num_warps: int | None,
) -> Any:
    """y where the tensor cores take codes of rows that name their groups."""
    (n, k), m = problem.shape, problem.x.shape[0]
    rows = 1 if m == 1 else 8
    features = features or _named_features(n, triton.cdiv(k, _together(weight)))
    _, width = weight.tile(1, max(features, 16))
    height = 64 if weight.group % 64 == 0 else 32
    if tile:
        height = min(max(tile // width, 32), height)
    tiles, k_tiles = triton.cdiv(n, width), triton.cdiv(k, height)
    steps = max(triton.cdiv(k_tiles * tiles, programs or NAMED_PROGRAMS), 1)
    of_split = (weight.group or height) // height
    steps = max(round(steps / of_split), 1) * of_split
    num_warps = num_warps or max(width // 64, 1)
    return _launched(
        named_kernel,
        (tiles, 1, triton.cdiv(k_tiles, steps)),
        problem,
        empty,
        weight,
        steps,
        ADDED=weight.format.added,
        HOW=weight.how(height, width),
        FEW=weight.how(16, width),
        ROWS=rows,
        PER_WARP=width // num_warps,
        STAGES=NAMED_STAGES,
        num_warps=num_warps,
        maxnreg=NAMED_REGISTERS if num_warps > 4 else CODES_REGISTERS,
    )


def _together(weight: Weight) -> int:
    """k that a split has all of: a group, or as much as makes its scales small beside the codes."""
    return weight.group or 512


def _named_features(n: int, splits: int) -> int:
    return next((f for f in NAMED_FEATURES if triton.cdiv(n, f) * splits >= NAMED_PROGRAMS), NAMED_FEATURES[-1])


def _tile(weight: Weight, x_rows: int, tile: int, features: int | None) -> tuple[int, int]:
    """Rows and columns of the tile of the weight that a step decodes."""
    transposed = weight.format.transposed
    if features is None:
        features = (FEATURES if x_rows == 1 else DOT_FEATURES)[transposed]
    straddling = weight.format.bits and 32 % weight.format.bits  # its fields are loaded one by one: half the registers
    tile = max(tile // 2, 256) if straddling else tile
    if x_rows > 1:  # a matrix instruction wants 16 each way
        tile, features = max(tile, 256), max(features, 16)
        features = max(features // 2, 16) if straddling else features
    if transposed:
        _, width = weight.tile(1, features)
        height, _ = weight.tile(max(tile // width, 16 if x_rows > 1 else 1), width)
    else:
        _, width = weight.tile(1, max(tile // features, 16))
        height, _ = weight.tile(tile // width, width)
    least = 16 if x_rows > 1 else 1
    return max(height, least), max(width, least)


def variants(problem: DequantGemv) -> list[dict[str, Any]]:
    """Tiles and splits small enough that a test's little problem has several of each."""
    return [{"tile": 256, "features": 16, "max_rows": 16}, {"tile": 1024, "programs": 1}]
