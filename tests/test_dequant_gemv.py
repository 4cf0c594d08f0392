"""The fused product's meaning and bound: honest ways of computing it pass, faulty ones do not."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagebench.reference.dequant import Dequantize, decode, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv, assert_product, dequant_gemv
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, round_to, to_float64

DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
# Of the packed bit strings, one that straddles words and one that does not.
EVERY_FORMAT = pytest.mark.parametrize(
    "format",
    [name for name in FORMATS if not name.startswith("pack") or name in ("pack_quantized_3", "pack_quantized_4")],
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)


def make(format: str, dtype: np.dtype[Any], *, m: int = 3, n: int = 24, k: int = 512, seed: int = 0) -> DequantGemv:
    rng = np.random.default_rng(seed)
    form = next(iter(FORMATS[format].forms))
    group_size = 64 if FORMATS[format].grouped(form) else None
    packed = random_packed(format, (n, k), group_size, rng, finite=True)
    x = round_to(rng.standard_normal((m, k)), dtype)
    return DequantGemv(format, packed, (n, k), group_size, dtype, default_contract(format), x)


def weight_of(problem: DequantGemv) -> Array:
    fields = (problem.format, problem.packed, problem.shape, problem.group_size, problem.dtype, problem.contract)
    return dequantize(Dequantize(*fields))


# --- what is not finite


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_ct", "nvfp4_swizzled", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_weight_that_only_overflows_float32_asks_for_nothing(format: str) -> None:
    """Its scale may be moved out of the sum, where all is finite; a scale that is infinite may not be lost."""
    problem = make(format, BFLOAT16, m=1)
    name = "global_scale" if format.startswith("nvfp4") else "scale"
    divides = format == "nvfp4_ct"

    def scaled(by: float) -> DequantGemv:
        scale = np.full(problem.packed[name].shape, by, np.float32)
        return dataclasses.replace(problem, packed={**problem.packed, name: scale})

    product = dequant_gemv(scaled(2.0**-127 if divides else 2.0**127))
    assert not product.finite.any()
    assert not product.infinite.any()
    assert dequant_gemv(scaled(0.0 if divides else np.inf)).infinite.any()


# --- honest kernels


@EVERY_FORMAT
@EVERY_DTYPE
def test_identity_gives_the_columns(format: str, dtype: np.dtype[Any]) -> None:
    problem = make(format, dtype, n=16, k=256)
    problem = dataclasses.replace(problem, x=np.eye(256).astype(dtype))
    product = dequant_gemv(problem)
    assert product.finite.any()
    columns = weight_of(problem).T
    assert (round_to(product.y, dtype) == columns)[product.finite].all()
    assert_product("y", columns, product, dtype)


@EVERY_FORMAT
@EVERY_DTYPE
def test_float32_weights_and_sums_pass(format: str, dtype: np.dtype[Any]) -> None:
    """Float32 weights, one element of k after another."""
    problem = make(format, dtype)
    with np.errstate(all="ignore"):
        terms = problem.x.astype(FLOAT32)[:, None, :] * decode(problem).astype(FLOAT32)
        y = np.add.accumulate(terms, axis=2, dtype=FLOAT32)[..., -1]
    assert_product("y", round_to(y, dtype), dequant_gemv(problem), dtype)


@EVERY_FORMAT
@EVERY_DTYPE
def test_rounded_weights_pass(format: str, dtype: np.dtype[Any]) -> None:
    """Weights rounded to the dtype, as tensor cores take them, and sums of 16 in float32."""
    problem = make(format, dtype, seed=1)
    with np.errstate(all="ignore"):
        terms = problem.x.astype(FLOAT32)[:, None, :] * weight_of(problem).astype(FLOAT32)
        y = terms.reshape(3, 24, -1, 16).sum(axis=3, dtype=FLOAT32).sum(axis=2, dtype=FLOAT32)
    assert_product("y", round_to(y, dtype), dequant_gemv(problem), dtype)


@EVERY_DTYPE
def test_scales_outside_the_sum_pass(dtype: np.dtype[Any]) -> None:
    """scale * sum(q x) - scale * zero * sum(x) for each group, which cancels where q and zero are close."""
    problem = make("gptq_v2", dtype, n=64)
    problem.packed["g_idx"][:] = np.arange(512) // 64
    q, zero, scale = FORMATS["gptq_v2"]._parts(problem.packed, problem.shape)  # type: ignore[attr-defined]
    y = np.zeros((3, 64), FLOAT32)
    for group in range(8):
        rows = slice(64 * group, 64 * group + 64)
        x, s = problem.x[:, rows].astype(FLOAT32), scale[64 * group].astype(FLOAT32)
        y += s * (x @ q[rows].astype(FLOAT32)) - s * zero[64 * group].astype(FLOAT32) * x.sum(axis=1, keepdims=True)
    assert_product("y", round_to(y, dtype), dequant_gemv(problem), dtype)


@pytest.mark.parametrize("format", ["gptq_v2", "awq", "mxfp4", "q8_0", "int8"])
def test_integers_and_powers_of_two_are_exact(format: str) -> None:
    problem = make(format, FLOAT32)
    name = {"gptq_v2": "scales", "awq": "scales", "int8": "scale"}.get(format)
    if name:
        problem.packed[name][...] = 0.25
    elif format == "mxfp4":
        problem.packed["scales"][...] = 120
    else:
        problem.packed["blocks"].reshape(24, -1, 34)[..., :2] = np.array([2.0**-5], FLOAT16).view(np.uint8)
    problem.x[...] = np.random.default_rng(2).integers(-8, 9, problem.x.shape)
    y = problem.x.astype(FLOAT32) @ decode(problem).astype(FLOAT32).T
    assert (y == dequant_gemv(problem).y).all()


# --- faulty kernels


@EVERY_FORMAT
@EVERY_DTYPE
def test_the_bound_is_sharp(format: str, dtype: np.dtype[Any]) -> None:
    """A few roundings of the result's size: well below one term of the sum, so that a dropped element shows."""
    problem = make(format, dtype, k=256)
    product = dequant_gemv(problem)
    typical = np.median((abs(to_float64(problem.x)) @ abs(decode(problem).astype(np.float64)).T)[product.finite])
    allowed = {FLOAT16: 2e-3, BFLOAT16: 1e-2, FLOAT32: 5e-5}[dtype]
    assert np.median(product.bound[product.finite]) < allowed * typical


