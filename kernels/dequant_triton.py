"""Dequantisation in Triton: packed weights to fp16, bf16 or fp32, one kernel for all formats.

What it computes: weight [n, k] under the format's rounding contract. A format is one device function, which gives the
float32 values of a tile (`dequant_tile_triton`), and one line in `dequant_formats_triton`. The kernel cuts the output
into tiles, rounds once and stores; tails are masks.

GPTQ and AWQ, whose words run along n, are written as [k, n] and returned transposed; NF4 and FP4, whose packing runs on
from row to row, as one row.

Traffic: packed bytes once, weights once; scales and zero points once per tile that needs them, from the caches.

Code generation (Triton 3.9, sm_90, 4096 x 4096 to fp16), nothing run; no spill, and 4 stores of 16 bytes a thread:

                registers  programs/SM   loads of codes
    fp8_e4m3       44          10         2 of 16 bytes
    int8           32          16         2 of 16 bytes
    gptq_v2       103           2         1 of 16 bytes, or as many again where a tile has several groups; 8 warps
    awq            34           6         1 of 16 bytes; 8 warps
    pack_4         36          12         1 of 16 bytes; 3 bits: 32 of 4 bytes, a field each, from the L1 cache
    mxfp4          40          12         1 of 16 bytes
    nvfp4          40          12         1 of 16 bytes; nvfp4_ct 56 registers, 9 programs, for the division
    nf4            32          16         1 of 16 bytes
    q4_0, q8_0     54, 42    9, 10        2 bytes each: blocks are aligned to no more
    q4_k, q5_k     54, 60     9, 8        1 of 16 bytes
    q6_k           64           8         2 bytes each
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from pagebench.kernels.dequant_formats_triton import Weight, rejects
from pagebench.reference.dequant import Dequantize

__all__ = ["dequantize", "rejects", "variants"]

TILE = 4096  # elements per program, 32 for each thread of 4 warps: 64 take twice the registers and halve the occupancy
TILE_COLUMNS = 1024  # 4 warps side by side, 8 columns per thread
# GPTQ and AWQ: 64 rows share each read of a group's scales, 128 columns each read of g_idx. Smaller tiles ask for 3 to
# 12 % more bytes, as wide ones do of 4 rows, whose scales are a quarter of all that is read; the caches may hold them.
# These take twice the registers. Which is faster is not measured yet.
GROUPED_TILE = {"tile": 8192, "columns": 128, "num_warps": 8}
# Nested NF4 and FP4: blocks look their scales up in a table of 1 KB, of which each tile asks for each entry once: 1.6 %
# more bytes than the fewest, 2.2 % where a tile is TILE.
NESTED_TILE = {"tile": 16384, "columns": TILE_COLUMNS, "num_warps": 16}


@triton.jit
def dequantize_kernel(
    out,
    packed,
    strides,
    rows,
    columns,
    tiles_across,
    DECODE: tl.constexpr,
    HOW: tl.constexpr,
    LONG: tl.constexpr,
):
    """One tile of `out`, contiguous [rows, columns]. LONG: columns take more than 32 bits."""
    tile_row, tile_column = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    if LONG:
        tile_column = tile_column.to(tl.int64)
    value = DECODE(packed, strides, (tile_row, tile_column, rows, columns), HOW)
    row = (tile_row * HOW.rows + tl.arange(0, HOW.rows))[:, None]
    column = (tile_column * HOW.columns + tl.arange(0, HOW.columns))[None, :]
    pointer = out + row.to(tl.int64) * columns + column
    if HOW.even:
        tl.store(pointer, value.to(out.dtype.element_ty))
    else:
        tl.store(pointer, value.to(out.dtype.element_ty), mask=(row < rows) & (column < columns))


def dequantize(
    problem: Dequantize,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    tile: int | None = None,
    columns: int | None = None,
    num_warps: int | None = None,
) -> Any:
    """weight [n, k] of the problem's dtype, from a problem with device arrays; a transposed view if its format says so.

    `empty(shape, dtype)` makes the output. tile: elements per program; columns: how many of them side by side at most;
    both powers of two.
    """
    weight = Weight(problem, flat=True)
    fmt = weight.format
    default = GROUPED_TILE if fmt.transposed else {"tile": TILE, "columns": TILE_COLUMNS, "num_warps": 4}
    if weight.form.startswith("nested"):
        default = NESTED_TILE
    tile, columns = tile or default["tile"], columns or default["columns"]
    width = min(columns, tile // fmt.row_unit) if weight.rows > 1 else tile
    _, width = weight.tile(1, width)
    height, _ = weight.tile(tile // width, width)
    tiles_across = triton.cdiv(weight.columns, width)
    out = empty(problem.shape[::-1] if fmt.transposed else problem.shape, problem.dtype)
    dequantize_kernel[(tiles_across * triton.cdiv(weight.rows, height),)](
        out,
        weight.arrays,
        weight.strides,
        weight.rows,
        weight.columns,
        tiles_across,
        DECODE=fmt.decode,
        HOW=weight.how(height, width),
        LONG=weight.columns + width >= 2**31,
        num_warps=num_warps or default["num_warps"],
        maxnreg=fmt.registers,
        enable_fp_fusion=False,  # nested nf4 and fp4 round between a multiplication and an addition
    )
    return out.T if fmt.transposed else out


def variants(problem: Dequantize) -> list[dict[str, Any]]:
    """Tiles small enough that a test's little problem crosses their edges."""
    return [{"tile": 256, "columns": 32}, {"tile": 1024, "columns": 64, "num_warps": 2}]
