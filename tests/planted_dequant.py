"""Kernels for every packed format with one step wrong each: the kinds of fault that real kernels have had."""

import dataclasses
from typing import Any

import numpy as np
from numpy_kernels import Dequant, float32

from pagebench.reference import dequant
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_integer import Awq
from pagebench.reference.dtypes import FLOAT16, Array

GGUF = ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k")
PACKED = tuple(name for name in FORMATS if name.startswith("pack_quantized"))


class AnyFormat(Dequant):
    """Every format, read as the reference reads it. A fault is in the arrays it is given, or in what it makes of them.

    `formats`: those in which the fault can be.
    """

    formats: tuple[str, ...] = tuple(FORMATS)

    def values(self, p: Any) -> Array:
        arrays = {name: np.array(array) for name, array in p.packed.items()}
        self.read(p, arrays)
        return dequant.decode(self.asked(object_like(p, packed=arrays)))

    def rounded(self, values: Array, dtype: Any) -> Array:
        return dequant.round_to(values, dtype)

    def asked(self, p: Any) -> Any:
        """The problem as the kernel takes it."""
        return p

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        """Change `arrays`, copies of the packed ones, to what a faulty kernel sees in them."""


def object_like(p: Any, **changes: Any) -> Any:
    """A copy of the problem with other fields, not validated: a kernel does not."""
    other = object.__new__(type(p))
    for field in dataclasses.fields(p):
        object.__setattr__(other, field.name, changes.get(field.name, getattr(p, field.name)))
    return other


def swapped(data: Array) -> Array:
    return data << 4 | data >> 4


class NibblesSwapped(AnyFormat):
    """The high nibble first, or last, as in another format."""

    formats = ("mxfp4", "nvfp4", "nvfp4_ct", "nf4", "fp4")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        name = next(iter(FORMATS[p.format].arrays))
        arrays[name] = swapped(arrays[name])


class HalvesTakenAsPairs(AnyFormat):
    """Elements j and j + 16 of a byte taken for 2j and 2j + 1."""

    formats = ("q4_0", "q4_1", "q5_0")

    def values(self, p: Any) -> Array:
        blocks = super().values(p).reshape(-1, 2, 16)
        return blocks.transpose(0, 2, 1).reshape(p.shape)


