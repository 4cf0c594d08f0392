"""Attention kernels with one step wrong each: the kinds of fault that real kernels have had."""

from typing import Any

import numpy as np
from numpy_kernels import Attention, float32

from pagebench.reference.dtypes import FLOAT16, FLOAT32, Array
from pagebench.reference.paged_attention import PagedAttention

# a class name says what is wrong; a comment where it does not


class PaddingMultipliedByZero(Attention):
    """The last block is loaded whole, and its weights past the end are 0 instead of its values masked."""

    def keys(self, p: PagedAttention, seq: int, i: int, split: int) -> Array:
        keys = super().keys(p, seq, i, split)
        if keys.size == 0 or split % p.block_size:
            return keys
        stop = min(-(-(int(keys[-1]) + 1) // p.block_size) * p.block_size, (i + 1) * split)
        return np.arange(int(keys[0]), stop)

    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return super().mask(p, seq, keys) & (keys < int(p.seq_lens[seq]))

    def exp(self, x: Array) -> Array:
        return np.where(np.isnan(x), 0, np.exp(x))


class LastKeyDropped(Attention):
    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return super().mask(p, seq, keys) & (keys < max(int(p.seq_lens[seq]) - 1, 1))


class LastOfManyKeysDropped(Attention):
    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        length = int(p.seq_lens[seq])
        return super().mask(p, seq, keys) & (keys < length - (length > 20_000))


class FirstKeyDropped(Attention):
    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return super().mask(p, seq, keys) & ((keys > 0) | (int(p.seq_lens[seq]) == 1))


class OneKeyTooMany(Attention):
    def length(self, p: PagedAttention, seq: int) -> int:
        capacity = -(-int(p.seq_lens[seq]) // p.block_size) * p.block_size
        return min(int(p.seq_lens[seq]) + 1, capacity)

    def positions(self, p: PagedAttention, seq: int) -> Array:
        return super().positions(p, seq) + (self.length(p, seq) > int(p.seq_lens[seq]))


class KeyDroppedAtSplitEdge(Attention):
    def keys(self, p: PagedAttention, seq: int, i: int, split: int) -> Array:
        keys = super().keys(p, seq, i, split)
        return keys[:-1] if keys.size == split else keys


class KeyCountedTwiceAtSplitEdge(Attention):
    def keys(self, p: PagedAttention, seq: int, i: int, split: int) -> Array:
        keys = super().keys(p, seq, i, split)
        return np.concatenate([keys[:1] - 1, keys]) if i and keys.size and keys[0] > self.first(p, seq) else keys


class LastBlockOnlyWhenFull(Attention):
    """A length that is an exact multiple of the block loses its last block."""

    def length(self, p: PagedAttention, seq: int) -> int:
        length = int(p.seq_lens[seq])
        return length - p.block_size if length > p.block_size > 1 and length % p.block_size == 0 else length


class AlibiOfTheWrongSign(Attention):
    def distance(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return -super().distance(p, seq, keys)


class AlibiFromTheFirstKey(Attention):
    """Cancels in out, shows in lse."""

    def distance(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return np.broadcast_to(keys[None], (self.positions(p, seq).size, keys.size))


class WindowIgnored(Attention):
    def inside(self, p: PagedAttention, position: Array, keys: Array) -> Array:
        return np.ones((position.size, keys.size), bool)


class WindowOneTooWide(Attention):
    def inside(self, p: PagedAttention, position: Array, keys: Array) -> Array:
        return keys[None] >= position - (p.window or 0)


class WindowOneTooNarrow(Attention):
    def inside(self, p: PagedAttention, position: Array, keys: Array) -> Array:
        return keys[None] > position - max((p.window or 0) - 1, 1)


class CausalFromTheTopLeft(Attention):
    def positions(self, p: PagedAttention, seq: int) -> Array:
        rows = p.query_rows(seq)
        return np.arange(rows.stop - rows.start) if rows.stop - rows.start > 1 else p.positions(seq)


class SoftCapIgnored(Attention):
    def scores(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        key = self.load(p, seq, keys, p.key_cache, p.key_scale)
        return (
            super().scores(p, seq, keys)
            if p.soft_cap is None
            else self.dot(self.query(p, seq), key) * float32(np.array(p.scale))
        )


class CausalIgnored(Attention):
    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return np.ones((self.positions(p, seq).size, keys.size), bool)


class SinkOncePerSplit(Attention):
    def sink(self, p: PagedAttention, best: Array, splits: int) -> Any:
        return super().sink(p, best, splits) * max(splits, 1)


class SinkNotInLse(Attention):
    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        super().merge(p, seq, parts, out, lse)
        if p.sinks is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                lse[...] = np.log(np.maximum(np.exp(lse) - np.exp(p.sinks), 0))


class HeadSizePaddedIntoTheScale(Attention):
    def scores(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        padded = 1 << (p.head_size - 1).bit_length()
        return super().scores(p, seq, keys) * float32(np.array(np.sqrt(p.head_size / padded)))


class ColumnsBeyondAPowerOfTwoLost(Attention):
    def store(self, p: PagedAttention, out: Array, values: Array) -> None:
        power = 1 << (p.head_size.bit_length() - 1)
        super().store(p, out[..., :power], values[..., :power])


class GroupRoundedUpToAPowerOfTwo(Attention):
    def kv_head(self, p: PagedAttention) -> Array:
        return np.arange(p.num_query_heads) // (1 << (p.group - 1).bit_length())


class HeadsInterleavedNotGrouped(Attention):
    def kv_head(self, p: PagedAttention) -> Array:
        return np.arange(p.num_query_heads) % p.num_kv_heads


class GroupLargerThanTheTile(Attention):
    """Only 16 heads of a group are computed."""

    def store(self, p: PagedAttention, out: Array, values: Array) -> None:
        heads = np.arange(p.num_query_heads) % p.group < 16
        out[:, heads] = values[:, heads].astype(out.dtype)


class CacheScaleDropped(Attention):
    def scale_of(self, scale: Array, blocks: Array, offsets: Array) -> Array:
        return np.ones(1, np.float32)


class CacheScaleOfTheFirstHead(Attention):
    def scale_of(self, scale: Array, blocks: Array, offsets: Array) -> Array:
        return scale[blocks, offsets][..., :1, None] if scale.ndim == 3 else scale.reshape(-1)[:1]


class CacheScaleOfTheLogicalBlock(Attention):
    def scale_of(self, scale: Array, blocks: Array, offsets: Array) -> Array:
        return (
            super().scale_of(scale, np.argsort(np.argsort(blocks, kind="stable")) % scale.shape[0], offsets)
            if scale.ndim == 3
            else super().scale_of(scale, blocks, offsets)
        )


class LseInBaseTwo(Attention):
    def log(self, total: Array, best: Array) -> Array:
        return np.log2(np.e) * super().log(total, best)


class LseWithoutTheMaximum(Attention):
    def log(self, total: Array, best: Array) -> Array:
        return np.log(total)


class UnwrittenSplitsMerged(Attention):
    def merges(self, p: PagedAttention, seq: int, i: int, split: int) -> bool:
        return True


class EmptySequenceNotWritten(Attention):
    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        if p.seq_lens[seq]:
            super().merge(p, seq, parts, out, lse)


class EmptySequenceNaN(Attention):
    def store(self, p: PagedAttention, out: Array, values: Array) -> None:
        super().store(p, out, np.where(values.any(axis=2, keepdims=True), values, np.nan))


class CacheTakenAsContiguous(Attention):
    def load(self, p: PagedAttention, seq: int, keys: Array, cache: Array, scale: Any) -> Array:
        flat = np.ndarray(cache.shape, cache.dtype, buffer=cache.base, offset=_offset(cache))
        return super().load(p, seq, keys, flat, scale)


class QueryTakenAsContiguous(Attention):
    def query(self, p: PagedAttention, seq: int) -> Array:
        if p.query.size == 0:
            return super().query(p, seq)
        flat = np.ndarray(p.query.shape, p.query.dtype, buffer=p.query.base, offset=_offset(p.query))
        return float32(flat[p.query_rows(seq)])


class TableTakenAsContiguous(Attention):
    def block_ids(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        table = np.ndarray(p.block_table.shape, np.int32, buffer=p.block_table.base, offset=_offset(p.block_table))
        return table[seq, keys // p.block_size]


def _offset(view: Array) -> int:
    assert view.base is not None
    return int(view.ctypes.data - view.base.ctypes.data)  # type: ignore[attr-defined]  # the base is an array


class EveryBlockWeighedWithZero(Attention):
    """Another request's NaN leaks through a weight of 0."""

    def weigh(self, p: PagedAttention, weight: Array, value: Array) -> Array:
        return super().weigh(p, weight, value) + 0 * float32(p.value_cache).sum()


class TableReadPastTheRow(Attention):
    """The entry behind the last block is followed before the length is looked at."""

    def block_ids(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        if keys.size and (int(keys[-1]) + 1) % p.block_size == 0:
            p.block_table.reshape(-1)  # the row ends here
            following = p.block_table[seq, (int(keys[-1]) + 1) // p.block_size]
            assert 0 <= following < p.num_blocks
        return super().block_ids(p, seq, keys)


class LengthOfTheFirstSequence(Attention):
    def length(self, p: PagedAttention, seq: int) -> int:
        return min(int(p.seq_lens[0]), int(p.seq_lens[seq]))


class ScratchSizedTooSmall(Attention):
    """Scratch for one sequence fewer; the last write lands behind it."""

    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        scratch = self.empty((max(p.num_tokens - 1, 1), p.num_query_heads), FLOAT32)
        if p.num_tokens > 1:
            beyond = np.ndarray(
                (p.num_tokens, p.num_query_heads), FLOAT32, buffer=scratch.base, offset=_offset(scratch)
            )
            beyond[...] = 0
        return super().paged_attention(p, split)


class OutputOverrun(Attention):
    def store(self, p: PagedAttention, out: Array, values: Array) -> None:
        super().store(p, out, values)
        if out.base is not None and out.size:
            behind = np.ndarray(
                out.size + 1, out.dtype, buffer=_root(out), offset=int(out.ctypes.data - _root(out).ctypes.data)
            )
            behind[-1:] = 0 if behind.size * out.itemsize == 0 or _is_last(out, p) else behind[-1]


def _root(view: Array) -> Array:
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def _is_last(out: Array, p: PagedAttention) -> bool:
    return out.shape[0] > 0


class QueryScaledInPlace(Attention):
    def query(self, p: PagedAttention, seq: int) -> Array:
        rows = p.query[p.query_rows(seq)]
        scaled = float32(rows)
        rows[...] = 2 * rows
        return scaled


class NoMaximumSubtracted(Attention):
    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        parts = parts.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            factor = np.exp(parts[..., -2:-1])
            parts[..., :-2] *= factor
            parts[..., -1:] *= factor
            parts[..., -2] = np.where(np.isinf(parts[..., -2]), parts[..., -2], 0)
            super().merge(p, seq, parts, out, lse)


class LastSplitDropped(Attention):
    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        super().merge(p, seq, parts[:, :, : max(parts.shape[2] - 1, 1)], out, lse)


class SplitsNotRescaled(Attention):
    """Each split's sums are added up as if all had the same maximum."""

    def rescale(self, top: Array, best: Array) -> Array:
        return np.where(np.isinf(top), 0, np.ones_like(top))


class AccumulatedInHalf(Attention):
    def weigh(self, p: PagedAttention, weight: Array, value: Array) -> Array:
        total = np.zeros((weight.shape[0], weight.shape[1], value.shape[2]), FLOAT16)
        for key in range(value.shape[0]):
            total += (weight[:, :, key, None] * value[key]).astype(FLOAT16)
        return float32(total)


class QueryRoundedToHalf(Attention):
    """Tensor cores fed with a narrower type, as TF32 for float32."""

    def query(self, p: PagedAttention, seq: int) -> Array:
        return float32(super().query(p, seq).astype(FLOAT16))


class WeightsNotNormalised(Attention):
    def store(self, p: PagedAttention, out: Array, values: Array) -> None:
        super().store(p, out, values * float32(np.array(1 + 2.0**-6)))


class NegativeScaleMadePositive(Attention):
    def dot(self, query: Array, key: Array) -> Array:
        return super().dot(query, key)

    def scores(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return np.sign(p.scale or 1.0).astype(np.float32) * super().scores(p, seq, keys)


class OutputTransposed(Attention):
    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        out, lse = super().paged_attention(p, split)
        return out.transpose(1, 0, 2), lse


class OutputInFloat32(Attention):
    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        out, lse = super().paged_attention(p, split)
        return out.astype(np.float32), lse


class SecondVariantWrong(Attention):
    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        out, lse = super().paged_attention(p, split)
        return (out + out, lse) if split == 16 else (out, lse)


class EmptyBatchRefused(Attention):
    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        assert p.num_seqs, "a grid of 0 programs"
        return super().paged_attention(p, split)


class OffsetIn32Bits(Attention):
    """The product of block id and stride wraps; here to the first block."""

    shown_by = "test_far_blocks"

    def block_ids(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        blocks = super().block_ids(p, seq, keys)
        return np.where(blocks.astype(np.int64) * (p.key_cache.strides[0] // p.key_cache.itemsize) < 2**31, blocks, 0)


class FarKeyDroppedWithoutLse(Attention):
    """The last key of a long sequence is lost, and there is no lse to show it."""

    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        length = int(p.seq_lens[seq])
        return super().mask(p, seq, keys) & (keys < (length - 1 if length > 100 else length))

    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        return super().paged_attention(p, split)[0], None


class FarKeyAddedWithoutLse(OneKeyTooMany):
    """One key too many in a long sequence, and no lse."""

    def length(self, p: PagedAttention, seq: int) -> int:
        length = int(p.seq_lens[seq])
        return super().length(p, seq) if length > 100 else length

    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        return super().paged_attention(p, split)[0], None


class BatchedDifferently(Attention):
    """Right within the bound, but the split depends on the batch; `batch_invariant` promises otherwise."""

    shown_by = "test_batch_split"

    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        return super().paged_attention(p, max(split // max(p.num_seqs, 1), 1))
