"""Llama-3-8B's four projections take the kernels' whole, 16-byte paths in every format; nothing is compiled or run."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dequant_cases import EVERY_FORMAT

from bench.dequant_codegen import EXCEPTIONS
from bench.workloads import GROUPS, LLAMA_3_8B, projections
from pagebench.kernels import dequant_cupy
from pagebench.kernels.cupy_launch import Device
from pagebench.kernels.dequant_layouts import COLUMN_FORMATS
from pagebench.kernels.providers import load_provider
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import FLOAT16


def untouched(format: str, form: str, shape: tuple[int, int]) -> Dequantize:
    """A weight of zeros, whose pages are never touched; arrays begin at multiples of 256 bytes, as on a GPU."""
    known = FORMATS[format]
    group_size = GROUPS.get(format, 128) if known.grouped(form) else None
    device = Device(raw_module=object)
    specs = known.specs(form, shape, group_size)
    packed = {name: device.empty(spec.shape, spec.dtypes[0]) for name, spec in specs.items()}
    if "g_idx" in packed:
        packed["g_idx"][...] = 0
    return Dequantize(format, packed, shape, group_size, FLOAT16, default_contract(format))


class Recorder:
    """In place of a kernel, of either backend: keeps what it is launched with."""

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        self.args, self.named = args, named


@EVERY_FORMAT
def test_triton_tiles_fill_them(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = load_provider("triton")
    from pagebench.kernels import dequant_triton

    for form in FORMATS[format].forms:
        for shape in projections(LLAMA_3_8B).values():
            kernel = Recorder()
            monkeypatch.setattr(dequant_triton, "dequantize_kernel", kernel)
            problem = untouched(format, form, shape)
            on_device = _replaced(problem, {name: triton.to_device(a) for name, a in problem.packed.items()})
            dequant_triton.dequantize(on_device, triton.empty)
            how = kernel.named["HOW"]
            assert how.even, shape
            assert kernel.named["enable_fp_fusion"] is False  # no contract is at the compiler's mercy
            assert how.align == 16 or format in EXCEPTIONS, (shape, how.align)


def _replaced(problem: Any, packed: dict[str, Any]) -> Any:
    changed = object.__new__(type(problem))
    for name in ("format", "shape", "group_size", "dtype", "contract"):
        object.__setattr__(changed, name, getattr(problem, name))
    object.__setattr__(changed, "packed", packed)
    return changed


@EVERY_FORMAT
def test_cuda_rows_are_whole_words(format: str) -> None:
    for form in FORMATS[format].forms:
        for shape in projections(LLAMA_3_8B).values():
            kernel = Recorder()
            device = SimpleNamespace(kernel=lambda source, name, kernel=kernel: kernel)
            recording = SimpleNamespace(device=device, empty=Device(raw_module=object).empty)
            dequant_cupy.dequantize(recording, untouched(format, form, shape))
            arguments = kernel.args[2]
            if format in COLUMN_FORMATS:
                assert arguments[7] & 1, shape  # mode: codes, scales and g_idx in words of 16 bytes
                continue
            assert arguments[2] == 1, shape  # runs of eight weights are stored whole
            dense = [argument for argument in arguments if isinstance(argument, np.int32)][-1]
            assert dense == 1, shape
