"""How to build a block copy problem: caches by dtype, block shape and layout, pairs by structure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.dtypes import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    INT64,
    UINT8,
    Array,
)

DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32, FLOAT8_E4M3FN, FLOAT8_E5M2, INT8, UINT8, INT64)}


@dataclass(frozen=True, slots=True)
class CopyRecipe:
    """`caches` are (dtype, trailing shape, layout); a layout `halves` adds two caches, both halves of one tensor.

    pairs: "random" a partial map, "chain" i -> i+1, "cycle" the same closed, "swap" neighbours, "fan out" one source,
    "forks" sources of two destinations each, "self" every block to itself, "none". `count` is the number of pairs aimed
    at, or of blocks that they move between.
    """

    caches: tuple[tuple[str, tuple[int, ...], str], ...] = (("float16", (2, 4), "contiguous"),)
    num_blocks: int = 4
    pairs: str = "random"
    count: int = 1
    seed: int = 0

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dtype": tuple(DTYPES),
        "shape": ((2, 4), (), (1,), (3,), (17,), (16, 2, 8), (2, 3, 5), (16, 2, 64), (5, 410), (4096,), (0,)),
        "layout": ("contiguous", "halves", "hnd", "padded", "spread"),
        "pairs": ("random", "none", "chain", "cycle", "swap", "fan out", "forks", "self"),
    }

    @classmethod
    def sample(
        cls, dtype: str = "float16", shape: Any = (2, 4), layout: str = "contiguous", pairs: str = "random"
    ) -> "CopyRecipe":
        """A small recipe with these values of AXES, for asking a provider what it supports."""
        return cls(caches=((dtype, shape, layout),), pairs=pairs, count=3)

    def build(self) -> CopyBlocks:
        """The problem, every byte of every cache and of the gaps between its elements random."""
        rng = np.random.default_rng(self.seed)
        caches = [view for cache in self.caches for view in _views(*cache, self.num_blocks, rng)]
        return CopyBlocks(tuple(caches), _pairs(self.pairs, self.num_blocks, self.count, rng))


@dataclass(frozen=True, slots=True)
class SwapRecipe:
    """`caches` are (dtype, trailing shape, layout of the source, of the target); pairs as in CopyRecipe, between pools.

    adjacent: the pairs come sorted with neighbours next to each other, as an allocator hands them out.
    """

    caches: tuple[tuple[str, tuple[int, ...], str, str], ...] = (("float16", (2, 4), "contiguous", "contiguous"),)
    num_src: int = 4
    num_dst: int = 5
    count: int = 3
    adjacent: bool = False
    direction: str = "out"
    seed: int = 0

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dtype": CopyRecipe.AXES["dtype"],
        "shape": CopyRecipe.AXES["shape"],
        "src_layout": CopyRecipe.AXES["layout"],
        "dst_layout": CopyRecipe.AXES["layout"],
        "direction": ("out", "in"),
    }

    @classmethod
    def sample(
        cls,
        dtype: str = "float16",
        shape: Any = (2, 4),
        src_layout: str = "contiguous",
        dst_layout: str = "contiguous",
        direction: str = "out",
    ) -> "SwapRecipe":
        """A small recipe with these values of AXES, for asking a provider what it supports."""
        return cls(caches=((dtype, shape, src_layout, dst_layout),), direction=direction)

    def build(self) -> SwapBlocks:
        """The problem, every byte of both pools random; a layout `halves` on either side makes it two caches."""
        rng = np.random.default_rng(self.seed)
        sources, targets = list[Array](), list[Array]()
        for dtype, shape, src_layout, dst_layout in self.caches:
            twice = "halves" in (src_layout, dst_layout)
            for pool, layout, blocks in ((sources, src_layout, self.num_src), (targets, dst_layout, self.num_dst)):
                for _ in range(2 if twice and layout != "halves" else 1):
                    pool += _views(dtype, shape, layout, blocks, rng)
        count = min(self.count, self.num_src, self.num_dst)
        if self.adjacent:
            first = rng.integers(0, [self.num_src - count + 1, self.num_dst - count + 1])
            pairs = first + np.arange(count)[:, None]
        else:
            src = rng.integers(0, max(self.num_src, 1), count)
            pairs = np.stack([src, rng.permutation(self.num_dst)[:count]], axis=1)
        direction: Any = self.direction
        return SwapBlocks(tuple(sources), tuple(targets), pairs.astype(INT64).reshape(-1, 2), direction)


def _views(dtype: str, shape: tuple[int, ...], layout: str, blocks: int, rng: np.random.Generator) -> list[Array]:
    def base(*dims: int) -> Array:
        size = int(np.prod(dims)) * DTYPES[dtype].itemsize
        return rng.integers(0, 256, size, np.uint8).view(DTYPES[dtype]).reshape(dims)

    layouts: dict[str, Callable[[], list[Array]]] = {
        "contiguous": lambda: [base(blocks, *shape)],
        "halves": lambda: list(np.moveaxis(base(blocks, 2, *shape), 1, 0)),
        # the innermost dimension outermost but for the block, as key caches in [num_blocks, heads, block_size, ...]
        "hnd": lambda: [np.moveaxis(base(blocks, *shape[::-1]), range(1, len(shape) + 1), range(len(shape), 0, -1))],
        "padded": lambda: [base(blocks, *(n + 1 for n in shape))[(slice(None), *(slice(1, None) for _ in shape))]],
        "spread": lambda: [base(2 * blocks, *shape)[::2]],
    }
    return layouts[layout]()


def _pairs(kind: str, blocks: int, count: int, rng: np.random.Generator) -> Array:
    count = min(count, blocks) if kind != "none" else 0
    ids = rng.permutation(blocks)[: max(count, 1)]
    made: dict[str, Callable[[], tuple[Any, Any]]] = {
        "none": lambda: ([], []),
        "random": lambda: (rng.integers(0, max(blocks, 1), count), ids[:count]),
        "chain": lambda: (ids[:-1], ids[1:]),
        "cycle": lambda: (ids, np.roll(ids, -1)),
        "swap": lambda: (ids[: ids.size // 2 * 2], ids[: ids.size // 2 * 2].reshape(-1, 2)[:, ::-1].reshape(-1)),
        "fan out": lambda: (np.full(max(ids.size - 1, 0), ids[0] if ids.size else 0), ids[1:]),
        "forks": lambda: (np.repeat(ids[::3], 2)[: ids.size - ids[::3].size], np.delete(ids, np.s_[::3])),
        "self": lambda: (ids, ids),
    }
    return np.array(made[kind](), INT64).reshape(2, -1).T.copy()
