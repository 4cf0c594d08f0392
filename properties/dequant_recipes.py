"""How to build a dequantisation problem: format, sizes and hostile scales by name, the bits from a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, Array

DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32)}
SCALES = ("normal", "bits", "classes")

# Zeros, subnormals, the smallest normal of float16, ordinary ones of both signs, the largest, infinities, NaN
_ODD = (2.0**-24, -(2.0**-24), 2.0**-14 - 2.0**-24, 2.0**-14, 65504.0, -65504.0)
_NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
SCALE_CLASSES = (0.0, -0.0, 1.0, -1.0, -0.3, *_ODD, *_NOT_FINITE)


@dataclass(frozen=True, slots=True)
class DequantRecipe:
    """Sizes count in the format's own units: n = rows * unit, k = columns * unit."""

    format: str = "q8_0"
    dtype: str = "float16"
    rows: int = 1
    columns: int = 1
    group_size: int = 32
    scale_dtype: str = "float16"
    scales: str = "normal"
    order: str = "natural"
    bits: str = "random"
    layout: str = "contiguous"
    contract: str | None = None
    seed: int = 0

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "format": ("q8_0", "gptq_v2"),
        "dtype": tuple(DTYPES),
        "group_size": (32, -1, 8, 24, 64, 128),
        "scale_dtype": ("float16", "bfloat16"),
        "order": ("natural", "act-order", "one group"),
        "layout": ("contiguous", "every second row", "columns of a wider array"),
    }

    @classmethod
    def sample(cls, **choices: Any) -> "DequantRecipe":
        """A small recipe with these values of AXES, for asking a provider what it supports."""
        if {"group_size", "scale_dtype", "order"} & set(choices):
            choices.setdefault("format", "gptq_v2")
        return cls(rows=2, columns=3, **choices)

    def build(self) -> Dequantize:
        rng = np.random.default_rng(self.seed)
        packed, shape = BUILDERS[self.format](self, rng)
        packed = {name: _laid_out(array, self.layout) for name, array in packed.items()}
        group_size = None if self.format == "q8_0" else self.group_size
        contract = self.contract or default_contract(self.format)
        return Dequantize(self.format, packed, shape, group_size, DTYPES[self.dtype], contract)


Built = tuple[dict[str, Array], tuple[int, int]]


def _q8_0(recipe: DequantRecipe, rng: np.random.Generator) -> Built:
    """n = rows, k = 32 columns."""
    n, blocks = recipe.rows, recipe.columns
    data = np.empty((n, blocks, 34), np.uint8)
    data[..., :2] = _scales(recipe, (n, blocks), FLOAT16, rng)[..., None].view(np.uint8)
    data[..., 2:] = _bytes(recipe, (n, blocks, 32), rng)
    return {"blocks": data.reshape(n, blocks * 34)}, (n, 32 * blocks)


def _gptq_v2(recipe: DequantRecipe, rng: np.random.Generator) -> Built:
    """n = 8 rows, k = 8 columns."""
    n, k = 8 * recipe.rows, 8 * recipe.columns
    groups = 1 if recipe.group_size == -1 else -(-k // recipe.group_size)
    natural = np.arange(k) // (k if recipe.group_size == -1 else recipe.group_size)
    order: dict[str, Callable[[], Array]] = {
        "natural": lambda: natural,
        "act-order": lambda: rng.permutation(natural),
        "one group": lambda: natural * 0,
    }
    packed = {
        "qweight": _bytes(recipe, (k // 8, n, 4), rng).view(INT32)[..., 0],
        "qzeros": _bytes(recipe, (groups, n // 8, 4), rng).view(INT32)[..., 0],
        "scales": _scales(recipe, (groups, n), DTYPES[recipe.scale_dtype], rng),
        "g_idx": order[recipe.order]().astype(INT32),
    }
    return packed, (n, k)


BUILDERS: dict[str, Callable[[DequantRecipe, np.random.Generator], Built]] = {"q8_0": _q8_0, "gptq_v2": _gptq_v2}


def _bytes(recipe: DequantRecipe, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """uint8: random, or one bit pattern all over that leaves few bits set or clear."""
    data = rng.integers(0, 256, shape, np.uint8)
    if recipe.bits == "one nibble":  # a nibble of each word is set, at a place that moves from word to word
        data[...] = 0
        flat = data.reshape(-1, 4) if data.size % 4 == 0 else data.reshape(-1, 1)
        place = np.arange(flat.shape[0])
        flat[place, place // 2 % flat.shape[1]] = np.where(place % 2, 0xF0, 0x0F)
    elif recipe.bits == "sign":  # only the top bit of each byte, as -128 and as the sign of an int32
        data[...] = 0x80
    elif recipe.bits == "zero and fifteen":
        data[...] = rng.choice(np.array([0x00, 0x0F, 0xF0, 0xFF], np.uint8), shape)
    return data


def _scales(recipe: DequantRecipe, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    if recipe.scales == "bits":
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if recipe.scales == "classes":
        with np.errstate(over="ignore"):
            return rng.choice(np.array(SCALE_CLASSES, FLOAT32), shape).astype(dtype)
    return rng.standard_normal(shape).astype(FLOAT32).astype(dtype)


def _laid_out(array: Array, layout: str) -> Array:
    """The same values as a view of a larger array whose other bytes are 0xFF."""
    if layout == "contiguous" or array.ndim < 2:
        return np.ascontiguousarray(array)
    rows, columns = array.shape
    if layout == "every second row":
        wide, view = (2 * rows, columns), (slice(None, None, 2), slice(None))
    else:
        wide, view = (rows, columns + 3), (slice(None), slice(1, columns + 1))
    base = np.full(wide, 0xFF, np.uint8) if array.dtype == np.uint8 else np.zeros(wide, array.dtype)
    base.view(np.uint8)[...] = 0xFF
    base[view] = array
    return base[view]
