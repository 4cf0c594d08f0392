"""How the reference is compared with an oracle: the same random bytes, and the elements whose bits differ."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.reference.dequant import Dequantize, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, as_bits

DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
SCALES = ("bits", "normal")  # scales of any bits, and ordinary ones: with the former much overflows


@dataclass(frozen=True)
class Comparison:
    """`got` of an oracle and `want` of the reference; `known`: why they may differ."""

    what: str
    got: Array
    want: Array
    known: str | None = None

    @property
    def mismatches(self) -> int:
        """Elements whose bits differ; any NaN equals any NaN."""
        assert self.got.dtype == self.want.dtype, (self.what, self.got.dtype, self.want.dtype)
        assert self.got.shape == self.want.shape, (self.what, self.got.shape, self.want.shape)
        both_nan = np.isnan(self.got) & np.isnan(self.want)
        return int(((as_bits(self.got) != as_bits(self.want)) & ~both_nan).sum())


def problem(
    format: str,
    shape: tuple[int, int],
    group_size: int | None = None,
    *,
    seed: int = 0,
    scales: str = "bits",
    form: str | None = None,
    number: np.dtype[Any] | None = None,
    dtype: np.dtype[Any] = FLOAT32,
    contract: str | None = None,
) -> Dequantize:
    """A random Dequantize problem; see `random_packed`."""
    rng = np.random.default_rng(seed)
    packed = random_packed(format, shape, group_size, rng, form=form, scales=scales, number=number)
    return Dequantize(format, packed, shape, group_size, dtype, contract or default_contract(format))


def compare(what: Dequantize, got: Array, note: str = "", known: str | None = None) -> Comparison:
    form = FORMATS[what.format].form(what.packed)
    parts = (what.format, "" if form == "plain" else form, what.dtype.name, what.contract, note)
    return Comparison(" ".join(part for part in parts if part), got, dequantize(what), known)


# --- between NumPy and torch


def tensor(array: Array) -> Any:
    """The array copied to a torch tensor of the same dtype."""
    import torch

    array = array.copy(order="C")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    import torch

    return {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT32: torch.float32}[dtype]


def array_of(values: Any) -> Array:
    import torch

    values = values.detach().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(BFLOAT16)
    return values.numpy()