class AwqInNaturalOrder(AnyFormat):
    formats = ("awq",)

    def values(self, p: Any) -> Array:
        n, k = p.shape
        columns = super().values(p).T.reshape(k, n // 8, 8)
        return columns[..., list(Awq.ORDER)].reshape(k, n).T


class AwqZerosInNaturalOrder(AnyFormat):
    formats = ("awq",)

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        nibbles = (arrays["qzeros"].view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
        moved = nibbles[..., list(Awq.ORDER)] << (4 * np.arange(8, dtype=np.uint32))
        arrays["qzeros"] = np.bitwise_or.reduce(moved, axis=-1).view(np.int32)


class VersionsConfused(AnyFormat):
    """The stored zero point of the other version of GPTQ."""

    formats = ("gptq_v1", "gptq_v2")

    def asked(self, p: Any) -> Any:
        return object_like(p, format={"gptq_v1": "gptq_v2", "gptq_v2": "gptq_v1"}[p.format])


class AddedToTheWholeWord(AnyFormat):
    """0x11111111 added to eight zero points at once: a stored 15 carries into its neighbour."""

    formats = ("gptq_v1",)

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["qzeros"] = (arrays["qzeros"].view(np.uint32) + np.uint32(0x11111111)).view(np.int32)

    def asked(self, p: Any) -> Any:
        return object_like(p, format="gptq_v2")


class GroupSizeOfTheTile(AnyFormat):
    """One scale for every 64 features, whatever the groups."""

    formats = ("awq",)

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        if p.group_size in (8, 24, 32):
            keep = np.arange(arrays["scales"].shape[0]) * p.group_size // 64 * 64 // p.group_size
            arrays["scales"], arrays["qzeros"] = arrays["scales"][keep], arrays["qzeros"][keep]


class NaNReadAsLargest(AnyFormat):
    """e4m3fn's NaN taken for 448 or, as here, for the code below it."""

    formats = ("fp8_e4m3", "nvfp4", "nvfp4_swizzled")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        name = "weight" if "weight" in arrays else "weight_scale"
        arrays[name][(arrays[name] & 0x7F) == 0x7F] -= 1


class Float8SubnormalsFlushed(AnyFormat):
    formats = ("fp8_e4m3", "fp8_e5m2")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        subnormal = arrays["weight"] & 0x7F < (8 if p.format == "fp8_e4m3" else 4)
        arrays["weight"][subnormal] &= 0x80


class Float8SignLost(AnyFormat):
    """Sign of zero only."""

    formats = ("fp8_e4m3", "fp8_e5m2")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["weight"][arrays["weight"] == 0x80] = 0


class FormatsOfFloat8Confused(AnyFormat):
    formats = ("fp8_e4m3", "fp8_e5m2")

    def asked(self, p: Any) -> Any:
        return object_like(p, format={"fp8_e4m3": "fp8_e5m2", "fp8_e5m2": "fp8_e4m3"}[p.format])


class BlockScalesTransposed(AnyFormat):
    formats = ("fp8_e4m3",)

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        if arrays["scale"].ndim == 2:
            arrays["scale"] = np.resize(arrays["scale"].T, arrays["scale"].shape)


class ScaleRoundedFirst(AnyFormat):
    """A float32 scale taken as bfloat16."""

    formats = ("fp8_e4m3", "int8", "nvfp4", "nf4")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        for name in ("scale", "global_scale", "absmax"):
            if name in arrays:
                arrays[name] = float32(dequant.round_to(np.asarray(arrays[name]), dequant.COMPUTE_DTYPES[1]))


class LowestScaleFlushed(AnyFormat):
    """2^-127 is a subnormal number."""

    formats = ("mxfp4",)

    def values(self, p: Any) -> Array:
        zero = np.repeat(p.packed["scales"] == 0, 32, axis=1)
        return np.where(zero, 0.0, super().values(p))


class NaNScaleTakenAsPower(AnyFormat):
    formats = ("mxfp4",)

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["scales"][arrays["scales"] == 255] = 254


class SignOfBlockScaleLost(AnyFormat):
    formats = ("nvfp4", "nvfp4_ct", "nvfp4_swizzled")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["weight_scale"] &= 0x7F


class GlobalScaleFirst(AnyFormat):
    """number * (scale * global_scale), which rounds elsewhere."""

    formats = ("nvfp4", "nvfp4_ct")

    def asked(self, p: Any) -> Any:
        return object_like(p, contract="f32x2")


class MultipliedInsteadOfDivided(AnyFormat):
    """By the rounded reciprocal."""

    formats = ("nvfp4_ct",)

    def asked(self, p: Any) -> Any:
        with np.errstate(divide="ignore"):
            inverse = np.float32(1) / p.packed["global_scale"]
        return object_like(p, format="nvfp4", packed={**p.packed, "global_scale": np.asarray(inverse)})


class SwizzledTakenAsLinear(AnyFormat):
    formats = ("nvfp4_swizzled",)

    def asked(self, p: Any) -> Any:
        n, k = p.shape
        linear = p.packed["weight_scale"][:n, : k // 16]
        return object_like(p, format="nvfp4", packed={**p.packed, "weight_scale": linear})


class BlocksBeginWithRows(AnyFormat):
    """A block of the flat weight taken for a block of its row."""

    formats = ("nf4", "fp4")

    def values(self, p: Any) -> Array:
        if "absmax" not in p.packed:
            return super().values(p)
        n, k = p.shape
        code = dequant.decode(object_like(p, packed={**p.packed, "absmax": np.ones_like(p.packed["absmax"])}))
        block = np.arange(n)[:, None] * -(-k // p.group_size) + np.arange(k) // p.group_size
        return code * p.packed["absmax"][np.minimum(block, p.packed["absmax"].size - 1)]


class OffsetForgotten(AnyFormat):
    formats = ("nf4", "fp4")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        if "offset" in arrays:
            arrays["offset"] = np.zeros_like(arrays["offset"])


class Contracted(AnyFormat):
    """code2 * absmax2 + offset as one operation, with one rounding."""

    formats = ("nf4", "fp4")

    def asked(self, p: Any) -> Any:
        if "offset" not in p.packed:
            return p
        q = p.packed["absmax_q"]
        outer = p.packed["absmax2"][np.arange(q.size) // 256].astype(np.float64)
        absmax = p.packed["code2"][q] * outer + p.packed["offset"]
        return object_like(p, packed={"packed": p.packed["packed"], "absmax": absmax.astype(np.float32)})


class ZeroPointIgnored(AnyFormat):
    formats = ("int8",)

    def asked(self, p: Any) -> Any:
        return object_like(p, packed={name: p.packed[name] for name in ("weight", "scale")})


class DifferenceInEightBits(AnyFormat):
    """q - zero wraps."""

    formats = ("int8",)

    def asked(self, p: Any) -> Any:
        if "zero_point" not in p.packed or p.packed["zero_point"].ndim:
            return p
        weight = p.packed["weight"] - p.packed["zero_point"]
        return object_like(p, packed={"weight": weight, "scale": p.packed["scale"]})


class StraddlingBitsLost(AnyFormat):
    """Fields that begin in one word and end in the next lose their upper bits."""

    formats = ("pack_quantized_3", "pack_quantized_5", "pack_quantized_6", "pack_quantized_7")

    def values(self, p: Any) -> Array:
        bits = int(p.format[-1])
        first = np.arange(p.shape[1]) * bits
        straddles = first // 32 != (first + bits - 1) // 32
        words = p.packed["weight_packed"].view(np.uint32).copy()
        whole = super().values(p)
        for k in np.flatnonzero(straddles):
            words[:, (first[k] + bits - 1) // 32] &= np.uint32(0xFFFFFFFF) << np.uint32((first[k] + bits) % 32)
        other = super().values(object_like(p, packed={**p.packed, "weight_packed": words.view(np.int32)}))
        return np.where(straddles, other, whole)


class StoredAsTwosComplement(AnyFormat):
    """The offset of 2^(bits-1) left out."""

    formats = PACKED

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        if p.format == "pack_quantized_4":
            arrays["weight_packed"] ^= np.uint32(0x88888888).view(np.int32)


class ExactProductRoundedTwice(AnyFormat):
    """float32 first, although the scale is float32."""

    formats = ("pack_quantized_8", "pack_quantized_7")

    def asked(self, p: Any) -> Any:
        return object_like(p, contract="f32")


class InHalf(AnyFormat):
    """As the CUDA kernels of vLLM's plugin compute."""

    formats = ("q4_k", "q5_k", "q6_k", "q4_1")

    def asked(self, p: Any) -> Any:
        return object_like(p, contract="half")


class MinimumIgnored(AnyFormat):
    formats = ("q4_1", "q4_k", "q5_k")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["blocks"].reshape(-1, FORMATS[p.format].nbytes)[:, 2:4] = 0  # type: ignore[attr-defined]  # a GGUF format


class FifthBitsIgnored(AnyFormat):
    formats = ("q5_0", "q5_k")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        where = {"q5_0": slice(2, 6), "q5_k": slice(16, 48)}[p.format]
        arrays["blocks"].reshape(-1, FORMATS[p.format].nbytes)[:, where] = 0  # type: ignore[attr-defined]  # a GGUF format


class UpperScaleBitsIgnored(AnyFormat):
    """The last four scales of a block without the two bits kept beside the first four."""

    formats = ("q4_k", "q5_k")

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["blocks"].reshape(-1, FORMATS[p.format].nbytes)[:, 4:12] &= 0x3F  # type: ignore[attr-defined]  # GGUF


class SubScalesUnsigned(AnyFormat):
    formats = ("q6_k",)

    def read(self, p: Any, arrays: dict[str, Array]) -> None:
        arrays["blocks"].reshape(-1, 210)[:, 192:208] &= 0x7F


class LastColumnsDropped(AnyFormat):
    """k not a multiple of 64."""

    def values(self, p: Any) -> Array:
        values = super().values(p).copy()
        values[:, values.shape[1] // 64 * 64 or None :] = 0
        return values


# --- the fused product


class SumInHalf(AnyFormat):
    """Products added up in float16."""

    def row_product(self, values: Array, x: Array) -> Array:
        return (values * x).astype(FLOAT16).sum(axis=1, dtype=FLOAT16)


class LastSplitLost(AnyFormat):
    def row_product(self, values: Array, x: Array) -> Array:
        whole = max(x.size // 32 * 32, min(x.size, 32))
        return super().row_product(values[:, :whole], x[:whole])


class OneFeatureTwice(AnyFormat):
    """Splits overlap by one."""

    def row_product(self, values: Array, x: Array) -> Array:
        return super().row_product(values, x) + (values[:, 32] * x[32] if x.size > 32 else 0)


class RowsBeyondSixteenLost(AnyFormat):
    def dequant_gemv(self, p: Any) -> Array:
        y = super().dequant_gemv(p)
        y[16:] = 0
        return y


class NaNSpreads(AnyFormat):
    """A row of x that is not finite spoils the other rows."""

    def dequant_gemv(self, p: Any) -> Array:
        y = super().dequant_gemv(p)
        with np.errstate(invalid="ignore"):
            return (y + (float32(p.x) * 0).sum()).astype(p.dtype)


class InputTakenAsContiguous(AnyFormat):
    def dequant_gemv(self, p: Any) -> Array:
        x = p.x
        offset = int(x.ctypes.data - x.base.ctypes.data)
        flat = np.ndarray(x.shape, x.dtype, buffer=x.base, offset=offset)
        return super().dequant_gemv(object_like(p, x=flat))
