"""How to build a block copy problem: caches by dtype, block shape and layout, pairs by structure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.block_copy import CopyBlocks
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
    "self" every block to itself, "none". `count` is the number of pairs aimed at.
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
        "pairs": ("random", "none", "chain", "cycle", "swap", "fan out", "self"),
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
        "self": lambda: (ids, ids),
    }
    return np.array(made[kind](), INT64).reshape(2, -1).T.copy()
