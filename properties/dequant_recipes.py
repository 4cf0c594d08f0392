"""How to build a dequantisation problem: format, sizes and hostile scales by name, the bits from a seed.

What a format's arrays are, it says itself (`PackedFormat.specs`), so that a recipe serves every format and form.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.dequant_layout import FLOAT8_E8M0, ArraySpec, PackedFormat
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, Array, round_to

DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32)}
SCALES = ("normal", "bits", "classes")
MOST_ELEMENTS = 20_000  # of a weight: a small tile makes some 80 programs of it

# Zeros, subnormals, the smallest normal of float16, ordinary ones of both signs, the largest, infinities, NaN
_ODD = (2.0**-24, -(2.0**-24), 2.0**-14 - 2.0**-24, 2.0**-14, 65504.0, -65504.0)
_NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
SCALE_CLASSES = (0.0, -0.0, 1.0, -1.0, -0.3, *_ODD, *_NOT_FINITE)
_FLOAT32_CLASSES = (2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 3.4028234663852886e38, -3.4028234663852886e38)
_BFLOAT16_CLASSES = (2.0**-133, 2.0**-126 - 2.0**-133, 2.0**-126, 3.3895313892515355e38, -3.3895313892515355e38)
_E8M0_CLASSES = (0, 1, 2, 127, 134, 253, 254, 255)
_E4M3_CLASSES = (0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x38, 0xB8, 0x7E, 0xFE, 0x7F, 0xFF)


@dataclass(frozen=True, slots=True)
class DequantRecipe:
    """Sizes count in the format's own units: n = rows * unit, k = columns * unit, k cut to MOST_ELEMENTS.

    form: number of the format's form, modulo how many it has. Where a format has other group sizes or but one dtype of
    scales, or no order, the nearest takes its place.
    """

    format: str = "q8_0"
    form: int = 0
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
        "format": ("q8_0", *(name for name in FORMATS if name != "q8_0")),
        "form": tuple(range(6)),
        "dtype": tuple(DTYPES),
        "group_size": (32, -1, 8, 24, 64, 128),
        "scale_dtype": ("float16", "bfloat16", "float32"),
        "order": ("natural", "act-order", "one group"),
        "layout": ("contiguous", "every second row", "columns of a wider array"),
    }

    @classmethod
    def sample(cls, **choices: Any) -> Any:
        """A small recipe with these values of AXES, for asking a provider what it supports."""
        if "order" in choices or "group_size" in choices:
            choices.setdefault("format", "gptq_v2")
        if "form" in choices:
            choices.setdefault("format", "int8")
        if "scale_dtype" in choices:
            choices.setdefault("format", "pack_quantized_4" if choices["scale_dtype"] == "float32" else "gptq_v2")
        return cls(rows=2, columns=3, **choices)

    def build(self) -> Any:
        """The Dequantize problem."""
        return Dequantize(**self._fields())

    def _fields(self, *, finite: bool = False) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        chosen = FORMATS[self.format]
        forms = tuple(chosen.forms)
        form = forms[self.form % len(forms)]
        shape, group_size = self._sizes(chosen, form)
        drawn = "bits" if self.scales == "bits" else "normal"
        number = DTYPES[self.scale_dtype]
        options: dict[str, Any] = {"form": form, "scales": drawn, "number": number, "finite": finite}
        packed = random_packed(self.format, shape, group_size, rng, **options)
        for name, spec in chosen.specs(form, shape, group_size).items():
            packed[name] = self._overlaid(packed[name], spec, rng)
            if name == "g_idx":
                packed[name] = self._ordered(shape[1], group_size, rng)
            packed[name] = _laid_out(packed[name], self.layout)
        return {
            "format": self.format,
            "packed": packed,
            "shape": shape,
            "group_size": group_size,
            "dtype": DTYPES[self.dtype],
            "contract": self.contract or default_contract(self.format),
        }

    def _sizes(self, chosen: PackedFormat, form: str) -> tuple[tuple[int, int], int | None]:
        """(n, k) and the group size."""
        n = self.rows * chosen.n_multiple
        if chosen.k_multiple == 1 and self.rows > 8:
            n *= 5  # more than the 128 rows of a block of scales
        unit = chosen.k_multiple if chosen.k_multiple > 1 else 8 - self.columns % 2  # odd sizes too
        k = min(self.columns, max(MOST_ELEMENTS // (n * unit), 1)) * unit
        if not chosen.grouped(form):
            return (n, k), None
        allowed = chosen.group_sizes(form)
        choice = self.group_size
        group_size = choice if choice in allowed else allowed[self.AXES["group_size"].index(choice) % len(allowed)]
        assert group_size is not None
        if self.format.startswith("pack_quantized") and group_size > 0:  # which must divide k
            k = -(-k // group_size) * group_size
        return (n, k), group_size

    def _overlaid(self, array: Array, spec: ArraySpec, rng: np.random.Generator) -> Array:
        """`array` with its codes or scales as the recipe asks."""
        if spec.scale is None and spec.below is None:
            return _patterned(array, self.bits, rng)
        if self.scales != "classes" or spec.scale is None:
            return array
        if spec.scale_offsets is None:
            classes = scale_classes(spec.scale if array.dtype == np.uint8 else array.dtype)
            return np.asarray(rng.choice(classes, array.shape))
        blocks = np.ascontiguousarray(array).reshape(-1, spec.period)
        for offset in spec.scale_offsets:
            blocks[:, offset : offset + 2] = rng.choice(scale_classes(FLOAT16), (len(blocks), 1)).view(np.uint8)
        return blocks.reshape(array.shape)

    def _ordered(self, k: int, group_size: int | None, rng: np.random.Generator) -> Array:
        natural = np.arange(k) // (k if group_size == -1 else int(group_size or 1))
        order = {"natural": natural, "act-order": rng.permutation(natural), "one group": natural * 0}[self.order]
        return order.astype(INT32)


def scale_classes(number: np.dtype[Any]) -> Array:
    """Scales of every class in the format `number`; of an 8-bit format the bytes."""
    if number.itemsize == 1:
        return np.array(_E8M0_CLASSES if number == FLOAT8_E8M0 else _E4M3_CLASSES, np.uint8)
    wide = {FLOAT32: _FLOAT32_CLASSES, BFLOAT16: _BFLOAT16_CLASSES}.get(number, ())
    with np.errstate(over="ignore"):
        return np.array((*SCALE_CLASSES, *wide), FLOAT32).astype(number)


def _patterned(array: Array, bits: str, rng: np.random.Generator) -> Array:
    """Codes of the same shape: as they are, or one bit pattern all over that leaves few bits set or clear."""
    if bits == "random":
        return array
    data = np.zeros((*array.shape, array.itemsize), np.uint8)
    if bits == "one nibble":  # a nibble of each 4 bytes is set, at a place that moves from word to word
        flat = data.reshape(-1, 4) if data.size % 4 == 0 else data.reshape(-1, 1)
        place = np.arange(flat.shape[0])
        flat[place, place // 2 % flat.shape[1]] = np.where(place % 2, 0xF0, 0x0F)
    elif bits == "sign":  # only the top bit of each byte, as -128 and as the sign of an int32
        data[...] = 0x80
    elif bits == "zero and fifteen":
        data[...] = rng.choice(np.array([0x00, 0x0F, 0xF0, 0xFF], np.uint8), data.shape)
    return data.view(array.dtype)[..., 0]


def _laid_out(array: Array, layout: str) -> Array:
    """The same values as a view of a larger array whose other bytes are 0xFF."""
    if layout == "contiguous" or array.ndim < 2:
        return array.copy()
    rows, *inner, columns = array.shape
    if layout == "every second row":
        wide: tuple[int, ...] = (2 * rows, *inner, columns)
        view: tuple[slice, ...] = (slice(None, None, 2),)
    else:
        wide, view = (rows, *inner, columns + 3), (*(slice(None),) * (array.ndim - 1), slice(1, columns + 1))
    base = np.full((*wide, array.itemsize), 0xFF, np.uint8).view(array.dtype)[..., 0]
    base[view] = array
    return base[view]


@dataclass(frozen=True, slots=True)
class GemvRecipe(DequantRecipe):
    """A fused product: the weight of a DequantRecipe without NaN or infinite codes, and `m` rows of x, drawn as `x`."""

    m: int = 1
    x: str = "normal"

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **DequantRecipe.AXES,
        "m": (1, 2, 16, 5, 17),
        "x": ("normal", "small integers", "one-hot", "some not finite"),
    }

    def build(self) -> Any:
        """The DequantGemv problem."""
        # the two-argument super() does not work in a dataclass with slots, which is made twice
        fields = DequantRecipe._fields(self, finite=True)
        k = fields["shape"][1]
        rng = np.random.default_rng(self.seed + 1)
        x = rng.standard_normal((self.m, k))
        if self.x == "small integers":
            x = rng.integers(-2, 3, x.shape).astype(np.float64)
        elif self.x == "one-hot":
            x = (np.arange(k) == rng.permutation(max(k, self.m))[: self.m, None] % k).astype(np.float64)
        elif self.x == "some not finite":
            x[rng.integers(self.m), rng.integers(k)] = rng.choice([np.nan, np.inf, -np.inf])
        return DequantGemv(**fields, x=_laid_out(round_to(x, fields["dtype"]), self.layout))
