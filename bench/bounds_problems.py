"""Problems whose results come as near to the error bound as float32 sums can bring them, drawn from a seed.

Roundings of unlike numbers cancel; those of equal ones do not. So half of the problems of paged attention with many
keys in float32, where sums lose most, have equal weights or all but few equal, and values that are one number for each
column, or one in the first half of the keys and another of the opposite sign in the second. The others have scores that
are random, small, large (which leaves few keys that count), rising or one of them above all others, and values that are
random or of one sign; in 16 bits the rounding of the result shows most, which equal values need not have. From 10,000
keys on, half of the problems have large scores: nothing that sums tile by tile loses a fiftieth of what a sum of so
many equal weights may lose one after the other, but the errors of large scores reach that of their bound at any length.

The n-th problem of a seed is always the same one, whatever was drawn before it.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.properties.paged_attention_recipes import DTYPES, AttentionRecipe
from pagebench.reference.dtypes import INT8, Array, round_to, to_float64
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.problem import Problem

COMPUTE = ("float16", "bfloat16", "float32")
DECADES = (1, 10, 100, 1000, 10000)  # 1 to 9 visible keys, and so on
MOST_KEYS = 33000
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal prefill": {},
    "window": {},
    "soft cap": {},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "fp8 e4m3": {"cache_dtype": "float8_e4m3fn"},
    "fp8 e5m2": {"cache_dtype": "float8_e5m2"},
    "int8": {"cache_dtype": "int8"},
    "split": {},
    "groups": {},
}
# Few different numbers, and many.
EQUAL_SCORES, EQUAL_VALUES = ("equal", "all but few equal", "all but few equal"), ("constant", "halves")
SCORES = ("normal", "small", "large", "large", "large", "rising", "peaked", "equal")
VALUES = ("normal", "normal", "positive", "halves")
MANY_KEYS, VERY_MANY_KEYS = 100, 10000
INT8_ONE = 20  # the code of 1.0
EACH_SUM = 100  # keys from one that is above the others to the next, so that any tile or split of a kernel has seen one
DIFFERENCES = (0.0, 0.1, 1.0, 10.0)  # of merged lses: from each to the next, and from 10 to 80


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem, the feature that it is drawn for, the variant to run it with and how its numbers came about."""

    problem: Problem
    feature: str
    variant: dict[str, Any]
    numbers: str


