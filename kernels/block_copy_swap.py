"""Swapping blocks between the device's pool and the host's: which transfers, as few and as long as they can be.

Pairs and caches are known on the host. They become pieces of contiguous bytes; pieces that follow each other on both
sides become one, in whatever order they come (adjacent blocks, K and V as halves of one tensor), and pieces of one
length at equal distances on both sides become the rows of one 2-D transfer. The order of transfers is free, since
nothing is written twice and no pool's memory is in both. The copy engines do the rest, on a stream of their own: it
waits for what was launched before, and what is launched after waits for it. A source of several destinations is read
for each of them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from pagebench.kernels.launch_buffers import Buffer

MAX_PITCH = 2**31 - 1  # bytes, of a 2-D transfer


@dataclass(frozen=True, slots=True)
class Transfer:
    """`rows` of `nbytes` each from address src to address dst; pitches in bytes from row to row (0 for one row)."""

    src: int
    dst: int
    nbytes: int
    rows: int = 1
    src_pitch: int = 0
    dst_pitch: int = 0


def transfers(pools: Sequence[tuple[Buffer, Buffer, Hashable]], pairs: np.ndarray) -> list[Transfer]:
    """Transfers that copy block pairs[:, 0] to block pairs[:, 1] in each (source, target, memory) of `pools`.

    pairs: int64 [n, 2] on the host. `memory` says which allocations the two lie in: no transfer spans several.
    """
    pieces: dict[Hashable, list[np.ndarray]] = {}
    for source, target, memory in pools:
        if pairs.shape[0] and 0 not in source.shape:
            pieces.setdefault(memory, []).append(_pieces(source, target, pairs))
    return [transfer for some in pieces.values() for transfer in _fewest(_joined(np.concatenate(some)))]


def _pieces(source: Buffer, target: Buffer, pairs: np.ndarray) -> np.ndarray:
    """int64 [pieces, 3] (src, dst, nbytes): the contiguous runs of the blocks."""
    run, inner = source.itemsize, list[tuple[int, int, int]]()
    dims = sorted(zip(source.strides[1:], target.strides[1:], source.shape[1:], strict=True))
    for src_stride, dst_stride, n in dims:
        if n > 1 and not inner and src_stride == dst_stride == run:
            run *= n
        elif n > 1:
            inner.append((src_stride, dst_stride, n))
    src = source.start + pairs[:, 0] * source.strides[0]
    dst = target.start + pairs[:, 1] * target.strides[0]
    for src_stride, dst_stride, n in inner:
        step = np.arange(n)
        src, dst = ((a[:, None] + step * s).reshape(-1) for a, s in ((src, src_stride), (dst, dst_stride)))
    return np.stack([src, dst, np.full(src.size, run)], axis=1).astype(np.int64)


def _joined(pieces: np.ndarray) -> np.ndarray:
    """The same bytes in as few pieces as can be: those that continue another one on both sides become part of it.

    Such pieces have one distance from source to target, so that sorted by it and then by address they are neighbours,
    also where a source has several targets. The result comes in this order.
    """
    src, dst, nbytes = pieces[np.lexsort((pieces[:, 0], pieces[:, 1] - pieces[:, 0]))].T
    starts = np.ones(src.size, bool)
    starts[1:] = (src[1:] != src[:-1] + nbytes[:-1]) | (dst[1:] != dst[:-1] + nbytes[:-1])
    first = np.flatnonzero(starts)
    return np.stack([src[first], dst[first], np.add.reduceat(nbytes, first)], axis=1)


def _fewest(pieces: np.ndarray) -> list[Transfer]:
    """The pieces as rows of transfers, in the order in which they come or in that of their sources.

    The former suits several targets of one source, the latter targets that lie closer together than their sources.
    """
    by_source = pieces[np.argsort(pieces[:, 0], kind="stable")]
    found, rows_from = min(((some, _in_rows(some)) for some in (by_source, pieces)), key=lambda pair: len(pair[1]))
    listed = found.tolist()
    made = []
    for at, rows in rows_from:
        src, dst, nbytes = listed[at]
        next_src, next_dst, _ = listed[at + 1] if rows > 1 else listed[at]
        made.append(Transfer(src, dst, nbytes, rows, next_src - src, next_dst - dst))
    return made


def _in_rows(pieces: np.ndarray) -> list[tuple[int, int]]:
    """(first, count) of runs of pieces of one length and equal steps, none overlapping the next."""
    count = pieces.shape[0]
    steps = np.diff(pieces, axis=0)
    forward = (steps[:, 2] == 0) & ((steps[:, :2] >= pieces[:-1, 2:]) & (steps[:, :2] <= MAX_PITCH)).all(axis=1)
    alike = forward[1:] & forward[:-1] & (steps[1:] == steps[:-1]).all(axis=1)
    last = np.append(np.flatnonzero(~alike), max(count - 2, 0))  # of each run of equal steps
    last_of = last[np.searchsorted(last, np.arange(count - 1))]
    rows = np.append(np.where(forward, last_of - np.arange(count - 1) + 2, 1), 1).tolist()  # from each piece on
    runs, at = list[tuple[int, int]](), 0
    while at < count:
        runs.append((at, rows[at]))
        at += rows[at]
    return runs
