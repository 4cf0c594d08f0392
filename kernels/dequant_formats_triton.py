"""The packed formats in Triton: one line each. A new format is a device function (`dequant_tile_triton`) and a line.

`Weight` is what a launcher needs to know of one packed weight: the arrays in order, their strides, and how to cut it
into tiles.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from pagebench.kernels import dequant_codes_triton as codes
from pagebench.kernels import dequant_float_triton as floats
from pagebench.kernels import dequant_gguf_triton as gguf
from pagebench.kernels import dequant_integer_triton as integers
from pagebench.kernels.dequant_tile_triton import How
from pagebench.reference import dequant_formats
from pagebench.reference.dequant import PackedWeight, default_contract
from pagebench.reference.dequant_float import FP4_CODES, NF4_CODES
from pagebench.reference.dtypes import FLOAT32


@dataclass(frozen=True, slots=True)
class Codes:
    """How the fused product takes codes to tensor cores: see `dequant_codes_triton`, also for `decode` and `finish`.

    per: codes in a word of 32 bits; span: in a block with a scale of its own, 0 for those of How; offset: there is one.
    """

    decode: Any
    per: int
    span: int
    finish: Any
    offset: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """`decode` decodes tiles of whole units of row_unit x column_unit elements.

    transposed: the weight is decoded as [k, n]. flat: its packing runs on from row to row, so that it may be decoded as
    one long row. table: what `decode` looks up. bits: see How. registers: a thread may have as many; left to itself the
    compiler aims at 64 or less for one GPU or another, and spills the few that are missing. onward: decodes tiles one
    after another along k, keeping what they share; rows_named: each row of the weight names its group.
    codes: for float16 and few rows of x.
    """

    decode: Any
    row_unit: int = 1
    column_unit: int = 1
    transposed: bool = False
    flat: bool = False
    table: tuple[float, ...] = ()
    bits: int = 0
    registers: int | None = None
    onward: Any = None
    rows_named: bool = False
    codes: Codes | None = None
    added: int = 0


def _gptq(decode: Any, onward: Any, added: int) -> Format:
    return Format(decode, 8, 8, transposed=True, registers=128, onward=onward, rows_named=True, added=added)


FORMATS: dict[str, Format] = {
    "fp8_e4m3": Format(floats.fp8_e4m3, codes=Codes(codes.fp8_e4m3, 4, 0, codes.finish_fp8_e4m3)),
    "fp8_e5m2": Format(floats.fp8_e5m2, codes=Codes(codes.fp8_e5m2, 4, 0, codes.finish_fp8_e5m2)),
    "int8": Format(integers.int8),
    "gptq_v1": _gptq(integers.gptq_v1, integers.gptq_v1_onward, 1),
    "gptq_v2": _gptq(integers.gptq_v2, integers.gptq_v2_onward, 0),
    "awq": Format(
        integers.awq,
        1,
        8,
        transposed=True,
        onward=integers.awq_onward,
        codes=Codes(codes.awq, 1, 32, codes.finish_awq, offset=True),
    ),
    **{f"pack_quantized_{bits}": Format(integers.pack_quantized, 1, 32, bits=bits) for bits in range(2, 9)},
    "mxfp4": Format(floats.mxfp4, 1, 32, codes=Codes(codes.mxfp4, 8, 32, codes.finish_mxfp4)),
    "nvfp4": Format(floats.nvfp4, 1, 16, codes=Codes(codes.nvfp4, 8, 16, codes.finish_nvfp4)),
    "nvfp4_ct": Format(floats.nvfp4_ct, 1, 16, registers=128, codes=Codes(codes.nvfp4, 8, 16, codes.finish_nvfp4_ct)),
    "nvfp4_swizzled": Format(
        floats.nvfp4_swizzled, 1, 16, codes=Codes(codes.nvfp4_swizzled, 8, 16, codes.finish_nvfp4)
    ),
    "nf4": Format(floats.bits4, 1, 2, flat=True, table=NF4_CODES),
    "fp4": Format(floats.bits4, 1, 2, flat=True, table=FP4_CODES),
    "q4_0": Format(gguf.q4_0, 1, 32),
    "q4_1": Format(gguf.q4_1, 1, 32, registers=128),
    "q5_0": Format(gguf.q5_0, 1, 32, registers=128),
    "q8_0": Format(gguf.q8_0, 1, 32),
    "q4_k": Format(gguf.q4_k, 1, 256, codes=Codes(codes.q4_k, 4, 32, codes.finish_nothing, offset=True)),
    "q5_k": Format(gguf.q5_k, 1, 256),
    "q6_k": Format(gguf.q6_k, 1, 256),
}


def rejects(problem: PackedWeight) -> str | None:
    """Why a host problem is not supported; None when it is. Arithmetic is exact where that is the default, else f32."""
    name, contract = problem.format, problem.contract
    if name not in FORMATS:
        return f"format {name} is not supported"
    exact = default_contract(name) == "exact"  # then float32 is exact too, save for pack_quantized with float32 scales
    same = ("exact", "f32") if exact else ("f32", "f32x2") if FORMATS[name].table else ("f32",)
    return None if contract in same else f"contract {contract} of {name} is not supported"


class Weight:
    """A packed weight of device arrays, as [rows, columns] of its storage: [n, k], transposed [k, n], or one row.

    arrays and strides are what a device function takes as `packed` and `strides`. words: the first array
    may be read 4 bytes at a time.
    """

    def __init__(self, problem: PackedWeight, *, flat: bool) -> None:
        self.format = FORMATS[problem.format]
        n, k = problem.shape
        self.flat = flat and self.format.flat
        self.rows, self.columns = (k, n) if self.format.transposed else (1, n * k) if self.flat else (n, k)
        self.form, self.arrays = _form(problem)
        self.align = 1
        first, *rest = ([0, *array.stride()] if array.ndim == 1 else list(array.stride()) for array in self.arrays)
        # A longer stride stays whole: a kernel would multiply its quotient by `align` in 32 bits.
        if first[-1] == 1 and first[0] < 2**31 and self.arrays[0].data_ptr() % 16 == 0:
            self.align = _power_of_two(first[0], 16)
        first[0] //= self.align
        dense = self.align >= 4 and self.arrays[0][0].is_contiguous()
        self.words = dense or self.arrays[0].dtype == torch.int32
        self.strides = (*first, *(stride for strides in rest for stride in strides or (0, 0)))
        if self.format.table:
            self.arrays = (*self.arrays, _table(self.format.table, self.arrays[0].device))
        # A quotient of wide scales is exact only before the output's rounding
        wide = problem.format.startswith("pack_quantized") and self.arrays[1].dtype == torch.float32
        self.to_odd = wide and problem.contract == "exact" and problem.dtype != FLOAT32
        self.group = 128 if self.form == "block" else max(problem.group_size or 0, 0)
        if not self.format.table and self.group >= k:  # one group of all k, of whatever size
            self.group = 0

    def how(self, rows: int, columns: int) -> How:
        """For tiles of rows x columns, powers of two that are multiples of the format's units."""
        form, group = self.form, self.group
        if self.format.table and not self.flat:  # blocks begin anywhere in a row, so spans must divide its length too
            group = _power_of_two(self.columns, group & -group)
            form += " odd" if self.columns % 2 else ""
        extent = rows if self.format.transposed else columns
        return How(
            rows=rows,
            columns=columns,
            even=self.rows % rows == 0 and self.columns % columns == 0,
            unit=_power_of_two(self.columns, columns),
            align=self.align,
            form=form,
            group=self.group,
            span=_power_of_two(group, extent),
            bits=self.format.bits,
            to_odd=self.to_odd,
        )

    def tile(self, rows: int, columns: int) -> tuple[int, int]:
        """A tile of about rows x columns: whole units of the format, powers of two, not much larger than the weight."""
        return (
            _extent(rows, self.format.row_unit, self.rows),
            _extent(columns, self.format.column_unit, self.columns),
        )


def _form(problem: PackedWeight) -> tuple[str, tuple[torch.Tensor, ...]]:
    """The form of a problem with device arrays, and these in the form's order; as `PackedFormat.form`, unchecked."""
    forms = dequant_formats.FORMATS[problem.format].forms
    found = [form for form, names in forms.items() if set(names) == set(problem.packed)]
    form = found[0] if len(found) == 1 else found[problem.packed["scale"].ndim]
    return form, tuple(problem.packed[name] for name in forms[form])


def _power_of_two(number: int, limit: int) -> int:
    """The largest power of two that divides `number`, at most `limit`, itself one."""
    return int(min(number & -number, limit)) if number else limit


def _extent(elements: int, unit: int, extent: int) -> int:
    """Elements of a tile along an axis of `extent`."""
    units = min(max(elements // unit, 1), triton.next_power_of_2(triton.cdiv(extent, unit)))
    return int(units * unit)


_tables: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}


def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """float32 on the device, made once."""
    if (values, device) not in _tables:
        _tables[values, device] = torch.tensor(values, dtype=torch.float32, device=device)
    return _tables[values, device]
