"""Weights of more than 2^31 elements, in memory that is not touched: only the first and the last program run.

Every program of a launch works out its addresses in the same way, so that the last one shows whether any wraps. That
offsets of packed rows do not, `properties/far_blocks.py` shows of every format.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dequant_cases import EVERY_FORMAT, make

from pagebench.kernels import triton_interpreter
from pagebench.kernels.cupy_provider import CupyProvider, provider
from pagebench.properties.far_blocks import _untouched as untouched
from pagebench.reference import error_bounds
from pagebench.reference.dequant import dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv, assert_product, dequant_gemv
from pagebench.reference.dtypes import FLOAT16, Array, round_to

INTERPRETED = triton_interpreter.activate()

ON_HOST = pytest.mark.skipif(
    provider.device.on_gpu or provider.unavailable() is not None,
    reason="untouched pages cost nothing in host memory only; and there only where CUDA C++ can be compiled",
)
TRANSPOSED = ("gptq_v1", "gptq_v2", "awq")  # written as [k, n]
FEW = 128  # rows of the output at either end that hold anything: more than a program takes, whole blocks of scales
K, N = 2304, 16_448  # along the output's rows: whole blocks of every format, and whole tiles of no launcher's
NEVER = 0xFFFF  # bits of a float16 that no kernel writes: NaN, where all weights are finite


def near_and_far(
    format: str, *, axis: int, row: int, form: str | None = None, group_size: int | None = None
) -> tuple[Any, Any]:
    """(a weight of FEW along `axis`, n or k, and `row` along the other; one as wide and of more than 2^31 elements).

    The larger's packed arrays hold those of the smaller at either end and are never touched between.
    """
    sizes = {axis: FEW, 1 - axis: row}
    if group_size is None:
        group_size = -1 if format in TRANSPOSED else 128 if format.startswith("pack") else None
    options: dict[str, Any] = {} if group_size is None else {"group_size": group_size}
    small = make(format, form, shape=(sizes[0], sizes[1]), scales="normal", finite=True, dtype=FLOAT16, **options)
    sizes[axis] = FEW * ((1 << 31) // (row * FEW) + 1)
    shape = sizes[0], sizes[1]
    assert shape[0] * shape[1] > 1 << 31
    packed = {}
    for name, spec in FORMATS[format].specs(FORMATS[format].form(small.packed), shape, small.group_size).items():
        part = small.packed[name]
        if spec.shape == part.shape:
            packed[name] = part
            continue
        packed[name] = empty(spec.shape, part.dtype)
        (along,) = [i for i, (a, b) in enumerate(zip(spec.shape, part.shape, strict=True)) if a != b]
        for ends in (slice(None, part.shape[along]), slice(-part.shape[along], None)):
            packed[name][(slice(None),) * along + (ends,)] = part
    return small, dataclasses.replace(small, packed=packed, shape=shape)


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that take no memory until they are written."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return untouched(nbytes).view(dtype).reshape(shape)


class Output:
    """What a launcher writes to: an output of more than 2^31 elements, with NEVER at its ends."""

    def __init__(self, length: int) -> None:
        self.length = length

    def make(self, shape: tuple[int, ...], dtype: Any) -> Array:
        assert np.dtype(dtype) == FLOAT16
        array = empty(shape, dtype)
        flat = array.reshape(-1).view(np.uint16)
        flat[: self.length] = flat[-self.length :] = NEVER
        self.flat = flat
        return array

    def check(self, expected: Array) -> None:
        """Both ends were written to, and hold what the small weight's ends do where they were."""
        bits = expected.reshape(-1)
        assert len(bits) == self.length
        for name, got in (("first", self.flat[: self.length]), ("last", self.flat[-self.length :])):
            written = got != NEVER
            assert written.sum() >= min(512, self.length)
            assert written[0 if name == "first" else -1]
            error_bounds.assert_same_bits(name, got.view(FLOAT16)[written], bits[written])


def check_dequantize(format: str, run: Any, form: str | None = None) -> None:
    axis = 1 if format in TRANSPOSED else 0
    small, large = near_and_far(format, axis=axis, row=N if axis else K, form=form)
    weight = dequantize(small)
    output = Output(weight.size)
    run(large, output.make)
    output.check(np.ascontiguousarray(weight.T if axis else weight))


def with_x(weight: Any, x: Array) -> DequantGemv:
    return DequantGemv(**{f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}, x=x)


def check_gemv(format: str, run: Any) -> None:
    """The weight's n is large, so that y has two ends."""
    small, large = near_and_far(format, axis=0, row=64 if format in TRANSPOSED else 2304)
    x = round_to(np.random.default_rng(0).standard_normal((1, small.shape[1])), FLOAT16)
    y: list[Array] = []

    def make_y(shape: tuple[int, ...], dtype: Any) -> Array:
        assert shape == (1, large.shape[0])  # no scratch: one split
        y.append(empty(shape, dtype))
        y[0].view(np.uint16)[:, :FEW] = y[0].view(np.uint16)[:, -FEW:] = NEVER
        return y[0]

    run(with_x(large, x), make_y)
    expected = dequant_gemv(with_x(small, x))
    for ends in (slice(None, FEW), slice(-FEW, None)):
        got = y[0][:, ends]
        written = got.view(np.uint16)[0] != NEVER
        assert written.sum() >= 8
        part = dataclasses.replace(
            expected, **{f.name: getattr(expected, f.name)[:, written] for f in dataclasses.fields(expected)}
        )
        assert_product("y", got[:, written], part, FLOAT16)


