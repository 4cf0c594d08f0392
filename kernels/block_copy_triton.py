"""Copying KV blocks inside caches in Triton: all caches in one launch, reads before writes whatever the pairs.

What it computes: `new[dst] = old[src]` for each (src, dst) of `pairs` int64 [n, 2], in place in every cache
[num_blocks, ...]. Layout: a block of a cache is `rows` runs of bytes, the cache's dimensions sorted by stride and
joined as far as they are dense; a dense block is one run. A table on the device holds one line of address, strides and
sizes per cache. Caches with accesses of one width and tiles of one shape share a launch, usually all of them.

Order without a plan: a pair must be read before its parent, the pair that writes its source. A block is written by at
most one pair, so parents form trees, and each has one root: a pair whose source nobody writes, or the pair of lowest
index on a cycle. The program of a root copies its whole tree, children before parents, and the programs of all other
pairs return at once; no program touches a byte that another one writes. The root's source is read first of all and
written last, which opens a cycle. Without conflicts every pair is a root without children, which a program finds by
reading `pairs` (16 n bytes, from the L2).

Traffic: each source block read once per pair and each destination written once; nothing is staged in memory. Fast
because accesses are 16 bytes wide where alignment allows, neighbours in a warp touch neighbouring bytes, and a
program holds 16 KB of loads in flight (32 registers per thread), four programs per SM.

Code generation (Triton 3.9; 64 pairs in 160 caches with blocks of 32 KB), nothing run: 124 registers on sm_80, 125 on
sm_90, 94 on sm_100, no spill; 8 loads and 8 stores of 16 bytes for what a root holds, as many for what moves before it.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pagebench.kernels.triton_arrays import knows
from pagebench.reference.block_copy import CopyBlocks

TILE = 2048  # elements moved at once by a program: 16 KB when they are 8 bytes, 128 bytes per thread of 4 warps
PROGRAMS = 2048  # to aim for: 15 for each of 132 SMs
FEW_PAIRS, MANY_PAIRS = 64, 512  # looked at in one step: two sizes, since each is compiled by itself
MAX_GRID_YZ = 65535
CACHED_TABLES = 16
FIELDS: tl.constexpr = tl.constexpr(7)  # of a table line: address, block stride, rows, inner rows, 2 row strides, run

_ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by the alignment of all accesses


@triton.jit
def _first_pair(pairs, ps0, ps1, num_pairs, block, after, skip, BY_SRC: tl.constexpr, SCAN: tl.constexpr):
    """Lowest index > `after`, other than `skip`, of a pair whose src (or dst) is `block`; num_pairs if there is none.

    A pair with src == dst changes nothing and counts as absent.
    """
    found = num_pairs
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        src = tl.load(pairs + i.to(tl.int64) * ps0, mask=i < num_pairs, other=-1)
        dst = tl.load(pairs + i.to(tl.int64) * ps0 + ps1, mask=i < num_pairs, other=-1)
        hit = ((src if BY_SRC else dst) == block) & (src != dst) & (i > after) & (i != skip)
        found = tl.minimum(found, tl.min(tl.where(hit, i, num_pairs), axis=0))
    return found


@triton.jit
def _parent_and_child(pairs, ps0, ps1, num_pairs, pair, src, dst, SCAN: tl.constexpr):
    """`_first_pair` of who writes `src` and of who else than `pair` reads `dst`, in one pass."""
    parent, child = num_pairs, num_pairs
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        their_src = tl.load(pairs + i.to(tl.int64) * ps0, mask=i < num_pairs, other=-1)
        their_dst = tl.load(pairs + i.to(tl.int64) * ps0 + ps1, mask=i < num_pairs, other=-1)
        moves = their_src != their_dst
        parent = tl.minimum(parent, tl.min(tl.where(moves & (their_dst == src), i, num_pairs), axis=0))
        reads = moves & (their_src == dst) & (i != pair)
        child = tl.minimum(child, tl.min(tl.where(reads, i, num_pairs), axis=0))
    return parent, child


@triton.jit
def _deepest(pairs, ps0, ps1, num_pairs, pair, child, root, SCAN: tl.constexpr):
    """The end of the walk from `pair` to its first `child`, the child's first child, and so on."""
    # `pair` and `child` must come as two values: Triton 3.9 drops from a loop a variable that is assigned what another
    # one holds, if both held the same value before the loop.
    while child < num_pairs:
        pair = child
        dst = tl.load(pairs + pair.to(tl.int64) * ps0 + ps1)
        child = _first_pair(pairs, ps0, ps1, num_pairs, dst, -1, root, True, SCAN)
    return pair


@triton.jit
def _next_pair(pairs, ps0, ps1, num_pairs, pair, root, SCAN: tl.constexpr):
    """The pair after `pair` of the tree of `root`, children before parents and `root` last."""
    src = tl.load(pairs + pair.to(tl.int64) * ps0)
    following = _first_pair(pairs, ps0, ps1, num_pairs, src, pair, root, True, SCAN)
    if following < num_pairs:
        dst = tl.load(pairs + following.to(tl.int64) * ps0 + ps1)
        child = _first_pair(pairs, ps0, ps1, num_pairs, dst, -1, root, True, SCAN)
        following = _deepest(pairs, ps0, ps1, num_pairs, following, child, root, SCAN)
    else:
        following = _first_pair(pairs, ps0, ps1, num_pairs, src, -1, -1, False, SCAN)
    return following


