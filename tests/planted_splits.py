"""Attention kernels whose reduction of splits is wrong: faults that show with many splits only, and some with any."""

from typing import Any

import numpy as np
from numpy_kernels import Attention
from planted_attention import LastSplitDropped, SplitsNotRescaled

from pagebench.reference.dtypes import Array
from pagebench.reference.paged_attention import PagedAttention

TURN = 16  # splits that these kernels take in one turn


class OnlyTheFirstTurn(Attention):
    """Splits behind the first turn are lost."""

    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        super().merge(p, seq, parts[:, :, :TURN], out, lse)


class MaximumOfTheFirstTurn(Attention):
    """What a later split is rescaled by overflows where that split's maximum is much larger."""

    def best(self, top: Array) -> Array:
        return super().best(top[:, :, :TURN])


class LastTurnOnlyWhenFull(Attention):
    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        splits = parts.shape[2]
        super().merge(p, seq, parts[:, :, : splits // TURN * TURN if splits > TURN else splits], out, lse)


class EarlierTurnsNotRescaled(Attention):
    """When a later turn finds a new maximum, what the earlier ones added up stays as it was."""

    def rescale(self, top: Array, best: Array) -> Array:
        turn = np.arange(top.shape[2]) // TURN
        known = np.stack([super(EarlierTurnsNotRescaled, self).best(top[:, :, turn <= t]) for t in turn], axis=2)
        return np.exp(top - np.where(np.isinf(known), 0, known))


PLANTED: tuple[Any, ...] = (
    LastSplitDropped,
    SplitsNotRescaled,
    OnlyTheFirstTurn,
    MaximumOfTheFirstTurn,
    LastTurnOnlyWhenFull,
    EarlierTurnsNotRescaled,
)