# --- Triton


@pytest.fixture
def only_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches in the interpreter run their first and their last program."""

    def ends(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        return iter(dict.fromkeys([(0,) * len(sizes), tuple(size - 1 for size in sizes)]))

    monkeypatch.setattr(np, "ndindex", ends)  # what the launch's loop over programs takes them from


def run_triton(problem: Any, make_output: Any) -> None:
    import torch

    from pagebench.kernels.dequant_gemv_triton import dequant_gemv as gemv
    from pagebench.kernels.dequant_triton import dequantize as launch

    def to_tensor(array: Array) -> Any:
        return torch.from_numpy(np.atleast_1d(array)).reshape(array.shape)

    packed = {name: to_tensor(array) for name, array in problem.packed.items()}
    placed = object.__new__(type(problem))  # on the device nothing is validated
    for field in dataclasses.fields(problem):
        object.__setattr__(placed, field.name, getattr(problem, field.name))
    object.__setattr__(placed, "packed", packed)
    if problem.op == "dequant_gemv":
        object.__setattr__(placed, "x", to_tensor(problem.x))
        gemv(placed, lambda shape, dtype: to_tensor(make_output(tuple(shape), dtype)))
    else:
        launch(placed, lambda shape, dtype: to_tensor(make_output(tuple(shape), dtype)))


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: a GPU is present")
@EVERY_FORMAT
def test_triton_weights_beyond_32_bits(format: str, only_the_ends: None) -> None:
    check_dequantize(format, run_triton)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: a GPU is present")
@pytest.mark.parametrize("format", ["mxfp4", "nf4", "q6_k", "gptq_v2"])
def test_triton_products_beyond_32_bits(format: str, only_the_ends: None) -> None:
    check_gemv(format, run_triton)


# --- CUDA C++

COUNT_FROM = """
#include <cstdlib>
static unsigned first_program() { return strtoul(getenv("PAGEBENCH_FIRST_PROGRAM"), nullptr, 10); }
"""


def run_cuda(problem: Any, make_output: Any) -> None:
    """The first, then the last program of a launch on the host, as a grid of one that counts from there."""
    from pagebench.kernels import cuda_host

    outputs: list[Array] = []

    class Ends:
        def __init__(self, code: str, **options: Any) -> None:
            code = COUNT_FROM + code.replace("blockIdx.x", "(blockIdx.x + first_program())")
            self.module = cuda_host.RawModule(code=code, **options)

        def get_function(self, name: str) -> Any:
            kernel = self.module.get_function(name)

            class Launch:
                max_dynamic_shared_size_bytes = kernel.max_dynamic_shared_size_bytes

                def __call__(self, grid: tuple[int, ...], *arguments: Any, **more: Any) -> None:
                    assert set(grid[1:]) <= {1}
                    kernel.max_dynamic_shared_size_bytes = self.max_dynamic_shared_size_bytes
                    for first in (0, grid[0] - 1):
                        os.environ["PAGEBENCH_FIRST_PROGRAM"] = str(first)
                        kernel((1,), *arguments, **more)

            return Launch()

    def once(shape: tuple[int, ...], dtype: Any) -> Array:
        outputs.append(make_output(tuple(shape), dtype))
        return outputs[0]

    planted = CupyProvider(Ends)
    planted.empty = once  # type: ignore[method-assign]
    try:
        getattr(planted, problem.op)(problem)
    finally:
        os.environ.pop("PAGEBENCH_FIRST_PROGRAM", None)
    assert len(outputs) == 1


# A row after another, all rows as one, and [k, n]; all forms where these differ in it.
SEVERAL = ("fp8_e4m3", "nf4")
FAR_FORMS = [(name, form) for name in FORMATS for form in (FORMATS[name].forms if name in SEVERAL else [None])]


@ON_HOST
@pytest.mark.parametrize(("format", "form"), FAR_FORMS)
def test_cuda_weights_beyond_32_bits(format: str, form: str | None) -> None:
    check_dequantize(format, run_cuda, form)


@ON_HOST
@pytest.mark.parametrize("format", ["mxfp4", "awq"])
def test_cuda_products_beyond_32_bits(format: str) -> None:
    check_gemv(format, run_cuda)


# One row of more than 2^31 weights, which share a scale: a group is told apart from the others beyond 2^30 too.
@ON_HOST
@pytest.mark.parametrize(("format", "form"), [("pack_quantized_4", "symmetric"), ("int8", "group_zero")])
def test_cuda_rows_of_one_group_beyond_32_bits(format: str, form: str) -> None:
    small, large = near_and_far(format, axis=1, row=1, form=form, group_size=-1)
    output = Output(small.shape[1])
    run_cuda(large, output.make)
    output.check(dequantize(small))
