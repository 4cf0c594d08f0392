"""Checks at the door: a ValueError that names the argument, the rule and the value."""

from collections.abc import Collection
from typing import Any

import numpy as np


def require(condition: object, argument: str, rule: str, value: object) -> None:
    """Raise ValueError `argument must rule, got value` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{argument} must {rule}, got {value!r}")


def require_array(
    argument: str,
    array: Any,
    *,
    dtypes: Collection[np.dtype[Any]] | None = None,
    ndim: int | None = None,
    shape: tuple[int | None, ...] | None = None,
) -> None:
    """Require a NumPy array of one of `dtypes`, of `ndim` dimensions and of `shape` (None = any length)."""
    # Nor a subclass with a meaning of its own: kernels would not see a mask, and a matrix has no one-dimensional row.
    plain = isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray | np.matrix)
    require(plain, argument, "be a NumPy array", type(array).__name__)
    if dtypes is not None:
        require(array.dtype in dtypes, argument, f"have dtype {' or '.join(str(d) for d in dtypes)}", str(array.dtype))
    if ndim is not None:
        require(array.ndim == ndim, argument, f"have {ndim} dimensions", array.shape)
    if shape is not None:
        fits = array.ndim == len(shape) and all(w is None or n == w for n, w in zip(array.shape, shape, strict=False))
        require(fits, argument, f"have shape [{', '.join('any' if w is None else str(w) for w in shape)}]", array.shape)
    require(all(s >= 0 for s in array.strides), argument, "have no negative stride", array.strides)
    require(array.flags.aligned, argument, "be aligned to its item size", array.ctypes.data)


def require_dtype(argument: str, dtype: Any, dtypes: Collection[np.dtype[Any]]) -> None:
    """Require a NumPy dtype among `dtypes`. A name or a scalar type compares equal to one, but has no `itemsize`."""
    rule = f"be {' or '.join(str(d) for d in dtypes)} as a numpy.dtype"
    require(isinstance(dtype, np.dtype) and dtype in dtypes, argument, rule, dtype)


def require_writeable(argument: str, array: np.ndarray[Any, Any]) -> None:
    """Require an array that an op in place may write."""
    got = f"a read-only array {list(array.shape)}"
    require(array.flags.writeable, argument, "be writeable, since the op works in place", got)


def require_all(argument: str, array: np.ndarray[Any, Any], ok: np.ndarray[Any, Any], rule: str) -> None:
    """Require `ok` everywhere; the error shows the first offending element and its index."""
    if not ok.all():
        where = tuple(int(i) for i in np.argwhere(~ok)[0])
        raise ValueError(f"{argument} must {rule}, got {array[where]!r} at index {list(where)}")


def require_finite(argument: str, value: Any) -> None:
    """Require every element (or the scalar) to be finite."""
    array = np.asarray(value)
    require_all(argument, array, np.isfinite(array.astype(np.float64)), "be finite")


def require_real(argument: str, value: Any) -> None:
    """Require a finite Python or NumPy real number (no bool) within the range of float32."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    number = value.item() if isinstance(value, np.generic) else value  # Python's compare whatever their size
    most = int(np.finfo(np.float32).max)
    require(real and -most <= number <= most, argument, "be finite and within float32", value)


def require_option(argument: str, value: Any, low: int, high: int, *, power_of_two: bool = False) -> None:
    """Require of an option of a launch a Python integer (no bool) from `low` to `high`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    kind = "a power of two" if power_of_two else "an integer"
    require(whole and not (power_of_two and value & (value - 1)), argument, f"be {kind} from {low} to {high}", value)


def require_int(argument: str, value: Any, *, low: int) -> None:
    """Require a Python or NumPy integer (no bool) of at least `low`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(whole and value >= low, argument, f"be an integer >= {low}", value)
