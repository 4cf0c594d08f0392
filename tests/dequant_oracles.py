"""Other people's dequantisation, run on the same random bytes as the reference.

    python tests/dequant_oracles.py results/oracles.json

compares with every oracle that is installed and stores the number of elements and mismatches of each comparison;
oracles that are not installed keep what an earlier run stored. An oracle is a function in ORACLES that yields
Comparisons. What `known` says is a difference of meaning; test_dequant_oracles says which the reference takes, and why.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagebench.reference.dequant import Dequantize, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gguf import GgufFormat
from pagebench.reference.dequant_layout import FLOAT8_E8M0
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, FLOAT32, Array, as_bits

DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
STORED_ROWS = 6700  # rows of three 256-element blocks for the stored run: 20,100 blocks of each K format
SCALES = ("bits", "normal")  # scales of any bits, and ordinary ones: with the former much overflows


@dataclass(frozen=True)
class Comparison:
    """`got` of an oracle and `want` of the reference; `known`: why they may differ."""

    what: str
    got: Array
    want: Array
    known: str | None = None

    @property
    def mismatches(self) -> int:
        """Elements whose bits differ; any NaN equals any NaN."""
        assert self.got.dtype == self.want.dtype, (self.what, self.got.dtype, self.want.dtype)
        assert self.got.shape == self.want.shape, (self.what, self.got.shape, self.want.shape)
        both_nan = np.isnan(self.got) & np.isnan(self.want)
        return int(((as_bits(self.got) != as_bits(self.want)) & ~both_nan).sum())


def problem(
    format: str,
    shape: tuple[int, int],
    group_size: int | None = None,
    *,
    seed: int = 0,
    scales: str = "bits",
    form: str | None = None,
    number: np.dtype[Any] | None = None,
    dtype: np.dtype[Any] = FLOAT32,
    contract: str | None = None,
) -> Dequantize:
    """A random Dequantize problem; see `random_packed`."""
    rng = np.random.default_rng(seed)
    packed = random_packed(format, shape, group_size, rng, form=form, scales=scales, number=number)
    return Dequantize(format, packed, shape, group_size, dtype, contract or default_contract(format))


def compare(what: Dequantize, got: Array, note: str = "", known: str | None = None) -> Comparison:
    form = FORMATS[what.format].form(what.packed)
    parts = (what.format, "" if form == "plain" else form, what.dtype.name, what.contract, note)
    return Comparison(" ".join(part for part in parts if part), got, dequantize(what), known)


# --- between NumPy and torch


def tensor(array: Array) -> Any:
    """The array copied to a torch tensor of the same dtype."""
    import torch

    array = array.copy(order="C")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    import torch

    return {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT32: torch.float32}[dtype]


def array_of(values: Any) -> Array:
    import torch

    values = values.detach().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(BFLOAT16)
    return values.numpy()


# --- the oracles


def gguf(rows: int = 100) -> Iterator[Comparison]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    for what, note in _gguf_problems(rows):
        kind = GGMLQuantizationType[_ggml_name(what.format)]
        with np.errstate(all="ignore"):
            yield compare(what, decode(what.packed["blocks"], kind), note)


def libgguf(rows: int = 100) -> Iterator[Comparison]:
    import libgguf as library
    from gguf import GGMLQuantizationType

    for what, note in _gguf_problems(rows):
        kind = GGMLQuantizationType[_ggml_name(what.format)]
        got = library.dequantize_rows(what.packed["blocks"], int(kind), n_per_row=what.shape[1])
        yield compare(what, got, note)


def _gguf_problems(rows: int) -> Iterator[tuple[Dequantize, str]]:
    for name, format in FORMATS.items():
        if isinstance(format, GgufFormat):
            for seed, scales in enumerate(SCALES):
                yield problem(name, (rows, 768), scales=scales, seed=seed), f"{scales} scales"


def _ggml_name(format: str) -> str:
    return format.upper()


def torch() -> Iterator[Comparison]:
    """torch's own float8 types, their products with float32 scales, and its e8m0."""
    import torch

    numbers = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    for format, number in numbers.items():
        for form in FORMATS[format].forms:
            for dtype in DTYPES:
                what = problem(format, (150, 260), form=form, dtype=dtype)
                scale = tensor(what.packed["scale"])
                if form == "channel":
                    scale = scale[:, None]
                elif form == "block":
                    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:150, :260]
                weight = tensor(what.packed["weight"]).view(number).float() * scale
                yield compare(what, array_of(weight.to(torch_dtype(dtype))))
    for number in (FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E8M0):
        codes = np.arange(256, dtype=np.uint8)
        got = tensor(codes).view(getattr(torch, number.name)).float()
        yield Comparison(f"codes of {number.name}", array_of(got), codes.view(number).astype(FLOAT32))


def ml_dtypes() -> Iterator[Comparison]:
    import ml_dtypes as library

    from pagebench.reference.dequant_layout import E2M1

    codes = np.arange(16, dtype=np.uint8)
    yield Comparison("codes of e2m1", codes.view(library.float4_e2m1fn).astype(FLOAT32), E2M1.astype(FLOAT32))


def gfloat() -> Iterator[Comparison]:
    from gfloat import decode_float
    from gfloat import formats as known

    from pagebench.reference.dequant_layout import E2M1, as_number

    for format, number in (
        (known.format_info_ocp_e4m3, FLOAT8_E4M3FN),
        (known.format_info_ocp_e5m2, FLOAT8_E5M2),
        (known.format_info_ocp_e8m0, FLOAT8_E8M0),
    ):
        got = np.array([decode_float(format, i).fval for i in range(256)])
        yield Comparison(f"codes of {number.name}", got, as_number(np.arange(256), number))
    got = np.array([decode_float(known.format_info_ocp_e2m1, i).fval for i in range(16)])
    yield Comparison("codes of e2m1", got, E2M1)


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


ORACLES: dict[str, Callable[..., Iterator[Comparison]]] = {
    "gguf": gguf,
    "ml_dtypes": ml_dtypes,
    "torch": torch,
    "libgguf": libgguf,
    "gfloat": gfloat,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "torchao": torchao,
    "transformers": transformers,
    "optimum-quanto": optimum_quanto,
    "gptqmodel": gptqmodel,
}


def version(package: str) -> str | None:
    """The installed version; None where the package is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(path: Path) -> None:
    stored = json.loads(path.read_text()) if path.exists() else {}
    for package, oracle in ORACLES.items():
        found = version(package)
        if found is None:
            print(f"{package}: not installed")
            continue
        results = [
            {"what": c.what, "elements": int(c.want.size), "mismatches": c.mismatches}
            | ({"known": c.known} if c.known else {})
            for c in (oracle(rows=STORED_ROWS) if package in ("gguf", "libgguf") else oracle())
        ]
        stored[package] = {"version": found, "comparisons": results}
        wrong = [c for c in results if c["mismatches"]]
        print(f"{package} {found}: {sum(c['elements'] for c in results)} elements in {len(results)} comparisons")
        print("".join(f"    {c}\n" for c in wrong), end="")
    stored["reference"] = {"numpy": version("numpy"), "ml_dtypes": version("ml_dtypes")}
    path.write_text(_text(stored))


def _text(stored: dict[str, Any]) -> str:
    """JSON with one comparison to a line."""
    text = json.dumps(stored, indent=1)
    return re.sub(r'\{\s+"what".*?\}', lambda found: re.sub(r"\n\s*", " ", found[0]), text, flags=re.DOTALL) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
