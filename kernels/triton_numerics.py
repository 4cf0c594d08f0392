"""Number formats that NumPy lacks, as the GPU decodes and rounds them: bfloat16 and the OCP float8 pair.

Triton's interpreter keeps these values as raw codes (uint16, uint8). Everything here maps codes to float32 and back,
with the GPU's rules: round to nearest even by default, one NaN code, float8 saturates. Formats go by Triton's names.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format: `mantissa` explicit bits, `min_exponent` of its normal numbers, and its special codes."""

    bits: int
    mantissa: int
    min_exponent: int
    max_code: int
    overflow_code: int
    nan_code: int

    @property
    def uint(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.bits == 8 else np.uint16


# overflow_code: what a value that rounds beyond the largest finite one becomes. float8 saturates (cvt.satfinite).
FORMATS = {
    "bf16": Format(16, 7, -126, 0x7F7F, 0x7F80, 0x7FFF),
    "fp16": Format(16, 10, -14, 0x7BFF, 0x7C00, 0x7FFF),
    "fp8e4nv": Format(8, 3, -6, 0x7E, 0x7E, 0x7F),
    "fp8e5": Format(8, 2, -14, 0x7B, 0x7B, 0x7F),
}
RAW_FORMATS = frozenset(FORMATS) - {"fp16"}


def _float8_values(name: str) -> Array:
    fmt = FORMATS[name]
    code = np.arange(256)
    exponent, mantissa = (code & 0x7F) >> fmt.mantissa, code & ((1 << fmt.mantissa) - 1)
    significand = mantissa + (exponent > 0) * (1 << fmt.mantissa)
    value: Array = np.ldexp(significand, np.maximum(exponent, 1) - 1 + fmt.min_exponent - fmt.mantissa).astype(
        np.float32
    )
    value[(code & 0x7F) > fmt.max_code] = np.nan
    if name == "fp8e5":
        value[(code & 0x7F) == 0x7C] = np.inf
    return np.where(code & 0x80, -value, value).astype(np.float32)


_FLOAT8_VALUES = {name: _float8_values(name) for name in ("fp8e4nv", "fp8e5")}


def decode(codes: Array, name: str) -> Array:
    """float32 values of raw `codes` in format `name`; exact."""
    if name == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _FLOAT8_VALUES[name][codes]


def encode(values: Array, name: str, toward_zero: bool = False) -> Array:
    """Raw codes in format `name` of float `values`, rounded once: to nearest even, or `toward_zero`."""
    if name == "bf16" and values.dtype == np.float32 and not toward_zero:
        return _encode_bfloat16(values)
    fmt = FORMATS[name]
    magnitude = np.abs(values.astype(np.float64))
    nan, infinite = np.isnan(magnitude), np.isinf(magnitude)
    magnitude = np.where(nan | infinite, 0, magnitude)
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, fmt.min_exponent).clip(fmt.min_exponent)
    steps = np.ldexp(magnitude, fmt.mantissa - exponent)  # in units of the last place: exact
    steps = (np.trunc(steps) if toward_zero else np.rint(steps)).astype(np.int64)
    code = (
        (exponent.astype(np.int64) - fmt.min_exponent) << fmt.mantissa
    ) + steps  # a carry moves to the next exponent
    code = np.where(code > fmt.max_code, fmt.max_code if toward_zero else fmt.overflow_code, code)
    code = np.where(infinite, fmt.overflow_code, code)
    code = np.where(nan, fmt.nan_code, code | (np.signbit(values).astype(np.int64) << (fmt.bits - 1)))
    return code.astype(fmt.uint)


def _encode_bfloat16(values: Array) -> Array:
    bits = np.asarray(values, order="C").view(np.uint32)
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (lowest_kept + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FFF), rounded) if nan.any() else rounded


def to_integer(values: Array, dtype: np.dtype[Any]) -> Array:
    """Float to integer as cvt.rzi: toward zero, saturating, NaN to 0; 8 bits are the low byte of a 16-bit result."""
    register = np.dtype(np.int16 if dtype.kind == "i" else np.uint16) if dtype.itemsize == 1 else dtype
    low, high = (register.type(limit) for limit in (np.iinfo(register).min, np.iinfo(register).max))
    wide = np.trunc(values.astype(np.float64))
    inside = (wide >= float(low)) & (wide < float(high) + (0 if register.itemsize == 8 else 1))
    safe = np.where(inside, wide, 0).astype(register)
    edge = np.where(np.isnan(wide), register.type(0), np.where(wide < 0, low, high))
    return np.where(inside, safe, edge).astype(dtype)


def divide_full(x: Array, y: Array) -> Array:
    """float32 division as div.full does it, with a rounded reciprocal: off by one unit in a quarter of the cases."""
    quotient = x / y
    product = x * (np.float32(1) / y)
    usual = (np.abs(y) >= np.float32(2.0**-126)) & (np.abs(y) <= np.float32(2.0**126))
    usual &= np.isfinite(product) & (np.abs(product) >= np.float32(2.0**-126))
    return np.where(usual, product, quotient)


def flush_subnormal(values: Array) -> Array:
    """float32 as an .ftz instruction reads or writes it: subnormal numbers are zeros of their sign."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def to_tensorfloat32(values: Array) -> Array:
    """float32 as a TF32 tensor core reads it: the low 13 mantissa bits ignored; infinities and NaN as they are."""
    bits = np.asarray(values, dtype=np.float32, order="C").view(np.uint32)
    return np.where(np.isfinite(values), (bits & np.uint32(0xFFFFE000)).view(np.float32), values)
