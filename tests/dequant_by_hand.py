"""One weight at a time, from the formats' specifications, in Python integers and fractions: no NumPy arithmetic.

`ELEMENT[format](packed, row, column, shape, group_size)` is the exact value, for finite scales.
"""

import struct
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

Packed = Mapping[str, Any]
Element = Callable[[Packed, int, int, tuple[int, int], int | None], Fraction]


def bits(value: Any, first: int, count: int) -> int:
    """`count` bits of an integer taken as two's complement of any width, from bit `first`."""
    return int(value) >> first & (1 << count) - 1


def exactly(value: Any) -> Fraction:
    return Fraction(float(value))


def half(block: Any, offset: int) -> Fraction:
    return Fraction(struct.unpack("<e", bytes(block[offset : offset + 2]))[0])


def group_of(column: int, group_size: int | None) -> int:
    return 0 if group_size in (-1, None) else column // int(group_size or 1)


# --- integers


def int8(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    place = ((), (row,), (row, group_of(column, group_size)))[packed["scale"].ndim]
    zero = int(packed["zero_point"][place]) if "zero_point" in packed else 0
    return exactly(packed["scale"][place]) * (int(packed["weight"][row, column]) - zero)


def gptq(stored_less: int) -> Element:
    def element(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
        group = packed["g_idx"][column]
        q = bits(packed["qweight"][column // 8, row], 4 * (column % 8), 4)
        zero = bits(packed["qzeros"][group, row // 8], 4 * (row % 8), 4) + stored_less & 15
        return exactly(packed["scales"][group, row]) * (q - zero)

    return element


def awq(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    slot = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}[row % 8]
    group = group_of(column, group_size)
    q, zero = (
        bits(word, 4 * slot, 4) for word in (packed["qweight"][column, row // 8], packed["qzeros"][group, row // 8])
    )
    return exactly(packed["scales"][group, row]) * (q - zero)


def pack_quantized(width: int) -> Element:
    def field(words: Any, index: int) -> int:
        string = sum(bits(word, 0, 32) << 32 * i for i, word in enumerate(words))
        return bits(string, width * index, width)

    def element(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
        group = group_of(column, group_size)
        zero = 1 << width - 1
        if "weight_zero_point" in packed:
            zero = field(packed["weight_zero_point"][:, group], row)
        return exactly(packed["weight_scale"][row, group]) * (field(packed["weight_packed"][row], column) - zero)

    return element


# --- floating point


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    sign = -1 if code >> exponent_bits + mantissa_bits else 1
    exponent = bits(code, mantissa_bits, exponent_bits)
    mantissa = Fraction(bits(code, 0, mantissa_bits), 1 << mantissa_bits)
    return sign * (1 + mantissa if exponent else mantissa) * Fraction(2) ** (max(exponent, 1) - bias)


def e2m1(code: int) -> Fraction:
    return small_float(code, 2, 1, 1)


def e4m3(code: int) -> Fraction:
    return small_float(code, 4, 3, 7)


def fp8(exponent_bits: int, mantissa_bits: int, bias: int) -> Element:
    def element(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
        place = ((), (row,), (row // 128, column // 128))[packed["scale"].ndim]
        code = int(packed["weight"][row, column])
        return small_float(code, exponent_bits, mantissa_bits, bias) * exactly(packed["scale"][place])

    return element


def mxfp4(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    block, place = divmod(column, 32)
    code = bits(packed["blocks"][row, block, place // 2], 4 * (place % 2), 4)
    return e2m1(code) * Fraction(2) ** (int(packed["scales"][row, block]) - 127)


def nvfp4(divides: bool = False, swizzled: bool = False) -> Element:
    def element(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
        code = bits(packed["weight_packed"][row, column // 2], 4 * (column % 2), 4)
        block, scales = column // 16, packed["weight_scale"]
        scale = scales[row, block]
        if swizzled:  # tile by tile: 32 rows of four groups of four bytes, the groups being rows 32 apart
            tile = row // 128 * (scales.shape[1] // 4) + block // 4
            scale = scales.reshape(-1, 32, 4, 4)[tile, row % 32, row // 32 % 4, block % 4]
        common = exactly(packed["global_scale"])
        return e2m1(code) * e4m3(int(scale)) * (1 / common if divides else common)

    return element


# --- GGUF


def block_at(packed: Packed, row: int, column: int, elements: int, nbytes: int) -> tuple[Any, int]:
    """The block's bytes and the place of the element in it."""
    block = column // elements
    return packed["blocks"][row, block * nbytes : (block + 1) * nbytes], column % elements


def q4_0(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    block, i = block_at(packed, row, column, 32, 18)
    return half(block, 0) * (bits(block[2 + i % 16], 4 * (i // 16), 4) - 8)


def q4_1(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    block, i = block_at(packed, row, column, 32, 20)
    return half(block, 0) * bits(block[4 + i % 16], 4 * (i // 16), 4) + half(block, 2)


def q5_0(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    block, i = block_at(packed, row, column, 32, 22)
    high = int.from_bytes(bytes(block[2:6]), "little") >> i & 1
    return half(block, 0) * (bits(block[6 + i % 16], 4 * (i // 16), 4) + 16 * high - 16)


def q8_0(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    block, i = block_at(packed, row, column, 32, 34)
    return half(block, 0) * int(np.int8(block[2 + i].view(np.int8)))


def scale_and_minimum(s: Any, j: int) -> tuple[int, int]:
    """get_scale_min_k4 of ggml."""
    if j < 4:
        return int(s[j]) & 63, int(s[j + 4]) & 63
    return int(s[j + 4]) & 15 | int(s[j - 4]) >> 6 << 4, int(s[j + 4]) >> 4 | int(s[j]) >> 6 << 4


def k_quant(nbytes: int, codes: int, high: int | None) -> Element:
    """Q4_K and Q5_K: `codes` and `high` are where qs and qh start."""

    def element(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
        block, i = block_at(packed, row, column, 256, nbytes)
        sub = i // 32
        q = bits(block[codes + 32 * (sub // 2) + i % 32], 4 * (sub % 2), 4)
        if high is not None:
            q += 16 * bits(block[high + i % 32], sub, 1)
        scale, minimum = scale_and_minimum(block[4:16], sub)
        return half(block, 0) * scale * q - half(block, 2) * minimum

    return element


def q6_k(packed: Packed, row: int, column: int, shape: tuple[int, int], group_size: int | None) -> Fraction:
    block, i = block_at(packed, row, column, 256, 210)
    part, place = divmod(i, 128)
    quarter, lane = divmod(place, 32)
    low = bits(block[64 * part + 32 * (quarter % 2) + lane], 4 * (quarter // 2), 4)
    high = bits(block[128 + 32 * part + lane], 2 * quarter, 2)
    return half(block, 208) * int(block[192 + i // 16].view(np.int8)) * (low + 16 * high - 32)


ELEMENT: dict[str, Element] = {
    "int8": int8,
    "gptq_v1": gptq(1),
    "gptq_v2": gptq(0),
    "awq": awq,
    **{f"pack_quantized_{width}": pack_quantized(width) for width in range(2, 9)},
    "fp8_e4m3": fp8(4, 3, 7),
    "fp8_e5m2": fp8(5, 2, 15),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4(),
    "nvfp4_ct": nvfp4(divides=True),
    "nvfp4_swizzled": nvfp4(swizzled=True),
    "q4_0": q4_0,
    "q4_1": q4_1,
    "q5_0": q5_0,
    "q8_0": q8_0,
    "q4_k": k_quant(144, 16, None),
    "q5_k": k_quant(176, 48, 16),
    "q6_k": q6_k,
}
