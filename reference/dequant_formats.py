"""One decoder per packed format: the shortest code that says what the format is.

A decoder returns weight [n, k]: float64 holding the exact value for contract `exact`, float32 computed in the stated
order for contract `f32`. To learn a format, read its class; to add one, write a class and list it in FORMATS.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from pagebench.reference.dtypes import BFLOAT16, FLOAT16, INT32, UINT8, Array
from pagebench.reference.validation import require, require_all, require_array, require_int

Packed = Mapping[str, Array]


class Format(Protocol):
    """What a format declares: its array names, its contracts (the default first), validation and decoding."""

    @property
    def arrays(self) -> tuple[str, ...]: ...

    @property
    def contracts(self) -> tuple[str, ...]: ...

    def validate(self, packed: Packed, shape: tuple[int, int], group_size: int | None) -> None: ...

    def decode(self, packed: Packed, shape: tuple[int, int], group_size: int | None, contract: str) -> Array: ...


def nibbles(words: Array) -> Array:
    """int64 [..., 8]: the eight 4-bit fields of each int32 word, lowest bits first."""
    return (words.view(np.uint32).astype(np.int64)[..., None] >> (4 * np.arange(8))) & 15


class GptqV2:
    """GPTQ int4 with zero points stored as they are (AutoGPTQ's layout, GPTQModel's version 2).

    qweight int32 [k/8, n]: element k of a column in bits 4*(k%8) of row k//8. qzeros int32 [groups, n/8]: column n's
    zero point in bits 4*(n%8). scales fp16 or bf16 [groups, n]. g_idx int32 [k]: the group of each input feature, in
    any order. weight[n, k] = scales[g, n] * (q - zero), exact in float32: 11 bits times 5.
    Source: GPTQModel `nn_modules/qlinear`, AutoGPTQ `qlinear_cuda_old.py`.
    """

    arrays = ("qweight", "qzeros", "scales", "g_idx")
    contracts = ("exact",)

    def validate(self, packed: Packed, shape: tuple[int, int], group_size: int | None) -> None:
        n, k = shape
        require(k % 8 == 0, "shape[1] (k)", "be a multiple of 8", k)
        require(n % 8 == 0, "shape[0] (n)", "be a multiple of 8", n)
        require(group_size is not None, "group_size", "be -1 or an integer >= 1", group_size)
        if group_size != -1:
            require_int("group_size", group_size, low=1)
        groups = 1 if group_size == -1 else -(-k // int(group_size or 1))
        require_array("packed['qweight']", packed["qweight"], dtypes=(INT32,), shape=(k // 8, n))
        require_array("packed['qzeros']", packed["qzeros"], dtypes=(INT32,), shape=(groups, n // 8))
        require_array("packed['scales']", packed["scales"], dtypes=(FLOAT16, BFLOAT16), shape=(groups, n))
        g_idx = packed["g_idx"]
        require_array("packed['g_idx']", g_idx, dtypes=(INT32,), shape=(k,))
        require_all("packed['g_idx']", g_idx, (g_idx >= 0) & (g_idx < groups), f"be in [0, {groups})")

    def decode(self, packed: Packed, shape: tuple[int, int], group_size: int | None, contract: str) -> Array:
        n, k = shape
        q = nibbles(packed["qweight"]).transpose(0, 2, 1).reshape(k, n)
        zero = nibbles(packed["qzeros"]).reshape(-1, n)
        scale = packed["scales"].astype(np.float32).astype(np.float64)
        group = packed["g_idx"]
        return ((q - zero[group]) * scale[group]).T


class Q8Zero:
    """GGUF Q8_0: blocks of 32 elements along k, 34 bytes: d (fp16, little-endian), then 32 int8 q. weight = q * d.

    blocks uint8 [n, k/32 * 34]. Source: ggml `ggml-common.h` block_q8_0, `dequantize_row_q8_0`.
    """

    arrays = ("blocks",)
    contracts = ("exact", "f32")
    elements, nbytes = 32, 34

    def validate(self, packed: Packed, shape: tuple[int, int], group_size: int | None) -> None:
        n, k = shape
        require(group_size is None, "group_size", "be None: the format's blocks fix it", group_size)
        require(k % self.elements == 0, "shape[1] (k)", f"be a multiple of {self.elements}", k)
        require_array(
            "packed['blocks']", packed["blocks"], dtypes=(UINT8,), shape=(n, k // self.elements * self.nbytes)
        )

    def decode(self, packed: Packed, shape: tuple[int, int], group_size: int | None, contract: str) -> Array:
        n, k = shape
        blocks = np.ascontiguousarray(packed["blocks"]).reshape(n, k // self.elements, self.nbytes)
        d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float64)
        q = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
        return (q * d).reshape(n, k)  # 8 bits times 11: exact in float32 too, so both contracts agree


FORMATS: dict[str, Format] = {"gptq_v2": GptqV2(), "q8_0": Q8Zero()}
