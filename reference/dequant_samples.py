"""Random packed weights of any format, made from what the format declares: any codes, scales as asked for."""

from typing import Any

import numpy as np

from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_layout import FLOAT8_E8M0, ArraySpec, Shape
from pagebench.reference.dtypes import FLOAT32, INT32, Array, round_to


def random_packed(
    format: str,
    shape: Shape,
    group_size: int | None,
    rng: np.random.Generator,
    *,
    form: str | None = None,
    scales: str = "normal",
    finite: bool = False,
    number: np.dtype[Any] | None = None,
) -> dict[str, Array]:
    """Arrays of a valid weight of `format` and `form` (default: its first).

    scales: "normal" (normally distributed) or "bits" (any bit pattern: NaN, infinities and subnormals too). finite: no
    code is NaN or an infinity. number: the dtype of the scales where the format has a choice (default: its first).
    Raises ValueError for sizes that the format does not have.
    """
    chosen = FORMATS[format]
    form = form or next(iter(chosen.forms))
    chosen.validate_sizes(form, shape, group_size)
    specs = chosen.specs(form, shape, group_size)
    packed = {name: _filled(spec, rng, scales, number) for name, spec in specs.items()}
    for name, spec in specs.items():
        if finite and spec.number is not None:
            packed[name][~np.isfinite(packed[name].view(spec.number).astype(FLOAT32))] = 0
    return packed


def _filled(spec: ArraySpec, rng: np.random.Generator, scales: str, number: np.dtype[Any] | None) -> Array:
    dtype = number if number in spec.dtypes else spec.dtypes[0]
    assert dtype is not None
    if spec.below is not None:
        return rng.integers(0, spec.below, spec.shape, INT32).astype(dtype)
    array = rng.integers(0, 256, (*spec.shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if spec.scale is None or scales == "bits":
        return array
    if spec.scale_offsets is None:
        stored = spec.scale if dtype.itemsize == 1 else dtype
        return _normal(spec.shape, stored, rng).view(dtype)
    blocks = array.reshape(-1, spec.period)
    for offset in spec.scale_offsets:
        blocks[:, offset : offset + 2] = _normal((len(blocks), 1), spec.scale, rng).view(np.uint8)
    return array


def _normal(shape: tuple[int, ...], number: np.dtype[Any], rng: np.random.Generator) -> Array:
    values = np.asarray(rng.standard_normal(shape), FLOAT32)
    if number == FLOAT8_E8M0:
        return np.asarray(np.frexp(values)[1] + 127, np.uint8)
    return round_to(values, number)
