"""The packed formats as the CUDA C++ kernels see them: the registration of each, and a problem's arrays as arguments.

A format is a struct in dequant_formats.cuh, dequant_gguf.cuh or dequant_columns.cuh and a line in ROW_FORMATS or
COLUMN_FORMATS. `settings` gives what the struct's comment calls its mode, and how many weights share a scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import address
from pagebench.reference.dtypes import COMPUTE_DTYPES, FLOAT32

KINDS = {dtype: np.int32(kind) for kind, dtype in enumerate(COMPUTE_DTYPES)}  # as in dequant_common.cuh
UNIT = 256  # weights; every format's blocks fit into it
STAGE_PAD = 48  # as in dequant_common.cuh
_ALL = 0  # as a group: the whole row
_INNER = 1 << 30  # bytes of a row that lie evenly, a part of it only for `Bytes`, which has a shift for them
_NONE = (None, np.int64(0), np.int64(0))

# Contracts that give the same bits as `exact`: scales of 16 bits times small integers are exact in float32 too.
_EXACT = ("exact", "f32")


@dataclass(frozen=True, slots=True)
class Settings:
    """group: weights along k under one scale, 0 for all (for NF4 and FP4 its logarithm). row_shift: a scale serves
    2^row_shift rows."""

    mode: int = 0
    group: int = _ALL
    row_shift: int = 0


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format whose bytes run along a row.

    packed: name of the array of those bytes; arrays: names of the others in the struct's order, tuples for one form or
    the other, absent ones allowed. nbytes: bytes of UNIT weights. flat: rows follow each other without a gap, even
    within a byte. of_rows: a one-dimensional array belongs to the rows.
    """

    struct: str
    packed: str
    nbytes: int
    contracts: tuple[str, ...]
    arrays: tuple[str, ...] = ()
    settings: Callable[[Any], Settings] = lambda problem: Settings()
    flat: bool = False
    of_rows: bool = False
    elements: int = 8


@dataclass(frozen=True, slots=True)
class ColumnFormat:
    """A format of codes across rows of [k, n]. words: of its arrays, what is loaded in 16-byte words where it can be;
    by_row: each row names its group; mode: of the struct."""

    struct: str
    arrays: tuple[str, ...]
    words: tuple[str, ...]
    mode: int = 0
    by_row: bool = False
    contracts: tuple[str, ...] = _EXACT


def _fp8(mode: int) -> Callable[[Any], Settings]:
    def settings(problem: Any) -> Settings:
        return Settings(mode, 128, 7) if problem.packed["scale"].ndim == 2 else Settings(mode)

    return settings


def _rounds_to_odd(problem: Any, scale: str) -> bool:
    """Whether a float32 product is not the exact one that is to be rounded once to 16 bits."""
    inexact = problem.contract == "exact" and problem.dtype != FLOAT32
    return bool(inexact and problem.packed[scale].dtype == FLOAT32)


def _int8(problem: Any) -> Settings:
    mode = ("zero_point" in problem.packed) | _rounds_to_odd(problem, "scale") << 1
    return Settings(mode, _group(problem) if problem.packed["scale"].ndim == 2 else _ALL)


def _pack_quantized(bits: int) -> Callable[[Any], Settings]:
    def settings(problem: Any) -> Settings:
        zero = "weight_zero_point" in problem.packed
        return Settings(bits | zero << 4 | _rounds_to_odd(problem, "weight_scale") << 5, _group(problem))

    return settings


def _nvfp4(mode: int) -> Callable[[Any], Settings]:
    return lambda problem: Settings(mode | (problem.contract == "f32x2") << 2)


def _bits4(mode: int) -> Callable[[Any], Settings]:
    return lambda problem: Settings(mode | ("absmax_q" in problem.packed) << 1, problem.group_size.bit_length() - 1)


def _group(problem: Any) -> int:
    return group_below(problem) or _ALL


