"""Launcher of block_copy.cu: what of each cache's block lies where, and in words of which size.

A block of a strided cache is cut into byte ranges that the kernel can describe (see `layouts_of`), each moved in the
widest words, up to 16 bytes, that its addresses and strides allow; one launch per word size, usually one in all.

Launches: the plan (one program) and the copy. Two launches, since whether pairs depend on each other is known on the
device only.

Code generation, NVRTC 13.2, sm_80 / sm_90 / sm_100, no spills: copy_blocks<uint4> 64 registers, 8 programs of 128
threads per SM, so 64 KB of loads in flight; 11 LDG.128, 8 STG.128; its 14 narrow loads are the pair, the plan and the
layout, one address for a whole program. plan_block_copy 32 / 32 / 40 registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import Device, address, ceil_div, strides_of

SOURCE = "block_copy.cu"
WORDS = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
WORDS_PER_THREAD = 4  # as in block_copy.cu
THREADS = 128  # 8 KB per program: a block of 32 KB makes four, and eight programs per SM keep 64 KB in flight
PLAN_THREADS = 256
MAX_WORDS = 2**31  # of one layout: the kernel divides in 32 bits
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
        return [self.offset, self.block_stride, *words, self.inner, self.inner_stride, self.outer_stride]


def layouts_of(index: int, cache: Any) -> Iterator[Layout]:
    """Layouts that cover each payload byte of a block of `cache` once.

    Dimensions that lie densely inside each other become runs. What is left beyond two dimensions is unrolled. A run
    that ends off a 16-byte boundary is cut there, so that its tail does not narrow the rest.
    """
    run, dims = _collapse(cache.shape[1:], cache.strides[1:], cache.itemsize)
    inner, outer, *rest = [*dims, (1, 0), (1, 0)][: max(len(dims), 2)]
    whole = run & -16
    cut = 0 < whole < run and not (cache.strides[0] | inner[1] | outer[1]) % 16
    parts = [(0, whole), (whole, run - whole)] if cut else [(0, run)]
    for at in np.ndindex(*[n for n, _ in rest]):
        start = sum(i * stride for i, (_, stride) in zip(at, rest, strict=True))
        for offset, nbytes in parts:
            yield Layout(index, start + offset, cache.strides[0], nbytes, *inner, *outer)


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
    """Layouts of one word size, as one launch takes them: their device tables, and the most words that one has."""

    word: int
    count: int
    words: int
    addresses: Any
    fields: Any


def batches_of(device: Device, caches: tuple[Any, ...]) -> list[Batch]:
    """All layouts of all caches."""
    by_word: dict[int, list[Layout]] = {}
    for i, cache in enumerate(caches):
        base = address(cache)
        for layout in layouts_of(i, cache) if cache.size else ():
            by_word.setdefault(layout.word(base), []).append(layout)
    return [
        Batch(
            word,
            len(rows),
            max(row.nbytes for row in rows) // word,
            device.pointer_table([caches[row.cache] for row in rows]),
            device.table(np.array([row.fields(word) for row in rows], np.int64)),
        )
        for word, same in by_word.items()
        for rows in (same[start : start + MAX_GRID_Y] for start in range(0, len(same), MAX_GRID_Y))
    ]


def copy_blocks(provider: Any, problem: Any, *, threads: int = THREADS) -> None:
    """Copy in place. `provider` supplies `device` and `empty`; `threads` of a program: it moves 64 bytes for each."""
    num_pairs, caches = problem.pairs.shape[0], problem.caches
    device: Device = provider.device
    batches = device.remember(caches, lambda: batches_of(device, caches)) if num_pairs else []
    if not batches:
        return
    pairs = (problem.pairs, *strides_of(problem.pairs))
    nodes = provider.empty((num_pairs, 4), np.int32)
    pair_of_block = provider.empty((caches[0].shape[0],), np.int32)
    rounds = provider.empty((4, num_pairs), np.int32)
    plan = device.kernel(SOURCE, "plan_block_copy")
    plan((1,), (PLAN_THREADS,), (*pairs, np.int32(num_pairs), pair_of_block, nodes, rounds))
    for batch in batches:
        kernel = device.kernel(SOURCE, f"copy_blocks<{WORDS[batch.word]}>")
        slices = ceil_div(batch.words, threads * WORDS_PER_THREAD)
        args = (batch.addresses, batch.fields, *pairs, nodes, np.int32(slices))
        kernel((num_pairs * slices, batch.count), (threads,), args)


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported; None when it is."""
    for i, cache in enumerate(problem.caches):
        if cache.size and cache.nbytes // cache.shape[0] >= MAX_WORDS:
            return f"caches[{i}] has blocks of 2 GiB or more"
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and programs small enough that little blocks take several."""
    return [{}, {"threads": 32}]
