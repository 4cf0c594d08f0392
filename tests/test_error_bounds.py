"""The bound is wide enough for honest arithmetic and narrow enough to see one key; comparisons say what is wrong."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bounds_kernels import AccumulatedInBfloat16, Descending, Online, ScoresInHalf, Sequential
from numpy_kernels import Attention

from bench import bounds_problems
from pagebench.properties import probes
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference import error_bounds
from pagebench.reference.dtypes import to_float64
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
    assert lse.max() < 2e-4


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


# --- kernels that are right, and two that are not


def against_bound(provider: Any, problem: Any) -> float:
    """The largest error / bound over out and lse."""
    got, expected = provider.paged_attention(problem), paged_attention(problem)
    bounds = error_bounds.paged_attention(problem)
    pairs = zip(got, expected, bounds, strict=True)
    return max(float(error_bounds.error_over_bound(to_float64(g), e, b).max()) for g, e, b in pairs)


def alike(keys: int, kind: str, dtype: str = "float32") -> Any:
    """One decode whose roundings all go one way: equal terms, one key above them, scores that rise by equal steps."""
    problem = AttentionRecipe(dtype=dtype, group=2, sequences=((1, keys),)).build()
    rng, at = np.random.default_rng(keys), np.arange(keys)
    slots = problem.block_table[0, at // problem.block_size], at % problem.block_size
    direction = rng.standard_normal(problem.head_size).astype(np.float32)
    rise = {"equal": np.zeros(keys), "one above": 0.3 * (at == keys // 2), "rising": at / keys / 1000}[kind]
    value = np.broadcast_to(rng.uniform(1, 2, problem.head_size), (keys, problem.head_size)).copy()
    value[keys // 3 :] *= -1 if kind == "rising" else 1
    problem.key_cache[slots] = (rise[:, None, None] * direction).astype(problem.key_cache.dtype)
    problem.value_cache[slots] = value[:, None].astype(problem.value_cache.dtype)
    return problem


@pytest.mark.parametrize("kernel", [Sequential, Descending, Online, Attention])
@pytest.mark.parametrize("kind", ["equal", "one above", "rising"])
@pytest.mark.parametrize("keys", [10, 100, 1000, 4000])
def test_sums_of_alike_terms_stay_inside(kernel: Any, kind: str, keys: int) -> None:
    assert against_bound(kernel(), alike(keys, kind)) <= 1


@pytest.mark.parametrize("kind", ["equal", "one above", "rising"])
@pytest.mark.parametrize("keys", [2**14, 2**16])
def test_long_plain_sums_stay_inside(kind: str, keys: int) -> None:
    """Also four times longer than what the bound admits, as no sum reaches its worst case."""
    assert against_bound(Sequential(), alike(keys, kind)) <= 1


@pytest.mark.parametrize("kernel", [Sequential, Descending])
@pytest.mark.parametrize("keys", [100, 1000, 2**14])
def test_the_bound_of_sums_is_no_wider_than_they_need(kernel: Any, keys: int) -> None:
    """A plain sum of equal terms in float32 loses a sixth of the bound and more, however long it is."""
    assert against_bound(kernel(), alike(keys, "one above")) > 1 / 6


@pytest.mark.parametrize("kernel", [Sequential, Descending, Online])
def test_drawn_problems_stay_inside(kernel: Any) -> None:
    for index in range(165):
        drawn = bounds_problems.attention(1, index, kernel())
        assert against_bound(kernel(), drawn.problem) <= 1, index


@pytest.mark.parametrize("dtype", U_OF)
@pytest.mark.parametrize("keys", [33, 200, 2000, 12000])
def test_scores_in_half_are_outside(dtype: str, keys: int) -> None:
    problem = AttentionRecipe(dtype=dtype, sequences=((1, keys),), scale=1.0).build()
    assert against_bound(ScoresInHalf(), problem) > 2
    assert against_bound(Sequential(), problem) < 1


@pytest.mark.parametrize("dtype", U_OF)
@pytest.mark.parametrize("kind", ["equal", "one above"])
@pytest.mark.parametrize("keys", [200, 1000, 12000])
def test_sums_in_bfloat16_are_outside(dtype: str, kind: str, keys: int) -> None:
    assert against_bound(AccumulatedInBfloat16(), alike(keys, kind, dtype)) > 2


@pytest.mark.parametrize("dtype", U_OF)
def test_drawn_problems_show_what_is_wrong(dtype: str) -> None:
    """The problems that the bounds are measured on find both faults too, in every dtype."""
    for kernel in (ScoresInHalf, AccumulatedInBfloat16):
        tried = (bounds_problems.attention(0, 3 * i + list(U_OF).index(dtype), kernel()) for i in range(40))
        assert any(against_bound(kernel(), drawn.problem) > 2 for drawn in tried), kernel.__name__


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


@pytest.mark.parametrize(
    ("dtype", "got", "expected", "bound", "good"),
    [
        (np.float16, np.inf, 65520.0, 42.0, True),  # half a unit beyond the largest: rounds to even, which is infinity
        (np.float16, -np.inf, -1e9, 42.0, True),
        (np.float16, np.inf, 65515.0, 42.0, True),  # 42 off, of which 32 are for rounding: may be 65525 before it
        (np.float16, -np.inf, -65515.0, 42.0, True),
        (np.float16, np.inf, 65515.0, 1.0, False),  # a bound below the rounding leaves nothing to compute
        (np.float16, np.inf, 65505.0, 42.0, False),
        (np.float16, -np.inf, 1e9, 42.0, False),
        (np.float16, np.nan, 1e9, 42.0, False),
        (np.float16, 65504.0, 1e9, 42.0, False),  # saturated
        (np.float16, 65504.0, 65510.0, 42.0, True),
        (np.float16, 1.0, 1 + 2.0**-12, 0.0, False),  # a number that the right result rounds to is no infinity
        (ml_dtypes.bfloat16, np.inf, 1e39, 42.0, True),
        (ml_dtypes.bfloat16, np.inf, 3e38, 42.0, False),
        (np.float32, np.inf, 1e39, 42.0, False),
    ],
)
def test_a_result_beyond_its_dtype_is_an_infinity(
    dtype: Any, got: float, expected: float, bound: float, good: bool
) -> None:
    arrays = np.array([got], dtype), np.array([expected]), np.array([bound])
    if good:
        assert_close("x", *arrays)
    else:
        with pytest.raises(AssertionError, match="x: 1 of 1"):
            assert_close("x", *arrays)


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
