"""Pairs of block ids (src, dst): what the allocator asks CopyBlocks and SwapBlocks to run."""

from collections.abc import Iterable, Sequence

import numpy as np

from pagebench.reference.dtypes import INT64, Array

Pairs = Sequence[tuple[int, int]]


def as_pairs(pairs: Iterable[tuple[int, int]]) -> Array:
    """Pairs as CopyBlocks and SwapBlocks take them: int64 [n, 2]."""
    return np.array(list(pairs), INT64).reshape(-1, 2)


def merge_copies(copies: Iterable[tuple[int, int]]) -> Array:
    """One simultaneous copy, int64 [n, 2], with the effect of `copies` run one after the other.

    For a scheduler that collects the pairs of many appends and runs them in one call, before the tokens are written: a
    block freed by one append may be handed out by the next, and so be a destination after it was a source.
    """
    origin: dict[int, int] = {}
    for source, target in copies:
        origin[target] = origin.get(source, source)
    return as_pairs((source, target) for target, source in origin.items())
