"""Copying KV blocks inside caches, and between two pools of them: the problems, their meaning, their bytes.

`new = old.copy(); new[dst] = old[src]` for every cache at once: all reads happen before all writes. Writing tokens into
blocks and gathering them is in `block_copy_write` and `block_copy_gather`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from pagebench.reference.dtypes import INT64, MOVED_DTYPES, Array
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_all, require_array, require_writeable


@dataclass(frozen=True, slots=True, eq=False)
class CopyBlocks(Problem):
    """Copy block `src` to block `dst` for each (src, dst) of `pairs`, in place, in all `caches`, simultaneously.

    caches: tuple of arrays [num_blocks, ...] of any of `MOVED_DTYPES` (bytes of another type are a view as uint8), one
    or more per layer, possibly strided views; dtypes and trailing shapes may differ. pairs: int64 [n, 2]. Chains and
    cycles are allowed, a self pair changes nothing, n = 0 is allowed. Raises ValueError for a repeated dst, an id out
    of range, caches that overlap or cannot be written, or pairs in their memory.

    Worked out at construction, since a launcher cannot read the pairs from the device and whoever hands out blocks has
    them on the host: `chained`, whether a source of one pair is the destination of another, so that their order
    matters; `fans_out`, whether a source has several destinations. Self pairs count in neither.
    """

    caches: tuple[Any, ...]
    pairs: Any
    chained: bool = field(init=False)
    fans_out: bool = field(init=False)

    op: ClassVar[str] = "copy_blocks"

    def __post_init__(self) -> None:
        self.validate()
        src, dst = self.pairs[self.pairs[:, 0] != self.pairs[:, 1]].T
        object.__setattr__(self, "chained", bool(np.isin(src, dst).any()))
        object.__setattr__(self, "fans_out", bool(np.unique(src).size < src.size))

    @property
    def num_blocks(self) -> int:
        return int(self.caches[0].shape[0])

    def validate(self) -> None:
        require_caches("caches", self.caches, written=True)
        require_pairs(self.pairs, self.num_blocks, self.num_blocks)
        require_apart(self.pairs, {f"caches[{i}]": cache for i, cache in enumerate(self.caches)})

    def bytes_moved(self) -> int:
        """Each distinct source block read once, each destination written once, per cache; the pairs read once."""
        moving = self.pairs[self.pairs[:, 0] != self.pairs[:, 1]]
        blocks = np.unique(moving[:, 0]).size + moving.shape[0]
        return int(self.pairs.nbytes + blocks * sum(block_bytes(cache) for cache in self.caches))

    def flops(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class SwapBlocks(Problem):
    """Copy block `src` of src_caches to block `dst` of dst_caches for each (src, dst) of `pairs`, in place.

    src_caches, dst_caches: tuples of as many arrays [num_blocks, ...]; the two of a pair have one dtype and trailing
    shape, each pool its own num_blocks. pairs: int64 [n, 2]. direction: "out" from the device's pool to the host's,
    "in" from the host's to the device's. The host's pool and the pairs, by which the host starts the transfers, are
    placed with the provider's `to_pinned`. Raises ValueError for a repeated dst, an id out of range, caches that
    overlap or cannot be written, or pairs in the memory of dst_caches.
    """

    src_caches: tuple[Any, ...]
    dst_caches: tuple[Any, ...]
    pairs: Any
    direction: Literal["out", "in"]

    op: ClassVar[str] = "swap_blocks"

    @property
    def pinned_fields(self) -> tuple[str, ...]:
        return ("pairs", "dst_caches" if self.direction == "out" else "src_caches")

    def validate(self) -> None:
        known = isinstance(self.direction, str) and self.direction in ("out", "in")
        require(known, "direction", "be 'out' or 'in'", self.direction)
        require_caches("src_caches", self.src_caches)
        require_caches("dst_caches", self.dst_caches, written=True)
        count = len(self.src_caches)
        require(len(self.dst_caches) == count, "dst_caches", f"be {count} like src_caches", len(self.dst_caches))
        for i, (src, dst) in enumerate(zip(self.src_caches, self.dst_caches, strict=True)):
            same = (src.dtype, src.shape[1:]) == (dst.dtype, dst.shape[1:])
            want = f"have blocks of {src.dtype} {list(src.shape[1:])} like src_caches[{i}]"
            require(same, f"dst_caches[{i}]", want, f"{dst.dtype} {list(dst.shape[1:])}")
        require_pairs(self.pairs, self.src_caches[0].shape[0], self.dst_caches[0].shape[0])
        sources = {f"src_caches[{i}]": cache for i, cache in enumerate(self.src_caches)}
        targets = {f"dst_caches[{i}]": cache for i, cache in enumerate(self.dst_caches)}
        require_apart(self.pairs, {**sources, **targets}, only_read=tuple(sources))

    def bytes_moved(self) -> int:
        """Each distinct source block read once, each destination written once, per cache; the pairs read once."""
        blocks = np.unique(self.pairs[:, 0]).size + self.pairs.shape[0]
        return int(self.pairs.nbytes + blocks * sum(block_bytes(cache) for cache in self.src_caches))

    def flops(self) -> int:
        return 0


def require_caches(argument: str, caches: Any, *, written: bool = False) -> None:
    """Require a tuple of arrays of as many blocks each, of dtypes that devices know, none overlapping itself."""
    require(isinstance(caches, tuple) and caches, argument, "be a tuple of at least one array", caches)
    for i, cache in enumerate(caches):
        name = f"{argument}[{i}]"
        require_array(name, cache)
        known = cache.dtype in MOVED_DTYPES
        require(known, name, "have a dtype that devices know; a view as uint8 has all its bytes", str(cache.dtype))
        if written:
            require_writeable(name, cache)
        require(cache.ndim >= 1, name, "have a leading block dimension", cache.shape)
        count = caches[0].shape[0]
        require(cache.shape[0] == count, name, f"have {count} blocks like {argument}[0]", cache.shape[0])
        require_no_internal_overlap(name, cache)


def require_pairs(pairs: Any, num_src: int, num_dst: int) -> None:
    """Require int64 [n, 2] of (src, dst) with ids in range and no dst twice."""
    require_array("pairs", pairs, dtypes=(INT64,), shape=(None, 2))
    for column, count, name in ((0, num_src, "src"), (1, num_dst, "dst")):
        ids = pairs[:, column]
        require_all(f"pairs[:, {column}] ({name})", ids, (ids >= 0) & (ids < count), f"be in [0, {count})")
    ids, counts = np.unique(pairs[:, 1], return_counts=True)
    require(not (counts > 1).any(), "pairs[:, 1] (dst)", "not repeat", ids[counts > 1][:1].tolist())


def require_apart(pairs: Array, caches: dict[str, Array], *, only_read: tuple[str, ...] = ()) -> None:
    """Require caches, by name, that share no memory, and pairs that lie in none but those that are only read."""
    names = [*caches, "pairs"]
    for i, j in overlapping((*caches.values(), pairs)):
        first, second = names[min(i, j)], names[max(i, j)]
        if second != "pairs":
            raise ValueError(f"caches must not overlap each other, got shared memory in {first} and {second}")
        require(first in only_read, "pairs", "not lie in a cache that is written", f"shared memory in {first}")


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


def require_no_internal_overlap(argument: str, array: Array) -> None:
    """Require that no two elements share memory."""
    require(not _has_internal_overlap(array), argument, "not overlap itself", array.strides)


def _has_internal_overlap(array: Array) -> bool:
    """Sorted by stride, each must step over all that the smaller ones span."""
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


def swap_blocks(problem: SwapBlocks) -> tuple[Array, ...]:
    """New dst_caches (contiguous copies) after the copy; the problem's own are left as they are."""
    copied = tuple(cache.copy() for cache in problem.dst_caches)
    swap_blocks_(SwapBlocks(problem.src_caches, copied, problem.pairs, problem.direction))
    return copied


def swap_blocks_(problem: SwapBlocks) -> None:
    """The same in place on the problem's dst_caches, whatever their strides."""
    src, dst = problem.pairs.T
    for source, target in zip(problem.src_caches, problem.dst_caches, strict=True):
        target[dst] = source[src]
