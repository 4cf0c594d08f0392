"""The bound is wide enough for honest arithmetic and narrow enough to see one key; comparisons say what is wrong."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagebench.properties import probes
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference import error_bounds
from pagebench.reference.error_bounds import assert_close, assert_same_bits
from pagebench.reference.paged_attention import paged_attention

U_OF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@pytest.mark.parametrize("dtype", U_OF)
@pytest.mark.parametrize("keys", [1, 17, 200])
def test_bound_is_a_few_roundings_wide(dtype: str, keys: int) -> None:
    """For ordinary data, in units of the output's own rounding. In float32 the scores' 129 roundings dominate and
    still leave 12 bits."""
    problem = AttentionRecipe(dtype=dtype, head_size=128, sequences=((1, keys),)).build()
    out, lse = error_bounds.paged_attention(problem)
    units = 8 if dtype != "float32" else 2**12
    assert out.max() < units * U_OF[dtype]
    assert lse.max() < 1e-4


@pytest.mark.parametrize("dtype", U_OF)
@pytest.mark.parametrize("keys", [2, 130, 205])
def test_one_key_more_or_less_is_far_outside(dtype: str, keys: int) -> None:
    """The counting probe shows it in lse at any length, and in out as well."""
    one, other = (
        probes.counting(AttentionRecipe(dtype=dtype, sequences=((1, n),), block_size=32).build())
        for n in (keys, keys - 1)
    )
    (out, lse), (out_bound, lse_bound) = paged_attention(one), error_bounds.paged_attention(one)
    fewer_out, fewer_lse = paged_attention(other)
    assert (abs(fewer_lse - lse) > 100 * lse_bound).all()
    assert (abs(fewer_out - out) > out_bound).any()


def in_float32(problem: Any, base_two: bool, half_weights: bool) -> tuple[Any, Any]:
    """One decode sequence in float32, optionally in base 2 and with weights rounded to the query's dtype."""
    blocks, offsets = problem.slots(0)
    key, value = (cache[blocks, offsets, 0].astype(np.float32) for cache in (problem.key_cache, problem.value_cache))
    factor = np.float32(problem.scale * (math.log2(math.e) if base_two else 1.0))
    score = (key @ problem.query[0, 0].astype(np.float32)) * factor
    weight = (np.exp2 if base_two else np.exp)(score - score.max())
    rounded = weight.astype(problem.query.dtype).astype(np.float32) if half_weights else weight
    top = score.max() * np.float32(math.log(2)) if base_two else score.max()
    out = ((rounded @ value) / weight.sum()).astype(problem.query.dtype)
    return out[None, None], (top + np.log(weight.sum()))[None, None]


@pytest.mark.parametrize("dtype", U_OF)
@pytest.mark.parametrize("base_two", [False, True])
@pytest.mark.parametrize("half_weights", [False, True])
def test_honest_arithmetic_stays_inside(dtype: str, base_two: bool, half_weights: bool) -> None:
    for seed in range(20):
        problem = AttentionRecipe(dtype=dtype, sequences=((1, 1 + 10 * seed),), seed=seed, values="special").build()
        for tried in (problem, probes.large_logits(problem), probes.counting(problem)):
            out, lse = in_float32(tried, base_two, half_weights)
            for name, got, expected, bound in zip(
                ("out", "lse"), (out, lse), paged_attention(tried), error_bounds.paged_attention(tried), strict=True
            ):
                assert_close(name, got, expected, bound)


def test_accumulation_is_the_smaller_of_worst_case_and_probabilistic() -> None:
    u = 2.0**-24
    assert error_bounds.accumulation(1) == u
    assert error_bounds.accumulation(64) == 64 * u
    assert error_bounds.accumulation(6400) == 8 * 80 * u


ONE = np.ones(3)


@pytest.mark.parametrize(
    ("got", "expected", "good"),
    [
        (ONE, ONE, True),
        (ONE + 0.1, ONE, True),
        (ONE + 0.2, ONE, False),
        (ONE * np.nan, ONE, False),
        (ONE, ONE * np.nan, False),
        (ONE * np.nan, ONE * np.nan, True),
        (ONE * np.inf, ONE * np.inf, True),
        (-ONE * np.inf, ONE * np.inf, False),
        (ONE * 1e30, ONE * np.inf, False),
        (ONE[:2], ONE, False),
        (ONE[:0], ONE[:0], True),
    ],
)
def test_assert_close(got: Any, expected: Any, good: bool) -> None:
    if good:
        assert_close("x", got, expected, np.full(expected.shape, 0.15))
    else:
        with pytest.raises(AssertionError, match="x: "):
            assert_close("x", got, expected, np.full(expected.shape, 0.15))


def test_assert_close_shows_the_worst_element() -> None:
    with pytest.raises(AssertionError, match=r"1 of 3 elements are wrong, the worst at \[1\]: got .*2\.0.*within 0\.5"):
        assert_close("x", np.array([1.0, 2.0, 1.0]), np.ones(3), np.full(3, 0.5))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_assert_same_bits(dtype: Any) -> None:
    zero, nan = np.zeros(2, dtype), np.full(2, np.nan, dtype)
    assert_same_bits("x", zero, zero)
    assert_same_bits("x", nan, -nan)
    for wrong in (-zero, nan, zero[:1], zero.astype(np.float64)):
        with pytest.raises(AssertionError, match="x: "):
            assert_same_bits("x", wrong, zero)
