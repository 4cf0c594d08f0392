"""The reference against other people's decoders, and the meanings it takes where they disagree with each other."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dequant_oracles import ORACLES, version
from oracle_comparison import problem

from pagebench.reference.dequant import dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array

STORED = Path(__file__).parents[1] / "results" / "oracles.json"
# Part of the ordinary test environment; the others are in the extra `oracles`, or too large for it.
ALWAYS = ("gguf", "ml_dtypes", "torch")


@pytest.mark.parametrize("package", ORACLES)
def test_reference_agrees(package: str) -> None:
    """On random bytes, bit for bit, save where a difference of meaning is known."""
    if version(package) is None and package not in ALWAYS:
        pytest.skip(f"oracle {package} is not installed")
    wrong = [(each.what, each.mismatches) for each in ORACLES[package]() if each.known is None and each.mismatches]
    assert wrong == []


def test_stored_counts() -> None:
    """results/oracles.json holds a run of every oracle, and nothing in it is unexplained."""
    stored = json.loads(STORED.read_text())
    for package in ORACLES:
        comparisons = stored[package]["comparisons"]
        assert comparisons
        assert [c for c in comparisons if c["mismatches"] and "known" not in c] == []


def test_stored_counts_cover_every_format() -> None:
    stored = json.loads(STORED.read_text())
    seen = {c["what"].split()[0] for package in ORACLES for c in stored[package]["comparisons"]}
    assert set(FORMATS) - seen == set()


# --- where oracles disagree


def test_e8m0_255_is_nan() -> None:
    """OCP MX defines 255 as NaN, for the whole block, zeros included; torch, torchao, ml_dtypes and gfloat read it so.

    transformers and compressed-tensors scale by 2 ** 128 and get infinities; zeros stay 0 in the one and are NaN in the
    other.
    """
    what = problem("mxfp4", (1, 64))
    what.packed["scales"][0] = (255, 254)
    weight = dequantize(what)
    assert np.isnan(weight[0, :32]).all()
    assert not np.isnan(weight[0, 32:]).any()


def test_gptq_v1_stored_15_means_0() -> None:
    """A version 1 packer stores zero - 1 in four bits, so 15 can only have meant 0: AutoGPTQ's torch and CUDA code.

    AutoGPTQ's Triton code and vLLM's exllama kernel read 16; GPTQModel's conversion carries into the next nibble. The
    neighbours keep their own zero points here.
    """
    stored = 0x7F6E0F7F  # nibbles, lowest first: 15, 7, 15, 0, 14, 6, 15, 7
    what = problem("gptq_v1", (8, 8), -1, scales="normal")
    what.packed["qzeros"][...] = np.array(stored, np.uint32).view(np.int32)
    what.packed["qweight"][...] = 0
    what.packed["scales"][...] = -1
    assert dequantize(what)[:, 0].tolist() == [0, 8, 0, 1, 15, 7, 0, 8]


def test_fp4_code_8_is_minus_0() -> None:
    """bitsandbytes' C++ and CUDA kernels, which serving runs, give -0; its generic path, with the integer -0, +0."""
    what = problem("fp4", (1, 2), 32, scales="normal")
    what.packed["packed"][...] = 0x80
    what.packed["absmax"][...] = 1
    assert np.signbit(dequantize(what)).tolist() == [[True, False]]


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_ct"])
def test_nvfp4_global_scale_comes_last(format: str) -> None:
    """(number * scale) * global rounds once, since the first product is exact, and so it is the nearest float32.

    torchao and compressed-tensors apply the global scale to the block's scale first and round twice: contract `f32x2`.
    The two differ in a good part of float32 results and seldom in 16 bits.
    """

    def weight(dtype: np.dtype[Any], contract: str) -> Array:
        return dequantize(problem(format, (256, 512), dtype=dtype, contract=contract, scales="normal"))

    assert (weight(FLOAT32, "f32") == weight(FLOAT32, "exact")).all()
    differing = {d: (weight(d, "f32") != weight(d, "f32x2")).mean() for d in (FLOAT16, BFLOAT16, FLOAT32)}
    assert 0.05 < differing[FLOAT32] < 0.4
    assert differing[FLOAT16] < 1e-3
    assert differing[BFLOAT16] < 1e-4


