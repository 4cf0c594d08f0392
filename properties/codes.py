"""Dequantisation problems that go through every code of a format, and every class of scale."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pagebench.properties.dequant_recipes import DTYPES, scale_classes
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_integer import Awq
from pagebench.reference.dequant_layout import ArraySpec
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, Array

WORD_FORMATS = ("gptq_v1", "gptq_v2", "awq")  # an int32 along n or k: a scale and a zero point for each column


def exhaustive() -> Iterator[Dequantize]:
    """All codes of each format and form under all classes of scale and a spread of ordinary scales, to float32, which
    hides nothing; and to the 16-bit dtypes for a format of either contract, since rounding is the same for all.
    """
    for format, chosen in FORMATS.items():
        rounded = format in ("q8_0", "gptq_v2", "q4_k")
        for form in chosen.forms:
            for dtype in DTYPES.values() if rounded else (FLOAT32,):
                if format in WORD_FORMATS:
                    yield _words(format, dtype, FLOAT16)
                else:
                    yield _rows(format, form, dtype)
    for format in ("gptq_v1", "gptq_v2"):
        yield _words(format, FLOAT32, BFLOAT16)
    for number in (BFLOAT16, FLOAT32):  # of a format whose scales may be either
        yield _rows("pack_quantized_5", "symmetric", FLOAT16, number)
        yield _rows("pack_quantized_4", "zero_point", BFLOAT16, number)


def _scales(number: np.dtype[Any]) -> Array:
    """Every class, the powers of two and one random scale for each exponent; of an 8-bit format every byte."""
    if number.itemsize == 1:
        return np.concatenate([scale_classes(number), np.arange(256, dtype=np.uint8)])
    powers = 2.0 ** np.arange(-24, 16)
    odd = powers * np.random.default_rng(0).uniform(1, 2, powers.size)
    with np.errstate(over="ignore"):
        return np.concatenate([scale_classes(number), np.concatenate([powers, odd]).astype(number)])


def _rows(format: str, form: str, dtype: np.dtype[Any], number: np.dtype[Any] | None = None) -> Dequantize:
    """A weight [n, k] whose rows hold every byte as codes, at places that move from row to row, and whose scales go
    through all there are: at least one for each row, where the format has so many.
    """
    chosen = FORMATS[format]
    n = 133 if chosen.k_multiple == 1 else 101  # two blocks of scales, where they are of 128 rows
    k = {16: 528, 32: 544, 256: 512}.get(chosen.k_multiple, 520)
    group_size = (520 if format.startswith("pack") else 64) if chosen.grouped(form) else None
    rng = np.random.default_rng(0)
    packed = random_packed(format, (n, k), group_size, rng, form=form, number=number)
    for name, spec in chosen.specs(form, (n, k), group_size).items():
        packed[name] = _enumerated(packed[name], spec)
    return Dequantize(format, packed, (n, k), group_size, dtype, default_contract(format))


def _enumerated(array: Array, spec: ArraySpec) -> Array:
    if spec.scale is None:
        row = array.itemsize * array.shape[-1] if array.ndim else 1
        data = np.arange(array.nbytes) + np.arange(array.nbytes) // row * 7  # no two rows in step with the scales
        if array.nbytes >= 256:  # fewer are zero points or quantised scales: better random
            return np.asarray(data.astype(np.uint8).view(array.dtype).reshape(array.shape))
        return array
    if spec.scale_offsets is None:
        scales = _scales(spec.scale if array.dtype == np.uint8 else array.dtype)
        return np.resize(scales, array.shape) if array.ndim else array
    blocks = np.ascontiguousarray(array).reshape(-1, spec.period)
    blocks[...] = np.resize(np.arange(256, dtype=np.uint8), blocks.shape)
    scales = _scales(FLOAT16)
    for i, offset in enumerate(spec.scale_offsets):
        which = np.arange(len(blocks)) + i * (np.arange(len(blocks)) // scales.size + 3)
        blocks[:, offset : offset + 2] = scales[which % scales.size, None].view(np.uint8)
    return blocks.reshape(array.shape)


def _words(format: str, dtype: np.dtype[Any], scale_dtype: np.dtype[Any]) -> Dequantize:
    """A column per scale; a group per zero point 0..15, whose 16 rows hold the codes 0..15."""
    scales = _scales(scale_dtype)
    n = -(-scales.size // 8) * 8
    code = np.broadcast_to(np.tile(np.arange(16), 16)[:, None], (256, n))
    zero = np.broadcast_to(np.arange(16)[:, None], (16, n))
    packed = {"scales": np.broadcast_to(np.resize(scales, n), (16, n)).copy()}
    if format == "awq":
        order = list(Awq.ORDER)
        packed["qweight"] = _packed(code.reshape(256, n // 8, 8)[..., order], 2)
        packed["qzeros"] = _packed(zero.reshape(16, n // 8, 8)[..., order], 2)
    else:
        packed["qweight"] = _packed(code.reshape(32, 8, n), 1)
        packed["qzeros"] = _packed(zero.reshape(16, n // 8, 8), 2)
        packed["g_idx"] = (np.arange(256) // 16).astype(INT32)
    return Dequantize(format, packed, (n, 256), 16, dtype, default_contract(format))


def _packed(nibbles: Array, axis: int) -> Array:
    """int32: eight nibbles along `axis` into one word, the first lowest."""
    shift = (4 * np.arange(8)).reshape([-1 if i == axis else 1 for i in range(nibbles.ndim)])
    words: Array = (nibbles.astype(np.uint64) << shift.astype(np.uint64)).sum(axis=axis).astype(np.uint32).view(INT32)
    return words
