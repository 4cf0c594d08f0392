"""Launcher of dequant.cu, and the registration of its formats.

A format is a struct in dequant.cu and a line in COLUMN_FORMATS or BLOCK_FORMATS.

Code generation, NVRTC 13.2, sm_80 / sm_90 / sm_100, float16 out, no spills: GPTQ 61 / 63 / 56 registers, 8 / 8 / 9
programs of 128 threads per SM, 32 KB of words in flight, 16 LDG.128 (two of words and two of g_idx per row
of words, one of scales per change of group), 8 STG.128, one 4-byte load of zero points per change of group. Q8_0
23 / 26 / 32 registers, 16 programs per SM, 68 KB in flight; one 1-byte load, of a last tile's odd bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import C_TYPES, Device, address, ceil_div

SOURCE = "dequant.cu"
CONTRACT = "exact"
RUN = 8  # as in dequant.cu: consecutive outputs of a thread
THREADS = 128
# Rows of words of a program of a column format: half a group of 128, so that scales, zero points and group indices are
# read 1.2 % of the bytes too often instead of 12 %, and a projection of 4096 x 14336 still makes 896 programs.
ROWS = 8
TILE = 128  # blocks of a byte-block format per program: Q8_0's 4352 bytes, 34 per thread in flight
_ABSENT = np.int64(0)


@dataclass(frozen=True, slots=True)
class ColumnFormat:
    """A format of words across the rows of [k, n]: its struct, the array whose dtype is the struct's Scale, its arrays
    in the struct's order, those of them that are loaded in 16-byte words where they can be, and the rows of a word."""

    struct: str
    scale: str
    arrays: tuple[str, ...]
    wide: tuple[str, ...]
    word_rows: int


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format of byte blocks along k: its struct, the elements and the bytes of a block."""

    struct: str
    elements: int
    nbytes: int


_GPTQ = (("qweight", "qzeros", "scales", "g_idx"), ("qweight", "scales", "g_idx"), 8)
COLUMN_FORMATS = {"gptq_v2": ColumnFormat("GptqV2", "scales", *_GPTQ)}
BLOCK_FORMATS = {"q8_0": BlockFormat("Q8Zero", 32, 34)}


def dequantize(provider: Any, problem: Any, *, threads: int = THREADS, rows: int = ROWS, tile: int = TILE) -> Any:
    """weight [n, k] of problem.dtype (a transposed view for column formats). `provider` supplies `device` and `empty`.

    threads: of a program. rows: of words, per program of a column format. tile: blocks per program of a block format, a
    multiple of 8.
    """
    if problem.format in COLUMN_FORMATS:
        return _dequantize_columns(provider, problem, COLUMN_FORMATS[problem.format], threads, rows)
    return _dequantize_blocks(provider, problem, BLOCK_FORMATS[problem.format], threads, tile)


def _dequantize_columns(provider: Any, problem: Any, format: ColumnFormat, threads: int, rows: int) -> Any:
    n, k = problem.shape
    out = provider.empty((k, n), problem.dtype)
    arrays = [problem.packed[name] for name in format.arrays]
    wide = all(_loads_16_bytes(problem.packed[name]) for name in format.wide)
    struct = f"{format.struct}<{C_TYPES[problem.packed[format.scale].dtype.name]}, {str(wide).lower()}>"
    kernel = provider.device.kernel(SOURCE, f"dequantize_columns<{struct}, {C_TYPES[problem.dtype.name]}>")
    views = [argument for i in range(4) for argument in _packed(arrays[i] if i < len(arrays) else None, out)]
    column_tiles = ceil_div(n, threads * RUN)
    word_rows = k // format.word_rows
    sizes = (np.int32(column_tiles), np.int32(word_rows), np.int32(rows))
    kernel((ceil_div(word_rows, rows) * column_tiles,), (threads,), (out, np.int64(n), *sizes, *views))
    return out.T


def _packed(array: Any, unused: Any) -> tuple[Any, np.int64, np.int64]:
    """Pointer, row and column stride in elements; a one-dimensional array is a row, an absent one is never read."""
    if array is None:
        return unused, _ABSENT, _ABSENT
    *outer, column = (s // array.itemsize for s in array.strides)
    return array, np.int64(outer[0] if outer else 0), np.int64(column)


def _loads_16_bytes(array: Any) -> bool:
    *outer, column = array.strides
    return column == array.itemsize and address(array) % 16 == 0 and all(stride % 16 == 0 for stride in outer)


def _dequantize_blocks(provider: Any, problem: Any, format: BlockFormat, threads: int, tile: int) -> Any:
    device: Device = provider.device
    (blocks,) = problem.packed.values()
    rows, row_blocks = problem.shape[0], problem.shape[1] // format.elements
    out = provider.empty(problem.shape, problem.dtype)
    row_stride, byte_stride = blocks.strides
    if byte_stride == 1 and row_stride == row_blocks * format.nbytes:
        rows, row_blocks = 1, rows * row_blocks  # one run of blocks: every tile then starts on a 16-byte boundary
        row_stride = 0
    vector = byte_stride == 1 and (address(blocks) | row_stride) % 16 == 0
    kernel = device.kernel(SOURCE, f"dequantize_blocks<{format.struct}, {C_TYPES[problem.dtype.name]}>")
    tiles = ceil_div(row_blocks, tile)
    sizes = (np.int64(row_stride), np.int64(byte_stride), np.int64(row_blocks))
    args = (out, blocks, *sizes, np.int32(tiles), np.int32(tile), np.int32(vector))
    kernel((rows * tiles,), (threads,), args, shared_mem=tile * format.nbytes)
    return out


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported; None when it is."""
    known = problem.format in COLUMN_FORMATS or problem.format in BLOCK_FORMATS
    return None if known else f"format {problem.format} is not implemented"


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and programs small enough that little weights take several."""
    return [{}, {"threads": 32, "rows": 3, "tile": 8}]
