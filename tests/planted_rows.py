"""Swaps, writes and gathers of KV rows with one step wrong each: the kinds of fault that real kernels have had."""

from typing import Any

import numpy as np
from numpy_kernels import Gather, Swap, Write, float32

from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array

# --- swap


class SwapsTheWrongWay(Swap):
    def sides(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:, 1] % max(p.src_caches[0].shape[0], 1), p.pairs[:, 1]


class SwapForgetsTheLastPair(Swap):
    def sides(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:-1, 0], p.pairs[:-1, 1]


class SwapMergesAllPairs(Swap):
    """One transfer from the first pair on, whether or not the others are adjacent."""

    def sides(self, p: Any) -> tuple[Array, Array]:
        step = np.arange(p.pairs.shape[0])
        src, dst = p.pairs[:1, 0] + step, p.pairs[:1, 1] + step
        inside = (src < p.src_caches[0].shape[0]) & (dst < p.dst_caches[0].shape[0])
        return src[inside], dst[inside]


class SwapIgnoresStrides(Swap):
    """The bytes of a block as they lie in the source."""

    def move(self, source: Array, target: Array, src: Array, dst: Array) -> None:
        order = np.argsort([-s for s in source.strides[1:]], kind="stable")
        shape = target.shape[1:]
        for s, d in zip(src, dst, strict=True):
            target[d] = source[s].transpose(order).reshape(shape)


class SwapKeepsOnlyTheFirstCaches(Swap):
    def swap_blocks(self, p: Any) -> None:
        src, dst = self.sides(p)
        for source, target in list(zip(p.src_caches, p.dst_caches, strict=True))[:32]:
            self.move(source, target, src, dst)


# --- write


class NegativeSlotIsTheLast(Write):
    """-1 as an index: the cache's last slot."""

    def mapped(self, p: Any) -> tuple[Array, Array]:
        rows = np.flatnonzero(p.slot_mapping >= 0)
        skipped = np.flatnonzero(p.slot_mapping < 0)[:1]
        slots = np.append(p.slot_mapping[rows], np.full(skipped.size, p.num_blocks * p.block_size - 1))
        return np.append(rows, skipped), slots


class OnlyMinusOneIsSkipped(Write):
    def mapped(self, p: Any) -> tuple[Array, Array]:
        rows = np.flatnonzero(p.slot_mapping != -1)
        return rows, p.slot_mapping[rows] % (p.num_blocks * p.block_size)


