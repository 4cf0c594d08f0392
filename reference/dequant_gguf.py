"""The block formats of GGUF files that serving meets: Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K.

blocks uint8 [n, k/elements * nbytes]: blocks run along k, and a row is a whole number of them. d, m and dmin are
float16, little-endian. Source: ggml `src/ggml-common.h` (the structs) and `src/ggml-quants.c` (dequantize_row_*), which
computes in float32.
"""

from typing import Any

import numpy as np

from pagebench.reference.dequant_layout import ARITHMETIC, ArraySpec, Packed, PackedFormat, Shape, array_names
from pagebench.reference.dtypes import FLOAT16, UINT8, Array

Terms = tuple[Array, ...]


class GgufFormat(PackedFormat):
    """`elements` in `nbytes` bytes, with float16 scales at the byte offsets `scale_offsets`.

    A weight is the sum of the format's `terms`. Contract `half`: every operation rounds to float16, as in the CUDA
    kernels of vLLM's GGUF plugin.
    """

    elements: int
    nbytes: int
    scale_offsets: tuple[int, ...] = (0,)

    forms = array_names(plain=("blocks",))
    contracts = ("exact", "f32", "half")

    def __init__(self) -> None:
        self.k_multiple = self.elements

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        n, k = shape
        row = k // self.elements * self.nbytes
        return {"blocks": ArraySpec((UINT8,), (n, row), None, FLOAT16, self.scale_offsets, self.nbytes)}

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        """The one or two terms that add up to each weight, `number` [blocks, elements], computed in `number`.

        blocks: uint8 [blocks, nbytes].
        """
        raise NotImplementedError

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        first, *second = self.terms(self._blocks(packed), ARITHMETIC[contract])
        return (first + second[0] if second else first).reshape(shape)

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        terms = self.terms(self._blocks(packed), ARITHMETIC["exact"])
        return np.asarray(sum(abs(term) for term in terms)).reshape(shape)

    def _blocks(self, packed: Packed) -> Array:
        return np.ascontiguousarray(packed["blocks"]).reshape(-1, self.nbytes)


def half_at(blocks: Array, offset: int, number: np.dtype[Any]) -> Array:
    """`number` [blocks, 1]: the float16 at a byte offset of each block."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(number)


def halves(data: Array) -> Array:
    """uint8 [blocks, 2 * bytes]: all low nibbles, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def bits_of(data: Array) -> Array:
    """uint8 [blocks, 8 * bytes]: every bit of the bytes, lowest first."""
    return np.unpackbits(data, axis=1, bitorder="little")


class Q4Zero(GgufFormat):
    """Q4_0, 32 elements in 18 bytes: d, qs[16]. Byte j holds elements j and, high, j + 16. weight = d * (q - 8)."""

    elements, nbytes = 32, 18

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        q = halves(blocks[:, 2:]).astype(number) - number.type(8)
        return (half_at(blocks, 0, number) * q,)


class Q4One(GgufFormat):
    """Q4_1, 32 elements in 20 bytes: d, m, qs[16] as in Q4_0. weight = d * q + m."""

    elements, nbytes, scale_offsets = 32, 20, (0, 2)
    contracts = ("f32", "exact", "half")

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        q = halves(blocks[:, 4:]).astype(number)
        return half_at(blocks, 0, number) * q, np.broadcast_to(half_at(blocks, 2, number), q.shape)


class Q5Zero(GgufFormat):
    """Q5_0, 32 elements in 22 bytes: d, qh[4], qs[16] as in Q4_0. Bit i of qh is the fifth bit of element i.

    weight = d * (q - 16).
    """

    elements, nbytes = 32, 22

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        q = halves(blocks[:, 6:]) | bits_of(blocks[:, 2:6]) << 4
        return (half_at(blocks, 0, number) * (q.astype(number) - number.type(16)),)


class Q8Zero(GgufFormat):
    """Q8_0, 32 elements in 34 bytes: d, then 32 int8 q. weight = d * q, exact in float32 too: 8 bits times 11."""

    elements, nbytes = 32, 34

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        return (half_at(blocks, 0, number) * blocks[:, 2:].view(np.int8).astype(number),)


def six_bit_scales(packed: Array) -> tuple[Array, Array]:
    """(scales, minima), each uint8 [blocks, 8], of the 12 bytes in which Q4_K and Q5_K keep them.

    The first four of both are the low six bits of bytes 0-3 and 4-7; the others have their low four bits in bytes 8-11,
    and their top two at the top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale, minimum


def min_terms(blocks: Array, q: Array, number: np.dtype[Any]) -> Terms:
    """d * scale * q and -(dmin * minimum) of blocks that start with d, dmin, scales[12]; q is uint8 [blocks, 256]."""
    scale, minimum = (x.astype(number) for x in six_bit_scales(blocks[:, 4:16]))
    factor, offset = half_at(blocks, 0, number) * scale, -(half_at(blocks, 2, number) * minimum)
    return np.repeat(factor, 32, axis=1) * q.astype(number), np.repeat(offset, 32, axis=1)


def chunk_halves(data: Array) -> Array:
    """uint8 [blocks, 256] of qs[128]: from each 32 bytes 32 low nibbles, then 32 high ones."""
    return halves(data.reshape(-1, 32)).reshape(-1, 256)


class Q4K(GgufFormat):
    """Q4_K, 256 elements in 144 bytes: d, dmin, scales[12], qs[128]. Sub-blocks of 32 share a 6-bit scale and minimum.

    Bytes 32c ... 32c + 31 hold sub-block 2c in their low and 2c + 1 in their high nibbles.
    weight = d * scale * q - dmin * minimum.
    """

    elements, nbytes, scale_offsets = 256, 144, (0, 2)
    contracts = ("f32", "exact", "half")

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        return min_terms(blocks, chunk_halves(blocks[:, 16:]), number)


class Q5K(GgufFormat):
    """Q5_K, 256 elements in 176 bytes: d, dmin, scales[12], qh[32], qs[128]. As Q4_K, and bit s of qh[l] is the fifth
    bit of element l of sub-block s.
    """

    elements, nbytes, scale_offsets = 256, 176, (0, 2)
    contracts = ("f32", "exact", "half")

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        high = bits_of(blocks[:, 16:48]).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)
        return min_terms(blocks, chunk_halves(blocks[:, 48:]) | high << 4, number)


class Q6K(GgufFormat):
    """Q6_K, 256 elements in 210 bytes: ql[128], qh[64], scales[16] int8, d. weight = d * scale * (q - 32).

    Each half of 128 elements has 64 bytes of ql and 32 of qh. Its element 32g + l has the low (g < 2) or high nibble of
    ql[32 * (g % 2) + l] and above it bits 2g and 2g + 1 of qh[l]. All of it is exact in float32: 11 + 7 + 5 bits.
    Sixteen elements share a scale.
    """

    elements, nbytes, scale_offsets = 256, 210, (208,)

    def terms(self, blocks: Array, number: np.dtype[Any]) -> Terms:
        low = halves(blocks[:, :128].reshape(-1, 64))  # [halves, 128]
        pairs = blocks[:, 128:192].reshape(-1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
        q = (low | pairs.reshape(-1, 128) << 4).reshape(-1, 256).astype(np.int8) - np.int8(32)
        scale = np.repeat(blocks[:, 192:208].view(np.int8), 16, axis=1)
        d = half_at(blocks, 208, number)
        if number == FLOAT16:  # vLLM's kernel multiplies the integers first, which loses the sign of a zero
            return (d * (scale.astype(np.int32) * q).astype(number),)
        return (d * scale.astype(number) * q.astype(number),)
