"""Launcher of dequant_gemv.cu. The formats are registered in dequant_layouts.py.

Code generation, NVRTC 13.2, sm_90, 16-bit types, no spills: rows up to 108 registers, four programs of 128 threads on
an SM, each with 8 KB or more of the next tile in flight. Columns 128 registers, 16 warps per SM with 3 KB of codes of
each in flight. In float32 up to 255 registers, 8 warps per SM: they keep the sums of 16 rows of x, so that the codes
are read once for them all.

Instructions a weight at m = 1, for a whole step (`bench/dequant_codegen_instructions.py`), and how many an H200 issues
while it reads a weight at 75 % of its bandwidth: they bind none.

                  gptq   awq   fp8-block  int8-channel  mxfp4  nvfp4  q8_0  q4_k
    issued        4.26  3.75        7.94          6.03   3.88   4.56  6.34  3.59
    affordable    4.28  4.28        8.24          8.24   4.38   4.63  8.75  4.63

g_idx of GPTQ is read once for 512 features, 1.5 % of the packed bytes, where that leaves 256 programs; Llama-3-8B's
projections to keys and values are too narrow for that, and read it for each 128 features, 5 %. More than 16 rows of x
read the packed bytes once for each 16, from the L2 cache but for the first.
"""

from typing import Any

import numpy as np

from pagebench.kernels import dequant_layouts
from pagebench.kernels.cupy_launch import address, ceil_div
from pagebench.kernels.dequant_layouts import COLUMN_FORMATS, KINDS, STAGE_PAD, UNIT
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32

SOURCE = "dequant_gemv.cu"
TYPES = {FLOAT16: "__half", BFLOAT16: "__nv_bfloat16", FLOAT32: "float"}
THREADS = 128
X_ROWS = 16  # as in dequant_gemv.cu
FEATURES = 8
COLUMNS = 64
STEP = 32
RING_BYTES = 4096  # of a warp
GROUP_BYTES = 2112  # of a piece of k: of 512 rows, and of 16 steps

# Warps wanted: four programs of four for each of 132 SMs. Splitting k costs a pass over float32 sums, small beside the
# weights as long as a split has some hundred of k.
WARPS = 2112
LEAST_SPLIT = 512
# Rows of k name their groups once for all features of a program: as many tiles of 64 as leave two programs to
# nearly every SM, when each has no less of k than a group.
TILES = (8, 4, 2)
LEAST_PROGRAMS = 256
LEAST_GROUPED = 128
TILE_UNITS = 2  # a program's four warps take 512 columns a round
TILE_BYTES = 1200  # at most, of an output feature per stage: two stages of eight are 17 KB, eight programs per SM
SUM_THREADS = 256


def dequant_gemv(
    provider: Any, problem: Any, *, threads: int | None = None, tile: int | None = None, split: int | None = None
) -> Any:
    """y [m, n] of problem.dtype. `provider` supplies `device` and `empty`.

    threads: of a program, 32, 64 or 128. tile: weights of a feature per stage of a row format, a multiple of 256.
    split: of k per program, rounded up to tiles, or to 32 of column formats. None chooses.
    """
    if problem.format in COLUMN_FORMATS:
        return _columns(provider, problem, threads, split)
    return _rows(provider, problem, threads or THREADS, tile, split)


