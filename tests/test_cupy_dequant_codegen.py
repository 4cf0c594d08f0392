"""What the CUDA C++ of dequantisation compiles to: nothing spilled, nothing contracted, nothing approximate."""

import re
from pathlib import Path
from typing import Any

import pytest

import pagebench.kernels
from bench import dequant_codegen_instructions
from bench._record_cuda import CudaToolsMissingError, nvrtc_compile
from bench.workloads import FUSED
from pagebench.kernels.dequant_layouts import COLUMN_FORMATS, ROW_FORMATS

KERNELS = Path(next(iter(pagebench.kernels.__path__)))
ROWS = tuple(sorted({format.struct for format in ROW_FORMATS.values()}))
COLUMNS = tuple(sorted({format.struct for format in COLUMN_FORMATS.values()}))
# Those that round float32 products to odd for a single rounding, which takes a multiply-add for what is lost; and those
# whose products of a factor and a code are exact, so that a multiply-add rounds as a difference would.
EXACT_BY_FMA = ("Int8", "PackQuantized", "Q4K", "Q5K")


def compiled(source: str, names: tuple[str, ...]) -> Any:
    try:
        return nvrtc_compile((KERNELS / source).read_text(), ("-std=c++17", f"-I{KERNELS}"), names, 90)
    except CudaToolsMissingError as error:
        pytest.skip(str(error))


def test_dequantisation_neither_contracts_nor_spills() -> None:
    names = (*(f"dequantize_rows<{s}>" for s in ROWS), *(f"dequantize_columns<{s}>" for s in COLUMNS))
    module = compiled("dequant.cu", names)
    for name in names:
        stats, ptx = module.kernels[module.symbol(name)], module.ptx_of(name)
        assert stats.spills == 0, name
        assert stats.generic_accesses == 0, name
        assert stats.global_stores[128] > 0, name
        assert set(stats.async_copies) <= {128}, name  # of packed bytes; narrow loads are of scales and ends
        assert stats.async_copies.get(128, 0) + stats.global_loads.get(128, 0) > 0, name
        assert not re.search(r"div\.(approx|full)|\.ftz|mad\.rn\.f32", ptx), name
        assert ("fma.rn" in ptx) == any(struct in name for struct in EXACT_BY_FMA), name


def test_the_fused_product_multiplies_on_tensor_cores_without_spilling() -> None:
    columns = (f"dequant_gemv_columns<{s}, __half>" for s in COLUMNS)
    names = (*(f"dequant_gemv_rows<{s}, __half>" for s in ("Q4K", "Fp8")), *columns)
    module = compiled("dequant_gemv.cu", names)
    for name in names:
        stats, ptx = module.kernels[module.symbol(name)], module.ptx_of(name)
        assert stats.spills == 0, name
        assert stats.generic_accesses == 0, name
        assert stats.matrix["HMMA"] >= 8, name  # four weights of a lane to each
        assert set(stats.async_copies) == {128}, name
        # Of exact products, or with scales and zero points of sums.
        assert ("fma.rn" in ptx) == ("Q4K" in name or "columns" in name), name


# A little above what NVRTC 13.2 makes of them, or what an H200 issues at 75 % of its bandwidth.
MOST = {
    "gptq": dequant_codegen_instructions.affordable("gptq"),
    "awq": 3.9,
    "fp8-block": dequant_codegen_instructions.affordable("fp8-block"),
    "int8-channel": 6.2,
    "mxfp4": 4.0,
    "nvfp4": dequant_codegen_instructions.affordable("nvfp4"),
    "q8_0": 6.5,
    "q4_k": 3.7,
}


@pytest.mark.parametrize("name", MOST)
def test_instructions_of_a_weight(name: str) -> None:
    try:
        found = dequant_codegen_instructions.per_weight(name)
    except CudaToolsMissingError as error:
        pytest.skip(str(error))
    assert found <= MOST[name]


def test_every_fused_format_is_counted() -> None:
    assert set(MOST) == set(dequant_codegen_instructions.FUSED) == set(FUSED)
