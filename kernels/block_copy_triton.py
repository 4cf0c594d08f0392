"""Copying KV blocks inside caches in Triton: all caches in one launch, reads before writes whatever the pairs.

What it computes: `new[dst] = old[src]` for each (src, dst) of `pairs` int64 [n, 2], in place in every cache
[num_blocks, ...]. Layout: a block of a cache is `rows` runs of bytes, the cache's dimensions sorted by stride and
joined as far as they are dense; a dense block is one run. A table on the device holds one line of address, strides and
sizes per cache. Caches with accesses of one width and tiles of one shape form a class, usually all of them; one launch
does one class after the other.

Order, known before the launch from the host that handed out the blocks: where no source is a destination, the programs
of a pair copy it, and those of a source's first pair copy to all its destinations, which they find by reading `pairs`.
Else `plan_kernel`, one program, works out which pair writes each pair's source, its parent, and which read its
destination, in O(pairs), and who is on a cycle in log2(pairs) rounds. A block is written by at most one pair, so
parents form trees, and each has one root: a pair whose source nobody writes, or the pair of lowest index on a cycle.
The programs of a root copy its whole tree, children before parents, and those of all other pairs return at once; no
program touches a byte that another one writes. On a cycle the root's source is read first of all and written last.

Traffic: each source that moves read once and each destination written once; nothing is staged in memory. (One block to
thousands of others would leave few programs that store much each; a fork is to a handful.) Fast because accesses are
16 bytes wide where alignment allows, neighbours in a warp touch neighbouring bytes, and a program holds 16 KB of loads
in flight (32 registers per thread).

Code generation (Triton 3.9; two caches with blocks of 32 KB; sm_80 / sm_90 / sm_100), nothing run, no spill:
54 registers where pairs are apart, 8 loads and 8 stores of 16 bytes; 72 on sm_90 where sources fan out; 96 / 95 / 95
where pairs are chained, with as many loads and stores for a cycle's source, for what moves on the walk, and for the
root; plan_kernel 32.
"""

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pagebench.reference.block_copy import CopyBlocks

TILE = 2048  # elements moved at once by a program: 16 KB when they are 8 bytes, 128 bytes per thread of 4 warps
PROGRAMS = 2048  # to aim for: 15 for each of 132 SMs
FEW_PAIRS, MANY_PAIRS = 64, 512  # looked at in one step: two sizes, since each is compiled by itself
MAX_GRID_YZ = 65535
CACHED_TABLES = 16
FIELDS: tl.constexpr = tl.constexpr(7)  # of a table line: address, block stride, rows, inner rows, 2 row strides, run

MOST_ROWS = 2**30  # of a table line: rows are counted in 32 bits


# How pairs depend on each other, which kernel and launcher agree on.
APART: tl.constexpr = tl.constexpr(0)
FANS_OUT: tl.constexpr = tl.constexpr(1)
CHAINED: tl.constexpr = tl.constexpr(2)
# What a pair is to the walk, the last of its four numbers in `nodes`.
ROOT: tl.constexpr = tl.constexpr(1)
CYCLE: tl.constexpr = tl.constexpr(2)


@triton.jit
def _pair(pairs, ps0, ps1, i, inside):
    """(src, dst) of pairs `i`; both -1 where not `inside`."""
    at = pairs + i.to(tl.int64) * ps0
    return tl.load(at, mask=inside, other=-1), tl.load(at + ps1, mask=inside, other=-1)