def _rows(provider: Any, problem: Any, threads: int, tile: int | None, split: int | None) -> Any:
    arguments = dequant_layouts.row_arguments(problem, one_row=False)
    nbytes, (n, k) = arguments.format.nbytes, problem.shape
    tile = tile or UNIT * TILE_UNITS * max(1, TILE_BYTES // (TILE_UNITS * nbytes))
    programs = ceil_div(n, FEATURES), ceil_div(problem.m, X_ROWS)
    split = split or min(k, max(LEAST_SPLIT, _share(programs, k, THREADS // 32)))
    split_tiles = ceil_div(split, tile)
    pitch = _pitch(tile // UNIT * nbytes + STAGE_PAD + 16)
    grid = (programs[0], ceil_div(k, split_tiles * tile), programs[1])
    args = (
        *_input(problem),
        *(np.int32(tile), np.int32(split_tiles), np.int32(pitch), np.int64(k)),
        *arguments.parameters,
        *arguments.packed,
        *arguments.arrays,
    )
    name = f"dequant_gemv_rows<{arguments.format.struct}, {TYPES[problem.dtype]}>"
    return _launch(provider, problem, name, grid, threads, args, 2 * FEATURES * pitch)


def _columns(provider: Any, problem: Any, threads: int | None, split: int | None) -> Any:
    n, k = problem.shape
    parameters, arrays = dequant_layouts.column_parameters(problem)
    format, x_programs = COLUMN_FORMATS[problem.format], ceil_div(problem.m, X_ROWS)
    unit = LEAST_SPLIT
    group = dequant_layouts.group_below(problem)
    if format.by_row and group:
        unit = group * ceil_div(LEAST_GROUPED, group)
    tiles = _tiles(n, x_programs * ceil_div(k, unit)) if format.by_row else 1
    warps = threads // 32 if threads else tiles if format.by_row else THREADS // 32
    tiles = min(tiles, warps)
    programs = ceil_div(n, COLUMNS * tiles), x_programs
    split = STEP * ceil_div(split or max(unit, _share(programs, k, warps) // unit * unit), STEP)
    pieces = warps // tiles
    grid = (programs[0], ceil_div(k, split), programs[1])
    args = (*_input(problem), np.int32(split), np.int32(pieces), np.int64(k), *parameters, *arrays)
    name = f"dequant_gemv_columns<{format.struct}, {TYPES[problem.dtype]}>"
    sums = 0 if problem.dtype == FLOAT32 else COLUMNS * 4 * (X_ROWS if problem.m > X_ROWS // 2 else X_ROWS // 2)
    shared = warps * (RING_BYTES + sums) + (pieces * GROUP_BYTES if format.by_row else 0)
    return _launch(provider, problem, name, grid, 32 * warps, args, shared)


def _tiles(n: int, others: int) -> int:
    """Tiles of 64 features to a program: the most that leave programs enough, of which there are `others` for each."""
    return next((t for t in TILES if ceil_div(n, COLUMNS * t) * others >= LEAST_PROGRAMS), TILES[-1])


def _share(programs: tuple[int, int], k: int, warps: int) -> int:
    """How much of k a program of so many warps takes, for all the warps that are wanted."""
    return ceil_div(k, max(1, WARPS // warps // (programs[0] * programs[1])))


def _pitch(nbytes: int) -> int:
    """At least `nbytes`, and 16 beyond a multiple of 128: then rows of four lanes' words lie in different banks."""
    return ceil_div(nbytes - 16, 128) * 128 + 16


def _input(problem: Any) -> tuple[Any, ...]:
    """m, n, x with its strides, and whether its runs are 16-byte words."""
    row, column = (stride // problem.x.itemsize for stride in problem.x.strides)
    wide = (column == 1 or problem.shape[1] == 1) and (address(problem.x) | row * problem.x.itemsize) % 16 == 0
    sizes = np.int64(problem.m), np.int64(problem.shape[0])
    return (*sizes, problem.x, np.int64(row), np.int64(column), np.int32(wide))


def _launch(
    provider: Any, problem: Any, name: str, grid: tuple[int, int, int], threads: int, args: tuple[Any, ...], shared: int
) -> Any:
    y = provider.empty((problem.m, problem.shape[0]), problem.dtype)
    splits, kind = grid[1], KINDS[problem.dtype]
    sums = provider.empty((splits, *y.shape), np.float32) if splits > 1 else y
    kernel = provider.device.kernel_with(SOURCE, name, shared)
    kernel(grid, (threads,), (sums, kind, *args), shared_mem=shared)
    if splits > 1:
        count = problem.m * problem.shape[0]
        add = provider.device.kernel(SOURCE, "dequant_gemv_sum")
        add((ceil_div(count, SUM_THREADS),), (SUM_THREADS,), (y, kind, sums, np.int32(splits), np.int64(count)))
    return y


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported; None when it is."""
    return dequant_layouts.rejects(problem)


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and tiles and splits so small that little weights have several."""
    return [
        {},
        {"threads": 64, "tile": UNIT, "split": UNIT},
        {"threads": 32, "tile": UNIT, "split": 32},
        {"threads": 128, "split": 64},
    ]
