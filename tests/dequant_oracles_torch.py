"""Oracles that need torch and are in the extra `oracles`, or too large for it (see dequant_oracles)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from oracle_comparison import DTYPES, SCALES, Comparison, array_of, compare, problem, tensor, torch_dtype

from pagebench.reference.dequant import Dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32


def bitsandbytes() -> Iterator[Comparison]:
    import torch
    from bitsandbytes import functional

    generic = "its generic path, taken for odd rows and large blocks, reads FP4's code 8 as +0; its C++ and CUDA as -0"

    for format in ("nf4", "fp4"):
        for dtype in DTYPES:
            for block, shape in ((32, (64, 256)), (64, (256, 512)), (128, (7, 96)), (256, (33, 130)), (4096, (1, 65))):
                for scales in SCALES:
                    what = problem(format, shape, block, dtype=dtype, scales=scales)
                    state = functional.QuantState(
                        tensor(what.packed["absmax"]), torch.Size(shape), None, block, format, torch_dtype(dtype)
                    )
                    got = functional.dequantize_4bit(tensor(what.packed["packed"]).reshape(-1, 1), state)
                    known = generic if format == "fp4" and block == 4096 else None
                    yield compare(what, array_of(got), f"block {block}, {scales} scales", known)
            what = problem(format, (64, 1032), 64, form="nested", dtype=dtype, scales="normal")
            outer = functional.QuantState(
                tensor(what.packed["absmax2"]), code=tensor(what.packed["code2"]), blocksize=256, dtype=torch.float32
            )
            state = functional.QuantState(
                tensor(what.packed["absmax_q"]),
                torch.Size(what.shape),
                None,
                64,
                format,
                torch_dtype(dtype),
                tensor(what.packed["offset"]),
                outer,
            )
            got = functional.dequantize_4bit(tensor(what.packed["packed"]).reshape(-1, 1), state)
            yield compare(what, array_of(got), "block 64")


def compressed_tensors() -> Iterator[Comparison]:
    import torch
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for bits in range(2, 9):
        for form in ("symmetric", "zero_point"):
            for number in DTYPES:
                what = problem(f"pack_quantized_{bits}", (33, 75), 25, form=form, number=number, dtype=number)
                args = QuantizationArgs(num_bits=bits, group_size=25, strategy="group", symmetric=form == "symmetric")
                scheme = QuantizationScheme(targets=["Linear"], weights=args)
                state = {name: tensor(array) for name, array in what.packed.items()}
                state["weight_shape"] = torch.tensor(what.shape)
                got = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
                yield compare(what, array_of(got), f"{number.name} scales")

    fp4 = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=fp4)
    for contract, dtype, known in (
        ("f32x2", BFLOAT16, None),
        ("f32", BFLOAT16, "divides the block's scale by the global scale first"),
    ):
        what = problem("nvfp4_ct", (64, 1024), dtype=dtype, contract=contract, scales="normal")
        state = {f"weight_{name.removeprefix('weight_')}": tensor(array) for name, array in what.packed.items()}
        state["weight_scale"] = state["weight_scale"].view(torch.float8_e4m3fn)
        # As checkpoints hold it: a global scale without dimensions would be rounded to bfloat16 by torch's promotion.
        state["weight_global_scale"] = state.pop("weight_global_scale").reshape(1)
        got = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        yield compare(what, array_of(got), known=known)

    mx = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=mx)
    for last, known in ((254, None), (255, "e8m0 255 is an infinity there")):
        what = _mxfp4(64, 1024, last, BFLOAT16)
        state = {
            "weight_packed": tensor(what.packed["blocks"].reshape(64, 512)),
            "weight_scale": tensor(what.packed["scales"]),
        }
        got = MXFP4PackedCompressor.decompress(state, scheme)["weight"]
        yield compare(what, array_of(got), f"scales 0 to {last}", known)


def _mxfp4(n: int, k: int, last: int, dtype: np.dtype[Any]) -> Dequantize:
    """An MXFP4 problem with scale bytes 0 to `last`."""
    rng = np.random.default_rng(3)
    packed = random_packed("mxfp4", (n, k), None, rng)
    packed["scales"] = rng.integers(0, last + 1, packed["scales"].shape).astype(np.uint8)
    packed["scales"].flat[:6] = (0, 1, 2, 127, 253, last)
    return Dequantize("mxfp4", packed, (n, k), None, dtype, "exact")


def transformers() -> Iterator[Comparison]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for last, known in ((254, None), (255, "e8m0 255 is an infinity there")):
        for dtype in (BFLOAT16, FLOAT32):
            what = _mxfp4(64, 1024, last, dtype)
            blocks, scales = (tensor(what.packed[name])[None] for name in ("blocks", "scales"))
            got = convert_moe_packed_tensors(blocks, scales, dtype=torch_dtype(dtype))[0].T  # [k, n] of one expert
            yield compare(what, array_of(got), f"scales 0 to {last}", known)


def torchao() -> Iterator[Comparison]:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_dtype
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.mx_formats.utils import to_blocked
    from torchao.quantization.quant_primitives import dequantize_affine

    for format, swizzled in (("nvfp4", False), ("nvfp4_swizzled", True)):
        for contract, known in (("f32x2", None), ("f32", "multiplies the block's scale by the global scale first")):
            for dtype in DTYPES:
                what = problem(format, (130, 80), dtype=dtype, contract=contract, scales="normal")
                packed, scale, common = (tensor(what.packed[name]) for name in FORMATS[format].arrays)
                scale = scale.view(torch.float8_e4m3fn)
                weight = NVFP4Tensor(packed, scale, 16, torch.float32, common, None, swizzled)
                yield compare(what, array_of(weight.dequantize(torch_dtype(dtype))), known=known)

    for shape in ((128, 64), (130, 80), (33, 48), (300, 192)):
        what = problem("nvfp4_swizzled", shape)
        linear = np.random.default_rng(1).integers(0, 256, (shape[0], shape[1] // 16), np.uint8)
        blocked = array_of(to_blocked(tensor(linear))).reshape(what.packed["weight_scale"].shape)
        got = FORMATS["nvfp4_swizzled"].block_scales({"weight_scale": blocked}, shape)  # type: ignore[attr-defined]
        yield Comparison(f"128x4 scales of {shape}", got.astype(FLOAT32), linear.astype(FLOAT32))

    what = _mxfp4(64, 1024, 255, FLOAT32)
    blocks, scales = what.packed["blocks"].reshape(64, 512), what.packed["scales"]
    e8m0 = tensor(scales).view(torch.float8_e8m0fnu)
    got = to_dtype(tensor(blocks), e8m0, torch.float4_e2m1fn_x2, 32, torch.float32)
    yield compare(what, array_of(got), "scales 0 to 255")

    for form in FORMATS["int8"].forms:
        group_size = 32 if form.startswith("group") else None
        what = problem("int8", (48, 96), group_size, form=form, scales="normal")
        block = {"t": (48, 96), "c": (1, 96), "g": (1, 32)}[form[0]]
        zero = tensor(what.packed["zero_point"]) if "zero_point" in what.packed else None
        got = dequantize_affine(tensor(what.packed["weight"]), block, tensor(what.packed["scale"]), zero, torch.int8)
        yield compare(what, array_of(got))


def optimum_quanto() -> Iterator[Comparison]:
    """Its AWQ unpacking; the arithmetic is ours."""
    from optimum.quanto.tensor.weights.awq.packed import unpack

    what = problem("awq", (64, 256), 128)
    q, zero = (array_of(unpack(tensor(what.packed[name]), reorder=True)).astype(int) for name in ("qweight", "qzeros"))
    group = np.arange(256) // 128
    with np.errstate(all="ignore"):
        got = ((q - zero[group]) * what.packed["scales"][group].astype(FLOAT32)).T
    yield compare(what, np.ascontiguousarray(got, FLOAT32))


def gptqmodel() -> Iterator[Comparison]:
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    what = problem("awq", (64, 256), 64, dtype=FLOAT16)
    arrays = [tensor(what.packed[name]) for name in ("qweight", "qzeros", "scales")]
    yield compare(what, array_of(dequantize_gemm(*arrays, 4, 64)).T)

    for format, order, known in (
        ("gptq_v2", "natural", None),
        ("gptq_v2", "act-order", None),
        ("gptq_v1", "natural", "a stored 15 carries into the neighbour"),
        ("gptq_v1", "no stored 15", None),
    ):
        what = problem(format, (64, 256), 64, dtype=FLOAT16)
        if order != "act-order":
            what.packed["g_idx"][:] = np.arange(256) // 64
        if order == "no stored 15":
            what.packed["qzeros"] &= np.int32(0x77777777)
        linear = TorchLinear(4, 64, False, True, 256, 64)
        for name, array in what.packed.items():
            setattr(linear, name, tensor(array))
        if format == "gptq_v1":
            linear.qzeros = linear.qzeros.clone()
            convert_gptq_v1_to_v2_format_module(linear, bits=4, pack_dtype=torch.int32)
        linear.eval()
        yield compare(what, array_of(linear.dequantize_weight()).T, order, known)
