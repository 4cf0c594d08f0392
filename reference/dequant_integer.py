"""Formats of packed integers under a scale and perhaps a zero point: INT8, GPTQ, AWQ, compressed-tensors.

All of them mean weight = scale * (q - zero), which is exact in float32 where the scale has 16 bits.
"""

from typing import Any

import numpy as np

from pagebench.reference.dequant_layout import (
    ARITHMETIC,
    ArraySpec,
    Packed,
    PackedFormat,
    Shape,
    array_names,
    bit_fields,
    codes,
    group_index,
    groups_of,
    nibbles,
    scales,
)
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, Array, round_to, to_float64
from pagebench.reference.validation import require


def affine(q: Array, zero: Array | int, scale: Array, contract: str) -> Array:
    """scale * (q - zero) of integers q and zero, in the arithmetic of `contract`.

    `half`: the scale rounds to float16, and so does the product. `fma_zero`: q * scale - round(zero * scale), where
    the inner product rounds to the scale's dtype and the rest only once (vLLM's Marlin and Machete kernels for AWQ).
    """
    if contract == "fma_zero":
        exact = to_float64(scale)
        return np.asarray(q * exact - to_float64(round_to(zero * exact, scale.dtype)))
    number = ARITHMETIC[contract]
    return np.asarray((q - zero).astype(number) * to_float64(scale).astype(number))


class Int8(PackedFormat):
    """INT8 weights: weight = scale * (weight - zero_point), the difference exact, the product one float32 rounding.

    weight int8 [n, k]. scale float32 [] (per tensor), [n] (per channel) or [n, groups] (per group of group_size
    elements along k, the last one perhaps partial). zero_point int8, shaped like scale, or absent: then 0.
    Source: torchao `dequantize_affine`, compressed-tensors `lifecycle/forward_helpers.py`.
    """

    _SYMMETRIC = ("weight", "scale")
    _ZERO = ("weight", "scale", "zero_point")

    forms = array_names(
        **dict.fromkeys(("tensor", "channel", "group"), _SYMMETRIC),
        **dict.fromkeys(("tensor_zero", "channel_zero", "group_zero"), _ZERO),
    )
    contracts = ("f32", "exact")

    def grouped(self, form: str) -> bool:
        return form.startswith("group")

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        n, k = shape
        of_scale = {"tensor": (), "channel": (n,)}.get(form.removesuffix("_zero"), (n, groups_of(k, group_size)))
        specs = {"weight": codes(INT8, n, k), "scale": scales(FLOAT32, shape=of_scale)}
        return {**specs, "zero_point": codes(INT8, *of_scale)} if form.endswith("_zero") else specs

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        q, zero, scale = self._parts(packed, shape, group_size)
        return affine(q, zero, scale, contract)

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        q, zero, scale = self._parts(packed, shape, group_size)
        return np.asarray((abs(q) + abs(zero)) * abs(to_float64(scale)))

    def _parts(self, packed: Packed, shape: Shape, group_size: int | None) -> tuple[Array, Array, Array]:
        """q [n, k], and zero point and scale that broadcast with it."""
        scale = packed["scale"]
        zero = packed.get("zero_point", np.zeros_like(scale, INT8)).astype(np.int64)
        if scale.ndim == 2:
            group = group_index(shape[1], group_size)
            scale, zero = scale[:, group], zero[:, group]
        elif scale.ndim == 1:
            scale, zero = scale[:, None], zero[:, None]
        return packed["weight"].astype(np.int64), zero, scale