@triton.jit(do_not_specialize=["num_pairs", "ps0", "ps1"])
def plan_kernel(pairs, num_pairs, ps0, ps1, of_block, nodes, rounds, SCAN: tl.constexpr):
    """nodes int32 [num_pairs, 4] of the walk: parent, first pair that reads what this one writes, next pair that reads
    the same source, and ROOT, CYCLE or 0; -1 for none.

    One program. of_block int32 [num_blocks], touched only where a moving pair reads or writes: the pair that writes the
    block, or else -2 less the last one found to read it, -1 before. rounds int32 [4, num_pairs].
    """
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        src, dst = _pair(pairs, ps0, ps1, i, i < num_pairs)
        tl.store(of_block + src, -1, mask=src != dst)
        tl.store(nodes + 4 * i.to(tl.int64) + 1, -1, mask=i < num_pairs)
    tl.debug_barrier()
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        src, dst = _pair(pairs, ps0, ps1, i, i < num_pairs)
        tl.store(of_block + dst, i, mask=src != dst)
    tl.debug_barrier()
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        src, dst = _pair(pairs, ps0, ps1, i, i < num_pairs)
        parent = tl.load(of_block + src, mask=src != dst, other=-1)
        has_parent = parent >= 0
        parent = tl.where(has_parent, parent, -1)
        sibling = tl.atomic_xchg(nodes + 4 * parent.to(tl.int64) + 1, i, mask=has_parent)
        reader = tl.atomic_xchg(of_block + src, -2 - i, mask=(src != dst) & (parent < 0))
        other = tl.where((src != dst) & (reader < -1), -2 - reader, -1)
        tl.store(nodes + 4 * i.to(tl.int64), parent, mask=i < num_pairs)
        tl.store(nodes + 4 * i.to(tl.int64) + 2, tl.where(has_parent, sibling, other), mask=i < num_pairs)
        tl.store(rounds + i, parent, mask=i < num_pairs)  # the ancestor 2^round up, here round 0
        tl.store(rounds + 2 * num_pairs + i, i, mask=i < num_pairs)  # the lowest from here to just below that ancestor
    tl.debug_barrier()
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        src, dst = _pair(pairs, ps0, ps1, i, i < num_pairs)
        last = tl.load(of_block + src, mask=src != dst, other=-1)
        tl.store(nodes + 4 * i.to(tl.int64) + 3, tl.where(last == -2 - i, ROOT, 0), mask=i < num_pairs)
    # Pointer doubling. A pair that still has an ancestor after climbing num_pairs steps leads into a cycle.
    now = 0
    climbed = 1
    while climbed < num_pairs:
        for start in range(0, num_pairs, SCAN):
            i = start + tl.arange(0, SCAN)
            up = tl.load(rounds + now * num_pairs + i, mask=i < num_pairs, other=-1)
            lowest = tl.load(rounds + (2 + now) * num_pairs + i, mask=i < num_pairs, other=0)
            further = tl.load(rounds + now * num_pairs + up, mask=up >= 0, other=-1)
            lower = tl.load(rounds + (2 + now) * num_pairs + up, mask=up >= 0, other=num_pairs)
            tl.store(rounds + (1 - now) * num_pairs + i, further, mask=i < num_pairs)
            tl.store(rounds + (3 - now) * num_pairs + i, tl.minimum(lowest, lower), mask=i < num_pairs)
        tl.debug_barrier()
        now = 1 - now
        climbed *= 2
    # The far ancestors are exactly the pairs on cycles; one on its cycle's lowest index leads it.
    for start in range(0, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        far = tl.load(rounds + now * num_pairs + i, mask=i < num_pairs, other=-1)
        lowest = tl.load(rounds + (2 + now) * num_pairs + far, mask=far >= 0, other=-1)
        tl.store(nodes + 4 * far.to(tl.int64) + 3, CYCLE, mask=(far >= 0) & (lowest == far))


@triton.jit
def _is_first_reader(pairs, ps0, ps1, pair, block, SCAN: tl.constexpr):
    """Whether no pair before `pair` moves `block`."""
    first = pair >= 0  # true, but not a constant
    start = 0
    while first & (start < pair):
        i = start + tl.arange(0, SCAN)
        src, dst = _pair(pairs, ps0, ps1, i, i < pair)
        first = tl.max(((src == block) & (dst != block)).to(tl.int32), axis=0) == 0
        start += SCAN
    return first


@triton.jit
def _store_to_others(
    pairs, ps0, ps1, num_pairs, first, block, tile_of_block_0, block_stride, held, inside, SCAN: tl.constexpr
):
    """Store `held` to the destinations of the pairs behind `first` that move `block`, each pair read once."""
    for start in range((first + 1) // SCAN * SCAN, num_pairs, SCAN):
        i = start + tl.arange(0, SCAN)
        src, dst = _pair(pairs, ps0, ps1, i, (i > first) & (i < num_pairs))
        left = tl.where((src == block) & (dst != block), dst, -1)  # no two of them are the same
        largest = tl.max(left, axis=0)
        while largest >= 0:
            tl.store(tile_of_block_0 + largest * block_stride, held, mask=inside)
            left = tl.where(left == largest, -1, left)
            largest = tl.max(left, axis=0)


@triton.jit
def _store_to_readers(pairs, ps0, ps1, nodes, reader, tile_of_block_0, block_stride, held, inside):
    """Store `held` to the destinations of `reader` and of those after it in its list."""
    while reader >= 0:
        dst = tl.load(pairs + reader.to(tl.int64) * ps0 + ps1)
        tl.store(tile_of_block_0 + dst * block_stride, held, mask=inside)
        reader = tl.load(nodes + 4 * reader.to(tl.int64) + 2)


@triton.jit
def _walk(pairs, ps0, ps1, nodes, first_reader, root_block, tile_of_block_0, block_stride, inside):
    """Copy what depends on the blocks that the readers of `root_block` write, up to these blocks themselves."""
    node = first_reader
    entering = 1  # else all that the readers of its destination write has been read
    while node >= 0:
        src = tl.load(pairs + node.to(tl.int64) * ps0)
        dst = tl.load(pairs + node.to(tl.int64) * ps0 + ps1)
        links = nodes + 4 * node.to(tl.int64)
        parent, reader, sibling = tl.load(links), tl.load(links + 1), tl.load(links + 2)
        down = (entering != 0) & (reader >= 0) & (dst != root_block)
        if entering == 0:
            tl.debug_barrier()  # loads here and stores before and after may be other threads' for the same byte
            held = tl.load(tile_of_block_0 + dst * block_stride, mask=inside)
            tl.debug_barrier()
            _store_to_readers(pairs, ps0, ps1, nodes, reader, tile_of_block_0, block_stride, held, inside)
        over = tl.where(sibling >= 0, sibling, tl.where(src == root_block, -1, parent))
        node = tl.where(down, reader, over)
        entering = tl.where(down | (sibling >= 0), 1, 0)


@triton.jit
def _copy_lines(
    pairs,
    ps0,
    ps1,
    num_pairs,
    root,
    src,
    dst,
    role,
    first_reader,
    nodes,
    lines,
    first,
    stop,
    groups,
    parts,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HOW: tl.constexpr,
    SCAN: tl.constexpr,
):
    """What a root copies in the lines of one class, [first, stop) of `lines`."""
    # Strides and the run come in units of UNIT elements, so that the compiler knows how wide accesses may be.
    NARROW: tl.constexpr = tl.int16 if ALIGNMENT == 2 else tl.int8
    ELEMENT: tl.constexpr = tl.int64 if ALIGNMENT >= 8 else tl.int32 if ALIGNMENT == 4 else NARROW
    UNIT: tl.constexpr = 2 if ALIGNMENT == 16 else 1
    for line in range(first + tl.program_id(1), stop, groups):
        entry = lines + line * FIELDS
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
            if HOW == CHAINED:
                held = tl.load(tile_of_block_0 + src * block_stride, mask=inside & (role == CYCLE))
                _walk(pairs, ps0, ps1, nodes, first_reader, src, tile_of_block_0, block_stride, inside)
                tl.debug_barrier()
                if role != CYCLE:
                    held = tl.load(tile_of_block_0 + src * block_stride, mask=inside)
                    tl.debug_barrier()
                _store_to_readers(pairs, ps0, ps1, nodes, first_reader, tile_of_block_0, block_stride, held, inside)
                tl.debug_barrier()
            else:
                held = tl.load(tile_of_block_0 + src * block_stride, mask=inside)
                tl.store(tile_of_block_0 + dst * block_stride, held, mask=inside)
                if HOW == FANS_OUT:
                    _store_to_others(
                        pairs, ps0, ps1, num_pairs, root, src, tile_of_block_0, block_stride, held, inside, SCAN
                    )


@triton.jit(do_not_specialize=["num_lines", "num_pairs", "ps0", "ps1", "groups", "parts"])
def copy_kernel(
    pairs,
    table,
    nodes,
    num_lines,
    num_pairs,
    ps0,
    ps1,
    groups,
    parts,
    CLASSES: tl.constexpr,
    HOW: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Pair program_id(0); of each class, lines from program_id(1) by `groups`, tiles from program_id(2) by `parts`.

    CLASSES: ((alignment, tile rows, tile columns), ...). table: each class's first line and the one behind its last,
    then lines. num_lines: of the only class, so that a launch of one class need not look up where its lines are.
    """
    root = tl.program_id(0)
    src = tl.load(pairs + root.to(tl.int64) * ps0)
    dst = tl.load(pairs + root.to(tl.int64) * ps0 + ps1)
    role, first_reader = 0, root
    if HOW == CHAINED:
        role = tl.load(nodes + 4 * root.to(tl.int64) + 3)
        if role == CYCLE:
            parent = tl.load(nodes + 4 * root.to(tl.int64))
            first_reader = tl.load(nodes + 4 * parent.to(tl.int64) + 1)
        leads = role != 0
    else:
        leads = src != dst
        if HOW == FANS_OUT:
            leads = leads & _is_first_reader(pairs, ps0, ps1, root, src, SCAN)
    if leads:
        for which in tl.static_range(len(CLASSES)):
            first, stop = 0, num_lines
            if len(CLASSES) > 1:
                first, stop = tl.load(table + 2 * which).to(tl.int32), tl.load(table + 2 * which + 1).to(tl.int32)
            _copy_lines(
                pairs, ps0, ps1, num_pairs, root, src, dst, role, first_reader, nodes,
                table + 2 * len(CLASSES), first, stop, groups, parts,
                CLASSES[which][0], CLASSES[which][1], CLASSES[which][2], HOW, SCAN,
            )  # fmt: skip  # as many arguments as a call can take in three lines


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
        """(alignment, tile rows, tile columns in elements): the class of this line."""
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
        for first in range(0, outer_rows, most := max(1, MOST_ROWS // inner_rows)):
            rows = inner_rows * min(most, outer_rows - first)
            at = start + first * outer_stride
            for begin, end in _cut(run * itemsize, at | block_stride | inner_stride | outer_stride):
                yield _Runs(at + begin, block_stride, rows, inner_rows, outer_stride, inner_stride, end - begin)


def _cut(run: int, steps: int) -> list[tuple[int, int]]:
    """Ranges of a run of bytes: what is whole 16 bytes apart from the rest, where all steps are multiples of 16."""
    whole = run & -16
    return [(0, whole), (whole, run)] if 0 < whole < run and steps % 16 == 0 else [(0, run)]


@dataclass(frozen=True, slots=True)
class _Classes:
    """Shapes of the classes of lines, the lines of the largest class, and the tiles of the largest line."""

    shapes: tuple[tuple[int, int, int], ...]
    lines: int
    tiles: int


_tables: OrderedDict[Any, tuple[torch.Tensor, _Classes]] = OrderedDict()


def _table(caches: tuple[torch.Tensor, ...], tile: int) -> tuple[torch.Tensor, _Classes]:
    """The table of `caches` on their device, and its classes; the last few are kept.

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
    numbers, classes = _tables[key]
    table = numbers.view(numbers.shape)  # an object of its own: `targets` keep the caches alive while it lives
    table.targets = caches  # what the CPU's checker lets the launch touch
    return table, classes


def _new_table(caches: tuple[torch.Tensor, ...], tile: int) -> tuple[torch.Tensor, _Classes]:
    runs: list[_Runs] = []
    for cache in caches:
        strides = [stride * cache.element_size() for stride in cache.stride()]
        runs += _runs(cache.data_ptr(), tuple(cache.shape), strides, cache.element_size())
    counts = Counter(run.shape(tile) for run in runs)
    runs.sort(key=lambda run: run.shape(tile))
    shapes = tuple(sorted(counts))
    stops = list(itertools.accumulate(counts[shape] for shape in shapes))
    bounds = [bound for pair in zip([0, *stops], stops, strict=False) for bound in pair]
    numbers = torch.tensor([*bounds, *itertools.chain.from_iterable(run.line() for run in runs)], dtype=torch.int64)
    most = max((run.tiles(tile) for run in runs), default=0)
    return numbers.to(caches[0].device), _Classes(shapes, max(counts.values(), default=0), most)


def copy_blocks(
    problem: CopyBlocks,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    tile: int = TILE,
    scan: int | None = None,
    num_warps: int = 4,
) -> None:
    """Copy in place in the device arrays `problem.caches`. `empty(shape, dtype)` makes the scratch of a plan.

    tile: elements that a program moves at once; scan: pairs that it looks at at once; both powers of two.
    """
    pairs = problem.pairs
    num_pairs = pairs.shape[0]
    if num_pairs == 0:
        return
    table, classes = _table(problem.caches, tile)
    if not classes.shapes:
        return
    scan = scan or (FEW_PAIRS if num_pairs <= FEW_PAIRS else MANY_PAIRS)
    how, nodes = (FANS_OUT if problem.fans_out else APART), pairs  # nobody looks at these nodes
    if problem.chained:
        how, nodes = CHAINED, empty((num_pairs, 4), np.dtype(np.int32))
        of_block = empty((problem.num_blocks,), np.dtype(np.int32))
        rounds = empty((4, num_pairs), np.dtype(np.int32))
        plan_kernel[(1,)](pairs, num_pairs, *pairs.stride(), of_block, nodes, rounds, SCAN=scan, num_warps=num_warps)
    groups = min(classes.lines, triton.cdiv(PROGRAMS, num_pairs), MAX_GRID_YZ)
    parts = min(classes.tiles, triton.cdiv(PROGRAMS, num_pairs * groups), MAX_GRID_YZ)
    copy_kernel[(num_pairs, groups, parts)](
        pairs,
        table,
        nodes,
        classes.lines,
        num_pairs,
        *pairs.stride(),
        groups,
        parts,
        CLASSES=classes.shapes,
        HOW=how.value,
        SCAN=1 if how is APART else scan,  # unused then, and not worth a compilation for each
        num_warps=num_warps,
    )


def rejects(problem: CopyBlocks) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: CopyBlocks) -> list[dict[str, Any]]:
    """Tiles and scans small enough that a test's little problem crosses their edges."""
    return [{"tile": 64, "scan": 4, "num_warps": 1}, {"tile": 256, "scan": 16, "num_warps": 1}]