@triton.jit
def _is_root(pairs, ps0, ps1, num_pairs, pair, parent, SCAN: tl.constexpr):
    """Whether a pair has no `parent`, or has the lowest index of its cycle."""
    ancestor = parent
    steps = 0
    # An ancestor of lower index means that this pair is no root. The count ends a walk into a cycle without this pair.
    while (ancestor > pair) & (ancestor < num_pairs) & (steps < num_pairs):
        src = tl.load(pairs + ancestor.to(tl.int64) * ps0)
        ancestor = _first_pair(pairs, ps0, ps1, num_pairs, src, -1, -1, False, SCAN)
        steps += 1
    return (parent == num_pairs) | (ancestor == pair)


@triton.jit(do_not_specialize=["num_pairs", "ps0", "ps1", "first", "stop", "groups", "parts"])
def copy_kernel(
    pairs,
    table,
    num_pairs,
    ps0,
    ps1,
    first,
    stop,
    groups,
    parts,
    ELEMENT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Pair program_id(0), table lines from `first` + program_id(1) by `groups`, tiles from program_id(2) by `parts`."""
    root = tl.program_id(0)
    src = tl.load(pairs + root.to(tl.int64) * ps0)
    dst = tl.load(pairs + root.to(tl.int64) * ps0 + ps1)
    parent, child = _parent_and_child(pairs, ps0, ps1, num_pairs, root, src, dst, SCAN)
    if (src != dst) & _is_root(pairs, ps0, ps1, num_pairs, root, parent, SCAN):
        earliest = _deepest(pairs, ps0, ps1, num_pairs, root, child, root, SCAN)
        for line in range(first + tl.program_id(1), stop, groups):
            # Strides and the run come in units of UNIT elements, so that the compiler knows how wide accesses may be.
            entry = table + line * FIELDS
            cache = tl.multiple_of(tl.load(entry).to(tl.pointer_type(ELEMENT)), 8 * UNIT)
            block_stride = tl.load(entry + 1) * UNIT
            rows, inner_rows = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
            outer_stride, inner_stride = tl.load(entry + 4) * UNIT, tl.load(entry + 5) * UNIT
            run = tl.load(entry + 6) * UNIT
            tiles_across = tl.cdiv(run, COLUMNS).to(tl.int32)
            for tile in range(tl.program_id(2), tl.cdiv(rows, ROWS) * tiles_across, parts):
                row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)
                column = (tile % tiles_across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
                row_offset = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
                tile_of_block_0 = cache + row_offset[:, None] + column[None, :]
                inside = (row < rows)[:, None] & (column < run)[None, :]
                held = tl.load(tile_of_block_0 + src * block_stride, mask=inside)
                pair = earliest
                while pair != root:
                    tl.debug_barrier()  # loads above and stores below may be other threads' for the same byte
                    pair_src = tl.load(pairs + pair.to(tl.int64) * ps0)
                    pair_dst = tl.load(pairs + pair.to(tl.int64) * ps0 + ps1)
                    moved = tl.load(tile_of_block_0 + pair_src * block_stride, mask=inside)
                    tl.store(tile_of_block_0 + pair_dst * block_stride, moved, mask=inside)
                    tl.debug_barrier()
                    pair = _next_pair(pairs, ps0, ps1, num_pairs, pair, root, SCAN)
                tl.store(tile_of_block_0 + dst * block_stride, held, mask=inside)


@dataclass(frozen=True, slots=True)
class _Runs:
    """A cache's blocks, in bytes: at `address` + id * block_stride, rows = outer * inner runs of `run` bytes."""

    address: int
    block_stride: int
    rows: int
    inner_rows: int
    outer_stride: int
    inner_stride: int
    run: int

    @property
    def alignment(self) -> int:
        """Bytes of the widest access, a power of two up to 16, that suits every run of every block."""
        return math.gcd(16, self.address, self.block_stride, self.outer_stride, self.inner_stride, self.run)

    def shape(self, tile: int) -> tuple[int, int, int]:
        """(alignment, tile rows, tile columns in elements): caches of one shape share a launch."""
        columns = min(tile, triton.next_power_of_2(self.run // min(self.alignment, 8)))
        return self.alignment, min(tile // columns, triton.next_power_of_2(self.rows)), columns

    def line(self) -> list[int]:
        """The table line: address in bytes, the rest in units of the alignment."""
        a = self.alignment
        strides = (self.outer_stride // a, self.inner_stride // a)
        return [self.address, self.block_stride // a, self.rows, self.inner_rows, *strides, self.run // a]

    def tiles(self, tile: int) -> int:
        """Tiles per block."""
        alignment, rows, columns = self.shape(tile)
        return int(triton.cdiv(self.rows, rows) * triton.cdiv(self.run // min(alignment, 8), columns))


def _runs(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Iterator[_Runs]:
    """How the blocks of a cache [num_blocks, ...] lie in memory (strides in bytes); nothing for empty blocks."""
    if 0 in shape:
        return
    inner = sorted((stride, n) for n, stride in zip(shape[1:], strides[1:], strict=True) if n > 1)
    dims = [(itemsize, 1)]  # (stride, count) from the innermost out; the first is the run, in elements
    for stride, n in inner:
        last_stride, last_n = dims[-1]
        if stride == last_stride * last_n:
            dims[-1] = (last_stride, last_n * n)
        else:
            dims.append((stride, n))
    (_, run), (inner_stride, inner_rows), (outer_stride, outer_rows) = (*dims, (0, 1), (0, 1))[:3]
    block_stride = strides[0] if shape[0] > 1 else 0
    for index in np.ndindex(*(n for _, n in dims[3:])):  # more than two outer dimensions: as several caches
        start = address + sum(i * stride for i, (stride, _) in zip(index, dims[3:], strict=True))
        rows = inner_rows * outer_rows
        yield _Runs(start, block_stride, rows, inner_rows, outer_stride, inner_stride, run * itemsize)


@dataclass(frozen=True, slots=True)
class _Launch:
    """Lines [first, stop) of the table, all of one shape."""

    shape: tuple[int, int, int]
    first: int
    stop: int
    tiles: int


_tables: OrderedDict[Any, tuple[torch.Tensor, tuple[_Launch, ...]]] = OrderedDict()


def _table(caches: tuple[torch.Tensor, ...], tile: int) -> tuple[torch.Tensor, tuple[_Launch, ...]]:
    """The table of `caches` on their device, and the launches that walk it; the last few are kept.

    A serving engine copies in the same caches at every step, and then nothing is sent to the device. A kept table holds
    numbers only: it keeps no cache alive, and is found again only for the same addresses, shapes and strides.
    """
    device = caches[0].device
    key = (device, tile, *((c.data_ptr(), tuple(c.shape), c.stride(), c.element_size()) for c in caches))
    if key not in _tables:
        _tables[key] = _new_table(caches, tile)
        if len(_tables) > CACHED_TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    numbers, launches = _tables[key]
    table = numbers.view(numbers.shape)  # an object of its own: `targets` keep the caches alive while it lives
    table.targets = caches  # what the CPU's checker lets the launch touch
    return table, launches


def _new_table(caches: tuple[torch.Tensor, ...], tile: int) -> tuple[torch.Tensor, tuple[_Launch, ...]]:
    runs: list[_Runs] = []
    for cache in caches:
        strides = [stride * cache.element_size() for stride in cache.stride()]
        runs += _runs(cache.data_ptr(), tuple(cache.shape), strides, cache.element_size())
    runs.sort(key=lambda r: r.shape(tile))
    launches, first = [], 0
    for shape, same in itertools.groupby(runs, key=lambda r: r.shape(tile)):
        members = list(same)
        launches.append(_Launch(shape, first, first + len(members), max(r.tiles(tile) for r in members)))
        first += len(members)
    lines = torch.tensor([r.line() for r in runs], dtype=torch.int64).reshape(-1, FIELDS.value)
    return lines.to(caches[0].device), tuple(launches)


def copy_blocks(problem: CopyBlocks, *, tile: int = TILE, scan: int | None = None, num_warps: int = 4) -> None:
    """Copy in place in the device arrays `problem.caches`.

    tile: elements that a program moves at once; scan: pairs that it looks at at once; both powers of two.
    """
    pairs = problem.pairs
    num_pairs = pairs.shape[0]
    if num_pairs == 0:
        return
    table, launches = _table(problem.caches, tile)
    for launch in launches:
        alignment, rows, columns = launch.shape
        groups = min(launch.stop - launch.first, triton.cdiv(PROGRAMS, num_pairs), MAX_GRID_YZ)
        parts = min(launch.tiles, triton.cdiv(PROGRAMS, num_pairs * groups), MAX_GRID_YZ)
        copy_kernel[(num_pairs, groups, parts)](
            pairs,
            table,
            num_pairs,
            *pairs.stride(),
            launch.first,
            launch.stop,
            groups,
            parts,
            ELEMENT=_ELEMENTS[alignment],
            UNIT=2 if alignment == 16 else 1,
            ROWS=rows,
            COLUMNS=columns,
            SCAN=scan or (FEW_PAIRS if num_pairs <= FEW_PAIRS else MANY_PAIRS),
            num_warps=num_warps,
        )


def rejects(problem: CopyBlocks) -> str | None:
    """Why a host problem is not supported; None when it is."""
    for cache in problem.caches:
        if not knows(cache.dtype):
            return f"torch has no dtype {cache.dtype}"
    return None


def variants(problem: CopyBlocks) -> list[dict[str, Any]]:
    """Tiles and scans small enough that a test's little problem crosses their edges."""
    return [{"tile": 64, "scan": 4, "num_warps": 1}, {"tile": 256, "scan": 16, "num_warps": 1}]
