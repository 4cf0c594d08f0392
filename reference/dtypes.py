"""The number formats of the project, as NumPy dtypes, and correct rounding between them.

bfloat16 and float8 come from `ml_dtypes`. Unit roundoff u is half the spacing of the floats just above 1.
"""

from typing import Any

import ml_dtypes
import numpy as np

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT8_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)

COMPUTE_DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
QUANTISED_DTYPES = (FLOAT8_E4M3FN, FLOAT8_E5M2, INT8)
# (lowest, highest) stored number of a quantised dtype.
CODE_LIMITS = {FLOAT8_E4M3FN: (-448.0, 448.0), FLOAT8_E5M2: (-57344.0, 57344.0), INT8: (-128.0, 127.0)}
# What a block that is only moved may hold: the numbers that both NumPy and device libraries have, in native byte order.
MOVED_DTYPES = frozenset(
    [*map(np.dtype, "?bhilqBHILQefdFD"), BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2]
    + [np.dtype(t) for t in (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu)]
)

Array = np.ndarray[Any, np.dtype[Any]]

# Significand bits with the implicit one, and the exponent of the smallest normal number.
_SIGNIFICAND = {FLOAT16: (11, -14), BFLOAT16: (8, -126), FLOAT32: (24, -126)}


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """u of a compute dtype: 2^-11 for float16, 2^-8 for bfloat16, 2^-24 for float32."""
    return float(2.0 ** -_SIGNIFICAND[dtype][0])


def half_smallest_subnormal(dtype: np.dtype[Any]) -> float:
    """Largest absolute rounding error of a result below the normal range of a compute dtype."""
    bits, low = _SIGNIFICAND[dtype]
    return float(2.0 ** (low - bits))


def largest_code(dtype: np.dtype[Any]) -> float:
    """The largest magnitude of a code of a quantised dtype."""
    return -CODE_LIMITS[dtype][0]


def round_to(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round float64 or float32 `values` once, to nearest even, to `dtype`; NaN, infinities and signs of zero are kept.

    `ml_dtypes` casts float64 to bfloat16 through float32, which rounds twice; rounding to odd in between mends that.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype == BFLOAT16 and values.dtype == np.float64:
            values = _round_to_odd_float32(values)
        return values.astype(dtype)


def _round_to_odd_float32(values: Array) -> Array:
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    # Step back towards zero where rounding went away from it: this is truncation ...
    truncated = np.where(np.abs(back) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)
    # ... and an inexact result gets an odd last bit.
    bits = truncated.view(np.uint32) if truncated.ndim else truncated.reshape(1).view(np.uint32)
    inexact = np.isfinite(values) & (truncated.astype(np.float64) != values)
    odd = np.where(inexact.reshape(bits.shape), bits | 1, bits).astype(np.uint32)
    return odd.view(np.float32).reshape(values.shape)


def to_float64(array: Array) -> Array:
    """Any dtype of the project to float64, exactly."""
    return array.astype(np.float64) if array.dtype.kind in "iuf" else array.astype(np.float32).astype(np.float64)


def as_bits(array: Array) -> Array:
    """The same elements as unsigned integers of the same size (a copy where `array` is not contiguous)."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)
