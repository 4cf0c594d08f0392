"""The fused product y = x W^T straight from packed weights: the problem, its meaning, its error bound, its bytes.

Meaning: W is the weight under the rounding contract, before its rounding to the output dtype; y is the exact product,
rounded once. So x = identity gives the columns that `dequantize` gives.

The bound. u = 2^-24 is the unit roundoff of float32, u_d that of the dtype, s_d half its smallest subnormal. A weight
is a sum of terms (scale * q and -scale * zero, or d * q and m); mag is the sum of their magnitudes. A kernel may
  (1) evaluate the terms in another order in float32, or move a scale out of the sum, four roundings each: 4 u mag |x|;
  (2) round each weight to the dtype, as tensor cores want it: (u_d |w| + s_d) |x|;
  (3) multiply in float32, and add up at most 2 k terms in any order and any split:
      (u + accumulation(2 k)) mag |x|, see `error_bounds.accumulation`;
  (4) round the result to the dtype: u_d |y| + s_d.
Sums run over k. First-order terms are multiplied by 1.01 to cover their products.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dequant import PackedWeight, decode
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import (
    Array,
    half_smallest_subnormal,
    round_to,
    to_float64,
    unit_roundoff,
)
from pagebench.reference.error_bounds import SECOND_ORDER, U, accumulation, assert_close
from pagebench.reference.validation import require, require_array


@dataclass(frozen=True, slots=True, eq=False)
class DequantGemv(PackedWeight):
    """y [m, n] = x [m, k] W^T for a packed weight W [n, k], both x and y of `dtype`; the other fields as in Dequantize.

    A row of x that holds NaN or infinities affects only its own row of y. Raises ValueError as Dequantize does, and for
    an x of another dtype or width, or without rows.
    """

    x: Any

    op: ClassVar[str] = "dequant_gemv"

    def validate(self) -> None:
        PackedWeight.validate(self)
        require_array("x", self.x, dtypes=(self.dtype,), shape=(None, self.shape[1]))
        require(self.m >= 1, "x", "have at least one row", self.x.shape)

    @property
    def m(self) -> int:
        """Rows of x and of y."""
        return int(self.x.shape[0])

    def bytes_moved(self) -> int:
        """Every packed byte that matters and x read once, y written once."""
        n, k = self.shape
        return int(self.packed_bytes() + self.m * (n + k) * self.dtype.itemsize)

    def flops(self) -> int:
        """A multiplication and an addition for each element of W and row of x; unpacking is not counted."""
        n, k = self.shape
        return 2 * self.m * n * k


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What a correct y is, all [m, n]: within `bound` of `y` where `finite`; an infinity or NaN where `infinite`.

    Neither holds where it depends on the order of the arithmetic: a weight overflows the dtype, or float32 before its
    scale is moved out of the sum, or the sum its range.
    """

    y: Array  # float64
    bound: Array  # float64
    finite: Array  # bool
    infinite: Array  # bool


def dequant_gemv(problem: DequantGemv) -> Product:
    """The float64 product, with the error that a kernel may make (see the module's docstring)."""
    with np.errstate(all="ignore"):
        w, x = decode(problem).astype(np.float64), to_float64(problem.x)
        format, k = FORMATS[problem.format], problem.shape[1]
        terms = format.magnitude(problem.packed, problem.shape, problem.group_size)
        entered = (np.isfinite(w) | np.isfinite(terms)).all(axis=1)  # finite terms of an infinite weight: it overflowed
        good_rows = np.isfinite(x).all(axis=1, keepdims=True)
        kept = np.isfinite(to_float64(round_to(w, problem.dtype))).all(axis=1) & np.isfinite(terms).all(axis=1)

        # What is not finite is left out of the sums, so that it does not spread to the elements beside it.
        x, w, terms = (np.where(np.isfinite(array), array, 0.0) for array in (x, w, terms))
        y, size, magnitude = x @ w.T, abs(x) @ abs(w).T, abs(x) @ terms.T
        u, smallest = unit_roundoff(problem.dtype), half_smallest_subnormal(problem.dtype)
        bound = SECOND_ORDER * ((accumulation(2 * k) + 5 * U) * magnitude + u * size + u * abs(y))
        bound += smallest * (abs(x).sum(axis=1, keepdims=True) + 1)
        largest = np.finfo(np.float32).max
        in_range = np.isfinite(to_float64(round_to(abs(y) + bound, problem.dtype))) & (magnitude < largest / 2)
    finite, infinite = np.asarray(good_rows & kept & in_range), np.asarray(~(good_rows & entered))
    return Product(y, bound, finite, infinite)


def assert_product(name: str, actual: Array, expected: Product, dtype: np.dtype[Any]) -> None:
    """Raise AssertionError unless `actual` [m, n] of `dtype` is a correct product; shows the worst element."""
    if actual.shape != expected.y.shape or actual.dtype != dtype:
        raise AssertionError(f"{name}: {actual.dtype} {list(actual.shape)}, expected {dtype} {list(expected.y.shape)}")
    got = to_float64(actual)
    assert_close(name, np.where(expected.finite, got, 0.0), np.where(expected.finite, expected.y, 0.0), expected.bound)
    wrong = expected.infinite & np.isfinite(got)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.size} elements are finite, although NaN or an infinity enters them, "
            f"the first at {list(where)}: got {got[where]!r}"
        )
