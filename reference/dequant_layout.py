"""What packed formats share: which arrays a problem holds, their shapes, and helpers that take bits apart.

A format is a `PackedFormat`: it declares its arrays (`specs`), from which they are validated here and drawn in
`dequant_samples`, and decodes them. Where it comes in several forms (per-tensor or per-channel scales, with or without
zero points, plain or nested), the form of a problem is read off its arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pagebench.reference.dtypes import FLOAT16, FLOAT32, INT32, UINT8, Array
from pagebench.reference.validation import require, require_all, require_array

Packed = Mapping[str, Array]
Shape = tuple[int, int]
Forms = Mapping[str, tuple[str, ...]]

FLOAT8_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

# The dtype in which a contract does its arithmetic, each operation rounding to it. In float64 all of it is exact.
ARITHMETIC: dict[str, np.dtype[Any]] = {
    "exact": np.dtype(np.float64),
    "f32": FLOAT32,
    "f32x2": FLOAT32,
    "half": FLOAT16,
}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What a packed array must be: one of `dtypes`, of `shape`, and, when `below` is given, all in [0, below).

    scale: the number format of the scales in it, None where every bit is a code. `scale_offsets` None: each element is
    a scale. Otherwise the bytes repeat every `period`, with a scale at each of these offsets. number: the number format
    of the codes, where some of them are not finite.
    """

    dtypes: tuple[np.dtype[Any], ...]
    shape: tuple[int, ...]
    below: int | None = None
    scale: np.dtype[Any] | None = None
    scale_offsets: tuple[int, ...] | None = None
    period: int = 0
    number: np.dtype[Any] | None = None


def array_names(**forms: tuple[str, ...]) -> Forms:
    """The array names of each form, by the form's name."""
    return forms


def codes(dtype: np.dtype[Any], *shape: int) -> ArraySpec:
    """An array in which any bits are allowed and none of them is a scale."""
    return ArraySpec((dtype,), shape)


def scales(*dtypes: np.dtype[Any], shape: tuple[int, ...]) -> ArraySpec:
    """An array of scales, stored as what they are."""
    return ArraySpec(dtypes, shape, scale=dtypes[0])


def scale_bytes(number: np.dtype[Any], *shape: int) -> ArraySpec:
    """A uint8 array whose every byte is a scale of the 8-bit format `number`."""
    return ArraySpec((UINT8,), shape, scale=number)


class PackedFormat:
    """Base of the formats. `forms`: the array names of each form. n and k must be multiples of `n_multiple` and
    `k_multiple`. `contracts`: the rounding contracts that `decode` knows, the default first.
    """

    forms: Forms
    contracts: tuple[str, ...] = ("exact", "f32")
    n_multiple = 1
    k_multiple = 1

    @property
    def arrays(self) -> tuple[str, ...]:
        """Array names of the first form."""
        return next(iter(self.forms.values()))

    def form(self, packed: Packed) -> str:
        """Which form `packed` has: by its names, and among equal ones by the dimensions of `scale`.

        Raises ValueError when there is none.
        """
        found = [form for form, names in self.forms.items() if set(names) == set(packed)]
        allowed = " or ".join(dict.fromkeys(str(sorted(names)) for names in self.forms.values()))
        require(found, "packed", f"hold exactly {allowed}", sorted(packed, key=str))
        if len(found) == 1:
            return found[0]
        require_array("packed['scale']", packed["scale"])
        ndim = packed["scale"].ndim
        rule = f"have at most {len(found) - 1} dimensions"
        require(ndim < len(found), "packed['scale']", rule, packed["scale"].shape)
        return found[ndim]

    def grouped(self, form: str) -> bool:
        """Whether a problem's group_size says how many elements share a scale; it must be None otherwise."""
        return False

    def group_sizes(self, form: str) -> tuple[int | None, ...]:
        """Group sizes worth trying, of those allowed."""
        return (32, -1, 8, 24, 64, 128) if self.grouped(form) else (None,)

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        """Each array of the form, for a valid shape and group size."""
        raise NotImplementedError

    def validate_sizes(self, form: str, shape: Shape, group_size: int | None) -> None:
        """Raise ValueError unless the format has weights of this shape with this group size."""
        for name, size, multiple in (
            ("shape[1] (k)", shape[1], self.k_multiple),
            ("shape[0] (n)", shape[0], self.n_multiple),
        ):
            require(size % multiple == 0, name, f"be a multiple of {multiple}", size)
        if not self.grouped(form):
            require(group_size is None, "group_size", "be None: the format or the scale's shape fixes it", group_size)
            return
        whole = isinstance(group_size, int | np.integer) and not isinstance(group_size, bool)
        allowed = whole and group_size is not None and (group_size == -1 or group_size >= 1)
        require(allowed, "group_size", "be -1 or an integer >= 1", group_size)

    def validate(self, packed: Packed, shape: Shape, group_size: int | None) -> None:
        """Raise ValueError naming the argument, the rule and the value, unless `packed` is such a weight."""
        form = self.form(packed)
        self.validate_sizes(form, shape, group_size)
        for name, spec in self.specs(form, shape, group_size).items():
            array, argument = packed[name], f"packed[{name!r}]"
            require_array(argument, array, dtypes=spec.dtypes, shape=spec.shape)
            if spec.below is not None:
                require_all(argument, array, (array >= 0) & (array < spec.below), f"be in [0, {spec.below})")

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        """weight [n, k] in the arithmetic of `contract`, still to be rounded to the output dtype."""
        raise NotImplementedError

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        """float64 [n, k]: the sum of the magnitudes of each weight's terms, finite where these are."""
        contract = "exact" if "exact" in self.contracts else self.contracts[0]
        return abs(self.decode(packed, shape, group_size, contract).astype(np.float64))

    def live(self, name: str, packed: Packed, shape: Shape, group_size: int | None) -> Any:
        """Index of the elements of array `name` that some weight depends on."""
        return ...


# --- taking bits apart


def groups_of(size: int, group_size: int | None) -> int:
    """Number of groups along an axis of `size`, the last one perhaps partial; -1 is one group."""
    return 1 if group_size == -1 else -(-size // int(group_size or 1))


def group_index(size: int, group_size: int | None) -> Array:
    """int64 [size]: the group of each element, in order."""
    return np.arange(size) // (size if group_size == -1 else int(group_size or 1))


def nibbles(words: Array) -> Array:
    """int64 [..., 8]: the eight 4-bit fields of each int32 word, lowest bits first."""
    return (words.astype(INT32, copy=False).view(np.uint32).astype(np.int64)[..., None] >> (4 * np.arange(8))) & 15


def nibble_pairs(data: Array) -> Array:
    """uint8 [..., 2]: the low and then the high nibble of each byte."""
    return np.stack([data & 15, data >> 4], axis=-1)


def bit_fields(words: Array, bits: int, count: int) -> Array:
    """int64 [rows, count]: consecutive fields of `bits` bits of each row of int32 words, lowest bits first.

    A field may straddle two words: the row is one little-endian string of bits.
    """
    data = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    string = np.unpackbits(data, axis=1, count=bits * count, bitorder="little")
    fields = string.reshape(len(words), count, bits).astype(np.int64)
    return np.asarray((fields << np.arange(bits)).sum(axis=2))


def as_number(codes: Array, number: np.dtype[Any]) -> Array:
    """float64: each byte read as a number of the 8-bit format `number`."""
    table = np.arange(256, dtype=np.uint8).view(number).astype(FLOAT32).astype(np.float64)
    return np.asarray(table[codes])


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
