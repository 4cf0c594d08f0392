"""Factors and values at the ends of float32 and bfloat16, in both backends: right wherever the result is."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from backends import PROVIDERS, supported

from pagebench.properties import contracts
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import AttentionRecipe


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_soft_cap_far_above_the_scores(name: str, dtype: str) -> None:
    """Where tanh of a small number is that number, to its own last place."""
    problem = AttentionRecipe(dtype=dtype, head_size=16, group=2, sequences=((1, 40),), soft_cap=1e5).build()
    contracts.check(supported(name), problem)


# scale, soft cap, factor of queries and keys, key scale and how it is given: scale / cap is below float32.
CAPPED: list[tuple[float, float, float, float | None, str]] = [
    (1e-20, 1e30, 1e15, None, "scalar"),
    (1e-10, 1e37, 1e18, None, "scalar"),
    *((1e-20, 1e30, 1.0, 1e30, given) for given in ("scalar", "head", "slot")),
    *((1e-28, 1e30, 1e5, 1e30, given) for given in ("scalar", "head", "slot")),
]


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize(("scale", "soft_cap", "factor", "key_scale", "given"), CAPPED)
def test_a_soft_cap_whose_ratio_to_the_scale_float32_does_not_hold(
    name: str, scale: float, soft_cap: float, factor: float, key_scale: float | None, given: str
) -> None:
    codes = {} if key_scale is None else {"cache_dtype": "float8_e4m3fn", "kv_scale": given}
    recipe = AttentionRecipe(
        dtype="float32", head_size=16, group=2, sequences=((1, 40),), soft_cap=soft_cap, scale=scale
    )
    problem: Any = dataclasses.replace(recipe, **codes).build()
    problem.query[...] *= np.float32(factor)
    if key_scale is None:
        problem.key_cache[...] *= np.float32(factor)
    else:
        scales = np.asarray(problem.key_scale)
        changed = np.float32(key_scale) if scales.ndim == 0 else np.full_like(scales, key_scale)
        problem = dataclasses.replace(problem, key_scale=changed)
    contracts.check(supported(name), dataclasses.replace(problem))


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("keys", [range(2), range(1, -1, -1)], ids=["the even key", "the odd key"])
@pytest.mark.parametrize("scales", [(1e-6, 1e4), (1e-5, 1e6), (1e-6, 1e6), (1e-5, 1e8)])
def test_value_scales_that_make_up_for_their_codes(
    name: str, queries: int, keys: range, scales: tuple[float, float]
) -> None:
    """The largest code has the smaller scale: the weights times scales are ten orders apart, the values one or two."""
    recipe = AttentionRecipe(head_size=32, group=2, sequences=((queries, 2),), cache_dtype="float8_e5m2")
    problem: Any = dataclasses.replace(recipe, kv_scale="slot").build()
    blocks, offsets = problem.slots(0)
    for key, code, scale in zip(keys, (57344.0, 2.0**-16), scales, strict=True):
        problem.value_cache[blocks[key], offsets[key]] = code
        problem.value_scale[blocks[key], offsets[key]] = scale
    contracts.check(supported(name), problem)
    contracts.check_variants(supported(name), problem)  # two queries are a long sequence in one of Triton's


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scale", [1e-37, 3e-39, 1e-40])
def test_value_scales_at_the_end_of_float32(name: str, dtype: str, scale: float) -> None:
    recipe = AttentionRecipe(dtype=dtype, head_size=32, group=2, sequences=((1, 40),), cache_dtype="float8_e5m2")
    problem: Any = dataclasses.replace(recipe, kv_scale="slot").build()
    problem.value_cache[...] = 57344
    problem.value_scale[...] = scale
    contracts.check(supported(name), problem)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("code", [0.0, 2.0**-9])
def test_the_largest_scale_of_a_value(name: str, dtype: str, code: float) -> None:
    """float32's largest, which rounds to an infinity in bfloat16, times a code so small that the product is none."""
    recipe = AttentionRecipe(dtype=dtype, head_size=32, group=2, sequences=((1, 1),), kv_scale="slot")
    problem: Any = dataclasses.replace(recipe, cache_dtype="float8_e5m2").build()
    problem.value_cache[...] = code
    problem.value_scale[...] = np.finfo(np.float32).max
    contracts.check(supported(name), problem)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("size", [1e9, 1e22, 1e37])
def test_scores_whose_error_is_beyond_any_exp(name: str, size: float) -> None:
    """Each score is off by more than 700 there, and lse by as much."""
    recipe = AttentionRecipe(dtype="float32", head_size=16, group=2, sequences=((1, 40), (2, 30)), scale=1.0)
    problem: Any = recipe.build()
    problem.query[...] *= np.float32(size / 50)
    contracts.check(supported(name), dataclasses.replace(problem))


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("queries", [1, 2])
def test_each_value_scale_counts_to_the_last_place(name: str, queries: int) -> None:
    """Nearly halfway between two numbers of bfloat16, whose distance is sixteen of float16; a column for each key."""
    recipe = AttentionRecipe(head_size=32, group=2, sequences=((queries, 32),), cache_dtype="float8_e5m2")
    problem: Any = dataclasses.replace(recipe, kv_scale="slot", causal=False).build()
    blocks, offsets = problem.slots(0)
    problem.query[...] = problem.value_cache[...] = 0
    problem.value_cache[blocks, offsets, :, np.arange(32)] = 1
    problem.value_scale[...] = 1 + 0.98 * 2.0**-8
    contracts.check(supported(name), problem)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("empty", ["a", "b"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_side_alone_keeps_the_sign_of_its_zeros(name: str, empty: str, dtype: str) -> None:
    """Its bits come back, which a sum with 0 would change."""
    problem = MergeRecipe(dtype=dtype, head_size=24, num_tokens=7, empty=empty).build()
    for out in (problem.out_a, problem.out_b):
        out[...] = -0.0
    contracts.check(supported(name), problem)
