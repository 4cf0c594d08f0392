"""Dequantisation problems that go through every code of a format, and every class of scale."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pagebench.properties.dequant_recipes import DTYPES, DequantRecipe, scale_classes
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_integer import Awq, PackQuantized
from pagebench.reference.dequant_layout import ArraySpec, PackedFormat
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import FLOAT16, FLOAT32, INT32, Array

WORD_FORMATS = ("gptq_v1", "gptq_v2", "awq")  # an int32 along n or k: a scale and a zero point for each column
OF_INTEGERS = ("int8", *(name for name in FORMATS if name.startswith(("gptq", "awq", "pack"))))
# Of a scale that a whole weight shares, a problem each: zeros, the ends of the subnormal range, the largest, not finite
SHARED = np.array([0, -0.0, 2.0**-149, 2.0**-126 - 2.0**-149, 1, -0.3, 3.4028234663852886e38, np.inf, np.nan], FLOAT32)


def exhaustive() -> Iterator[Dequantize]:
    """Of each format and form: all codes under all classes of scale and a spread of ordinary scales, to float32, which
    hides nothing; all codes under the classes alone, of each dtype of scales, to every dtype; and codes with few bits.
    """
    for format, chosen in FORMATS.items():
        for i, form in enumerate(chosen.forms):
            yield _words(format, FLOAT32, FLOAT16) if format in WORD_FORMATS else _rows(format, form, FLOAT32)
            for number in _scale_dtypes(chosen, form):
                for dtype in DTYPES.values():
                    yield from _classes(format, form, dtype, number)
            for bits in ("one nibble", "sign", "zero and fifteen") if format in OF_INTEGERS else ("one nibble",):
                yield DequantRecipe(format, i, "float32", rows=3, columns=9, bits=bits).build()


def _scale_dtypes(chosen: PackedFormat, form: str) -> tuple[np.dtype[Any], ...]:
    """Those that the form's scales may have."""
    specs = chosen.specs(form, (256, 256), 64 if chosen.grouped(form) else None).values()
    numbers = max((spec.dtypes for spec in specs if spec.scale is not None), key=len)
    if isinstance(chosen, PackQuantized) and chosen.bits not in (4, 5):  # the others decode their scales as these do
        return (numbers[chosen.bits % 3],)
    return numbers


def _classes(format: str, form: str, dtype: np.dtype[Any], number: np.dtype[Any]) -> Iterator[Dequantize]:
    """Every code under every class of scale; a problem for each class of a scale that all of the weight shares."""
    chosen = FORMATS[format]
    if format in WORD_FORMATS:
        yield _words(format, dtype, number, scale_classes(number))
        return
    shared = [name for name in ("scale", "global_scale", "offset") if name in chosen.forms[form]]
    if form == "block":  # a block of scales for each class, and a partial one
        shape = 3, 128 * len(scale_classes(number)) + 8
    elif form.startswith("tensor"):
        shape = 1, 256
    elif form == "nested":
        shape = 1, 1024
    else:
        shape = 21, {16: 528, 32: 544, 256: 512}.get(chosen.k_multiple, 264)
        if shared == ["global_scale"]:
            shape = 2, 208
    group_size = (shape[1] if format.startswith("pack") else 32) if chosen.grouped(form) else None
    specs = chosen.specs(form, shape, group_size)
    packed = random_packed(format, shape, group_size, np.random.default_rng(0), form=form, number=number)
    for name, spec in specs.items():
        packed[name] = _enumerated(packed[name], spec, scale_classes)
    if "absmax_q" in packed:  # entries of code2 in every class
        packed["absmax_q"] = np.arange(packed["absmax_q"].size, dtype=np.uint8)
    if not any(specs[name].shape == () for name in shared):
        yield Dequantize(format, packed, shape, group_size, dtype, default_contract(format))
        return
    for i, scale in enumerate(SHARED):
        changed: dict[str, Array] = {shared[0]: np.asarray(scale)}
        if "absmax2" in packed:  # 1 for every second, -0.0 among them
            outer = FLOAT32.type(1) if i % 2 else SHARED[-1 - i // 2]
            changed["absmax2"] = np.full_like(packed["absmax2"], outer)
        yield Dequantize(format, packed | changed, shape, group_size, dtype, default_contract(format))


def _scales(number: np.dtype[Any]) -> Array:
    """Every class, the powers of two and one random scale for each exponent; of an 8-bit format every byte."""
    if number.itemsize == 1:
        return np.concatenate([scale_classes(number), np.arange(256, dtype=np.uint8)])
    powers = 2.0 ** np.arange(-24, 16)
    odd = powers * np.random.default_rng(0).uniform(1, 2, powers.size)
    with np.errstate(over="ignore"):
        return np.concatenate([scale_classes(number), np.concatenate([powers, odd]).astype(number)])


def _rows(format: str, form: str, dtype: np.dtype[Any]) -> Dequantize:
    """A weight [n, k] whose rows hold every byte as codes, at places that move from row to row, and whose scales go
    through all there are: at least one for each row, where the format has so many.
    """
    chosen = FORMATS[format]
    n = 133 if chosen.k_multiple == 1 else 101  # two blocks of scales, where they are of 128 rows
    k = {16: 528, 32: 544, 256: 512}.get(chosen.k_multiple, 520)
    group_size = (520 if format.startswith("pack") else 64) if chosen.grouped(form) else None
    rng = np.random.default_rng(0)
    packed = random_packed(format, (n, k), group_size, rng, form=form)
    for name, spec in chosen.specs(form, (n, k), group_size).items():
        packed[name] = _enumerated(packed[name], spec, _scales)
    return Dequantize(format, packed, (n, k), group_size, dtype, default_contract(format))


def _enumerated(array: Array, spec: ArraySpec, scales_of: Callable[[np.dtype[Any]], Array]) -> Array:
    """`array` with consecutive bytes as codes, and scales that go through those which `scales_of` gives of a dtype."""
    if spec.scale is None:
        row = array.itemsize * array.shape[-1] if array.ndim else 1
        data = np.arange(array.nbytes) + np.arange(array.nbytes) // row * 7  # no two rows in step with the scales
        if array.nbytes >= 256:  # fewer are zero points or quantised scales: better random
            return np.asarray(data.astype(np.uint8).view(array.dtype).reshape(array.shape))
        return array
    if spec.scale_offsets is None:
        scales = scales_of(spec.scale if array.dtype == np.uint8 else array.dtype)
        return np.resize(scales, array.shape) if array.ndim else array
    blocks = np.ascontiguousarray(array).reshape(-1, spec.period)
    blocks[...] = np.resize(np.arange(256, dtype=np.uint8), blocks.shape)
    scales = scales_of(FLOAT16)
    for i, offset in enumerate(spec.scale_offsets):
        which = np.arange(len(blocks)) + i * (np.arange(len(blocks)) // scales.size + 3)
        blocks[:, offset : offset + 2] = scales[which % scales.size, None].view(np.uint8)
    return blocks.reshape(array.shape)


def _words(format: str, dtype: np.dtype[Any], number: np.dtype[Any], scales: Array | None = None) -> Dequantize:
    """A column per scale; a group per zero point 0..15, whose 16 rows hold the codes 0..15."""
    scales = _scales(number) if scales is None else scales
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
