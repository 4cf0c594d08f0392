"""Launcher of block_copy.cu: what of each cache's block lies where, and in words of which size.

A block of a strided cache is cut into byte ranges that the kernel can describe (see `layouts_of`), each moved in the
widest words, up to 16 bytes, that its addresses and strides allow.

Launches: one for all caches where no source is a destination, else the plan (one program) and the copy. Layouts of
words of several sizes share the launch; it is compiled for 16 bytes alone where all have that, as is usual.

Code generation, NVRTC 13.2, sm_80 / sm_90 / sm_100, no spills: copy_blocks<16, 0> 40 registers, 12 programs of 128
threads per SM, so 96 KB of loads in flight; 4 LDG.128 and 4 STG.128; its 10 narrow loads are the pair and the layout,
one address for a whole program. Layouts of several words: 40 registers, too. copy_chained<16> 56 / 63 / 64 registers,
plan_block_copy 32 / 32 / 40. copy_blocks<16, 1>, 256 threads: 48 on sm_90.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import Device, address, ceil_div, strides_of

SOURCE = "block_copy.cu"
WORDS_PER_THREAD = 4  # as in block_copy.cu
THREADS = 128  # 8 KB per program: a block of 32 KB makes four, and eight programs per SM keep 64 KB in flight
FORK_THREADS = 256  # where a source has several destinations: each program reads the pairs before and behind its own
FORK_PROGRAMS = 4096  # to aim for then; one in eight works where a source is forked to eight
PLAN_THREADS = 256
MAX_BYTES = 2**30  # of one layout: the kernel divides its words in 32 bits
MAX_GRID_Y = 65535


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes of every block of caches[cache]: `outer` x `inner` runs of `run` bytes; strides and offset in bytes."""

    cache: int
    offset: int
    block_stride: int
    run: int
    inner: int = 1
    inner_stride: int = 0
    outer: int = 1
    outer_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.run * self.inner * self.outer

    def word(self, base: int) -> int:
        """Bytes of the widest word that starts and steps at multiples of itself, given the cache's address."""
        together = base + self.offset | self.block_stride | self.run | self.inner_stride | self.outer_stride | 16
        return together & -together

    def fields(self, word: int) -> list[int]:
        """As struct Layout in block_copy.cu."""
        words = (self.nbytes // word, self.run // word)
        return [self.offset, self.block_stride, *words, self.inner, self.inner_stride, self.outer_stride, word]


def layouts_of(index: int, cache: Any) -> Iterator[Layout]:
    """Layouts that cover each payload byte of a block of `cache` once.

    Dimensions that lie densely inside each other become runs. What is left beyond two dimensions is unrolled, and
    what is longer than MAX_BYTES is cut. A run that ends off a 16-byte boundary is cut there, so that its tail does not
    narrow the rest.
    """
    run, dims = _collapse(cache.shape[1:], cache.strides[1:], cache.itemsize)
    inner, outer, *rest = [*dims, (1, 0), (1, 0)][: max(len(dims), 2)]
    whole = run & -16
    cut = 0 < whole < run and not (cache.strides[0] | inner[1] | outer[1]) % 16
    ends = sorted({*range(0, run, MAX_BYTES), run, *([whole] if cut else [])})
    most_inner = MAX_BYTES // min(run, MAX_BYTES)
    most_outer = max(1, most_inner // min(inner[0], most_inner))
    pieces = itertools.product(_pieces(*outer, most_outer), _pieces(*inner, most_inner), itertools.pairwise(ends))
    for (outer_at, outer_n), (inner_at, inner_n), (start, stop) in list(pieces):
        for at in np.ndindex(*[n for n, _ in rest]):
            offset = outer_at + inner_at + start + sum(i * stride for i, (_, stride) in zip(at, rest, strict=True))
            sizes = (stop - start, inner_n, inner[1], outer_n, outer[1])
            yield Layout(index, offset, cache.strides[0], *sizes)


def _pieces(n: int, stride: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset in bytes, length) of as many parts of a dimension as it takes with `most` in each."""
    return ((start * stride, min(most, n - start)) for start in range(0, n, most))


def _collapse(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """(bytes of a contiguous run, the other dimensions as (length, stride in bytes), the smallest stride first)."""
    run = itemsize
    dims: list[tuple[int, int]] = []
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if not dims and stride == run:
            run *= n
        elif dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * n, dims[-1][1])
        else:
            dims.append((n, stride))
    return run, dims


@dataclass(frozen=True, slots=True)
class Batch:
    """Layouts as one launch takes them: their device tables, the most words that one has, and the word of all, or 0."""

    word: int
    count: int
    words: int
    addresses: Any
    fields: Any


def batches_of(device: Device, caches: tuple[Any, ...]) -> list[Batch]:
    """All layouts of all caches; several batches only where they are more than a grid takes."""
    found = [
        (layout, layout.word(address(cache)))
        for i, cache in enumerate(caches)
        for layout in (layouts_of(i, cache) if cache.size else ())
    ]
    found.sort(key=lambda some: some[1])  # where they are several batches, most have words of one size
    batches = []
    for start in range(0, len(found), MAX_GRID_Y):
        some = found[start : start + MAX_GRID_Y]
        words = {word for _, word in some}
        batches.append(
            Batch(
                16 if words == {16} else 0,
                len(some),
                max(layout.nbytes // word for layout, word in some),
                device.pointer_table([caches[layout.cache] for layout, _ in some]),
                device.table(np.array([layout.fields(word) for layout, word in some], np.int64)),
            )
        )
    return batches


def copy_blocks(provider: Any, problem: Any, *, threads: int | None = None) -> None:
    """Copy in place. `provider` supplies `device` and `empty`; `threads` of a program: it moves 64 bytes for each."""
    threads = threads or (FORK_THREADS if problem.fans_out and not problem.chained else THREADS)
    num_pairs, caches = problem.pairs.shape[0], problem.caches
    device: Device = provider.device
    batches = device.remember(caches, lambda: batches_of(device, caches)) if num_pairs else []
    if not batches:
        return
    pairs = (problem.pairs, *strides_of(problem.pairs))
    nodes = _plan(provider, problem, pairs) if problem.chained else None
    for batch in batches:
        slices, fields = ceil_div(batch.words, threads * WORDS_PER_THREAD), (batch.addresses, batch.fields)
        if nodes is not None:
            kernel, groups = device.kernel(SOURCE, f"copy_chained<{batch.word}>"), batch.count
            args = (*fields, *pairs, nodes, np.int32(slices))
        else:
            kernel = device.kernel(SOURCE, f"copy_blocks<{batch.word}, {int(problem.fans_out)}>")
            groups = min(batch.count, ceil_div(FORK_PROGRAMS, num_pairs * slices)) if problem.fans_out else batch.count
            args = (*fields, *pairs, np.int32(num_pairs), np.int32(batch.count), np.int32(slices))
        kernel((num_pairs * slices, groups), (threads,), args)


def _plan(provider: Any, problem: Any, pairs: tuple[Any, ...]) -> Any:
    """The order of the walks: int32 [num_pairs, 4] on the device."""
    num_pairs = problem.pairs.shape[0]
    nodes = provider.empty((num_pairs, 4), np.int32)
    of_block = provider.empty((problem.caches[0].shape[0],), np.int32)
    rounds = provider.empty((4, num_pairs), np.int32)
    plan = provider.device.kernel(SOURCE, "plan_block_copy")
    plan((1,), (PLAN_THREADS,), (*pairs, np.int32(num_pairs), of_block, nodes, rounds))
    return nodes


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and programs small enough that little blocks take several."""
    return [{}, {"threads": 32}]
