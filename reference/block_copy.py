"""Copying KV blocks inside caches: the problem, its meaning, its bytes.

`new = old.copy(); new[dst] = old[src]` for every cache at once: all reads happen before all writes.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dtypes import INT64, Array
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_all, require_array


@dataclass(frozen=True, slots=True, eq=False)
class CopyBlocks(Problem):
    """Copy block `src` to block `dst` for each (src, dst) of `pairs`, in place, in all `caches`, simultaneously.

    caches: tuple of arrays [num_blocks, ...] of any dtype, one or more per layer, possibly strided views; dtypes and
    trailing shapes may differ. pairs: int64 [n, 2]. Chains and cycles are allowed, a self pair changes nothing, n = 0
    is allowed. Raises ValueError for a repeated dst, an id out of range, or caches that overlap.
    """

    caches: tuple[Any, ...]
    pairs: Any

    op: ClassVar[str] = "copy_blocks"

    @property
    def num_blocks(self) -> int:
        return int(self.caches[0].shape[0])

    def validate(self) -> None:
        require(
            isinstance(self.caches, tuple) and self.caches, "caches", "be a tuple of at least one array", self.caches
        )
        for i, cache in enumerate(self.caches):
            require_array(f"caches[{i}]", cache)
            require(cache.ndim >= 1, f"caches[{i}]", "have a leading block dimension", cache.shape)
            same = cache.shape[0] == self.num_blocks
            require(same, f"caches[{i}]", f"have {self.num_blocks} blocks like caches[0]", cache.shape[0])
            require(not _has_internal_overlap(cache), f"caches[{i}]", "not overlap itself", cache.strides)
        for i, j in overlapping(self.caches):
            raise ValueError(f"caches must not overlap each other, got shared memory in caches[{i}] and caches[{j}]")
        require_pairs(self.pairs, self.num_blocks, self.num_blocks)

    def bytes_moved(self) -> int:
        """Each distinct source block read once, each destination written once, per cache; the pairs read once."""
        moving = self.pairs[self.pairs[:, 0] != self.pairs[:, 1]]
        blocks = np.unique(moving[:, 0]).size + moving.shape[0]
        return int(self.pairs.nbytes + blocks * sum(block_bytes(cache) for cache in self.caches))

    def flops(self) -> int:
        return 0


def require_pairs(pairs: Any, num_src: int, num_dst: int) -> None:
    """Require int64 [n, 2] of (src, dst) with ids in range and no dst twice."""
    require_array("pairs", pairs, dtypes=(INT64,), shape=(None, 2))
    for column, count, name in ((0, num_src, "src"), (1, num_dst, "dst")):
        ids = pairs[:, column]
        require_all(f"pairs[:, {column}] ({name})", ids, (ids >= 0) & (ids < count), f"be in [0, {count})")
    ids, counts = np.unique(pairs[:, 1], return_counts=True)
    require(not (counts > 1).any(), "pairs[:, 1] (dst)", "not repeat", ids[counts > 1][:1].tolist())


def block_bytes(cache: Array) -> int:
    """Payload bytes of one block of `cache`."""
    return int(np.prod(cache.shape[1:], dtype=np.int64)) * cache.itemsize


def overlapping(arrays: tuple[Array, ...]) -> list[tuple[int, int]]:
    """Index pairs of arrays that share a byte; exact also for interleaved views (K and V as halves of one tensor)."""
    spans = sorted((*np.lib.array_utils.byte_bounds(a), i) for i, a in enumerate(arrays) if a.size)
    found, open_spans = [], []  # type: ignore[var-annotated]  # lists of index pairs and of spans
    for low, high, i in spans:
        open_spans = [span for span in open_spans if span[1] > low]
        found += [(j, i) for _, _, j in open_spans if np.shares_memory(arrays[i], arrays[j])]
        open_spans.append((low, high, i))
    return found


def _has_internal_overlap(array: Array) -> bool:
    """Whether two elements share memory; sorted by stride, each must step over all the smaller ones span."""
    span = array.itemsize
    for stride, n in sorted(zip(array.strides, array.shape, strict=True)):
        if n > 1:
            if stride < span:
                return array.size > 0
            span = stride * (n - 1) + span
    return False


def copy_blocks(problem: CopyBlocks) -> tuple[Array, ...]:
    """New caches (contiguous copies) after the copy; the problem's own caches are left as they are."""
    copied = tuple(cache.copy() for cache in problem.caches)
    copy_blocks_(CopyBlocks(copied, problem.pairs))
    return copied


def copy_blocks_(problem: CopyBlocks) -> None:
    """The same in place on the problem's caches, whatever their strides."""
    src, dst = problem.pairs.T
    for cache in problem.caches:
        cache[dst] = cache[src]  # fancy indexing reads everything before the assignment writes
