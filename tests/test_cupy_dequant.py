"""The CUDA C++ dequantisation of every format against the reference: through CuPy on a GPU, else on the host."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dequant_cases import EVERY_FORM, EVERY_FORMAT, make

from pagebench.kernels import dequant_layouts
from pagebench.kernels.cupy_provider import CupyProvider, provider
from pagebench.reference import error_bounds
from pagebench.reference.dequant import Dequantize, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import BFLOAT16, COMPUTE_DTYPES, FLOAT16, FLOAT32, Array
from pagebench.reference.placement import place

pytestmark = pytest.mark.skipif(provider.unavailable() is not None, reason=str(provider.unavailable()))


class PoisonedProvider(CupyProvider):
    """Every output begins as NaN."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.to_device(np.full(nbytes, 0xFF, np.uint8).view(dtype).reshape(shape))


POISONED = PoisonedProvider()


def check(problem: Dequantize, **variant: Any) -> None:
    assert provider.rejects(problem) is None
    placed = place(problem, POISONED)
    weight = POISONED.to_host(POISONED.dequantize(placed.problem, **variant))
    placed.check_fences()
    error_bounds.assert_same_bits("weight", np.ascontiguousarray(weight), dequantize(problem))


@EVERY_FORM
def test_any_bits_to_every_dtype(format: str, form: str) -> None:
    for seed, dtype in enumerate(COMPUTE_DTYPES):
        problem = make(format, form, seed=seed, dtype=dtype)
        check(problem, **provider.variants(problem)[seed % 2])


# Rows that are no multiple of a tile or of a run, single rows, one weight more than a tile.
SHAPES = {1: [(1, 1), (3, 8), (2, 257), (5, 96), (2, 4304)], 8: [(8, 8), (8, 640), (264, 16)]}
LENGTHS = (16, 32, 256, 576, 2304, 2880)  # of rows of whole blocks


def shapes_of(format: str) -> list[tuple[int, int]]:
    known = FORMATS[format]
    if known.k_multiple in (1, 8):
        return SHAPES[known.n_multiple]
    lengths = [k for k in LENGTHS if k % known.k_multiple == 0]
    return [(known.n_multiple, lengths[0]), (3 * known.n_multiple, lengths[-1])]


@EVERY_FORMAT
def test_tails(format: str) -> None:
    for seed, shape in enumerate(shapes_of(format)):
        for form in FORMATS[format].forms:
            sizes = [size for size in FORMATS[format].group_sizes(form) if fits(format, form, shape, size)]
            size = sizes[seed % len(sizes)]
            problem = make(format, form, shape=shape, group_size=size, seed=seed, dtype=COMPUTE_DTYPES[seed % 3])
            check(problem, **provider.variants(problem)[seed % 2])


def fits(format: str, form: str, shape: tuple[int, int], group_size: int | None) -> bool:
    try:
        FORMATS[format].validate_sizes(form, shape, group_size)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize("group_size", [1, 3, 12, -1])
def test_groups_that_split_runs(bits: int, group_size: int) -> None:
    number = (FLOAT16, BFLOAT16, FLOAT32)[bits % 3]
    check(make(f"pack_quantized_{bits}", "zero_point", shape=(5, 60), group_size=group_size, number=number))


def test_int8_groups_that_split_runs() -> None:
    for group_size in (1, 5, 12):
        check(make("int8", "group_zero", shape=(3, 61), group_size=group_size, dtype=FLOAT16))


LAYOUTS = ("gaps", "rows", "columns", "odd bytes")


def laid_out(array: Array, layout: str) -> Array:
    """The same values as a view of a larger array whose other bytes are 0xFF."""
    if array.ndim == 0:
        return array
    wide = {
        "gaps": tuple(2 * size for size in array.shape),
        "rows": (3 * array.shape[0], *array.shape[1:]),
        "columns": (*array.shape[:-1], array.shape[-1] + 5),
        "odd bytes": (*array.shape[:-1], array.shape[-1] + 1),
    }[layout]
    view = {
        "gaps": tuple(slice(None, None, 2) for _ in array.shape),
        "rows": (slice(None, None, 3),),
        "columns": (..., slice(3, array.shape[-1] + 3)),
        "odd bytes": (..., slice(1, None)),
    }[layout]
    base = np.full(int(np.prod(wide)) * array.itemsize, 0xFF, np.uint8).view(array.dtype).reshape(wide)
    base[view] = array
    strided: Array = base[view]
    return strided


@EVERY_FORM
def test_strided_arrays(format: str, form: str) -> None:
    for seed, layout in enumerate(LAYOUTS):
        problem = make(format, form, seed=seed, dtype=FLOAT16)
        packed = {name: laid_out(array, layout) for name, array in problem.packed.items()}
        check(dataclasses.replace(problem, packed=packed))


@EVERY_FORMAT
def test_other_contracts_are_right_or_rejected(format: str) -> None:
    for contract in FORMATS[format].contracts:
        for form, dtype in zip(FORMATS[format].forms, (FLOAT16, BFLOAT16) * 3, strict=False):
            problem = make(format, form, contract=contract, dtype=dtype)
            reason = provider.rejects(problem)
            if reason is None:
                check(problem)
            else:
                assert reason.startswith(f"contract {contract} of {format} is not implemented")
                assert contract != default_contract(format)


def test_float32_scales_round_once() -> None:
    for problem in next_to_the_middle():
        check(problem)


def next_to_the_middle() -> Iterator[Dequantize]:
    """Products next to the middle of two 16-bit floats, which a float32 product would round onto it."""
    rng = np.random.default_rng(0)
    for dtype, half in ((FLOAT16, 2.0**-11), (BFLOAT16, 2.0**-8)):
        problem = make("pack_quantized_8", number=FLOAT32, scales="normal", shape=(256, 256), group_size=1, dtype=dtype)
        q = rng.integers(1, 127, (256, 256))
        middle = np.asarray(rng.standard_normal((256, 256)), dtype).astype(np.float64) * (1 + half)
        problem.packed["weight_scale"][...] = (middle / q).astype(FLOAT32)
        problem.packed["weight_packed"][...] = np.ascontiguousarray((q + 128).astype(np.uint8)).view(np.int32)
        yield problem


def test_every_format_of_the_reference_is_registered_once() -> None:
    rows, columns = dequant_layouts.ROW_FORMATS, dequant_layouts.COLUMN_FORMATS
    assert set(rows) | set(columns) == set(FORMATS)
    assert not set(rows) & set(columns)
    for name, format in [*rows.items(), *columns.items()]:
        assert set(format.contracts) <= set(FORMATS[name].contracts)
        assert provider.contract(name) == default_contract(name)
