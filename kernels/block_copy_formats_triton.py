"""Codes of quantised KV caches (fp8 e4m3fn, fp8 e5m2, int8) in Triton, encoded and decoded as integers.

Triton has fp8 e4m3 from sm_89 on only, and its casts to int8 truncate; these compile for every GPU and give the same
bits everywhere. Formats go by the constants E4M3, E5M2 and INT8; 8-bit caches come as uint8 tensors.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

NONE, E4M3, E5M2, INT8 = (tl.constexpr(i) for i in range(4))
# How a scale is given: one number, an element of an array by [block, offset, head], or an output in that array.
VALUE, ARRAY, COMPUTED = (tl.constexpr(i) for i in range(3))

FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.int8: INT8}


@triton.jit
def highest(FORMAT: tl.constexpr):
    """The largest number of the format."""
    return 448.0 if FORMAT == 1 else (57344.0 if FORMAT == 2 else 127.0)


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """uint8 codes of float32 x: to nearest even, saturating; NaN becomes 0x7F, or 0 as int8."""
    nan = x != x
    finite = tl.where(nan, 0.0, x)
    if FORMAT == 3:
        clipped = tl.minimum(tl.maximum(finite, -128.0), 127.0)
        # 1.5 * 2^23 leaves the nearest integer in the low bits.
        code = (clipped + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
        return tl.where(nan, 0, code).to(tl.uint8)
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2  # a constant of the kernel
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15  # a constant of the kernel
    DROPPED: tl.constexpr = 23 - MANTISSA  # a constant of the kernel
    magnitude = tl.minimum(tl.abs(finite), highest(FORMAT))
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below the normal range the code counts steps; adding 2^23 steps rounds to a whole number of them.
    steps = 16384.0 if FORMAT == 1 else 128.0
    subnormal = (magnitude + steps).to(tl.int32, bitcast=True) - ((127 + 24 - BIAS - MANTISSA) << 23)
    code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(nan, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def decode(codes, FORMAT: tl.constexpr):
    """float32 values of uint8 codes, or of any float; exact."""
    if FORMAT == 0:
        return codes.to(tl.float32)
    if FORMAT == 3:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    wide = codes.to(tl.uint16)
    if FORMAT == 2:
        return (wide << 8).to(tl.float16, bitcast=True).to(tl.float32)
    # As the bits of a float16 an e4m3 number is 2^8 times smaller, subnormal numbers included.
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


def format_of(tensor: torch.Tensor) -> Any:
    """The format of a cache; NONE for one of floats."""
    return FORMATS.get(tensor.dtype, NONE)


def as_codes(tensor: torch.Tensor) -> torch.Tensor:
    """A quantised cache as uint8 with the same strides; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FORMATS else tensor


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size, so that nothing quiets a NaN."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def unit_of(*tensors: torch.Tensor) -> int:
    """Elements, a power of two, that the address and all strides but the last are multiples of, in every tensor.

    At most a 16-byte access of the narrowest tensor; 1 where the elements of a row lie apart.
    """
    unit: int = 16 // min(t.element_size() for t in tensors)
    for tensor in tensors:
        outer = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return 1
        while unit > 1 and (tensor.data_ptr() % (unit * tensor.element_size()) or any(s % unit for s in outer)):
            unit //= 2
    return unit


def regrouped(arrays: Sequence[torch.Tensor], most: int) -> list[torch.Tensor]:
    """The arrays [..., heads, head_size] with the elements of a token in other heads, where accesses get wider by it.

    So they do where heads of an odd size lie side by side in every array. Heads then have at most `most` elements, and
    fill the power of two that a tile has of columns nearly or as far as can be.
    """
    heads, size = arrays[0].shape[-2:]
    if heads > 1 and size > 1 and any(array.stride(-2) != size * array.stride(-1) for array in arrays):
        return list(arrays)
    rows = [array.view(*array.shape[:-2], heads * size) for array in arrays]
    unit = math.gcd(unit_of(*rows), heads * size)
    if unit <= unit_of(*arrays) or most < unit:
        return list(arrays)
    new_size = _head_size(heads * size, unit, most)
    return [row.view(*row.shape[:-1], heads * size // new_size, new_size) for row in rows]


@cache
def _head_size(total: int, unit: int, most: int) -> int:
    """The multiple of `unit` that divides `total`: the largest that fills nine tenths of its power of two, if any."""
    sizes = [n for n in range(unit, min(total, most) + 1, unit) if total % n == 0]
    return max(sizes, key=lambda n: (10 * n >= 9 * triton.next_power_of_2(n), n))


def units(tensor: torch.Tensor, unit: int) -> tuple[int, ...]:
    """Strides: all but the last in units of `unit` elements (0 of a dimension of one), the last in elements."""
    outer = (s // unit if n > 1 else 0 for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
    return (*outer, tensor.stride(-1) if tensor.shape[-1] > 1 else 1)


def scale_arguments(
    scale: Any, dummy: torch.Tensor, *, computed: bool = False
) -> tuple[Any, tuple[int, ...], float, Any]:
    """(array, its strides by block, offset and head, value, how it is given); `dummy` stands in for no array."""
    if not isinstance(scale, torch.Tensor):
        return dummy, (0, 0, 0), 1.0 if scale is None else float(scale), VALUE
    strides = (*[0] * (3 - scale.dim()), *scale.stride())
    return scale, strides, 1.0, COMPUTED if computed else ARRAY
