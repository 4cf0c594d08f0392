"""The lengths of real models' rows and columns that fill no tile, in every format that has them, by both providers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from dequant_cases import EVERY_FORM, EVERY_FORMAT, make, shape_of
from test_cupy_dequant import LAYOUTS, laid_out, next_to_the_middle
from test_cupy_dequant_gemv import with_x

from pagebench.kernels.providers import load_provider
from pagebench.reference import error_bounds
from pagebench.reference.dequant import Dequantize, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import assert_product, dequant_gemv
from pagebench.reference.dtypes import COMPUTE_DTYPES, FLOAT16, round_to

EVERY_PROVIDER = pytest.mark.parametrize("name", ["triton", "cupy"])
TAILS = (96, 576, 640, 2880, 4304)
# Elements of a weight with a tail along n. The interpreter takes a second for some 200,000, and its tiles of up to 512
# rows leave a tail at 577 and 640 as at any other length.
MOST = {"triton": 35_000, "cupy": 100_000}


def tails(format: str, provider: str) -> list[tuple[int, int]]:
    """(n, k) with a tail along k and n as odd as the format allows, and with one along n and the shortest rows."""
    known = FORMATS[format]
    n, k = (3 if known.n_multiple == 1 else known.n_multiple), max(known.k_multiple, 8)
    along_k = [(n, tail) for tail in TAILS if tail % k == 0]
    if format.startswith("pack_quantized") and format[-1] not in "34":
        return along_k  # one decoder serves all numbers of bits, and words lie along k
    along_n = [(tail, k) for tail in (97, 577, *TAILS) if tail % known.n_multiple == 0 and tail * k <= MOST[provider]]
    return along_k + along_n


def weight(format: str, i: int, shape: tuple[int, int], **options: Any) -> Dequantize:
    """The i-th: forms and layouts take turns. Groups of 64, the last one partial, where they need not divide k."""
    known = FORMATS[format]
    form = list(known.forms)[i % len(known.forms)]
    size = (8 if format.startswith("pack") else 64) if known.grouped(form) else None
    problem = make(format, form, shape=shape, group_size=size, seed=i, **options)
    if i % 2:  # rows that do not follow each other are not taken for one long row
        for key, array in problem.packed.items():
            problem.packed[key] = laid_out(array, "rows")
    return problem


def test_every_tail_occurs() -> None:
    for format, known in FORMATS.items():
        for name in MOST:
            shapes = tails(format, name)
            assert {k for _, k in shapes} >= {tail for tail in TAILS if tail % known.k_multiple == 0}
            assert known.n_multiple > 1 or any(n % 2 for n, _ in shapes)


@EVERY_PROVIDER
@EVERY_FORMAT
def test_tails_of_weights(format: str, name: str) -> None:
    provider = load_provider(name)
    for i, shape in enumerate(tails(format, name)):
        forms = len(FORMATS[format].forms)
        dtype = COMPUTE_DTYPES[(i + i // 3 * (forms % 3 == 0)) % 3]  # out of step with the forms
        problem = weight(format, i, shape, dtype=dtype)
        assert provider.rejects(problem) is None
        got = provider.to_host(provider.dequantize(problem.on(provider)))
        error_bounds.assert_same_bits(f"weight {shape}", np.ascontiguousarray(got), dequantize(problem))


@EVERY_FORM
def test_any_bits_in_any_layout(format: str, form: str) -> None:
    """By Triton; `test_cupy_dequant` is the same for CUDA C++. Every layout, and every dtype of result."""
    provider = load_provider("triton")
    n, k = shape_of(format)
    shape = (n if form == "block" else min(n, 24), k)  # only blocks of scales need the rows
    for seed, layout in enumerate(LAYOUTS):
        problem = make(format, form, shape=shape, seed=seed, dtype=COMPUTE_DTYPES[seed % 3])
        packed = {name: laid_out(array, layout) for name, array in problem.packed.items()}
        problem = dataclasses.replace(problem, packed=packed)
        got = provider.to_host(provider.dequantize(problem.on(provider)))
        error_bounds.assert_same_bits(f"weight, {layout}", np.ascontiguousarray(got), dequantize(problem))


def test_float32_scales_round_once() -> None:
    """By Triton, as `test_cupy_dequant` has it for CUDA C++."""
    provider = load_provider("triton")
    for problem in next_to_the_middle():
        got = provider.to_host(provider.dequantize(problem.on(provider)))
        error_bounds.assert_same_bits("weight", got, dequantize(problem))


@EVERY_PROVIDER
@pytest.mark.parametrize("format", ["gptq_v2", "awq"])
@pytest.mark.parametrize("group_size", [-1, 384, 1024])
def test_groups_larger_than_a_tile(format: str, group_size: int, name: str) -> None:
    """Than the 64 rows of k of a program of either backend, the last one partial."""
    provider = load_provider(name)
    problem = make(format, shape=(40, 1160), group_size=group_size)
    if "g_idx" in problem.packed:
        problem.packed["g_idx"][:] = np.arange(1160) // (1160 if group_size == -1 else group_size)
    got = provider.to_host(provider.dequantize(problem.on(provider)))
    error_bounds.assert_same_bits("weight", np.ascontiguousarray(got), dequantize(problem))


@EVERY_PROVIDER
@pytest.mark.parametrize("format", ["gptq_v2", "awq", "fp8_e4m3", "mxfp4", "nvfp4", "q4_k", "q8_0", "int8"])
def test_tails_of_products(format: str, name: str) -> None:
    provider = load_provider(name)
    for i, shape in enumerate(tails(format, name)[:4]):
        what = weight(format, i, shape, scales="normal", finite=True, dtype=FLOAT16)
        x = round_to(np.random.default_rng(i).standard_normal((1 + i % 3, shape[1])), what.dtype)
        problem = with_x(what, x)
        got = provider.to_host(provider.dequant_gemv(problem.on(provider)))
        assert_product(f"y {shape}", got, dequant_gemv(problem), what.dtype)
