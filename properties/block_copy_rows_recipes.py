"""How to build problems that move rows of keys and values into a paged cache, and out of it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dtypes import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    QUANTISED_DTYPES,
    Array,
)

DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32, FLOAT8_E4M3FN, FLOAT8_E5M2, INT8)}
QUANTISED = tuple(d.name for d in QUANTISED_DTYPES)
HEADS = (2, 1, 3, 5, 8, 16, 17, 31, 32, 33, 63, 64, 65)
HEAD_SIZES = (8, 128, 64, 1, 5, 17, 24, 40, 80, 256, 600)
MAX_ROW = 65 * 128  # elements of a token
KV_LAYOUTS = ("contiguous", "halves", "hnd", "padded", "dims apart")


def cache_views(
    layout: str, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator
) -> tuple[Array, Array]:
    """Key and value cache of `shape` [num_blocks, block_size, heads, head_size], every byte of their memory random."""

    def base(*dims: int) -> Array:
        return random_bits(rng, dims, dtype)

    blocks, slots, heads, size = shape
    if layout == "halves":
        both = base(blocks, 2, slots, heads, size)
        return both[:, 0], both[:, 1]
    if layout == "hnd":
        both = base(2, blocks, heads, slots, size)
        return both[0].transpose(0, 2, 1, 3), both[1].transpose(0, 2, 1, 3)
    if layout == "padded":
        return base(blocks, slots, heads, size + 1)[..., :-1], base(blocks + 1, slots, heads + 1, size)[1:, :, 1:]
    if layout == "dims apart":
        return base(blocks, heads, size, slots).transpose(0, 3, 1, 2), base(blocks, slots, heads, size, 2)[..., 1]
    return base(blocks, slots, heads, size), base(blocks, slots, heads, size)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Any bits: every code of small formats, NaN of every payload."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def random_scale(kind: str | None, cache: Array, rng: np.random.Generator) -> Any:
    """float32 from 2^-9 to 2^9: a scalar "value", "scalar" of no dimension, one per "head" or per "slot" and head."""
    if kind is None:
        return None
    shapes = {"value": (), "scalar": (), "head": cache.shape[2:3], "slot": cache.shape[:3]}
    drawn = np.exp2(rng.uniform(-9, 9, shapes[kind])).astype(FLOAT32)
    return np.float32(drawn) if kind == "value" else np.asarray(drawn, FLOAT32)


@dataclass(frozen=True, slots=True)
class WriteRecipe:
    """`num_rows` rows of which the first `mapped` have a slot; every `skip_every`-th of those is negative.

    cache_dtype: None for that of the rows. scale: None, "value", "scalar", "head" or "computed". values: "normal",
    "bits" any at all, "ties" halfway between numbers of the cache, "zeros" every other row.
    """

    dtype: str = "float16"
    cache_dtype: str | None = None
    num_kv_heads: int = 2
    head_size: int = 8
    block_size: int = 4
    num_rows: int = 3
    mapped: int = 2
    skip_every: int = 0
    row_layout: str = "contiguous"
    kv_layout: str = "contiguous"
    scale: str | None = None
    values: str = "normal"
    seed: int = 0

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dtype": ("float16", "bfloat16", "float32"),
        "cache_dtype": (None, *QUANTISED),
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZES,
        "block_size": (4, 1, 3, 16, 100),
        "row_layout": ("contiguous", "fused", "spread", "dims apart"),
        "kv_layout": KV_LAYOUTS,
        "scale": (None, "value", "scalar", "head", "computed"),
    }

    @classmethod
    def sample(cls, **choices: Any) -> "WriteRecipe":
        """A small recipe with these values of AXES; a scale needs a quantised cache."""
        if choices.get("scale") and not choices.get("cache_dtype"):
            choices["cache_dtype"] = QUANTISED[0]
        return cls(**choices)

    def build(self) -> WriteKV:
        """The problem, every byte of the caches' memory random."""
        rng = np.random.default_rng(self.seed)
        cache_dtype = DTYPES[self.cache_dtype or self.dtype]
        num_blocks = -(-max(self.mapped, 1) // self.block_size) + 1
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        key_cache, value_cache = cache_views(self.kv_layout, shape, cache_dtype, rng)
        slots = rng.permutation(num_blocks * self.block_size)[: self.mapped].astype(INT64)
        if self.skip_every:
            slots[:: self.skip_every] = -rng.integers(1, 2**40, slots[:: self.skip_every].size)
        key, value = self._rows(rng)
        if self.scale == "computed":
            key_scale, value_scale = random_bits(rng, (2, *shape[:3]), FLOAT32)
        else:
            key_scale, value_scale = (random_scale(self.scale, key_cache, rng) for _ in range(2))
        computed = self.scale == "computed"
        return WriteKV(key, value, key_cache, value_cache, slots, key_scale, value_scale, computed)

    def _rows(self, rng: np.random.Generator) -> tuple[Array, Array]:
        rows, heads, size, dtype = self.num_rows, self.num_kv_heads, self.head_size, DTYPES[self.dtype]

        def filled(*dims: int) -> Array:
            return self._values(dims, dtype, rng)

        if self.row_layout == "fused":  # the last two of query (twice the heads), key and value of each token
            qkv = filled(rows, 4 * heads, size)
            return qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
        if self.row_layout == "spread":
            return filled(2 * rows, heads, size)[::2], filled(rows, heads, size + 1)[..., 1:]
        if self.row_layout == "dims apart":
            return filled(rows, size, heads).transpose(0, 2, 1), filled(rows, heads, size, 2)[..., 0]
        return filled(rows, heads, size), filled(rows, heads, size)

    def _values(self, dims: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
        values = self._any_values(dims, dtype, rng)
        if self.scale == "computed" and rng.random() < 0.5:
            values[:, -1:] = 0  # rows of the last head, whose scale is then 1
        return values

    def _any_values(self, dims: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
        normal: Array = rng.standard_normal(dims) * np.exp2(rng.integers(-4, 5, dims[:1])).reshape(
            -1, *[1] * (len(dims) - 1)
        )
        if self.values == "bits":
            found = random_bits(rng, dims, dtype)
            with np.errstate(invalid="ignore"):
                return found if self.scale != "computed" else np.where(np.isfinite(found), found, 1).astype(dtype)
        if self.values == "ties":  # halves of whole numbers and of the steps of float8, small and large
            normal = (rng.integers(-40, 40, dims) + 0.5) * np.exp2(rng.integers(-14, 4, dims))
        if self.values == "zeros":
            normal[::2] = 0.0
            normal[1::2, :1] = -0.0
        with np.errstate(over="ignore"):
            return normal.astype(dtype)


@dataclass(frozen=True, slots=True)
class GatherRecipe:
    """`sequences` are lengths. cache_dtype: None for `dtype`, that of the result. scale: as in WriteRecipe, or "slot".

    garbage: table entries past a sequence's end. The bits of the caches are random.
    """

    dtype: str = "float16"
    cache_dtype: str | None = None
    num_kv_heads: int = 2
    head_size: int = 8
    block_size: int = 4
    sequences: tuple[int, ...] = (3, 5)
    kv_layout: str = "contiguous"
    table_layout: str = "contiguous"
    scale: str | None = None
    garbage: int = -1
    spare_entries: int = 1
    seed: int = 0

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dtype": ("float16", "bfloat16", "float32"),
        "cache_dtype": (None, *QUANTISED, "float16", "bfloat16", "float32"),
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZES,
        "block_size": (4, 1, 3, 16, 100),
        "kv_layout": KV_LAYOUTS,
        "table_layout": ("contiguous", "transposed"),
        "scale": (None, "value", "scalar", "head", "slot"),
    }

    @classmethod
    def sample(cls, **choices: Any) -> "GatherRecipe":
        """A small recipe with these values of AXES; a scale needs a quantised cache."""
        if choices.get("scale") and choices.get("cache_dtype") not in QUANTISED:
            choices["cache_dtype"] = QUANTISED[0]
        return cls(**choices)

    def build(self) -> GatherKV:
        """The problem; sequences share no block."""
        rng = np.random.default_rng(self.seed)
        lengths = np.array(self.sequences, INT32).reshape(-1)
        blocks = -(-lengths // self.block_size)
        num_blocks = int(blocks.sum()) + 1
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        key_cache, value_cache = cache_views(self.kv_layout, shape, DTYPES[self.cache_dtype or self.dtype], rng)
        width = int(blocks.max(initial=0)) + self.spare_entries
        table = np.full((lengths.size, width), self.garbage, INT32)
        free = iter(rng.permutation(num_blocks))
        for seq, count in enumerate(blocks):
            table[seq, :count] = [next(free) for _ in range(count)]
        if self.table_layout == "transposed":
            table = np.ascontiguousarray(table.T).T
        scales = (random_scale(self.scale, key_cache, rng) for _ in range(2))
        return GatherKV(key_cache, value_cache, table, lengths, DTYPES[self.dtype], *scales)
