"""Correct NumPy kernels over the whole contract, built like real ones: splits, scratch, online softmax in float32.

Each step is a method, so that a planted bug is a subclass that gets one step wrong. All optional parts are there.
"""

from typing import Any

import ml_dtypes
import numpy as np

from pagebench.properties.host_arrays import HostArrays
from pagebench.reference.dtypes import FLOAT32, Array
from pagebench.reference.paged_attention import PagedAttention


class NumpyKernels(HostArrays):
    """Base: arrays, and nothing rejected."""

    name = "numpy"
    batch_invariant = True

    def unavailable(self) -> str | None:
        return None

    def rejects(self, problem: Any) -> str | None:
        return None

    def synchronize(self) -> None:
        pass

    def empty(self, shape: Any, dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        return [{}]


def float32(array: Array) -> Array:
    return array.astype(FLOAT32)


class Attention(NumpyKernels):
    """Split-KV attention: a partial (top, total, weighted values) per split into scratch, then a merge."""

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        return [{}, {"split": 16}, {"split": 40}] if problem.op == "paged_attention" else [{}]

    def paged_attention(self, p: PagedAttention, split: int = 64) -> tuple[Array, Array | None]:
        out, lse = self.empty(p.query.shape, p.query.dtype), self.empty(p.query.shape[:2], FLOAT32)
        splits = max(-(-p.block_table.shape[1] * p.block_size // split), 1)
        scratch = self.empty((max(p.num_tokens, 1), p.num_query_heads, splits, p.head_size + 2), FLOAT32)
        for seq in range(p.num_seqs):
            rows = p.query_rows(seq)
            if rows.stop > rows.start:
                for i in range(splits):
                    if self.writes(p, seq, i, split):
                        scratch[rows, :, i] = self.partial(p, seq, self.keys(p, seq, i, split), i)
                used = [i for i in range(splits) if self.merges(p, seq, i, split)]
                self.merge(p, seq, scratch[rows][:, :, used], out[rows], lse[rows])
        return out, lse

    def length(self, p: PagedAttention, seq: int) -> int:
        return int(p.seq_lens[seq])

    def first(self, p: PagedAttention, seq: int) -> int:
        return p.first_visible(seq)

    def keys(self, p: PagedAttention, seq: int, i: int, split: int) -> Array:
        """Positions that split `i` goes through."""
        start = max(i * split, self.first(p, seq))
        return np.arange(start, max(start, min((i + 1) * split, self.length(p, seq))))

    def writes(self, p: PagedAttention, seq: int, i: int, split: int) -> bool:
        return bool(self.keys(p, seq, i, split).size)

    def merges(self, p: PagedAttention, seq: int, i: int, split: int) -> bool:
        return self.writes(p, seq, i, split)

    def partial(self, p: PagedAttention, seq: int, keys: Array, i: int) -> Array:
        """float32 [rows, heads, head_size + 2]: weighted values, then top and total."""
        score = np.where(self.mask(p, seq, keys)[:, None], self.scores(p, seq, keys), -np.inf)
        top = score.max(axis=2, initial=-np.inf)
        weight = self.exp(score - np.where(np.isinf(top), 0, top)[..., None])
        value = self.load(p, seq, keys, p.value_cache, p.value_scale)
        acc = self.weigh(p, weight, value)
        return np.concatenate([acc, top[..., None], weight.sum(axis=2)[..., None]], axis=2)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def weigh(self, p: PagedAttention, weight: Array, value: Array) -> Array:
        return np.einsum("rhk,khd->rhd", weight, value)

    def block_ids(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return p.block_table[seq, keys // p.block_size]

    def load(self, p: PagedAttention, seq: int, keys: Array, cache: Array, scale: Any) -> Array:
        """float32 [keys, num_query_heads, head_size]."""
        blocks, offsets = self.block_ids(p, seq, keys), keys % p.block_size
        rows = float32(cache[blocks, offsets])
        if scale is not None:
            rows = rows * self.scale_of(scale, blocks, offsets)
        return rows[:, self.kv_head(p)]

    def scale_of(self, scale: Array, blocks: Array, offsets: Array) -> Array:
        return scale[blocks, offsets][..., None] if scale.ndim == 3 else scale.reshape(-1, 1)

    def kv_head(self, p: PagedAttention) -> Array:
        return np.arange(p.num_query_heads) // p.group

    def query(self, p: PagedAttention, seq: int) -> Array:
        return float32(p.query[p.query_rows(seq)])

    def scores(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        """float32 [rows, heads, keys]."""
        key = self.load(p, seq, keys, p.key_cache, p.key_scale)
        score = self.dot(self.query(p, seq), key) * FLOAT32.type(p.scale)
        if p.soft_cap is not None:
            score = FLOAT32.type(p.soft_cap) * np.tanh(score / FLOAT32.type(p.soft_cap))
        if p.alibi_slopes is not None:
            score = score + float32(p.alibi_slopes[:, None] * self.distance(p, seq, keys)[:, None])
        return score

    def dot(self, query: Array, key: Array) -> Array:
        return np.einsum("rhd,khd->rhk", query, key)

    def distance(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        return keys[None] - self.positions(p, seq)[:, None]

    def positions(self, p: PagedAttention, seq: int) -> Array:
        return p.positions(seq)

    def mask(self, p: PagedAttention, seq: int, keys: Array) -> Array:
        """bool [rows, keys]."""
        position = self.positions(p, seq)[:, None]
        seen = keys[None] <= position if p.causal else np.ones((position.size, keys.size), bool)
        return seen if p.window is None else seen & self.inside(p, position, keys)

    def inside(self, p: PagedAttention, position: Array, keys: Array) -> Array:
        return keys[None] > position - p.window

    def merge(self, p: PagedAttention, seq: int, parts: Array, out: Array, lse: Array) -> None:
        acc, top, total = parts[..., :-2], parts[..., -2], parts[..., -1]
        best = self.best(top)
        if p.sinks is not None:
            best = np.maximum(best, p.sinks)
        best = np.where(np.isinf(best), 0, best)
        factor = self.rescale(top, best[..., None])
        total = (factor * total).sum(axis=2) + self.sink(p, best, parts.shape[2])
        weighted = (factor[..., None] * acc).sum(axis=2)
        self.store(p, out, weighted / np.where(total == 0, 1, total)[..., None])
        with np.errstate(divide="ignore"):
            lse[...] = self.log(total, best)

    def best(self, top: Array) -> Array:
        """float32 [rows, heads] of the splits' top [rows, heads, splits]."""
        best: Array = top.max(axis=2, initial=-np.inf)
        return best

    def rescale(self, top: Array, best: Array) -> Array:
        """What each split's sums are multiplied by."""
        factor: Array = np.exp(top - best)
        return factor

    def sink(self, p: PagedAttention, best: Array, splits: int) -> Any:
        return 0 if p.sinks is None else np.exp(p.sinks - best)

    def log(self, total: Array, best: Array) -> Array:
        return best + np.log(total)

    def store(self, p: PagedAttention, out: Array, values: Array) -> None:
        out[...] = values.astype(out.dtype)


class Copy(NumpyKernels):
    """Block copy through scratch: everything read, then everything written."""

    def copy_blocks(self, p: Any) -> None:
        for cache in self.caches(p):
            src, dst = self.pairs(p)
            staged = self.empty((src.size, *cache.shape[1:]), cache.dtype)
            staged[...] = cache[src]
            self.write(cache, dst, staged)

    def caches(self, p: Any) -> tuple[Array, ...]:
        caches: tuple[Array, ...] = p.caches
        return caches

    def pairs(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:, 0], p.pairs[:, 1]

    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        cache[dst] = staged


class Swap(NumpyKernels):
    """Blocks from one pool to the other."""

    def swap_blocks(self, p: Any) -> None:
        src, dst = self.sides(p)
        for source, target in zip(p.src_caches, p.dst_caches, strict=True):
            self.move(source, target, src, dst)

    def sides(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:, 0], p.pairs[:, 1]

    def move(self, source: Array, target: Array, src: Array, dst: Array) -> None:
        target[dst] = source[src]


class Write(NumpyKernels):
    """Rows into slots, a whole array at a time."""

    def write_kv(self, p: Any) -> None:
        with np.errstate(all="ignore"):
            rows, slots = self.mapped(p)
            where = self.place(p, slots)
            for name in ("key", "value"):
                cache, scale = getattr(p, f"{name}_cache"), getattr(p, f"{name}_scale")
                values = getattr(p, name)[rows]
                if p.compute_scales:
                    scale[where] = self.row_scale(p, values)
                if p.quantised:
                    values = self.quantised(float32(values), self.write_scale(scale, where), cache.dtype)
                self.put(cache, where, values)

    def mapped(self, p: Any) -> tuple[Array, Array]:
        rows = np.flatnonzero(p.slot_mapping >= 0)
        return rows, p.slot_mapping[rows]

    def place(self, p: Any, slots: Array) -> tuple[Array, Array]:
        return slots // p.block_size, slots % p.block_size

    def row_scale(self, p: Any, values: Array) -> Array:
        largest = abs(float32(values)).max(axis=2)
        return np.where(largest == 0, FLOAT32.type(1), largest / FLOAT32.type(self.highest(p.key_cache.dtype)))

    def highest(self, dtype: Any) -> float:
        return 127 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)

    def write_scale(self, scale: Any, where: tuple[Array, Array]) -> Any:
        if scale is None:
            return FLOAT32.type(1)
        return scale[where][..., None] if scale.ndim == 3 else np.asarray(scale).reshape(1, -1, 1)

    def quantised(self, values: Array, scale: Any, dtype: Any) -> Array:
        return self.encode(self.divide(values, scale), dtype)

    def divide(self, values: Array, scale: Any) -> Array:
        quotient: Array = values / scale
        return quotient

    def encode(self, x: Array, dtype: Any) -> Array:
        nan = np.isnan(x)
        clipped = self.clip(np.where(nan, 0, x), dtype)
        codes = np.asarray(self.round(clipped) if dtype == np.int8 else clipped).astype(dtype).view(np.uint8)
        return np.where(nan, self.nan_code(dtype), codes).astype(np.uint8).view(dtype)

    def clip(self, x: Array, dtype: Any) -> Array:
        highest = self.highest(dtype)
        return np.clip(x, -highest - (dtype == np.int8), highest)

    def round(self, x: Array) -> Array:
        return np.rint(x)

    def nan_code(self, dtype: Any) -> int:
        return 0 if dtype == np.int8 else 0x7F

    def put(self, cache: Array, where: tuple[Array, Array], values: Array) -> None:
        cache[where] = values


class Gather(NumpyKernels):
    """Sequence by sequence into outputs of its own."""

    def gather_kv(self, p: Any) -> tuple[Array, Array]:
        shape = (p.num_tokens, p.num_kv_heads, p.head_size)
        out = self.empty(shape, p.dtype), self.empty(shape, p.dtype)
        start = 0
        with np.errstate(all="ignore"):
            for seq in range(p.num_seqs):
                where = self.locate(p, seq, np.arange(self.length_of(p, seq)))
                stop = start + where[0].size
                for dense, cache, scale in zip(
                    out, (p.key_cache, p.value_cache), (p.key_scale, p.value_scale), strict=True
                ):
                    dense[start:stop] = self.dequantised(cache[where], self.factor(scale, where), p.dtype)
                start = stop
        return out

    def length_of(self, p: Any, seq: int) -> int:
        return int(p.seq_lens[seq])

    def locate(self, p: Any, seq: int, position: Array) -> tuple[Array, Array]:
        return p.block_table[seq, position // p.block_size], position % p.block_size

    def factor(self, scale: Any, where: tuple[Array, Array]) -> Any:
        if scale is None:
            return None
        return scale[where][..., None] if scale.ndim == 3 else np.asarray(scale).reshape(1, -1, 1)

    def dequantised(self, stored: Array, factor: Any, dtype: Any) -> Array:
        if stored.dtype == dtype:
            return stored
        return self.rounded(float32(stored) * (1 if factor is None else factor), dtype)

    def rounded(self, values: Array, dtype: Any) -> Array:
        return values.astype(dtype)


class Dequant(NumpyKernels):
    """Two formats as float32 products of an integer and a scale, and the fused product with one row after another."""

    formats: tuple[str, ...] = ("q8_0", "gptq_v2")

    def rejects(self, problem: Any) -> str | None:
        if problem.op.startswith("dequant") and problem.format not in self.formats:
            return f"format {problem.format} is not supported"
        return None

    def dequantize(self, p: Any) -> Array:
        with np.errstate(all="ignore"):
            weight = self.empty(p.shape, p.dtype)
            weight[...] = self.rounded(self.values(p), p.dtype)
            return weight

    def dequant_gemv(self, p: Any) -> Array:
        with np.errstate(all="ignore"):
            y = self.empty((p.x.shape[0], p.shape[0]), p.dtype)
            values = float32(self.values(p))
            for row, x in enumerate(float32(p.x)):
                y[row] = self.row_product(values, x).astype(p.dtype)
            return y

    def row_product(self, values: Array, x: Array) -> Array:
        return (values * x).sum(axis=1, dtype=FLOAT32)

    def values(self, p: Any) -> Array:
        """Weights before their rounding to the output's dtype."""
        return self.q8_0(p) if p.format == "q8_0" else self.gptq_v2(p)

    def rounded(self, values: Array, dtype: Any) -> Array:
        return values.astype(dtype)

    def q8_0(self, p: Any) -> Array:
        blocks = self.array(p, "blocks").reshape(p.shape[0], -1, 34)
        return self.product(self.codes(blocks[..., 2:]), self.scale(p, self.d(blocks))).reshape(p.shape)

    def d(self, blocks: Array) -> Array:
        return blocks[..., :2].copy().view("<f2")

    def codes(self, data: Array) -> Array:
        return data.view(np.int8)

    def gptq_v2(self, p: Any) -> Array:
        n, k = p.shape
        q = self.nibbles(self.array(p, "qweight")).transpose(0, 2, 1).reshape(k, n)
        zero = self.zero(self.zero_nibbles(self.array(p, "qzeros")).reshape(-1, n))
        group = self.group(p)
        return self.product(q - zero[group], self.scale(p, self.array(p, "scales")[group])).T

    def array(self, p: Any, name: str) -> Array:
        array: Array = p.packed[name]
        return array

    def nibbles(self, words: Array) -> Array:
        return (words[..., None] >> (4 * np.arange(8, dtype=np.int32))) & 15

    def zero_nibbles(self, words: Array) -> Array:
        return self.nibbles(words)

    def zero(self, stored: Array) -> Array:
        return stored

    def group(self, p: Any) -> Array:
        return self.array(p, "g_idx")

    def scale(self, p: Any, scale: Array) -> Array:
        return float32(scale)

    def product(self, q: Array, scale: Array) -> Array:
        return float32(q) * scale


class Everything(Attention, Copy, Swap, Write, Gather, Dequant):
    """All ops."""


class EverythingReversed(Everything):
    """The same with the keys of each split taken backwards, sums in another order and rounded weights."""

    batch_invariant = False

    def keys(self, p: PagedAttention, seq: int, i: int, split: int) -> Array:
        return super().keys(p, seq, i, split)[::-1].copy()

    def weigh(self, p: PagedAttention, weight: Array, value: Array) -> Array:
        return super().weigh(p, float32(weight.astype(p.query.dtype)), value)
