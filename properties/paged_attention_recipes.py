"""How to build a paged attention problem: every structural choice by name, the numbers from a seed.

A recipe is what Hypothesis draws and shrinks; its defaults are the plainest problem.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.properties import poison
from pagebench.reference.dtypes import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8, INT32, Array
from pagebench.reference.paged_attention import PagedAttention

DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32, FLOAT8_E4M3FN, FLOAT8_E5M2, INT8)}
MAX_KEYS = 210  # of one sequence: two blocks of 100 and a bit, thirteen of 16


@dataclass(frozen=True, slots=True)
class AttentionRecipe:
    """`sequences` are (queries, keys) pairs. Dead slots hold `dead`, dead table entries `garbage`."""

    dtype: str = "float16"
    head_size: int = 64
    group: int = 1
    num_kv_heads: int = 1
    block_size: int = 16
    sequences: tuple[tuple[int, int], ...] = ((1, 33),)
    query_layout: str = "contiguous"
    kv_layout: str = "contiguous"
    table_layout: str = "contiguous"
    shared: bool = False
    spare_blocks: int = 1
    spare_entries: int = 1
    garbage: str = "zero"
    dead: str = "random"
    values: str = "normal"
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    cache_dtype: str | None = None
    kv_scale: str | None = None
    seed: int = 0

    # Values of the fields that a provider may support in part; the first is the plainest.
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dtype": ("float16", "bfloat16", "float32"),
        "head_size": (64, 32, 40, 80, 96, 112, 120, 128, 192, 256, 1, 16, 24, 33, 576),
        "group": (1, 2, 5, 7, 8, 17, 64),
        "num_kv_heads": (1, 2, 3),
        "block_size": (16, 1, 2, 3, 8, 32, 100, 128, 256),
        "sequences": ("decode", "mixed"),
        "query_layout": ("contiguous", "fused", "padded", "transposed"),
        "kv_layout": ("contiguous", "halves", "stacked", "hnd", "padded", "interleaved"),
        "table_layout": ("contiguous", "sliced"),
        "causal": (True, False),
        "window": (None, 1, 2, 3, 16, 40),
        "soft_cap": (None, 0.5, 30.0),
        "alibi": (False, True),
        "sinks": (False, True),
        "cache_dtype": (None, "float8_e4m3fn", "float8_e5m2", "int8"),
        "kv_scale": (None, "scalar", "head", "slot"),
    }

    @classmethod
    def sample(cls, **choices: Any) -> "AttentionRecipe":
        """A small recipe with these values of AXES, for asking a provider what it supports."""
        if "sequences" in choices:
            choices["sequences"] = ((1, 33), (0, 0)) if choices["sequences"] == "decode" else ((3, 33), (1, 2))
        if choices.get("kv_scale") and not choices.get("cache_dtype"):
            choices["cache_dtype"] = "float8_e4m3fn"
        return cls(**choices)

    @property
    def num_query_heads(self) -> int:
        return self.group * self.num_kv_heads

    def build(self) -> PagedAttention:
        """The problem. Raises ValueError for a recipe whose choices exclude each other."""
        rng = np.random.default_rng(self.seed)
        problem = self._alive(rng)
        self._kill(problem, rng)
        problem.validate()
        return problem

    def _alive(self, rng: np.random.Generator) -> PagedAttention:
        """The problem with every slot and table entry valid."""
        queries = np.array([q for q, _ in self.sequences], np.int64)
        keys = np.array([k for _, k in self.sequences], np.int64)
        needed = -(-keys // self.block_size)
        total = int(needed.sum()) if not self.shared else int(needed.max(initial=0))
        num_blocks = total + self.spare_blocks
        width = int(needed.max(initial=0)) + self.spare_entries
        key_cache, value_cache = _kv(self, num_blocks, rng)
        scales = (
            {}
            if self.kv_scale is None
            else {name: _scale(self, num_blocks, rng) for name in ("key_scale", "value_scale")}
        )

        def per_head() -> Array:
            return rng.uniform(-1, 1, self.num_query_heads).astype(np.float32)

        return PagedAttention(
            query=_query(self, int(queries.sum()), rng),
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=_table(self, needed, num_blocks, width, rng),
            seq_lens=keys.astype(INT32),
            query_start=np.concatenate([[0], np.cumsum(queries)]).astype(INT32),
            scale=1 / math.sqrt(self.head_size) if self.scale is None else self.scale,
            causal=self.causal,
            window=self.window,
            soft_cap=self.soft_cap,
            alibi_slopes=per_head() if self.alibi else None,
            sinks=4 * per_head() if self.sinks else None,
            **scales,
        )

    def _kill(self, problem: PagedAttention, rng: np.random.Generator) -> None:
        """Fill what must not matter with what would show."""
        dead = ~poison.live_entries(problem)
        problem.block_table[dead] = _garbage(self.garbage, int(dead.sum()), problem.num_blocks, rng)
        if self.dead == "random":
            return
        byte = poison.NAN if self.dead == "nan" else poison.LARGE
        slots = ~poison.live_slots(problem)
        for array in (problem.key_cache, problem.value_cache, problem.key_scale, problem.value_scale):
            if np.ndim(array) >= 3:
                array[slots] = poison.filler(array.dtype, byte)


def _garbage(kind: str, count: int, num_blocks: int, rng: np.random.Generator) -> Array:
    if kind == "random":
        return rng.integers(-(2**31), 2**31, count).astype(INT32)
    if kind == "valid":
        return rng.integers(0, max(num_blocks, 1), count).astype(INT32)
    return np.full(count, {"zero": 0, "minus one": -1, "huge": 2**31 - 1}[kind], INT32)


def _table(recipe: AttentionRecipe, needed: Array, num_blocks: int, width: int, rng: np.random.Generator) -> Array:
    """int32 [num_seqs, width]: distinct blocks in random places, or, shared, the same ones for every sequence."""
    extra = 3 if recipe.table_layout == "sliced" else 0
    table = np.zeros((needed.size, width + extra), INT32)[:, :width]
    order = rng.permutation(num_blocks)
    at = 0
    for seq, count in enumerate(needed):
        table[seq, :count] = order[at : at + count]
        at += 0 if recipe.shared else int(count)
    return table


def _numbers(recipe: AttentionRecipe, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    values = rng.standard_normal(shape, np.float32)
    if recipe.values == "zero":
        values[...] = 0
    if recipe.values == "special" and values.size:
        # -0, the smallest subnormals of each dtype, a number that no sum of others hides
        special = np.array([0.0, -0.0, 6e-8, -1e-40, 1.0, -1.0, 120.0, -120.0], np.float32)
        values.reshape(-1)[rng.integers(0, values.size, 1 + values.size // 16)] = rng.choice(special)
    return (values * 20 if dtype == INT8 else values).astype(dtype)


def _query(recipe: AttentionRecipe, rows: int, rng: np.random.Generator) -> Array:
    heads, size, dtype = recipe.num_query_heads, recipe.head_size, DTYPES[recipe.dtype]
    layouts: dict[str, Callable[[], Array]] = {
        "contiguous": lambda: np.zeros((rows, heads, size), dtype),
        "fused": lambda: np.zeros((rows, heads + 2 * recipe.num_kv_heads, size), dtype)[:, :heads],
        "padded": lambda: np.zeros((rows, heads, size + 3), dtype)[..., 1 : size + 1],
        "transposed": lambda: np.zeros((heads, rows, size), dtype).transpose(1, 0, 2),
    }
    query = _with_gaps(layouts[recipe.query_layout]())
    query[...] = _numbers(recipe, query.shape, dtype, rng)
    return query


def _kv(recipe: AttentionRecipe, num_blocks: int, rng: np.random.Generator) -> tuple[Array, Array]:
    b, s, h, d = num_blocks, recipe.block_size, recipe.num_kv_heads, recipe.head_size
    dtype = DTYPES[recipe.cache_dtype or recipe.dtype]

    def both(shape: tuple[int, ...], view: Callable[[Array], Array]) -> tuple[Array, Array]:
        return _with_gaps(view(np.zeros(shape, dtype))), _with_gaps(view(np.zeros(shape, dtype)))

    def halves(shape: tuple[int, ...], axis: int) -> tuple[Array, Array]:
        base = np.zeros(shape, dtype)
        first, second = np.moveaxis(base, axis, 0)
        return first, second

    layouts: dict[str, Callable[[], tuple[Array, Array]]] = {
        "contiguous": lambda: both((b, s, h, d), lambda base: base),
        "halves": lambda: halves((b, 2, s, h, d), 1),
        "stacked": lambda: halves((2, b, s, h, d), 0),
        "interleaved": lambda: halves((b, s, h, d, 2), 4),
        "hnd": lambda: both((b, h, s, d), lambda base: base.transpose(0, 2, 1, 3)),
        "padded": lambda: both((b, s, h, d + 3), lambda base: base[..., 1 : d + 1]),
    }
    key_cache, value_cache = layouts[recipe.kv_layout]()
    for cache in (key_cache, value_cache):
        cache[...] = _numbers(recipe, cache.shape, dtype, rng)
    return key_cache, value_cache


def _with_gaps(view: Array) -> Array:
    """The same view, the memory around it filled with NaN bytes."""
    owner = view if view.base is None else view.base
    owner.view(np.uint8)[...] = poison.NAN
    return view


def _scale(recipe: AttentionRecipe, num_blocks: int, rng: np.random.Generator) -> Array:
    shapes = {
        "scalar": (),
        "head": (recipe.num_kv_heads,),
        "slot": (num_blocks, recipe.block_size, recipe.num_kv_heads),
    }
    return np.asarray(rng.uniform(0.25, 2.0, shapes[recipe.kv_scale or "scalar"]).astype(np.float32))