class HeadsBeyondTheGridForgotten(Write):
    """512 threads of 16 bytes cover 8 KB of a token."""

    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        most = max(512 * 16 // (values.shape[2] * cache.itemsize), 1)
        for i in range(where[0].size):
            cache[where[0][i], where[1][i], :most] = values[i, :most]


class HeadsBeyond1024ThreadsForgotten(Write):
    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        most = max(1024 * 16 // (values.shape[2] * cache.itemsize), 1)
        for i in range(where[0].size):
            cache[where[0][i], where[1][i], :most] = values[i, :most]


class VectorTailLost(Write):
    """Eight elements at a time, and no tail."""

    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        whole = values.shape[2] // 8 * 8
        for i in range(where[0].size):
            cache[where[0][i], where[1][i], :, :whole] = values[i, :, :whole]


class RowsPastTheMappingWritten(Write):
    """As many rows as key has, from a mapping padded with its last entry's neighbour."""

    def write_kv(self, p: Any) -> None:
        super().write_kv(p)
        beyond = p.slot_mapping.size
        free = np.setdiff1d(np.arange(p.num_blocks * p.block_size), p.slot_mapping)
        if beyond < p.key.shape[0] and free.size and not p.quantised:
            p.key_cache[free[0] // p.block_size, free[0] % p.block_size] = p.key[beyond]


class BlockAndOffsetSwapped(Write):
    def place(self, p: Any, slots: Array) -> tuple[Array, Array]:
        return slots % p.num_blocks, slots // p.num_blocks


class TruncatesToInt8(Write):
    def round(self, x: Array) -> Array:
        return np.trunc(x)


class RoundsHalvesAway(Write):
    def round(self, x: Array) -> Array:
        return np.copysign(np.floor(abs(x) + 0.5), x)


class MultipliesByTheReciprocal(Write):
    def divide(self, values: Array, scale: Any) -> Array:
        quotient: Array = values * (FLOAT32.type(1) / scale)
        return quotient


class MultipliesByTheScale(Write):
    def divide(self, values: Array, scale: Any) -> Array:
        quotient: Array = values * scale
        return quotient


class DividesInTheRowsType(Write):
    def quantised(self, values: Array, scale: Any, dtype: Any) -> Array:
        return self.encode(float32(self.divide(values, scale).astype(FLOAT16)), dtype)


class NoSaturation(Write):
    """As an ml_dtypes cast: NaN or infinity beyond the range, wrapped int8."""

    def clip(self, x: Array, dtype: Any) -> Array:
        return np.clip(x, -1e9, 1e9)


class Int8StopsAtMinus127(Write):
    def clip(self, x: Array, dtype: Any) -> Array:
        return np.clip(x, -self.highest(dtype), self.highest(dtype))


class NanBecomesTheLargest(Write):
    def nan_code(self, dtype: Any) -> int:
        return 127 if dtype == np.int8 else 0x7E


class SignOfZeroLost(Write):
    def encode(self, x: Array, dtype: Any) -> Array:
        codes = super().encode(x, dtype)
        return np.where(codes.view(np.uint8) == 0x80, 0, codes.view(np.uint8)).astype(np.uint8).view(dtype)


class SubnormalsFlushed(Write):
    def encode(self, x: Array, dtype: Any) -> Array:
        smallest = {"float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14}.get(np.dtype(dtype).name, 0.0)
        return super().encode(np.where(abs(x) < smallest, np.copysign(0, x), x).astype(FLOAT32), dtype)


class ZeroRowGetsScaleZero(Write):
    def row_scale(self, p: Any, values: Array) -> Array:
        return abs(float32(values)).max(axis=2) / FLOAT32.type(self.highest(p.key_cache.dtype))


class ScaleOfTheWholeToken(Write):
    def row_scale(self, p: Any, values: Array) -> Array:
        scale = super().row_scale(p, values)
        return np.broadcast_to(scale.max(axis=1, keepdims=True), scale.shape)


class ScaleIgnoresNegatives(Write):
    def row_scale(self, p: Any, values: Array) -> Array:
        largest = np.maximum(float32(values).max(axis=2), 0)
        return np.where(largest == 0, FLOAT32.type(1), largest / FLOAT32.type(self.highest(p.key_cache.dtype)))


class ScaleFor448EverywhereInFp8(Write):
    def highest(self, dtype: Any) -> float:
        return 127 if dtype == np.int8 else 448


class KeyScaleForValues(Write):
    def write_kv(self, p: Any) -> None:
        before = p.value_cache.copy()
        super().write_kv(p)
        if p.quantised and not p.compute_scales and p.key_scale is not None:
            rows, slots = self.mapped(p)
            where = self.place(p, slots)
            p.value_cache[...] = before
            self.put(
                p.value_cache,
                where,
                self.quantised(float32(p.value[rows]), self.write_scale(p.key_scale, where), before.dtype),
            )


class ScaleOfTheFirstHead(Write):
    def write_scale(self, scale: Any, where: tuple[Array, Array]) -> Any:
        return super().write_scale(scale, where) if np.ndim(scale) != 1 else scale[0]


class WritesThroughFloat(Write):
    """Numbers instead of bits: signalling NaNs become quiet ones."""

    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        cache[where] = float32(values).astype(cache.dtype) if cache.dtype in (FLOAT16, BFLOAT16) else values


class CacheStridesIgnored(Write):
    """The value cache taken for a contiguous array that begins where it does."""

    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        base = cache
        while isinstance(base.base, np.ndarray):
            base = base.base
        offset = cache.ctypes.data - base.ctypes.data
        if cache.size and base.flags.c_contiguous and offset + cache.nbytes <= base.nbytes:
            cache = np.ndarray(cache.shape, cache.dtype, buffer=base, offset=offset)
        cache[where] = values


class WriteOffsetIn32Bits(Write):
    """The product of block id and stride wraps; here to the first block."""

    shown_by = "test_far_blocks"

    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        blocks = np.where(where[0] * (cache.strides[0] // cache.itemsize) < 2**31, where[0], 0)
        cache[blocks, where[1]] = values


# --- gather


class LastTokenMissed(Gather):
    def length_of(self, p: Any, seq: int) -> int:
        return max(super().length_of(p, seq) - 1, 0)


class TableOfTheFirstSequence(Gather):
    def locate(self, p: Any, seq: int, position: Array) -> tuple[Array, Array]:
        entry = np.minimum(position // p.block_size, p.block_table.shape[1] - 1)
        return p.block_table[0, entry] % p.num_blocks, position % p.block_size


class TableFromItsMemory(Gather):
    """Strides of the block table ignored."""

    def locate(self, p: Any, seq: int, position: Array) -> tuple[Array, Array]:
        flat = p.block_table.T.reshape(-1) if not p.block_table.flags.c_contiguous else p.block_table.reshape(-1)
        return flat[seq * p.block_table.shape[1] + position // p.block_size] % p.num_blocks, position % p.block_size


class ScaleForgotten(Gather):
    def factor(self, scale: Any, where: tuple[Array, Array]) -> Any:
        return None


class SlotScaleOfTheFirstHead(Gather):
    def factor(self, scale: Any, where: tuple[Array, Array]) -> Any:
        return super().factor(scale, where) if np.ndim(scale) != 3 else scale[where][:, :1, None]


class ValueScaleForKeys(Gather):
    def gather_kv(self, p: Any) -> tuple[Array, Array]:
        if p.value_scale is not None:
            object.__setattr__(p, "key_scale", p.value_scale)
        return super().gather_kv(p)


class NanReadAs480(Gather):
    def dequantised(self, stored: Array, factor: Any, dtype: Any) -> Array:
        if stored.dtype.name != "float8_e4m3fn":
            return super().dequantised(stored, factor, dtype)
        values = float32(stored)
        values = np.where(np.isnan(values), np.where(stored.view(np.uint8) & 0x80, -480, 480), values).astype(FLOAT32)
        return self.rounded(values * (1 if factor is None else factor), dtype)


class ScaledInTheResultsType(Gather):
    """Rounded before and after the product."""

    def dequantised(self, stored: Array, factor: Any, dtype: Any) -> Array:
        if factor is None:
            return super().dequantised(stored, factor, dtype)
        return self.rounded(float32(stored) * float32(np.asarray(factor).astype(dtype)), dtype)


class ThroughHalf(Gather):
    """The scaled number goes through float16 on its way to another type: large scales overflow."""

    def rounded(self, values: Array, dtype: Any) -> Array:
        return values.astype(FLOAT16).astype(dtype)


class TruncatedToBfloat16(Gather):
    def rounded(self, values: Array, dtype: Any) -> Array:
        if dtype != BFLOAT16:
            return values.astype(dtype)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


class GatherOffsetIn32Bits(Gather):
    shown_by = "test_far_blocks"

    def locate(self, p: Any, seq: int, position: Array) -> tuple[Array, Array]:
        blocks, offsets = super().locate(p, seq, position)
        return np.where(
            blocks.astype(np.int64) * (p.key_cache.strides[0] // p.key_cache.itemsize) < 2**31, blocks, 0
        ), offsets
