"""Block copies and dequantisations with one step wrong each: the kinds of fault that real kernels have had."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy_kernels import Copy, Dequant, float32

from pagebench.reference.dtypes import BFLOAT16, FLOAT16, Array


class CopiedOneByOne(Copy):
    """In place, pair after pair: chains and cycles read what was just written."""

    def copy_blocks(self, p: Any) -> None:
        for cache in p.caches:
            for src, dst in p.pairs:
                cache[dst] = cache[src]


class CopiedOneByOneBackwards(Copy):
    """Right for a chain, wrong for a cycle."""

    def copy_blocks(self, p: Any) -> None:
        for cache in p.caches:
            for src, dst in p.pairs[::-1]:
                cache[dst] = cache[src]


class SourceAndDestinationSwapped(Copy):
    def pairs(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:, 1], p.pairs[:, 0]


class LastPairForgotten(Copy):
    def pairs(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:-1, 0], p.pairs[:-1, 1]


class LastCacheForgotten(Copy):
    def caches(self, p: Any) -> tuple[Array, ...]:
        return p.caches[: max(len(p.caches) - 1, 1)]  # type: ignore[no-any-return]  # a tuple of arrays


class FanOutOnce(Copy):
    """Each source serves one destination."""

    def pairs(self, p: Any) -> tuple[Array, Array]:
        _, first = np.unique(p.pairs[:, 0], return_index=True)
        return p.pairs[first, 0], p.pairs[first, 1]


class TailBytesLost(Copy):
    """Sixteen bytes at a time, and no tail."""

    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        whole = int(np.prod(cache.shape[1:])) * cache.itemsize // 16 * 16 // cache.itemsize
        for row, block in zip(dst, staged, strict=True):
            cache[row].reshape(-1)[:whole] = block.reshape(-1)[:whole]
            if not cache[row].flags.c_contiguous:
                cache[row] = block


class CopiedThroughFloat(Copy):
    """Numbers instead of bytes: signalling NaNs become quiet ones."""

    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        if cache.dtype in (FLOAT16, BFLOAT16):
            with np.errstate(invalid="ignore"):
                staged = float32(staged).astype(cache.dtype)
        super().write(cache, dst, staged)


class GapsOverwritten(Copy):
    """A strided block is copied as one run from its first to its last byte."""

    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        super().write(cache, dst, staged)
        if (
            cache.ndim > 1
            and cache.size
            and cache.shape[-1] > 1
            and cache.strides[-1] == cache.itemsize
            and cache.ndim > 2
        ):
            for block in dst:
                span = cache[block]
                gap = span.strides[-2] // span.itemsize - span.shape[-1]
                if gap > 0 and span.shape[-2] > 1:
                    run = np.lib.stride_tricks.as_strided(span, (span.strides[-2] // span.itemsize,), (span.itemsize,))
                    run.view(np.uint8)[...] = run.view(np.uint8)[...]
                    run[span.shape[-1] :].view(np.uint8)[...] = 0


class StridesIgnored(Copy):
    def caches(self, p: Any) -> tuple[Array, ...]:
        return tuple(
            np.ndarray(c.shape, c.dtype, buffer=c.base, offset=int(c.ctypes.data - c.base.ctypes.data)) if c.size else c
            for c in p.caches
        )


class ScratchTooSmall(Copy):
    def copy_blocks(self, p: Any) -> None:
        if p.pairs.shape[0] > 1 and p.caches[0].size:
            scratch = self.empty((p.pairs.shape[0] - 1,), np.int64)
            offset = int(scratch.ctypes.data - scratch.base.ctypes.data)  # type: ignore[union-attr]  # an array
            np.ndarray(p.pairs.shape[0], np.int64, buffer=scratch.base, offset=offset)[...] = 0
        super().copy_blocks(p)


class NothingToCopyRefused(Copy):
    def copy_blocks(self, p: Any) -> None:
        assert p.pairs.size, "a grid of 0 programs"
        super().copy_blocks(p)


class SelfPairClears(Copy):
    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        super().write(cache, dst, staged)

    def copy_blocks(self, p: Any) -> None:
        super().copy_blocks(p)
        for cache in p.caches:
            for src, dst in p.pairs:
                if src == dst:
                    cache[dst] = np.zeros(cache.shape[1:], cache.dtype)


class OnlyThirtyTwoCaches(Copy):
    def caches(self, p: Any) -> tuple[Array, ...]:
        return p.caches[:32]  # type: ignore[no-any-return]  # a tuple of arrays


class OffsetIn32Bits(Copy):
    """The product of block id and stride wraps; here to the first block."""

    shown_by = "test_far_blocks"

    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        super().write(cache, np.where(dst * (cache.strides[0] // cache.itemsize) < 2**31, dst, 0), staged)


# --- dequantisation


class NibblesReversed(Dequant):
    def nibbles(self, words: Array) -> Array:
        return super().nibbles(words)[..., ::-1]


class NibblesInAwqOrder(Dequant):
    def nibbles(self, words: Array) -> Array:
        return super().nibbles(words)[..., [0, 4, 1, 5, 2, 6, 3, 7]]


class ZeroPlusOne(Dequant):
    def zero(self, stored: Array) -> Array:
        return stored + 1


class ZeroPlusOneWrapped(Dequant):
    def zero(self, stored: Array) -> Array:
        return (stored + 1) & 15


class ZeroAlwaysEight(Dequant):
    def zero(self, stored: Array) -> Array:
        return np.full_like(stored, 8)


class ZeroFifteenTakenAsNone(Dequant):
    def zero(self, stored: Array) -> Array:
        return np.where(stored == 15, 0, stored)


class ArithmeticShift(Dequant):
    """The top nibble of a negative word keeps its sign."""

    def nibbles(self, words: Array) -> Array:
        fields = super().nibbles(words)
        fields[..., 7] = words >> 28
        return fields


class ArithmeticShiftOfZeros(Dequant):
    def zero_nibbles(self, words: Array) -> Array:
        fields = super().nibbles(words)
        fields[..., 7] = words >> 28
        return fields


class GroupFromThePosition(Dequant):
    """g_idx ignored."""

    def group(self, p: Any) -> Array:
        k = p.shape[1]
        return np.arange(k) // (k if p.group_size == -1 else p.group_size)


class GroupOfTheTile(Dequant):
    """One scale per tile of 32 rows, whatever the groups."""

    def group(self, p: Any) -> Array:
        g_idx = super().group(p)
        return g_idx[np.arange(g_idx.size) // 32 * 32]


class GroupSizeMinusOne(Dequant):
    def group(self, p: Any) -> Array:
        g_idx = super().group(p)
        return np.minimum(g_idx, g_idx.max() - 1) if p.group_size != -1 and g_idx.max() else g_idx


class RowsBeyondTheTileLost(Dequant):
    """n not a multiple of 16."""

    def rounded(self, values: Array, dtype: Any) -> Array:
        weight = super().rounded(values, dtype)
        whole = max(values.shape[0] // 16 * 16, 1)
        weight[whole:] = weight[:1]
        return weight


class ColumnsBeyondTheTileLost(Dequant):
    """k not a multiple of 64."""

    def rounded(self, values: Array, dtype: Any) -> Array:
        weight = super().rounded(values, dtype)
        whole = values.shape[1] // 64 * 64
        weight[:, whole:] = 0
        return weight


class RoundedTwice(Dequant):
    """float16 first, whatever the output."""

    def rounded(self, values: Array, dtype: Any) -> Array:
        return values.astype(FLOAT16).astype(dtype)


class Truncated(Dequant):
    """bfloat16 by cutting off the low bits."""

    def rounded(self, values: Array, dtype: Any) -> Array:
        if dtype != BFLOAT16:
            return super().rounded(values, dtype)
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


class ScaleSignLost(Dequant):
    def scale(self, p: Any, scale: Array) -> Array:
        return abs(float32(scale))


class SubnormalScaleFlushed(Dequant):
    def scale(self, p: Any, scale: Array) -> Array:
        wide = float32(scale)
        return np.where(abs(wide) < 2.0**-14, np.float32(0), wide)


class InfiniteScaleClamped(Dequant):
    def scale(self, p: Any, scale: Array) -> Array:
        return np.clip(float32(scale), -65504, 65504)


class NaNScaleZeroed(Dequant):
    def scale(self, p: Any, scale: Array) -> Array:
        return np.nan_to_num(float32(scale), nan=0.0, posinf=np.inf, neginf=-np.inf)


class ZeroTimesInfinityIsZero(Dequant):
    def product(self, q: Array, scale: Array) -> Array:
        return np.where(q == 0, np.float32(0), super().product(q, scale))


class NegativeZeroLost(Dequant):
    def product(self, q: Array, scale: Array) -> Array:
        return super().product(q, scale) + np.float32(0)


class BrainScaleReadAsHalf(Dequant):
    def scale(self, p: Any, scale: Array) -> Array:
        return float32(np.ascontiguousarray(scale).view(FLOAT16))


class OutputSubnormalsFlushed(Dequant):
    def rounded(self, values: Array, dtype: Any) -> Array:
        weight = super().rounded(values, dtype)
        if dtype == FLOAT16:
            weight[abs(float32(weight)) < 2.0**-14] = 0
        return weight


class CodesUnsigned(Dequant):
    def codes(self, data: Array) -> Array:
        return data


class CodeMinus128Clamped(Dequant):
    def codes(self, data: Array) -> Array:
        return np.maximum(super().codes(data), -127)


class ScaleBytesSwapped(Dequant):
    def d(self, blocks: Array) -> Array:
        return blocks[..., :2].copy().view(">f2").astype(FLOAT16)


class PackedTakenAsContiguous(Dequant):
    def array(self, p: Any, name: str) -> Array:
        a = p.packed[name]
        return np.ndarray(a.shape, a.dtype, buffer=a.base, offset=int(a.ctypes.data - a.base.ctypes.data))


class ProductMinusProduct(Dequant):
    """q * s - z * s, each rounded to float16."""

    def rounded(self, values: Array, dtype: Any) -> Array:
        return super().rounded(values, dtype)

    def gptq_v2(self, p: Any) -> Array:
        n, k = p.shape
        q = self.nibbles(self.array(p, "qweight")).transpose(0, 2, 1).reshape(k, n)
        group = self.group(p)
        scale = self.scale(p, self.array(p, "scales")[group])
        zero = self.nibbles(self.array(p, "qzeros")).reshape(-1, n)[group]
        return ((q * scale).astype(FLOAT16) - (zero * scale).astype(FLOAT16)).T.astype(np.float32)


class WeightNotTransposed(Dequant):
    def dequantize(self, p: Any) -> Array:
        return super().dequantize(p).T


class UnusedGroupLeaks(Dequant):
    """The scales of every group are looked at, and a NaN in any of them spreads."""

    def gptq_v2(self, p: Any) -> Array:
        with np.errstate(all="ignore"):
            unused = float32(p.packed["scales"])[~np.isin(np.arange(p.packed["scales"].shape[0]), p.packed["g_idx"])]
        return super().gptq_v2(p) + np.float32(0) * unused.sum()