def test_a_dropped_key_is_caught() -> None:
    problem = make("awq", FLOAT16, m=4)
    y = to_float64(problem.x)[:, :-1] @ decode(problem)[:, :-1].T
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_product("y", round_to(y, FLOAT16), dequant_gemv(problem), FLOAT16)


def test_a_wrong_zero_point_is_caught() -> None:
    problem = make("gptq_v1", BFLOAT16)
    other = dataclasses.replace(problem, format="gptq_v2")
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_product("y", round_to(dequant_gemv(other).y, BFLOAT16), dequant_gemv(problem), BFLOAT16)


def test_float16_sums_are_caught() -> None:
    problem = make("q8_0", FLOAT16, m=8, k=2048)
    terms = problem.x[:, None, :] * weight_of(problem)
    y = np.add.accumulate(terms, axis=2, dtype=FLOAT16)[..., -1]
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_product("y", y, dequant_gemv(problem), FLOAT16)


# --- what is not finite


def test_a_row_of_nan_stays_in_its_row() -> None:
    problem = make("awq", FLOAT16)
    problem.x[1, 7] = np.nan
    product = dequant_gemv(problem)
    assert product.infinite.tolist() == [[False] * 24, [True] * 24, [False] * 24]
    assert product.finite.tolist() == [[True] * 24, [False] * 24, [True] * 24]
    y = round_to(product.y, FLOAT16)
    with pytest.raises(AssertionError, match="24 of 72 elements are finite, although"):
        assert_product("y", y, product, FLOAT16)
    y[1] = np.nan
    assert_product("y", y, product, FLOAT16)
    y[2] = np.nan
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_product("y", y, product, FLOAT16)


def test_an_infinite_scale_spoils_its_output() -> None:
    problem = make("awq", FLOAT16)
    problem.packed["scales"][3, 5] = np.inf
    product = dequant_gemv(problem)
    assert (product.infinite == (np.arange(24) == 5)).all()


def test_overflow_depends_on_the_order() -> None:
    """A weight beyond float16 is an infinity to a kernel that rounds it, and a number to one that does not."""
    problem = make("q8_0", FLOAT16)
    blocks = problem.packed["blocks"].reshape(24, -1, 34)
    blocks[0, 0, :2] = np.array([60000], FLOAT16).view(np.uint8)
    blocks[0, 0, 2:] = 5
    product = dequant_gemv(problem)
    assert not product.finite[:, 0].any()
    assert not product.infinite.any()
    assert product.finite[:, 1:].all()


# --- the problem


def test_bytes_and_operations() -> None:
    problem = make("q4_k", FLOAT16, m=4, n=24, k=512)
    assert problem.bytes_moved() == 24 * 2 * 144 + 2 * (4 * 512 + 4 * 24)
    assert problem.flops() == 2 * 4 * 24 * 512


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((3, 511), FLOAT16), r"x must have shape \[any, 512\]"),
        (np.zeros((3, 512), FLOAT32), "x must have dtype float16"),
        (np.zeros(512, FLOAT16), r"x must have shape \[any, 512\]"),
        (np.zeros((0, 512), FLOAT16), "x must have at least one row"),
        ([[0.0] * 512], "x must be a NumPy array"),
    ],
)
def test_bad_x(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make("q8_0", FLOAT16), x=x)


def test_text_form() -> None:
    from pagebench.reference.problem import from_text

    problem = make("nvfp4", BFLOAT16)
    again = from_text(problem.to_text())
    assert (again.x == problem.x).all()
    assert (dequant_gemv(again).y == dequant_gemv(problem).y).all()
