"""Swapping blocks between the device's pool and the host's: which transfers, as few and as long as they can be.

Pairs and caches are known on the host. They become pieces of contiguous bytes, sorted by address; pieces that follow
each other on both sides become one (adjacent blocks, K and V as halves of one tensor), and pieces of one length at
equal distances on both sides become the rows of one 2-D transfer. The copy engines do the rest, on a stream of their
own: it waits for what was launched before, and what is launched after waits for it. A source of several destinations is
read for each of them.
"""

from collections.abc import Hashable, Iterator, Sequence
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
    return [transfer for some in pieces.values() for transfer in _in_rows(_joined(np.concatenate(some)))]


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
    """The pieces in the order of their sources; those that continue the one before on both sides become part of it."""
    src, dst, nbytes = pieces[np.argsort(pieces[:, 0], kind="stable")].T
    starts = np.ones(src.size, bool)
    starts[1:] = (src[1:] != src[:-1] + nbytes[:-1]) | (dst[1:] != dst[:-1] + nbytes[:-1])
    first = np.flatnonzero(starts)
    return np.stack([src[first], dst[first], np.add.reduceat(nbytes, first)], axis=1)


def _in_rows(pieces: np.ndarray) -> Iterator[Transfer]:
    """Runs of pieces of one length and equal steps, none overlapping the next, as rows of one transfer."""
    at, count = 0, pieces.shape[0]
    steps = np.diff(pieces, axis=0)
    listed = pieces.tolist()
    forward = (steps[:, 2] == 0) & ((steps[:, :2] >= pieces[:-1, 2:]) & (steps[:, :2] <= MAX_PITCH)).all(axis=1)
    while at < count:
        src, dst, nbytes = listed[at]
        stop = at + 1
        while stop < count and forward[stop - 1] and (steps[stop - 1] == steps[at]).all():
            stop += 1
        pitches = steps[at, :2].tolist() if stop > at + 1 else (0, 0)
        yield Transfer(src, dst, nbytes, stop - at, *pitches)
        at = stop
