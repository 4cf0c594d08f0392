"""Block copies, swaps, writes and gathers that are right up to a size: what a launch boundary got wrong leaves out.

Sizes are those of real kernels: pairs, tokens and rows that a program or a warp looks at at once, bytes of a tile.
"""

from typing import Any

import numpy as np
from numpy_kernels import Copy, Gather, Swap, Write, float32

from pagebench.reference.dtypes import FLOAT32, Array

# --- copy


class OnlySixteenPairs(Copy):
    shown_by = "test_many_pairs"
    most = 16

    def pairs(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[: self.most, 0], p.pairs[: self.most, 1]


class Only64Pairs(OnlySixteenPairs):
    most = 64


class Only256Pairs(OnlySixteenPairs):
    most = 256


class Only512Pairs(OnlySixteenPairs):
    most = 512


class OnlyEightDestinations(Copy):
    """Of each source."""

    shown_by = "test_many_pairs"

    most = 8

    def pairs(self, p: Any) -> tuple[Array, Array]:
        order = np.argsort(p.pairs[:, 0], kind="stable")
        src, dst = p.pairs[order].T
        rank = np.arange(src.size) - np.searchsorted(src, src)
        return src[rank < self.most], dst[rank < self.most]


class Only64Destinations(OnlyEightDestinations):
    most = 64


class Only256Destinations(OnlyEightDestinations):
    most = 256


class PairsApartOnly64(OnlySixteenPairs):
    """The chained ones are right."""

    most = 64

    def pairs(self, p: Any) -> tuple[Array, Array]:
        return super().pairs(p) if not p.chained else (p.pairs[:, 0], p.pairs[:, 1])


class PairsChainedOnly256(OnlySixteenPairs):
    """Those apart are right."""

    most = 256

    def pairs(self, p: Any) -> tuple[Array, Array]:
        return super().pairs(p) if p.chained else (p.pairs[:, 0], p.pairs[:, 1])


class CyclesOf256StayOpen(Copy):
    """A longer one's last pair is lost."""

    shown_by = "test_many_pairs"

    def pairs(self, p: Any) -> tuple[Array, Array]:
        src, dst = p.pairs.T
        closed = src.size > 256 and set(src.tolist()) == set(dst.tolist())
        return (src[:-1], dst[:-1]) if closed else (src, dst)


class BytesBeyond32KibibytesLost(Copy):
    shown_by = "test_large_blocks"
    most = 2**15

    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        elements = self.most // cache.itemsize
        if staged[:1].size <= elements:
            super().write(cache, dst, staged)
            return
        after = cache[dst]
        after.reshape(dst.size, -1)[:, :elements] = staged.reshape(dst.size, -1)[:, :elements]
        super().write(cache, dst, after)


class BytesBeyond64KibibytesLost(BytesBeyond32KibibytesLost):
    most = 2**16


# --- swap


class OnlySixteenSwaps(Swap):
    shown_by = "test_many_pairs"
    most = 16

    def sides(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[: self.most, 0], p.pairs[: self.most, 1]


class Only256Swaps(OnlySixteenSwaps):
    most = 256


class Only512Swaps(OnlySixteenSwaps):
    most = 512


# --- write


class Only32Tokens(Write):
    shown_by = "test_many_tokens"
    most = 32

    def mapped(self, p: Any) -> tuple[Array, Array]:
        rows = np.flatnonzero(p.slot_mapping[: self.most] >= 0)
        return rows, p.slot_mapping[rows]


class Only256Tokens(Only32Tokens):
    most = 256


class Only1024Tokens(Only32Tokens):
    most = 1024


class ScaleOfTheFirst512(Write):
    """Elements of a row, as many as a warp holds at once."""

    shown_by = "test_scales_of_rows_of_every_kind"

    most = 512

    def row_scale(self, p: Any, values: Array) -> Array:
        return super().row_scale(p, values[:, :, : self.most])


class ScaleOfTheFirst1024(ScaleOfTheFirst512):
    most = 1024


class ScaleOfMinusZeros(Write):
    """A row of -0 alone does not count as zero."""

    shown_by = "test_scales_of_rows_of_every_kind"

    def row_scale(self, p: Any, values: Array) -> Array:
        scale = super().row_scale(p, values)
        minus = ((values == 0) & np.signbit(float32(values))).all(axis=2)
        return np.where(minus, FLOAT32.type(2), scale)


class SubnormalScaleIsOne(Write):
    """Flushed to zero, and zero's scale is 1."""

    shown_by = "test_scales_of_rows_of_every_kind"

    def row_scale(self, p: Any, values: Array) -> Array:
        scale = super().row_scale(p, values)
        return np.where(scale < np.finfo(FLOAT32).smallest_normal, FLOAT32.type(1), scale)


class SubnormalElementsFlushed(Write):
    """Before the largest is found."""

    shown_by = "test_scales_of_rows_of_every_kind"

    def row_scale(self, p: Any, values: Array) -> Array:
        wide = float32(values)
        return super().row_scale(p, np.where(abs(wide) < np.finfo(FLOAT32).smallest_normal, FLOAT32.type(0), wide))


class LargestFoundInHalf(Write):
    """The largest number of float32 and bfloat16 is beyond float16's."""

    shown_by = "test_scales_of_rows_of_every_kind"

    def row_scale(self, p: Any, values: Array) -> Array:
        return super().row_scale(p, np.clip(float32(values), -65504, 65504))


# --- gather


class Only64RowsOfASequence(Gather):
    shown_by = "test_many_rows"
    most = 64

    def locate(self, p: Any, seq: int, position: Array) -> tuple[Array, Array]:
        return super().locate(p, seq, np.minimum(position, self.most - 1))


class Only1024RowsOfASequence(Only64RowsOfASequence):
    most = 1024