def attention(seed: int, index: int, provider: Any) -> Drawn:
    """The `index`-th problem of paged attention: dtypes, decades and features in turn, everything else drawn."""
    rng = np.random.default_rng([seed, index])
    dtype = COMPUTE[index % 3]
    low = DECADES[index // 3 % len(DECADES)]
    feature = list(FEATURES)[index // (3 * len(DECADES)) % len(FEATURES)]
    recipe = _recipe(rng, dtype, _keys(rng, low), feature)
    scores, values = _kinds(rng, dtype == "float32" and low >= MANY_KEYS, low >= VERY_MANY_KEYS)
    if scores == "equal" and recipe.cache_dtype:  # sums of such short numbers are exact
        scores = "all but few equal"
    problem = recipe.build()
    if recipe.alibi:  # from no slope to one that leaves a handful of keys
        slopes = rng.choice([-1, 1], recipe.num_query_heads) * 2.0 ** rng.uniform(-16, 0, recipe.num_query_heads)
        slopes[rng.integers(recipe.num_query_heads)] = 0
        problem = dataclasses.replace(problem, alibi_slopes=slopes.astype(np.float32))
    for seq in range(problem.num_seqs):
        _fill(problem, seq, scores, values, rng)
    if scores == "large":
        problem = dataclasses.replace(problem, scale=problem.scale * float(10 ** rng.uniform(0.5, 3)))
    return Drawn(problem, feature, _variant(rng, feature, provider, problem), f"{scores} scores, {values} values")


def _keys(rng: np.random.Generator, low: int) -> int:
    """Visible keys in [low, 10 low) up to MOST_KEYS, every second time within a tenth of `low`."""
    high = min(10, MOST_KEYS / low)
    return int(low * 10 ** rng.uniform(0, math.log10(high) if rng.random() < 0.5 else 0.04))


def _kinds(rng: np.random.Generator, equal: bool, large: bool) -> tuple[str, str]:
    if large and rng.random() < 0.5:
        return "large", str(rng.choice(VALUES))
    if rng.random() < (0.5 if equal else 0.1):
        return str(rng.choice(EQUAL_SCORES)), str(rng.choice(EQUAL_VALUES))
    return str(rng.choice(SCORES)), str(rng.choice(VALUES))


def _recipe(rng: np.random.Generator, dtype: str, keys: int, feature: str) -> AttentionRecipe:
    small, huge = keys < 1000, keys >= VERY_MANY_KEYS
    window = keys if feature == "window" else None
    length = keys + (int(rng.integers(1, 100)) if window else 0)
    queries = int(rng.integers(2, 17 if small else 3 if huge else 4)) if feature == "causal prefill" else 1
    head_size = int(rng.choice([16, 16, 24, 64] if small else [16, 16, 16, 24]))
    quantised = "cache_dtype" in FEATURES[feature]
    return AttentionRecipe(
        dtype=dtype,
        head_size=head_size,
        group=int(rng.choice(_groups(feature, quantised))),
        num_kv_heads=1 if huge else int(rng.choice([1, 2])),
        block_size=int(rng.choice([1, 3, 16, 32])) if small else 16,
        sequences=((queries, length), *([(1, keys)] if small and rng.random() < 0.3 else [])),
        causal=bool(feature in ("window", "causal prefill", "alibi") or rng.random() < 0.5),
        window=window,
        scale=1 / (INT8_ONE * math.sqrt(head_size)) if feature == "int8" else None,
        soft_cap=float(2.0 ** rng.uniform(-1, 6)) if feature == "soft cap" else None,
        kv_scale=str(rng.choice(["scalar", "scalar", "head", "head", "slot"])) if quantised else None,
        seed=int(rng.integers(2**32)),
        **FEATURES[feature],
    )


def _groups(feature: str, quantised: bool) -> list[int]:
    """Query heads per KV head. Codes have few digits: it takes the weights of several heads to make unlike products."""
    if feature == "groups":
        return [4, 5, 8, 16]
    return [1, 8] if quantised else [1, 2]


def _variant(rng: np.random.Generator, feature: str, provider: Any, problem: Problem) -> dict[str, Any]:
    """Any of the provider's variants for splits; else the default, or for ours the one of the longest sums."""
    few = {"triton": {"split": 2**14}, "cupy": {"split": 2**14, "row_warps": 4}}
    own = provider.variants(problem) if hasattr(provider, "variants") else [{}]
    if feature == "split":
        pieces = int(rng.integers(2, 9))
        cut = {"split": max(16, 2 ** int(math.log2(max(problem.seq_lens) / pieces + 1)))}  # type: ignore[attr-defined]  # of attention
        return cut if provider.name in few and rng.random() < 0.7 else dict(own[rng.integers(len(own))])
    return dict(few.get(provider.name, {})) if rng.random() < 0.5 else {}


def _fill(problem: PagedAttention, seq: int, scores: str, values: str, rng: np.random.Generator) -> None:
    """Write queries, keys and values of a sequence."""
    first, length = problem.first_visible(seq), int(problem.seq_lens[seq])
    at = np.arange(first, length)
    blocks, offsets = problem.block_table[seq, at // problem.block_size], at % problem.block_size
    shape = (at.size, problem.num_kv_heads, problem.head_size)
    rows = problem.query_rows(seq)
    problem.query[rows] = round_to(rng.standard_normal(problem.query[rows].shape), problem.query.dtype)
    first_heads = to_float64(problem.query[rows.start, :: problem.group])
    _write(problem.key_cache, blocks, offsets, _key_numbers(scores, shape, first_heads, rng))
    _write(problem.value_cache, blocks, offsets, _value_numbers(values, shape, rng))


def _write(cache: Array, blocks: Array, offsets: Array, numbers: Array) -> None:
    codes = cache.dtype == INT8
    cache[blocks, offsets] = np.rint(INT8_ONE * numbers).astype(INT8) if codes else round_to(numbers, cache.dtype)


def _key_numbers(kind: str, shape: tuple[int, ...], direction: Array, rng: np.random.Generator) -> Array:
    """float64 [keys, num_kv_heads, head_size]; `direction` [num_kv_heads, head_size] is that of a query head of each.

    The few keys above the others are so for that head: the others' weights are then any numbers, and not 1.
    """
    if kind in ("normal", "large", "small"):
        return rng.standard_normal(shape) * (0.1 if kind == "small" else 1.0)
    if kind == "rising":
        return direction * np.linspace(-1, 1, shape[0])[:, None, None] * rng.uniform(0.1, 3)
    keys = np.zeros(shape)
    if kind == "all but few equal":
        keys[:: int(rng.choice([EACH_SUM, shape[0]]))] = direction * rng.uniform(0.02, 0.5)
    elif kind == "peaked":
        keys = rng.standard_normal(shape) * 0.1
        keys[rng.integers(shape[0])] = direction * 5
    return keys


def _value_numbers(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """float64 [keys, num_kv_heads, head_size], below 6 in magnitude."""
    if kind == "normal":
        return np.clip(rng.standard_normal(shape), -6, 6)
    if kind == "positive":
        return rng.uniform(0.5, 2, shape)
    one, other = rng.uniform(1, 2, (2, *shape[1:])) * 2.0 ** rng.integers(-2, 2, shape[1:])
    values = np.broadcast_to(one, shape).copy()
    if kind == "halves":
        values[shape[0] // 2 :] = -other
    return values


def merging(seed: int, index: int, provider: Any) -> Drawn:
    """The `index`-th problem of merge_states: dtypes and distances of the lses in turn."""
    rng = np.random.default_rng([seed, index])
    dtype, decade = DTYPES[COMPUTE[index % 3]], index // 3 % len(DIFFERENCES)
    low = DIFFERENCES[decade]
    high = DIFFERENCES[decade + 1] if decade + 1 < len(DIFFERENCES) else 80.0
    tokens, heads, size = 8, 4, int(rng.choice([16, 24, 64, 128]))
    lse_a = rng.uniform(-1, 1, (tokens, heads)) * float(10 ** rng.uniform(-1, 2.5))
    distance = rng.uniform(low, high, lse_a.shape) * rng.choice([-1, 1], lse_a.shape)
    kind = str(rng.choice(["random", "alike", "opposite"]))
    out_a = rng.standard_normal((tokens, heads, size))
    out_b = (
        rng.standard_normal(out_a.shape) if kind == "random" else out_a * (1 + rng.uniform(-0.01, 0.01, out_a.shape))
    )
    out_b = -out_b if kind == "opposite" else out_b
    outs = [round_to(out, dtype) for out in (out_a, out_b)]
    lses = [lse.astype(np.float32) for lse in (lse_a, lse_a + distance)]
    return Drawn(MergeStates(outs[0], lses[0], outs[1], lses[1]), f"from {low:g} apart", {}, f"{kind} sides")


def decade_of(count: int) -> str:
    """ "10-99" for 10 to 99."""
    low = 10 ** (len(str(count)) - 1)
    return f"{low}-{10 * low - 1}"
