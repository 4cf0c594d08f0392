"""Dequantisation in Triton: packed weights to fp16, bf16 or fp32, one kernel for all formats.

What it computes: weight [n, k] under the format's rounding contract. A format is one device function, which gives the
float32 values of a tile, and one line in FORMATS. The kernel tiles the output, rounds once and stores; tails are masks.

Layout: the kernel sees the output in storage order as rows x columns, each cut into units of the format's packing: an
element is [row unit, row in unit, column unit, column in unit], and a tile is that four-dimensional box. So a packed
word or a scale is loaded once, with extent 1 along what it serves, and unpacking is broadcasting within a thread.

- gptq_v2 packs 8 elements along k in a word, and neighbouring words belong to neighbouring n. It is written as [k, n]
  and returned transposed: a thread loads 8 words, 32 bytes, and stores 8 rows of 8 columns, 16 bytes each in a 16-bit
  type, without a pass through shared memory.
- q8_0 is written as [n, k]. Its 34-byte blocks are aligned to 2 bytes only, so two elements is the widest load there
  is (one, where k is no multiple of 256 and the compiler cannot see that rows begin at even addresses); a warp's loads
  are still dense, and at an H200's 4.8 TB/s and two elements they take about a tenth of an SM's load issue slots.

Traffic: packed words once, weights once. What a tile of gptq_v2 shares with its neighbours is asked for again: scales
and zero points by every tile of a group of rows, g_idx by every tile beside it. In tiles of 64 rows x 128 columns that
is 2 % of all bytes; in tiles of 8 x 512 it was 12 %.

Code generation (Triton 3.9, sm_90, 4096 x 4096 to fp16), nothing run: gptq_v2 76 registers, 5 loads and 4 stores of 16
bytes, 3 programs of 8 warps per SM; q8_0 32 registers, 16 loads of 2 bytes, 4 stores of 16 bytes, 16 programs per SM;
no spill.
For fp16 the compiler multiplies in fp16, where the factors are exact and the product rounds once: the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from pagebench.reference.dequant import Dequantize

# --- formats: float32 values of a tile, broadcastable to [row units, rows in unit, column units, columns in unit].
# Each gets the packed arrays and their strides in the order of FORMATS, and the index of each element along each axis
# with extent 1 along the other three. What lies outside rows x columns is not loaded, and its value does not matter.


@triton.jit
def _gptq_v2(packed, strides, row_unit, row_in_unit, column_unit, column_in_unit, rows, columns):
    """scales[g, n] * (q - zero), exact: 5 bits times 11. Rows are k, 8 to a word; columns n, 8 zeros to a word."""
    qweight, qzeros, scales, g_idx = packed
    k, n = row_unit * 8 + row_in_unit, column_unit * 8 + column_in_unit
    word = tl.load(
        qweight + row_unit.to(tl.int64) * strides[0] + n.to(tl.int64) * strides[1],
        mask=(row_unit * 8 < rows) & (n < columns),
        other=0,
    )
    group = tl.load(g_idx + k.to(tl.int64) * strides[6], mask=k < rows, other=0).to(tl.int64)
    zeros = tl.load(
        qzeros + group * strides[2] + column_unit.to(tl.int64) * strides[3],
        mask=(k < rows) & (column_unit * 8 < columns),
        other=0,
    )
    scale = tl.load(
        scales + group * strides[4] + n.to(tl.int64) * strides[5],
        mask=(k < rows) & (n < columns),
        other=0.0,
    )
    q = (word >> (row_in_unit * 4)) & 15
    zero = (zeros >> (column_in_unit * 4)) & 15
    return (q - zero).to(tl.float32) * scale.to(tl.float32)


@triton.jit
def _q8_0(packed, strides, row_unit, row_in_unit, column_unit, column_in_unit, rows, columns):
    """q * d, exact: 8 bits times 11. Column units are blocks of 34 bytes: d (fp16, low byte first), then 32 int8 q."""
    blocks, n = packed[0], row_unit
    block = blocks + n.to(tl.int64) * strides[0] + column_unit.to(tl.int64) * 34 * strides[1]
    live = (n < rows) & (column_unit * 32 < columns)
    low = tl.load(block, mask=live, other=0).to(tl.uint16)
    high = tl.load(block + strides[1], mask=live, other=0).to(tl.uint16)
    d = (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)
    q = tl.load(block + (2 + column_in_unit) * strides[1], mask=live, other=0).to(tl.int8, bitcast=True)
    return q.to(tl.float32) * d


@dataclass(frozen=True, slots=True)
class _Format:
    """`arrays` as `decode` takes them, rows and columns per unit, and whether rows are k (the result is transposed).

    tile: elements per program, 32 for each thread (64 take twice the registers and halve the occupancy); columns: how
    many of them side by side at most.
    """

    decode: Any
    arrays: tuple[str, ...]
    row_unit: int
    column_unit: int
    transposed: bool = False
    tile: int = 4096
    columns: int = 1024  # 4 warps side by side, 8 columns per thread
    num_warps: int = 4


FORMATS: dict[str, _Format] = {
    "gptq_v2": _Format(_gptq_v2, ("qweight", "qzeros", "scales", "g_idx"), 8, 8, True, 8192, 128, 8),
    "q8_0": _Format(_q8_0, ("blocks",), 1, 32),
}


@triton.jit
def dequantize_kernel(
    out,
    packed,
    strides,
    rows,
    columns,
    tiles_across,
    DECODE: tl.constexpr,
    ROW_UNIT: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    COLUMN_UNITS: tl.constexpr,
):
    """One tile of `out`, contiguous [rows, columns]: ROW_UNITS x COLUMN_UNITS units."""
    tile_row, tile_column = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    row_unit = (tile_row * ROW_UNITS + tl.arange(0, ROW_UNITS))[:, None, None, None]
    row_in_unit = tl.arange(0, ROW_UNIT)[None, :, None, None]
    column_unit = (tile_column * COLUMN_UNITS + tl.arange(0, COLUMN_UNITS))[None, None, :, None]
    column_in_unit = tl.arange(0, COLUMN_UNIT)[None, None, None, :]
    value = DECODE(packed, strides, row_unit, row_in_unit, column_unit, column_in_unit, rows, columns)
    row, column = row_unit * ROW_UNIT + row_in_unit, column_unit * COLUMN_UNIT + column_in_unit
    inside = (row < rows) & (column < columns)
    tl.store(out + row.to(tl.int64) * columns + column, value.to(out.dtype.element_ty), mask=inside)


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
    both powers of two. None: the format's own.
    """
    fmt = FORMATS[problem.format]
    n, k = problem.shape
    height, width = (k, n) if fmt.transposed else (n, k)
    tile = tile or fmt.tile
    column_units = _units(min(columns or fmt.columns, tile // fmt.row_unit), fmt.column_unit, width)
    row_units = _units(tile // (column_units * fmt.column_unit), fmt.row_unit, height)
    tiles_across = triton.cdiv(width, column_units * fmt.column_unit)
    arrays = tuple(problem.packed[name] for name in fmt.arrays)
    out = empty((height, width), problem.dtype)
    dequantize_kernel[(tiles_across * triton.cdiv(height, row_units * fmt.row_unit),)](
        out,
        arrays,
        tuple(stride for array in arrays for stride in array.stride()),
        height,
        width,
        tiles_across,
        DECODE=fmt.decode,
        ROW_UNIT=fmt.row_unit,
        COLUMN_UNIT=fmt.column_unit,
        ROW_UNITS=row_units,
        COLUMN_UNITS=column_units,
        num_warps=num_warps or fmt.num_warps,
    )
    return out.T if fmt.transposed else out


def _units(elements: int, unit: int, extent: int) -> int:
    """Units of `unit` elements along a tile of `elements` or so: a power of two, no more than `extent` needs."""
    return int(min(max(elements // unit, 1), triton.next_power_of_2(triton.cdiv(extent, unit))))


def rejects(problem: Dequantize) -> str | None:
    """Why a host problem is not supported; None when it is."""
    return None if problem.format in FORMATS else f"format {problem.format} is not supported yet"


def variants(problem: Dequantize) -> list[dict[str, Any]]:
    """Tiles small enough that a test's little problem crosses their edges."""
    return [{"tile": 256, "columns": 32}, {"tile": 1024, "columns": 64, "num_warps": 2}]
