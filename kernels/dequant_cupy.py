"""Launcher of dequant.cu. The formats are registered in dequant_layouts.py.

Code generation, NVRTC 13.2, sm_90, no spills. Rows: 54 registers for Q8_0, 80 for INT8 and pack-quantized, six to nine
programs of 128 threads per SM with 4 KB of packed bytes each in flight, LDGSTS.128 in, STG.128 out; the narrow
accesses are scales, the ends of segments that are not aligned to 16 bytes, and runs at the end of a row. Columns: 46 to
56 registers, 40 KB of codes in flight per SM, LDG.128 for codes, scales and g_idx.
"""

from typing import Any

import numpy as np

from pagebench.kernels import dequant_layouts
from pagebench.kernels.cupy_launch import ceil_div
from pagebench.kernels.dequant_layouts import COLUMN_FORMATS, KINDS, STAGE_PAD, UNIT

SOURCE = "dequant.cu"
RUN = 8  # as in dequant_common.cuh: consecutive weights of a thread
ROWS = 8  # as in dequant_columns.cuh: rows of a thread's codes
ROWS_EACH = 8  # times eight rows of a program: a group's scales are read once or twice for its 128 rows, not 16 times
THREADS = 128
TILE_BYTES = 4096  # of packed bytes per program, 32 in flight for each thread; more would cost occupancy
# Nested NF4 and FP4: a program reads a table of 1 KB, 1.2 % of what so many weights move, 5 % with TILE_BYTES.
NESTED_TILE = 32768  # weights; 132 SMs have two programs each from 8.7 million weights on


def dequantize(provider: Any, problem: Any, *, threads: int = THREADS, tile: int | None = None) -> Any:
    """weight [n, k] of problem.dtype (a transposed view for column formats). `provider` supplies `device` and `empty`.

    threads: of a program, a multiple of 32. tile: weights per program of a row format, a multiple of 256.
    """
    if problem.format in COLUMN_FORMATS:
        return _dequantize_columns(provider, problem, threads)
    return _dequantize_rows(provider, problem, threads, tile)


def _dequantize_rows(provider: Any, problem: Any, threads: int, tile: int | None) -> Any:
    out = provider.empty(problem.shape, problem.dtype)
    arguments = dequant_layouts.row_arguments(problem, one_row=True)
    rows, k = arguments.rows, arguments.k
    nbytes = arguments.format.nbytes
    nested = "code2" in problem.packed
    tile = tile or (NESTED_TILE if nested else UNIT * max(1, TILE_BYTES // nbytes))
    tiles = ceil_div(k, tile)
    wide = rows == 1 or k % RUN == 0
    args = (
        *(out, KINDS[problem.dtype], np.int32(wide), np.int64(k), np.int32(tiles), np.int32(tile)),
        *arguments.parameters,
        *arguments.packed,
        *arguments.arrays,
    )
    kernel = provider.device.kernel(SOURCE, f"dequantize_rows<{arguments.format.struct}>")
    kernel((rows * tiles,), (threads,), args, shared_mem=tile // UNIT * nbytes + STAGE_PAD + 16)
    return out


def _dequantize_columns(provider: Any, problem: Any, threads: int) -> Any:
    n, k = problem.shape
    out = provider.empty((k, n), problem.dtype)
    parameters, arrays = dequant_layouts.column_parameters(problem)
    column_tiles = ceil_div(n, threads * RUN)
    counts = (np.int64(k), np.int64(n), np.int32(column_tiles), np.int32(ROWS_EACH))
    args = (out, KINDS[problem.dtype], *counts, *parameters, *arrays)
    kernel = provider.device.kernel(SOURCE, f"dequantize_columns<{COLUMN_FORMATS[problem.format].struct}>")
    kernel((ceil_div(k, ROWS * ROWS_EACH) * column_tiles,), (threads,), args)
    return out.T


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported; None when it is."""
    return dequant_layouts.rejects(problem)


def contract(format: str) -> str:
    """The rounding contract of `format` here: that of its definition."""
    known = dequant_layouts.ROW_FORMATS.get(format) or COLUMN_FORMATS[format]
    return known.contracts[0]


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and programs small enough that little weights take several."""
    return [{}, {"threads": 32, "tile": UNIT}]
