"""Dequantisation of packed weights: the problem, its meaning under a named rounding contract, its bytes.

Every format is a decoder, listed in `dequant_formats`. The result is compared bit for bit, so a contract names where
rounding happens; after it comes one rounding to the output dtype:

- `exact`: nowhere, the value is the exact real number.
- `f32`: float32 arithmetic in the format's stated order.
- `f32x2`: the same where that order has two rounded steps which must not be fused.
- `half`: float16 arithmetic in the format's stated order.
- `fma_zero`: scale * q - round(scale * zero), the inner product rounded to the scale's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_layout import ARITHMETIC
from pagebench.reference.dtypes import COMPUTE_DTYPES, Array, half_smallest_subnormal, round_to, unit_roundoff
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_dtype, require_int

CONTRACTS = ("exact", "f32", "f32x2", "half", "fma_zero")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight(Problem):
    """The fields of every problem about a packed weight; see Dequantize."""

    format: str
    packed: Mapping[str, Any]
    shape: tuple[int, int]
    group_size: int | None
    dtype: np.dtype[Any]
    contract: str

    def validate(self) -> None:
        require(
            isinstance(self.format, str) and self.format in FORMATS,
            "format",
            f"be one of {sorted(FORMATS)}",
            self.format,
        )
        pair = isinstance(self.shape, tuple) and len(self.shape) == 2
        require(pair, "shape", "be a tuple (n, k)", self.shape)
        for name, size in zip(("shape[0] (n)", "shape[1] (k)"), self.shape, strict=True):
            require_int(name, size, low=1)
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))  # launchers want Python's
        require_dtype("dtype", self.dtype, COMPUTE_DTYPES)
        contracts = FORMATS[self.format].contracts
        known = isinstance(self.contract, str) and self.contract in contracts
        require(known, "contract", f"be one of {contracts} for {self.format}", self.contract)
        require(isinstance(self.packed, dict), "packed", "be a dict of arrays by name", type(self.packed).__name__)
        FORMATS[self.format].validate(self.packed, self.shape, self.group_size)
        if self.group_size is not None:
            object.__setattr__(self, "group_size", int(self.group_size))

    def packed_bytes(self) -> int:
        """Bytes of the packed elements that some weight depends on."""
        return sum(array[self.live(name)].size * array.itemsize for name, array in self.packed.items())

    def live(self, name: str) -> Any:
        """Index of the elements of the packed array `name` that some weight depends on."""
        return FORMATS[self.format].live(name, self.packed, self.shape, self.group_size)


@dataclass(frozen=True, slots=True, eq=False)
class Dequantize(PackedWeight):
    """Unpack `packed` (arrays by name, see the format) to weight [n, k] of `dtype` under `contract`.

    shape: (n output features, k input features). group_size: elements along k that share a scale, -1 for all of k;
    None for a format whose blocks or scales fix it. dtype: float16, bfloat16 or float32. The packed bits and scales may
    be anything, NaN and infinities included. Raises ValueError for an unknown format, dtype or contract, for a missing,
    extra or misshapen array, and for group indices out of range.
    """

    op: ClassVar[str] = "dequantize"

    def bytes_moved(self) -> int:
        """Every packed byte that matters read once, every weight written once."""
        n, k = self.shape
        return int(self.packed_bytes() + n * k * self.dtype.itemsize)

    def flops(self) -> int:
        return 0


def default_contract(format: str) -> str:
    """The rounding contract that the format's definition implies."""
    return FORMATS[format].contracts[0]


def decode(problem: PackedWeight) -> Array:
    """weight [n, k] in the arithmetic of the problem's contract, not yet rounded to its dtype."""
    with np.errstate(all="ignore"):
        return FORMATS[problem.format].decode(problem.packed, problem.shape, problem.group_size, problem.contract)


def contract_bound(problem: PackedWeight) -> Array:
    """float64 [n, k]: how far a finite weight of the contract may lie from the exact one, before rounding to the dtype.

    A loose bound, to show beside a bitwise verdict: four roundings of the sum of the magnitudes of the weight's terms,
    and what they lose below the normal range, scaled up by a code of at most 6 bits; infinite where the sum overflows.
    """
    number = ARITHMETIC.get(problem.contract)
    if problem.contract == "exact":
        return np.zeros(problem.shape)
    if number is None:  # fma_zero: only the zero term rounds, to the scale's dtype
        number = problem.packed["scales"].dtype
    with np.errstate(all="ignore"):
        size = FORMATS[problem.format].magnitude(problem.packed, problem.shape, problem.group_size)
        bound = 4 * unit_roundoff(number) * size + 64 * half_smallest_subnormal(number)
        return np.where(np.isfinite(round_to(2 * size, number).astype(np.float64)), bound, np.inf)


def dequantize(problem: Dequantize) -> Array:
    """weight [n, k] of the problem's dtype."""
    return round_to(decode(problem), problem.dtype)
