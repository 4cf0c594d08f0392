"""How to build a problem of merging two partial results: every structural choice by name, the numbers from a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array
from pagebench.reference.merge_states import MergeStates

DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32)}


@dataclass(frozen=True, slots=True)
class MergeRecipe:
    """`lse` says how far apart the sides are, `empty` which of them have rows without a key, which hold `dead`."""

    dtype: str = "float16"
    head_size: int = 64
    num_heads: int = 1
    num_tokens: int = 3
    layout: str = "contiguous"
    lse: str = "near"
    empty: str = "neither"
    dead: str = "nan"
    seed: int = 0

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dtype": ("float16", "bfloat16", "float32"),
        "head_size": (64, 8, 40, 80, 112, 128, 192, 256, 1, 24, 33, 576),
        "layout": ("contiguous", "stacked", "interleaved", "padded", "transposed"),
        "lse": ("near", "equal", "far", "huge", "tiny"),
        "empty": ("neither", "a", "b", "either"),
    }

    @classmethod
    def sample(cls, **choices: Any) -> "MergeRecipe":
        """A small recipe with these values of AXES, for asking a provider what it supports."""
        return cls(**choices)

    def build(self) -> MergeStates:
        """The problem."""
        rng = np.random.default_rng(self.seed)
        shape = (self.num_tokens, self.num_heads)
        outs = _sides(self.layout, (*shape, self.head_size), DTYPES[self.dtype], rng)
        lses = _sides("contiguous" if self.layout == "stacked" else self.layout, shape, FLOAT32, rng)
        for out in outs:
            out[...] = rng.standard_normal(out.shape, np.float32)
        spread = {"near": 3.0, "equal": 0.0, "far": 60.0, "huge": 1e5, "tiny": 1e-3}[self.lse]
        middle = 8 * rng.standard_normal(shape) if self.lse != "huge" else rng.choice([-1e5, 0.0, 1e5], shape)
        for lse in lses:
            lse[...] = middle + spread * rng.uniform(-1, 1, shape)
        for name, out, lse in zip("ab", outs, lses, strict=True):
            if self.empty in (name, "either"):
                rows = rng.random(shape) < 0.5
                lse[rows] = -np.inf
                out[rows] = {"nan": np.nan, "inf": np.inf, "zero": 0.0}[self.dead]
        return MergeStates(outs[0], lses[0], outs[1], lses[1])


def _sides(layout: str, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator) -> tuple[Array, Array]:
    """Two views of `shape`, the memory between their elements random."""

    def base(*dims: int) -> Array:
        return rng.integers(0, 256, (*dims[:-1], dims[-1] * dtype.itemsize), np.uint8).view(dtype)

    *outer, last = shape
    layouts: dict[str, Callable[[], tuple[Array, Array]]] = {
        "contiguous": lambda: (base(*shape), base(*shape)),
        "stacked": lambda: tuple(base(2, *shape)),
        "interleaved": lambda: tuple(np.moveaxis(base(*shape, 2), -1, 0)),
        "padded": lambda: (base(*outer, last + 3)[..., 1 : last + 1], base(*outer, last + 16)[..., :last]),
        "transposed": lambda: (base(*shape[1::-1], *shape[2:]).swapaxes(0, 1), base(*shape)),
    }
    return layouts[layout]()
