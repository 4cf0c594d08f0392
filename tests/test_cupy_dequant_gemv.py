"""The fused product in CUDA C++ against the reference: through CuPy on a GPU, else on the host."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from dequant_cases import EVERY_FORM, FORMATS, make
from test_cupy_dequant import POISONED, laid_out

from pagebench.kernels import memory_trace
from pagebench.kernels.cupy_provider import CupyProvider, provider
from pagebench.reference import error_bounds
from pagebench.reference.dequant import default_contract, dequantize
from pagebench.reference.dequant_gemv import DequantGemv, assert_product, dequant_gemv
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, as_bits, round_to
from pagebench.reference.placement import place

pytestmark = pytest.mark.skipif(provider.unavailable() is not None, reason=str(provider.unavailable()))

# The formats that the fused product is made for, and one of each other way of decoding.
FORMATS_IN_USE = ("gptq_v2", "awq", "fp8_e4m3", "mxfp4", "nvfp4", "q4_k", "q8_0", "int8")


def product(format: str, m: int, form: str | None = None, **changes: Any) -> DequantGemv:
    """A random problem with finite weights."""
    what = make(format, form, scales="normal", finite=True, **changes)
    x = round_to(np.random.default_rng(m).standard_normal((m, what.shape[1])), what.dtype)
    return with_x(what, x)


def with_x(what: Any, x: Array) -> DequantGemv:
    fields = (what.format, what.packed, what.shape, what.group_size, what.dtype, what.contract)
    return DequantGemv(*fields, x)


def run(problem: DequantGemv, **variant: Any) -> Array:
    assert provider.rejects(problem) is None
    placed = place(problem, POISONED)
    y = POISONED.to_host(POISONED.dequant_gemv(placed.problem, **variant))
    placed.check_fences()
    return y


def check(problem: DequantGemv, **variant: Any) -> None:
    expected = dequant_gemv(problem)
    assert expected.finite.any()
    assert_product("y", run(problem, **variant), expected, problem.dtype)


@EVERY_FORM
def test_every_format(format: str, form: str) -> None:
    seed = sum(map(ord, format + form))
    problem = product(format, 3, form, dtype=(FLOAT16, BFLOAT16)[seed % 2], seed=seed)
    check(problem, **provider.variants(problem)[seed % 3])


@pytest.mark.skipif(provider.device.on_gpu, reason="traced on the host")
@pytest.mark.parametrize("format", ["gptq_v2", "awq", "q4_k"])
def test_float32_reads_the_codes_once_for_16_rows(format: str) -> None:
    problem = product(format, 16, dtype=FLOAT32)
    codes = problem.packed["blocks" if format == "q4_k" else "qweight"]
    placed = problem.on(provider)
    with memory_trace.trace(provider) as launches:
        provider.dequant_gemv(placed)
    loaded = [b.loaded_bytes for launch in launches for b in launch.buffers.values() if b.nbytes == codes.nbytes]
    assert codes.nbytes in loaded


@pytest.mark.parametrize("format", ["fp8_e4m3", "q4_k", "nvfp4", "awq", "gptq_v2"])
def test_float32(format: str) -> None:
    for m in (1, 5, 17):
        problem = product(format, m, dtype=FLOAT32)
        check(problem, **provider.variants(problem)[m % 3])


@pytest.mark.parametrize("format", ["gptq_v2", "q8_0"])
def test_any_number_of_rows_under_every_variant(format: str) -> None:
    for m in (1, 2, 8, 9, 16, 17, 35):
        problem = product(format, m, dtype=FLOAT16, shape=(72, 96), group_size=32 if format == "gptq_v2" else None)
        for variant in provider.variants(problem):
            check(problem, **variant)


@pytest.mark.parametrize("format", FORMATS_IN_USE)
def test_identity_gives_the_columns(format: str) -> None:
    k = {256: 256, 32: 96}.get(FORMATS[format].k_multiple, 48)
    size = 32 if FORMATS[format].grouped(next(iter(FORMATS[format].forms))) else None
    for dtype in (FLOAT16, BFLOAT16):
        what = make(format, shape=(24, k), group_size=size, scales="normal", finite=True, dtype=dtype)
        y = run(with_x(what, np.eye(k).astype(dtype)))
        columns = np.ascontiguousarray(dequantize(what).T)
        finite = np.isfinite(columns).all(axis=0)
        assert finite.any()
        same = (as_bits(y) == as_bits(columns)) | ((y == 0) & (columns == 0))
        assert same[:, finite].all()


@pytest.mark.parametrize("format", ["gptq_v2", "awq", "q8_0", "int8"])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda d: d.name)
def test_integers_are_exact(format: str, dtype: Any) -> None:
    """Small integers times powers of two: every partial sum is exact, and y rounds once."""
    what = make(
        format, shape=(24, 96), group_size=None if format in ("q8_0", "int8") else 32, dtype=dtype, scales="normal"
    )
    for name in ("scales", "scale"):
        if name in what.packed:
            what.packed[name][...] = 0.25
    if format == "q8_0":
        what.packed["blocks"].reshape(24, 3, 34)[..., :2] = np.array([0.25], np.float16).view(np.uint8)
    x = np.random.default_rng(0).integers(-1, 2, (5, 96)).astype(dtype)
    y = run(with_x(what, x))
    exact = x.astype(np.float64) @ dequantize(dataclasses.replace(what, dtype=FLOAT32)).astype(np.float64).T
    error_bounds.assert_same_bits("y", y, round_to(exact, dtype) + np.zeros((), dtype))


def test_a_row_with_nan_affects_only_its_own() -> None:
    for format in ("q8_0", "gptq_v2"):
        problem = product(format, 12, dtype=FLOAT16)
        before = run(problem)
        problem.x[3, 7], problem.x[9] = np.nan, np.inf
        y = run(problem)
        others = [row for row in range(12) if row not in (3, 9)]
        assert np.array_equal(as_bits(y)[others], as_bits(before)[others])
        assert not np.isfinite(y[[3, 9]]).any()


@pytest.mark.parametrize("layout", ["gaps", "columns", "odd bytes"])
def test_strided_arrays(layout: str) -> None:
    for format, dtype in (("q4_k", FLOAT16), ("awq", BFLOAT16), ("gptq_v1", FLOAT16), ("nf4", BFLOAT16)):
        problem = product(format, 3, dtype=dtype)
        packed = {name: laid_out(array, layout) for name, array in problem.packed.items()}
        check(dataclasses.replace(problem, packed=packed, x=laid_out(problem.x, layout)))


def test_few_output_features_are_split_by_default() -> None:
    problem = product("q8_0", 2, dtype=FLOAT16, shape=(8, 2304))
    launched: list[Any] = []

    class Counting(CupyProvider):
        def empty(self, shape: Any, dtype: Any) -> Any:
            launched.append(tuple(shape))
            return super().empty(shape, dtype)

    counting = Counting()
    counting.dequant_gemv(problem.on(counting))
    assert launched == [(2, 8), (3, 2, 8)]  # y, and the sums of three splits
    check(problem)


def test_other_contracts_are_rejected() -> None:
    problem = product("q4_k", 1, dtype=FLOAT16)
    assert default_contract("q4_k") == "f32"
    assert "contract half" in str(provider.rejects(dataclasses.replace(problem, contract="half")))
