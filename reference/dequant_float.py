"""Formats of small floating-point numbers and tables: FP8, MXFP4, NVFP4, and bitsandbytes' NF4 and FP4."""

from typing import Any

import numpy as np

from pagebench.reference.dequant_layout import (
    ARITHMETIC,
    E2M1,
    FLOAT8_E8M0,
    ArraySpec,
    Packed,
    PackedFormat,
    Shape,
    array_names,
    as_number,
    codes,
    nibble_pairs,
    scale_bytes,
    scales,
)
from pagebench.reference.dtypes import FLOAT8_E4M3FN, FLOAT32, UINT8, Array
from pagebench.reference.validation import require


class Fp8(PackedFormat):
    """FP8 weights under a float32 scale: weight = number * scale, one float32 rounding.

    weight uint8 [n, k]: the bytes of float8 e4m3fn (NaN 0x7F and 0xFF, no infinity) or e5m2. scale float32 [] (per
    tensor), [n] (per channel) or [ceil(n/128), ceil(k/128)] (blocks of 128 x 128, the last ones perhaps partial;
    multiplied, although DeepSeek's checkpoints call it weight_scale_inv).
    Source: OCP 8-bit Floating Point Specification 1.0; DeepSeek-V3 `inference/kernel.py` weight_dequant.
    """

    BLOCK = 128

    forms = array_names(tensor=("weight", "scale"), channel=("weight", "scale"), block=("weight", "scale"))
    contracts = ("f32", "exact")

    def __init__(self, number: np.dtype[Any]) -> None:
        self.number = number

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        n, k = shape
        blocks = (-(-n // self.BLOCK), -(-k // self.BLOCK))
        of_scale = {"tensor": (), "channel": (n,), "block": blocks}[form]
        return {"weight": ArraySpec((UINT8,), (n, k), number=self.number), "scale": scales(FLOAT32, shape=of_scale)}

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        n, k = shape
        scale = packed["scale"]
        if scale.ndim == 2:
            scale = scale[np.arange(n)[:, None] // self.BLOCK, np.arange(k) // self.BLOCK]
        elif scale.ndim == 1:
            scale = scale[:, None]
        number = ARITHMETIC[contract]
        return np.asarray(as_number(packed["weight"], self.number).astype(number) * scale.astype(number))


class Mxfp4(PackedFormat):
    """OCP MXFP4 as gpt-oss stores it: blocks of 32 e2m1 numbers along k under one power of two.

    blocks uint8 [n, k/32, 16]: byte j of a block holds elements 2j (low nibble) and 2j + 1. scales uint8 [n, k/32]:
    e8m0, 2^(e - 127), 255 = NaN for the whole block. weight = number * scale, exact in float32 save for overflow.
    Readers differ at e = 255, where transformers and compressed-tensors give infinities: OCP MX says NaN.
    Source: OCP Microscaling Formats Specification 1.0; transformers `integrations/mxfp4.py`.
    """

    forms = array_names(plain=("blocks", "scales"))
    k_multiple = 32

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        n, k = shape
        return {"blocks": codes(UINT8, n, k // 32, 16), "scales": scale_bytes(FLOAT8_E8M0, n, k // 32)}

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        value = E2M1[nibble_pairs(packed["blocks"])].reshape(*packed["scales"].shape, 32)
        scale = as_number(packed["scales"], FLOAT8_E8M0)[..., None]
        number = ARITHMETIC[contract]
        return np.asarray(value.astype(number) * scale.astype(number)).reshape(shape)


class Nvfp4(PackedFormat):
    """NVFP4: blocks of 16 e2m1 numbers along k under an e4m3 scale, and one float32 scale for the tensor.

    weight_packed uint8 [n, k/2]: element 2j in the low nibble of byte j. weight_scale uint8 [n, k/16]: float8 e4m3fn
    with its sign and NaN. global_scale float32 [], multiplied (ModelOpt's weight_scale_2) or, in `nvfp4_ct`, divided by
    (compressed-tensors' weight_global_scale). weight = (number * scale) * global_scale: the first product is exact in
    float32, so there is one rounding. Contract `f32x2` applies the global scale to the block's scale first, and so
    rounds twice, as torchao and compressed-tensors do.
    Source: NVIDIA ModelOpt `nvfp4_tensor.py`; compressed-tensors `compressors/nvfp4`.
    """

    forms = array_names(plain=("weight_packed", "weight_scale", "global_scale"))
    contracts = ("f32", "exact", "f32x2")
    k_multiple = 16

    def __init__(self, divides: bool = False) -> None:
        self.divides = divides

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        n, k = shape
        return {
            "weight_packed": codes(UINT8, n, k // 2),
            "weight_scale": scale_bytes(FLOAT8_E4M3FN, n, k // 16),
            "global_scale": scales(FLOAT32, shape=()),
        }

    def block_scales(self, packed: Packed, shape: Shape) -> Array:
        """uint8 [n, k/16]."""
        return packed["weight_scale"]

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        n, k = shape
        number = ARITHMETIC[contract]
        value = E2M1[nibble_pairs(packed["weight_packed"])].reshape(n, k // 16, 16).astype(number)
        scale = as_number(self.block_scales(packed, shape), FLOAT8_E4M3FN)[..., None].astype(number)
        together = np.divide if self.divides else np.multiply
        common = packed["global_scale"].astype(number)
        if contract == "f32x2":
            return np.asarray(value * together(scale, common)).reshape(shape)
        # `exact`: a quotient of float32 numbers is never so near the middle of two floats that float64 hides its side.
        return np.asarray(together(value * scale, common)).reshape(shape)


class Nvfp4Swizzled(Nvfp4):
    """NVFP4 with the block scales in the order that Blackwell's tensor cores read: tiles of 128 rows by 4 blocks.

    weight_scale uint8 [n rounded up to 128, k/16 rounded up to 4] = [rows, columns], whose bytes in memory order are:
    that of row r, block c at (r//128 * columns/4 + c//4) * 512 + (r%32) * 16 + (r%128)//32 * 4 + c%4. Bytes of the
    padding do not matter. Source: cuBLAS documentation, "1D Block Scaling Factors Layout"; torchao `to_blocked`.
    """

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        n, k = shape
        padded = scale_bytes(FLOAT8_E4M3FN, -(-n // 128) * 128, -(-k // 64) * 4)
        return {**super().specs(form, shape, group_size), "weight_scale": padded}

    def block_scales(self, packed: Packed, shape: Shape) -> Array:
        return packed["weight_scale"][self._places(shape)]

    def live(self, name: str, packed: Packed, shape: Shape, group_size: int | None) -> Any:
        return self._places(shape) if name == "weight_scale" else ...

    def _places(self, shape: Shape) -> tuple[Array, Array]:
        """Row and column in weight_scale of each block's scale, both [n, k/16]."""
        n, k = shape
        r, c = np.arange(n)[:, None], np.arange(k // 16)
        columns = -(-k // 64) * 4
        place = (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        return place // columns, place % columns


# Quantiles of the normal distribution, scaled to [-1, 1] (QLoRA, arXiv 2305.14314, appendix E).
NF4_CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# bitsandbytes' own FP4, divided by its largest, 12: a sign bit and one of eight magnitudes, not e2m1. Code 8 is -0, as
# in its C++ and CUDA kernels; its generic PyTorch path reads +0, since its table has the Python integer -0 there.
FP4_CODES = tuple(x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3))


class Bits4(PackedFormat):
    """bitsandbytes' NF4 and FP4: codes of a table of 16 float32 numbers, blocks of group_size along the *flat* weight.

    packed uint8 [ceil(n*k/2)]: element 2j of the row-major weight in the *high* nibble of byte j. absmax float32
    [blocks]: block b scales elements b*group_size ...; a block may cross rows. weight = table[code] * absmax.
    Nested, absmax is itself quantised: absmax_q uint8 [blocks], absmax2 float32 [ceil(blocks/256)], offset float32 [],
    code2 float32 [256], and absmax[b] = code2[absmax_q[b]] * absmax2[b//256] + offset, each operation rounding
    (contract `f32x2`; for these formats `f32` means the same).
    Source: bitsandbytes `functional.py`, `backends/default/ops.py`.
    """

    NESTED = 256

    forms = array_names(plain=("packed", "absmax"), nested=("packed", "absmax_q", "absmax2", "offset", "code2"))
    contracts = ("f32", "f32x2")

    def __init__(self, table: tuple[float, ...]) -> None:
        self.table = np.array(table, FLOAT32)

    def grouped(self, form: str) -> bool:
        return True

    def group_sizes(self, form: str) -> tuple[int | None, ...]:
        return (32, 64, 128, 256, 512, 1024, 2048, 4096)

    def validate_sizes(self, form: str, shape: Shape, group_size: int | None) -> None:
        super().validate_sizes(form, shape, group_size)
        allowed = self.group_sizes(form)
        require(group_size in allowed, "group_size", f"be one of {allowed}", group_size)

    def specs(self, form: str, shape: Shape, group_size: int | None) -> dict[str, ArraySpec]:
        count = shape[0] * shape[1]
        blocks = -(-count // int(group_size or 1))
        packed = codes(UINT8, -(-count // 2))
        if form == "plain":
            return {"packed": packed, "absmax": scales(FLOAT32, shape=(blocks,))}
        return {
            "packed": packed,
            "absmax_q": codes(UINT8, blocks),
            "absmax2": scales(FLOAT32, shape=(-(-blocks // self.NESTED),)),
            "offset": scales(FLOAT32, shape=()),
            "code2": scales(FLOAT32, shape=(256,)),
        }

    def decode(self, packed: Packed, shape: Shape, group_size: int | None, contract: str) -> Array:
        absmax, *offset = self._absmax_terms(packed)
        if offset:
            absmax = absmax + offset[0]
        return self._scaled(self.table, packed, absmax, shape, group_size)

    def magnitude(self, packed: Packed, shape: Shape, group_size: int | None) -> Array:
        absmax = sum(abs(term.astype(np.float64)) for term in self._absmax_terms(packed))
        return self._scaled(abs(self.table.astype(np.float64)), packed, np.asarray(absmax), shape, group_size)

    def _scaled(self, table: Array, packed: Packed, absmax: Array, shape: Shape, group_size: int | None) -> Array:
        """[n, k]: each code's entry of `table` times the absmax of its block."""
        count = shape[0] * shape[1]
        code = nibble_pairs(packed["packed"])[:, ::-1].reshape(-1)[:count]
        block = np.arange(count) // int(group_size or 1)
        return np.asarray(table[code] * absmax[block]).reshape(shape)

    def _absmax_terms(self, packed: Packed) -> tuple[Array, ...]:
        """float32, adding up to absmax [blocks]."""
        if "absmax" in packed:
            return (packed["absmax"],)
        outer = packed["absmax2"][np.arange(packed["absmax_q"].size) // self.NESTED]
        return packed["code2"][packed["absmax_q"]] * outer, packed["offset"]