def group_below(problem: Any) -> int:
    """The group's elements; 0 where there is one group of all k."""
    return int(problem.group_size) if 0 < problem.group_size < problem.shape[1] else 0


def _nvfp4_format(mode: int) -> RowFormat:
    arrays = ("weight_scale", "global_scale")
    return RowFormat("Nvfp4", "weight_packed", 128, ("f32", "f32x2"), arrays, _nvfp4(mode))


def _gguf(struct: str, elements: int, nbytes: int, *contracts: str) -> RowFormat:
    return RowFormat(struct, "blocks", UNIT // elements * nbytes, contracts or _EXACT, elements=elements)


_SCALES, _ABSMAX = ("scale", "zero_point"), ("absmax", "absmax_q", "absmax2", "offset", "code2")
_PACKED = ("weight_scale", "weight_zero_point")

ROW_FORMATS: dict[str, RowFormat] = {
    "fp8_e4m3": RowFormat("Fp8", "weight", 256, ("f32",), _SCALES, _fp8(0), of_rows=True),
    "fp8_e5m2": RowFormat("Fp8", "weight", 256, ("f32",), _SCALES, _fp8(1), of_rows=True),
    "int8": RowFormat("Int8", "weight", 256, ("f32", "exact"), _SCALES, _int8, of_rows=True),
    **{
        f"pack_quantized_{bits}": RowFormat(
            "PackQuantized", "weight_packed", 32 * bits, _EXACT, _PACKED, _pack_quantized(bits)
        )
        for bits in range(2, 9)
    },
    "mxfp4": RowFormat("Mxfp4", "blocks", 128, _EXACT, ("scales",)),
    "nvfp4": _nvfp4_format(0),
    "nvfp4_ct": _nvfp4_format(1),
    "nvfp4_swizzled": _nvfp4_format(2),
    "nf4": RowFormat("Bits4", "packed", 128, ("f32", "f32x2"), _ABSMAX, _bits4(0), flat=True),
    "fp4": RowFormat("Bits4", "packed", 128, ("f32", "f32x2"), _ABSMAX, _bits4(1), flat=True),
    "q4_0": _gguf("Q4Zero", 32, 18),
    "q4_1": _gguf("Q4One", 32, 20, "f32"),
    "q5_0": _gguf("Q5Zero", 32, 22),
    "q8_0": _gguf("Q8Zero", 32, 34),
    "q4_k": _gguf("Q4K", 256, 144, "f32"),
    "q5_k": _gguf("Q5K", 256, 176, "f32"),
    "q6_k": _gguf("Q6K", 256, 210),
}

_GPTQ = (("qzeros", "scales", "g_idx"), ("qweight", "scales", "g_idx"))
COLUMN_FORMATS: dict[str, ColumnFormat] = {
    "gptq_v1": ColumnFormat("Gptq", *_GPTQ, mode=2, by_row=True),
    "gptq_v2": ColumnFormat("Gptq", *_GPTQ, by_row=True),
    "awq": ColumnFormat("Awq", ("qzeros", "scales"), ("qweight", "scales")),
}


@dataclass(frozen=True, slots=True)
class RowArguments:
    """What a kernel of a row format is given: the weight as `rows` of `k`, perhaps all of it as one row."""

    format: RowFormat
    rows: int
    k: int
    parameters: tuple[Any, ...]  # group ... scale_kind
    packed: tuple[Any, ...]  # bytes ... dense
    arrays: tuple[Any, ...]  # data0 ... column3


def row_arguments(problem: Any, *, one_row: bool) -> RowArguments:
    """The arguments of `problem`. one_row: take the whole weight as one row where its arrays lie so."""
    format = ROW_FORMATS[problem.format]
    n, k = problem.shape
    set_to, bytes_ = format.settings(problem), problem.packed[format.packed]
    others = [problem.packed[name] for name in format.arrays if name in problem.packed]
    joined = one_row and (format.flat or _is_one_row(format, set_to, bytes_, others))
    kind = KINDS[others[0].dtype] if others and others[0].dtype in KINDS else np.int32(0)
    triples = [_triple(array, format, joined) for array in others]
    # An absent array's place is never read; any array fills it, and no kernel sees a null pointer.
    triples += [(bytes_, np.int64(0), np.int64(0))] * (4 - len(triples))
    return RowArguments(
        format,
        1 if joined else n,
        n * k if joined else k,
        (np.int32(set_to.group), np.int32(set_to.row_shift), np.int32(set_to.mode), kind),
        _bytes(bytes_, joined),
        tuple(argument for triple in triples for argument in triple),
    )


def _is_one_row(format: RowFormat, settings: Settings, packed: Any, others: list[Any]) -> bool:
    """Whether rows, packed bytes and scales alike, follow each other as if they were one."""
    if settings.row_shift or (settings.mode & 2 and format.struct == "Nvfp4") or format.struct == "PackQuantized":
        return False
    if format.of_rows and others[0].ndim:
        return False
    return all(array.flags.c_contiguous for array in (packed, *others))


def _triple(array: Any, format: RowFormat, joined: bool) -> tuple[Any, np.int64, np.int64]:
    """Pointer, row and column stride in elements."""
    strides = [np.int64(stride // array.itemsize) for stride in array.strides]
    none = np.int64(0)
    if array.ndim == 0:
        return array, none, none
    if array.ndim == 1:
        return (array, strides[0], none) if format.of_rows else (array, none, strides[0])
    return (array, none, np.int64(1)) if joined else (array, strides[0], strides[1])


def _bytes(array: Any, joined: bool) -> tuple[Any, ...]:
    """(array, row stride, outer stride, byte stride, log2(inner), dense) of the packed bytes; strides in bytes."""
    *outer, last = array.strides
    inner, stride, step = _INNER, last, _INNER * last
    if array.itemsize > 1:  # words of bytes
        inner, stride, step = array.itemsize, 1, last
    elif array.ndim == 3:
        inner, step = array.shape[2], outer[1]
    dense = stride == 1 and (step == inner or (array.ndim > 1 and array.shape[1] == 1))
    row = 0 if joined or array.ndim == 1 else outer[0]
    return array, np.int64(row), np.int64(step), np.int64(stride), np.int32(inner.bit_length() - 1), np.int32(dense)


def column_parameters(problem: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(group, mode, scale_kind) and the packed arrays with their strides, of a format of columns."""
    format = COLUMN_FORMATS[problem.format]
    wide = all(_loads_16_bytes(problem.packed[name]) for name in format.words)
    if format.struct == "Awq":
        wide = wide and problem.shape[0] % 32 == 0
    arrays: list[Any] = []
    for name in ("qweight", *format.arrays):
        array = problem.packed[name]
        *outer, column = (np.int64(stride // array.itemsize) for stride in array.strides)
        arrays += [array, outer[0] if outer else np.int64(0), column]
    arrays += [arrays[0], np.int64(0), np.int64(0)] * (3 - len(format.arrays))
    kind = KINDS[problem.packed["scales"].dtype]
    return (np.int32(_group(problem)), np.int32(format.mode | wide), kind), tuple(arrays)


def _loads_16_bytes(array: Any) -> bool:
    *outer, column = array.strides
    return column == array.itemsize and address(array) % 16 == 0 and all(stride % 16 == 0 for stride in outer)


def rejects(problem: Any) -> str | None:
    """Why the kernels do not support a packed weight; None when they do."""
    format = ROW_FORMATS.get(problem.format) or COLUMN_FORMATS.get(problem.format)
    if format is None:
        return f"format {problem.format} is not implemented"
    if problem.contract not in format.contracts:
        return (
            f"contract {problem.contract} of {problem.format} is not implemented: {' and '.join(format.contracts)} are"
        )
    return None
