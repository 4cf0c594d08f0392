"""What happens to the numbers of paged attention in Triton besides the two matrix products.

Codes of quantised caches are decoded as integers: Triton has fp8 e4m3 from sm_89 on only. Both fp8 formats and int8 are
exact in float16 and bfloat16, so decoding rounds nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl

FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}  # 0: the cache has the query's dtype
# How the scales of a quantised cache are given: one for all (a number), an element for each KV head, for each slot.
ONE, HEAD, SLOT = 0, 1, 2
HALF_LN2: tl.constexpr = tl.constexpr(0.34657359027997264)
LARGEST_FLOAT32: tl.constexpr = tl.constexpr(3.4028234663852886e38)
LARGEST_BFLOAT16: tl.constexpr = tl.constexpr(3.3895313892515355e38)


@triton.jit
def numbers(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values of codes, in the low byte of uint8 or uint16, as DTYPE, exact; anything else as it is."""
    if FORMAT == 0:
        return codes
    elif FORMAT == 3:
        return codes.to(tl.uint8).to(tl.int8, bitcast=True).to(DTYPE)
    wide = codes.to(tl.uint16)
    if FORMAT == 2:
        return (wide << 8).to(tl.float16, bitcast=True).to(DTYPE)
    # As the bits of a float16 an e4m3 number is 2^8 times smaller, subnormal numbers included.
    small = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = small * tl.full([], 256.0, tl.float16)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def capped(score, factor, cap):
    """cap * tanh(x) where `factor` turns a score into 2 x log2(e); off by a few units in the last place."""
    power = tl.exp2(tl.abs(score) * factor)
    tanh = 1.0 - tl.div_rn(2.0, power + 1.0)  # 1 where the power is infinite
    x = score * factor * HALF_LN2
    square = x * x
    series = 21844.0 / 6081075.0 * square - 1382.0 / 155925.0  # of Taylor: 4e-9 are missing at the end of its range
    series = ((series * square + 62.0 / 2835.0) * square - 17.0 / 315.0) * square + 2.0 / 15.0
    near_zero = x + x * square * (series * square - 1.0 / 3.0)
    return cap * tl.where(square < 0.16, near_zero, tl.where(score < 0.0, -tanh, tanh))


@triton.jit
def with_sink(top, denominator, sink):
    """(top, denominator, what multiplies the weighted sum) once a sink's logit, in base 2, is counted."""
    sink = tl.minimum(tl.maximum(sink, -LARGEST_FLOAT32), LARGEST_FLOAT32)  # as a logit it was finite
    both = tl.maximum(top, sink)
    rescale = tl.exp2(top - both)
    return both, denominator * rescale + tl.exp2(sink - both), rescale


@triton.jit
def add_weighted(total, weight, v, MULTIPLY: tl.constexpr, TWO: tl.constexpr):
    """total + weight v. weight: float32, rounded to v's type, TWO: to the sum of two numbers of v's type."""
    if MULTIPLY:
        return total + tl.sum(weight[:, :, None] * v[None, :, :], axis=1)
    elif v.dtype == tl.bfloat16:
        weight = tl.minimum(weight, LARGEST_BFLOAT16)  # the largest scales are larger, by less than is rounded off
    high = weight.to(v.dtype)
    total = tl.dot(high, v, total, input_precision="ieee")
    if TWO:
        total = tl.dot((weight - high.to(tl.float32)).to(v.dtype), v, total)
    return total


def pairs_of(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes of even strides as uint16, two codes each."""
    return codes.view(torch.uint16)


def codes_of(cache: torch.Tensor) -> torch.Tensor:
    """A quantised cache as uint8 with the same strides; others as they are."""
    return cache.view(torch.uint8) if cache.dtype in FORMATS else cache


def aligned_elements(*tensors: torch.Tensor) -> int:
    """Elements, a power of two of at most 16 bytes, that each row begins at a multiple of; 1 if rows have gaps."""
    width: int = 16 // tensors[0].element_size()
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            return 1
        outer = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
        while width > 1 and (tensor.data_ptr() % (width * tensor.element_size()) or any(s % width for s in outer)):
            width //= 2
    return width


def scale_arguments(scale: Any, unused: torch.Tensor) -> tuple[float, torch.Tensor, tuple[int, int, int], int]:
    """(number, array, strides by block, offset and head, how it is given); `unused` stands in for no array."""
    if not isinstance(scale, torch.Tensor):
        return 1.0 if scale is None else float(scale), unused, (0, 0, 0), ONE
    strides = (*[0] * (3 - scale.dim()), *scale.stride())
    return 1.0, scale, strides, SLOT if scale.dim() == 3 else HEAD
