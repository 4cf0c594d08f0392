"""Dequantisation problems that go through every code of a format, and every class of scale."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pagebench.properties.dequant_recipes import DTYPES, SCALE_CLASSES
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, Array


def exhaustive() -> Iterator[Dequantize]:
    """For each output dtype: all codes of each format under all scale classes and a spread of ordinary scales."""
    for dtype in DTYPES.values():
        yield _q8_0(dtype)
        for scale_dtype in (FLOAT16, BFLOAT16):
            yield _gptq_v2(dtype, scale_dtype)


def _scales(dtype: np.dtype[Any]) -> Array:
    """Every class, the powers of two and one random scale for each exponent."""
    powers = 2.0 ** np.arange(-24, 16)
    odd = powers * np.random.default_rng(0).uniform(1, 2, powers.size)
    with np.errstate(over="ignore"):
        return np.concatenate([np.array(SCALE_CLASSES), powers, odd]).astype(FLOAT32).astype(dtype)


def _q8_0(dtype: np.dtype[Any]) -> Dequantize:
    """A row per scale; its eight blocks hold the codes -128..127 in order."""
    scales = _scales(FLOAT16)
    blocks = np.empty((scales.size, 8, 34), np.uint8)
    blocks[..., :2] = scales[:, None, None].view(np.uint8)
    blocks[..., 2:] = np.arange(256, dtype=np.uint8).reshape(8, 32)
    packed = {"blocks": blocks.reshape(scales.size, -1)}
    return Dequantize("q8_0", packed, (scales.size, 256), None, dtype, default_contract("q8_0"))


def _gptq_v2(dtype: np.dtype[Any], scale_dtype: np.dtype[Any]) -> Dequantize:
    """A column per scale; a group per zero point 0..15, whose 16 rows hold the codes 0..15."""
    scales = _scales(scale_dtype)
    n = -(-scales.size // 8) * 8
    code, zero = np.arange(16), np.arange(16)
    q = np.broadcast_to(np.tile(code, 16)[:, None], (256, n))
    z = np.broadcast_to(zero[:, None], (16, n))
    packed = {
        "qweight": _packed(q.reshape(32, 8, n), 1),
        "qzeros": _packed(z.reshape(16, n // 8, 8), 2),
        "scales": np.broadcast_to(np.resize(scales, n), (16, n)).copy(),
        "g_idx": (np.arange(256) // 16).astype(INT32),
    }
    return Dequantize("gptq_v2", packed, (n, 256), 16, dtype, default_contract("gptq_v2"))


def _packed(nibbles: Array, axis: int) -> Array:
    """int32: eight nibbles along `axis` into one word, the first lowest."""
    shift = (4 * np.arange(8)).reshape([-1 if i == axis else 1 for i in range(nibbles.ndim)])
    words: Array = (nibbles.astype(np.uint64) << shift.astype(np.uint64)).sum(axis=axis).astype(np.uint32).view(INT32)
    return words
