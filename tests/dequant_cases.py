"""Small dequantisation problems of every format for the tests: odd sizes, partial last groups, scales of any bits."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import FLOAT32, Array, as_bits

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
EVERY_FORM = pytest.mark.parametrize(
    ("format", "form"), [(name, form) for name, f in FORMATS.items() for form in f.forms]
)


def shape_of(format: str) -> tuple[int, int]:
    """Odd where the format allows it, with a partial last group or block of every size."""
    chosen = FORMATS[format]
    n = 133 if chosen.n_multiple == 1 else 3 * chosen.n_multiple
    k = {8: 200, 16: 208, 256: 512}.get(chosen.k_multiple, -(-150 // chosen.k_multiple) * chosen.k_multiple)
    return n, k


def group_size_of(format: str, form: str) -> int | None:
    if not FORMATS[format].grouped(form):
        return None
    return 50 if format.startswith("pack") else 64


def make(format: str, form: str | None = None, *, seed: int = 0, **changes: Any) -> Dequantize:
    """A random problem; scales are of any bits unless `scales` says otherwise."""
    form = form or next(iter(FORMATS[format].forms))
    shape = changes.pop("shape", shape_of(format))
    group_size = changes.pop("group_size", group_size_of(format, form))
    options = {name: changes.pop(name) for name in ("number", "finite") if name in changes}
    scales = changes.pop("scales", "bits")
    packed = random_packed(format, shape, group_size, np.random.default_rng(seed), form=form, scales=scales, **options)
    what = Dequantize(format, packed, shape, group_size, np.dtype(FLOAT32), default_contract(format))
    return dataclasses.replace(what, **changes)


def same(a: Array, b: Array) -> bool:
    """Equal bits; any NaN equals any NaN."""
    return a.dtype == b.dtype and bool(((as_bits(a) == as_bits(b)) | (np.isnan(a) & np.isnan(b))).all())


def small(format: str) -> tuple[int, int]:
    """The smallest shape that the format has."""
    return FORMATS[format].n_multiple, FORMATS[format].k_multiple * (50 if format.startswith("pack") else 1)