def test_gguf_zero_keeps_the_sign_of_the_product() -> None:
    """ggml multiplies floats: a zero code under a negative scale is -0. vLLM's plugin multiplies integers in Q6_K."""
    what = problem("q6_k", (1, 256), scales="normal")
    blocks = what.packed["blocks"].reshape(210)
    blocks[:] = 0
    blocks[128:192] = 0xAA  # the upper bits of every q are 2, so that q - 32 is 0
    blocks[192:208] = np.int8(-1).view(np.uint8)
    blocks[208:] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    assert (dequantize(what) == 0).all()
    assert np.signbit(dequantize(what)).all()
    half = problem("q6_k", (1, 256), contract="half")
    half.packed["blocks"][...] = blocks
    assert not np.signbit(dequantize(half)).any()


def test_gguf_zero_code_under_a_negative_scale_is_minus_0() -> None:
    """Q4_0's code 8 is zero, -0 under d < 0 as ggml multiplies floats, and NaN under an infinite d."""
    what = problem("q4_0", (1, 64), scales="normal")
    what.packed["blocks"][0] = np.full(36, 0x88, np.uint8)
    what.packed["blocks"].reshape(2, 18)[:, :2] = np.array([[-1], [np.inf]], FLOAT16).view(np.uint8)
    weight = dequantize(what)[0]
    assert (weight[:32] == 0).all()
    assert np.signbit(weight[:32]).all()
    assert np.isnan(weight[32:]).all()


def test_e2m1_code_8_is_minus_0() -> None:
    """As ml_dtypes and OCP have it; ggml's MXFP4 goes through a table of integers, and loses the sign."""
    what = problem("mxfp4", (1, 32))
    what.packed["blocks"][...], what.packed["scales"][...] = 0x80, 127
    assert np.signbit(dequantize(what)[0]).tolist() == [False, True] * 16


def test_nvfp4_block_scales_are_signed_e4m3() -> None:
    """0xB8 is -1 and 0x7F NaN, as the type says; ggml drops the sign, and reads 0 and 480 for the codes of NaN."""
    what = problem("nvfp4", (1, 64), scales="normal")
    what.packed["weight_packed"][...] = 0x22  # 1
    what.packed["global_scale"][...] = 1
    what.packed["weight_scale"][0] = (0xB8, 0x7F, 0xFF, 0x80)
    weight = dequantize(what)[0]
    assert (weight[:16] == -1).all()
    assert np.isnan(weight[16:48]).all()
    assert (weight[48:] == 0).all()
    assert np.signbit(weight[48:]).all()


@pytest.mark.parametrize(("format", "expected"), [("nvfp4", 4.0), ("nvfp4_swizzled", 4.0), ("nvfp4_ct", 0.25)])
def test_nvfp4_global_scales_multiply_or_divide(format: str, expected: float) -> None:
    """ModelOpt stores amax / (6 * 448), to multiply by; compressed-tensors the reciprocal, to divide by."""
    what = problem(format, (1, 64), scales="normal")
    what.packed["weight_packed"][...], what.packed["weight_scale"][...] = 0x22, 0x38  # both 1
    what.packed["global_scale"][...] = 4
    assert (dequantize(what) == expected).all()


def test_fp8_block_scales_multiply() -> None:
    """DeepSeek's checkpoints call it weight_scale_inv, and multiply by it."""
    what = problem("fp8_e4m3", (1, 1), form="block")
    what.packed["weight"][...], what.packed["scale"][...] = 0x38, 4
    assert dequantize(what).tolist() == [[4]]


def test_awq_zero_points_are_stored_as_they_are() -> None:
    """vLLM's conversion for exllama subtracts 1, to be added again there."""
    what = problem("awq", (8, 8), -1, scales="normal")
    what.packed["qweight"][...], what.packed["qzeros"][...] = 0, 0x11111111
    what.packed["scales"][...] = 1
    assert (dequantize(what) == -1).all()
