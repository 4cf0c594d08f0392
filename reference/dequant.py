"""Dequantisation of packed weights: the problem, its meaning under a named rounding contract, its bytes.

Every format is a decoder in `dequant_formats`. The result is compared bit for bit, so a contract names where rounding
happens: `exact` is the exact real value rounded once to the output dtype; `f32` is float32 arithmetic in the format's
stated order and then one rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import COMPUTE_DTYPES, Array, round_to
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_int

CONTRACTS = ("exact", "f32")


@dataclass(frozen=True, slots=True, eq=False)
class Dequantize(Problem):
    """Unpack `packed` (arrays by name, see the format) to weight [n, k] of `dtype` under `contract`.

    shape: (n output features, k input features). group_size: elements along k that share a scale, -1 for all of k;
    None for a format whose blocks fix it. dtype: float16, bfloat16 or float32. The packed bits and scales may be
    anything, NaN and infinities included. Raises ValueError for an unknown format, dtype or contract, for a missing,
    extra or misshapen array, and for group indices out of range.
    """

    format: str
    packed: Mapping[str, Any]
    shape: tuple[int, int]
    group_size: int | None
    dtype: np.dtype[Any]
    contract: str

    op: ClassVar[str] = "dequantize"

    def validate(self) -> None:
        require(self.format in FORMATS, "format", f"be one of {sorted(FORMATS)}", self.format)
        pair = isinstance(self.shape, tuple) and len(self.shape) == 2
        require(pair, "shape", "be a tuple (n, k)", self.shape)
        for name, size in zip(("shape[0] (n)", "shape[1] (k)"), self.shape, strict=True):
            require_int(name, size, low=1)
        require(
            isinstance(self.dtype, np.dtype) and self.dtype in COMPUTE_DTYPES,
            "dtype",
            f"be one of {[d.name for d in COMPUTE_DTYPES]}",
            self.dtype,
        )
        contracts = FORMATS[self.format].contracts
        require(self.contract in contracts, "contract", f"be one of {contracts} for {self.format}", self.contract)
        require(isinstance(self.packed, dict), "packed", "be a dict of arrays by name", type(self.packed).__name__)
        names = set(FORMATS[self.format].arrays)
        require(set(self.packed) == names, "packed", f"hold exactly {sorted(names)}", sorted(self.packed))
        FORMATS[self.format].validate(self.packed, self.shape, self.group_size)

    def bytes_moved(self) -> int:
        """Every packed byte read once, every weight written once."""
        n, k = self.shape
        return int(sum(array.nbytes for array in self.packed.values()) + n * k * self.dtype.itemsize)

    def flops(self) -> int:
        return 0


def default_contract(format: str) -> str:
    """The rounding contract that the format's definition implies."""
    return FORMATS[format].contracts[0]


def dequantize(problem: Dequantize) -> Array:
    """weight [n, k] of the problem's dtype."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        exact = FORMATS[problem.format].decode(problem.packed, problem.shape, problem.group_size, problem.contract)
    return round_to(exact, problem.dtype)