class GptqV2(PackedFormat):
    """GPTQ int4 with zero points stored as they are (AutoGPTQ's layout, GPTQModel's version 2).

    qweight int32 [k/8, n]: element k of a column in bits 4*(k%8) of row k//8. qzeros int32 [groups, n/8]: column n's
    zero point in bits 4*(n%8). scales fp16 or bf16 [groups, n]. g_idx int32 [k]: the group of each input feature, in
    any order. weight[n, k] = scales[g, n] * (q - zero), exact in float32: 11 bits times 5.
    Source: GPTQModel `nn_modules/qlinear`, AutoGPTQ `qlinear_cuda_old.py`.
    """

    forms = array_names(plain=("qweight", "qzeros", "scales", "g_idx"))
    contracts = ("exact", "f32", "half", "fma_zero")
    n_multiple = k_multiple = 8

    def grouped(self, form: str) -> bool:
        return True

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        (n, k), groups = shape, groups_of(shape[1], group_size)
        return {
            "qweight": codes(INT32, k // 8, n),
            "qzeros": codes(INT32, groups, n // 8),
            "scales": scales(FLOAT16, BFLOAT16, shape=(groups, n)),
            "g_idx": ArraySpec((INT32,), (k,), below=groups),
        }

    def zero_points(self, packed: Packed, n: int) -> Array:
        """int64 [groups, n]."""
        return nibbles(packed["qzeros"]).reshape(-1, n)

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        q, zero, scale = self._parts(packed, shape)
        return affine(q, zero, scale, contract).T

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        q, zero, scale = self._parts(packed, shape)
        return np.asarray((q + zero) * abs(to_float64(scale))).T

    def _parts(self, packed: Packed, shape: Shape) -> tuple[Array, Array, Array]:
        """q, zero point and scale, each [k, n]."""
        n, k = shape
        q = nibbles(packed["qweight"]).transpose(0, 2, 1).reshape(k, n)
        group = packed["g_idx"]
        return q, self.zero_points(packed, n)[group], packed["scales"][group]

    def live(self, name: str, packed: Packed, shape: Shape, group_size: int | None) -> Any:
        return np.unique(packed["g_idx"]) if name in ("scales", "qzeros") else ...


class GptqV1(GptqV2):
    """GPTQ int4 as AutoGPTQ writes it: as version 2, with zero - 1 stored, so that zero = (stored + 1) & 15.

    Readers differ where 15 is stored: AutoGPTQ's torch and CUDA code masks, as here, and reads 0; its Triton code and
    vLLM's exllama kernel add 1 unmasked and read 16; GPTQModel adds 0x11111111 to the whole word, carrying into the
    neighbour. A packer can only have meant 0 by 15, since a zero point is a 4-bit code.
    """

    def zero_points(self, packed: Packed, n: int) -> Array:
        return (super().zero_points(packed, n) + 1) & 15


class Awq(PackedFormat):
    """AWQ int4, the GEMM layout of AutoAWQ: words run along n, and their nibbles are interleaved.

    qweight int32 [k, n/8]: bits 4*i of word c hold column 8*c + ORDER[i]. qzeros int32 [groups, n/8]: the same, zero
    points as they are. scales fp16 [groups, n]. Feature k is in group k // group_size.
    Source: AutoAWQ `awq/utils/packing_utils.py`.
    """

    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    forms = array_names(plain=("qweight", "qzeros", "scales"))
    contracts = ("exact", "f32", "half", "fma_zero")
    n_multiple = 8

    def grouped(self, form: str) -> bool:
        return True

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        (n, k), groups = shape, groups_of(shape[1], group_size)
        return {
            "qweight": codes(INT32, k, n // 8),
            "qzeros": codes(INT32, groups, n // 8),
            "scales": scales(FLOAT16, shape=(groups, n)),
        }

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        q, zero, scale = self._parts(packed, shape, group_size)
        return affine(q, zero, scale, contract).T

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        q, zero, scale = self._parts(packed, shape, group_size)
        return np.asarray((q + zero) * abs(to_float64(scale))).T

    def _parts(self, packed: Packed, shape: Shape, group_size: int | None) -> tuple[Array, Array, Array]:
        """q, zero point and scale, each [k, n]."""
        group = group_index(shape[1], group_size)
        q, zero = (self._columns(packed[name], shape[0]) for name in ("qweight", "qzeros"))
        return q, zero[group], packed["scales"][group]

    def _columns(self, words: Array, n: int) -> Array:
        """int64 [rows, n]."""
        return nibbles(words)[..., np.argsort(self.ORDER)].reshape(-1, n)


class PackQuantized(PackedFormat):
    """compressed-tensors pack-quantized integers of 2 to 8 bits: each row one string of bits, without padding.

    weight_packed int32 [n, ceil(k * bits / 32)]: element k in bits k*bits ... of the row's words taken as one
    little-endian number (a field may straddle two words), offset by 2^(bits-1). weight_scale fp16, bf16 or fp32
    [n, groups]. weight_zero_point int32 [ceil(n * bits / 32), groups]: the same packing along n, or absent: then
    2^(bits-1), so that weight = scale * (q - zero) in both cases. group_size divides k.
    Source: compressed-tensors `compressors/pack_quantized/helpers.py`.
    """

    forms = array_names(
        symmetric=("weight_packed", "weight_scale"),
        zero_point=("weight_packed", "weight_scale", "weight_zero_point"),
    )

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def grouped(self, form: str) -> bool:
        return True

    def validate_sizes(self, form: str, shape: Shape, group_size: int | None) -> None:
        super().validate_sizes(form, shape, group_size)
        whole = group_size == -1 or shape[1] % int(group_size or 1) == 0
        require(whole, "group_size", f"divide shape[1] (k) = {shape[1]}", group_size)

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        (n, k), groups = shape, groups_of(shape[1], group_size)
        specs = {
            "weight_packed": codes(INT32, n, self._words(k)),
            "weight_scale": scales(FLOAT16, BFLOAT16, FLOAT32, shape=(n, groups)),
        }
        return {**specs, "weight_zero_point": codes(INT32, self._words(n), groups)} if form == "zero_point" else specs

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        q, zero, scale = self._parts(packed, shape, group_size)
        return affine(q, zero, scale, contract)

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        q, zero, scale = self._parts(packed, shape, group_size)
        return np.asarray((q + zero) * abs(to_float64(scale)))

    def _parts(self, packed: Packed, shape: Shape, group_size: int | None) -> tuple[Array, Array, Array]:
        """q, zero point and scale, each [n, k]."""
        n, k = shape
        group = group_index(k, group_size)
        q = bit_fields(packed["weight_packed"], self.bits, k)
        zero = np.full(packed["weight_scale"].shape, 1 << (self.bits - 1))
        if "weight_zero_point" in packed:
            zero = bit_fields(packed["weight_zero_point"].T, self.bits, n).T
        return q, zero[:, group], packed["weight_scale"][:, group]

    def _words(self, count: int) -> int:
        return -(-count * self.bits // 32)
