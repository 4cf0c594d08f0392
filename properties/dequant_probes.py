"""Fused products whose result is known to the last bit, whatever the order of the sums."""

import dataclasses
from typing import Any

import numpy as np

from pagebench.properties.contracts import Missing, require_form, require_supported
from pagebench.properties.runs import run
from pagebench.reference.dequant import Dequantize, decode, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.dequant_layout import FLOAT8_E8M0
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import COMPUTE_DTYPES, FLOAT8_E4M3FN, FLOAT16, Array, round_to, to_float64

# The fields of these are integers of at most 11 bits times their scale, exact in float16.
EXACT_FORMATS = (
    "int8", "gptq_v1", "gptq_v2", "awq", "pack_quantized_3", "pack_quantized_4", "pack_quantized_8", "mxfp4", "nvfp4",
    "nvfp4_ct", "nvfp4_swizzled", "q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q5_k",
)  # fmt: skip


def identity(format: str, *, m: int, seed: int = 0) -> DequantGemv:
    """x is `m` rows of the identity, the last column of W among them; n and k have tails."""
    problem = _weight(format, np.random.default_rng(seed), COMPUTE_DTYPES[seed % 3])
    k = problem.shape[1]
    columns = np.linspace(k - 1, 0, m).astype(int)
    return _with_x(problem, round_to((np.arange(k) == columns[:, None]).astype(np.float64), problem.dtype))


def check_identity(provider: Any, problem: DequantGemv, *, variant: dict[str, Any] | None = None) -> Missing:
    """Element [i, n] of y has the bits of W[n, column of row i], or is a zero like it, where row n of W is finite."""
    require_supported(provider, problem)
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Dequantize)}
    weight = dequantize(Dequantize(**fields))
    finite = np.isfinite(to_float64(weight)).all(axis=1)
    expected = weight[:, np.argmax(to_float64(problem.x), axis=1)].T
    done = run(provider, problem, variant)
    y = done.results["y"]
    require_form("y", y, expected.shape, expected.dtype)
    assert y is not None
    _assert_equal(y[:, finite], expected[:, finite], "columns of the weight")
    return done.not_exercised


def exact(format: str, *, m: int, dtype: np.dtype[Any]) -> DequantGemv:
    """x is of small integers, every scale a power of two, and no sum reaches 24 bits."""
    rng = np.random.default_rng(1)
    problem = _weight(format, rng, dtype)
    for name, spec in (
        FORMATS[format].specs(FORMATS[format].form(problem.packed), problem.shape, problem.group_size).items()
    ):
        array = problem.packed[name]
        if spec.scale is None:
            continue
        if spec.scale_offsets is not None:
            for offset in spec.scale_offsets:
                two = array.reshape(-1, spec.period)[:, offset : offset + 2]
                two[...] = np.array([2.0**-6], FLOAT16).view(np.uint8)
        elif array.dtype == np.uint8:
            array[...] = {FLOAT8_E8M0: 125, FLOAT8_E4M3FN: 0x28}[spec.scale]  # 2^-2
        else:
            array[...] = 0.25
    return _with_x(problem, round_to(rng.integers(-2, 3, (m, problem.shape[1])).astype(np.float64), dtype))


def check_exact(provider: Any, problem: DequantGemv, *, variant: dict[str, Any] | None = None) -> Missing:
    """y is the exact product, rounded once."""
    require_supported(provider, problem)
    expected = round_to(to_float64(problem.x) @ decode(problem).astype(np.float64).T, problem.dtype)
    done = run(provider, problem, variant)
    y = done.results["y"]
    require_form("y", y, expected.shape, expected.dtype)
    assert y is not None
    _assert_equal(y, expected, "exact sums")
    return done.not_exercised


def _assert_equal(y: Array, expected: Array, what: str) -> None:
    wrong = np.argwhere(to_float64(y) != to_float64(expected))
    if wrong.size:
        where = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"y: {len(wrong)} of {y.size} elements are not the {what}, the first at {list(where)}: "
            f"got {y[where]!r}, expected {expected[where]!r}"
        )


def _weight(format: str, rng: np.random.Generator, dtype: np.dtype[Any]) -> Dequantize:
    """n of a little more than a tile of 16, k of a little more than a tile of 256 where the format allows it."""
    chosen = FORMATS[format]
    n, k = 24, {256: 512, 32: 288, 16: 272}.get(chosen.k_multiple, 264)
    form = next(iter(chosen.forms))
    group_size = (24 if format.startswith("pack") else 32) if chosen.grouped(form) else None
    packed = random_packed(format, (n, k), group_size, rng, form=form, finite=True)
    return Dequantize(format, packed, (n, k), group_size, dtype, default_contract(format))


def _with_x(problem: Dequantize, x: Array) -> DequantGemv:
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    return DequantGemv(**fields, x=x)
