"""What the rounding contracts of each format round, and how many bytes a problem must move."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from dequant_cases import EVERY_FORM, EVERY_FORMAT, make, same, small

from pagebench.reference.dequant import CONTRACTS, contract_bound, decode, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, UINT8, round_to


@pytest.mark.parametrize("format", [name for name, f in FORMATS.items() if {"exact", "f32"} <= set(f.contracts)])
def test_f32_rounds_once(format: str) -> None:
    """In the stated order at most one float32 operation rounds, also for scales of any bits: subnormal, huge, NaN."""
    for form in FORMATS[format].forms:
        f32, exact = (dequantize(make(format, form, contract=contract)) for contract in ("f32", "exact"))
        assert same(f32, exact)


EXACT_IN_F32 = ("gptq_v1", "gptq_v2", "awq", "mxfp4", "q4_0", "q5_0", "q8_0", "q6_k")


@pytest.mark.parametrize("format", EXACT_IN_F32)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda d: d.name)
def test_formats_exact_in_float32(format: str, dtype: np.dtype[Any]) -> None:
    """Where float32 holds every value, both contracts agree in 16 bits too: nothing is rounded twice."""
    f32, exact = (dequantize(make(format, contract=contract, dtype=dtype)) for contract in ("f32", "exact"))
    assert same(f32, exact)


def test_half_overflows_where_f32_does_not() -> None:
    """vLLM's Q4_K kernel multiplies d = 1040 by a scale of 63 in float16: infinity, although the weight is 1040."""
    what = make("q4_k", shape=(1, 256))
    what.packed["blocks"][...] = 0
    what.packed["blocks"][0, :4] = np.array([1040, 1040], FLOAT16).view(UINT8)
    what.packed["blocks"][0, 4] = 63  # scale of sub-block 0
    what.packed["blocks"][0, 8] = 62  # its minimum
    what.packed["blocks"][0, 16] = 1  # q of element 0
    assert dequantize(dataclasses.replace(what, dtype=FLOAT16))[0, 0] == 1040
    half = dataclasses.replace(what, contract="half", dtype=FLOAT16)
    assert np.isnan(dequantize(half)[0, 0]) or np.isinf(dequantize(half)[0, 0])


def test_half_rounds_every_step() -> None:
    """Q6_K: d * half(scale * q); GPTQ: half((q - zero) * scale), also where the output is wider."""
    what = make("q6_k", scales="normal", contract="half")
    blocks = what.packed["blocks"].reshape(-1, 210)
    exact = decode(dataclasses.replace(what, contract="exact")).reshape(-1, 256)
    d = blocks[:, 208:].copy().view(FLOAT16).astype(np.float64)
    with np.errstate(all="ignore"):
        product = np.where(d == 0, 0, exact / d).astype(FLOAT16)
        expected = (d.astype(FLOAT16) * product).astype(FLOAT32)
    assert (dequantize(what).reshape(-1, 256) == expected).all()
    gptq = make("gptq_v2", scales="normal", contract="half", dtype=BFLOAT16)
    once = dequantize(dataclasses.replace(gptq, contract="exact", dtype=FLOAT16))
    assert same(dequantize(gptq), once.astype(BFLOAT16))
    assert not same(dequantize(gptq), dequantize(dataclasses.replace(gptq, contract="exact")))


def test_fma_zero_rounds_the_zero_term() -> None:
    """q * s - round(z * s): as (q - z) * s where z * s has few bits, up to half a unit of z * s off elsewhere."""
    what = make("awq", scales="normal", contract="fma_zero", dtype=FLOAT16)
    exact = dequantize(dataclasses.replace(what, contract="exact"))
    assert not same(dequantize(what), exact)
    zero = 2.0**-11 * 15 * abs(what.packed["scales"].astype(np.float64))
    groups = np.arange(what.shape[1]) // 64
    assert (abs(dequantize(what).astype(np.float64) - exact) <= zero[groups].T + 2.0**-10 * abs(exact)).all()
    # 15 * 0.0999755859375 = 1.4996337890625, of which float16 makes 1.5
    what.packed["qweight"][...] = what.packed["qzeros"][...] = -1
    what.packed["scales"][...] = 0.1
    assert (dequantize(what) == 1.4996337890625 - 1.5).all()
    what.packed["scales"][...] = 0.5
    assert same(dequantize(what), np.zeros(what.shape, FLOAT16))


@EVERY_FORMAT
def test_contracts_are_known_and_the_default_comes_first(format: str) -> None:
    contracts = FORMATS[format].contracts
    assert set(contracts) <= set(CONTRACTS)
    exact = ("gptq", "awq", "pack", "mxfp4", "q4_0", "q5_0", "q8_0", "q6_k")
    assert default_contract(format) == ("exact" if format.startswith(exact) else "f32")


@EVERY_FORM
def test_every_contract_and_dtype_decodes(format: str, form: str) -> None:
    for contract in FORMATS[format].contracts:
        what = make(format, form, contract=contract, shape=small(format))
        for dtype in (FLOAT16, BFLOAT16, FLOAT32):
            weight = dequantize(dataclasses.replace(what, dtype=dtype))
            assert weight.shape == what.shape
            assert weight.dtype == dtype
            assert same(weight, round_to(decode(what), dtype))


@EVERY_FORM
def test_magnitude_covers_the_weight(format: str, form: str) -> None:
    what = make(format, form, scales="normal", finite=True)
    with np.errstate(all="ignore"):
        size = FORMATS[format].magnitude(what.packed, what.shape, what.group_size)
    assert size.shape == what.shape
    assert (abs(decode(what).astype(np.float64)) <= size * (1 + 1e-6)).all()


@pytest.mark.parametrize("format", [name for name, f in FORMATS.items() if "exact" in f.contracts])
def test_contract_bound_covers_the_contract(format: str) -> None:
    """How far each contract lies from the exact value: not at all, or within a few roundings."""
    for scales in ("normal", "bits"):
        exact = decode(make(format, scales=scales, contract="exact"))
        for contract in FORMATS[format].contracts:
            what = make(format, scales=scales, contract=contract)
            weight, bound = decode(what).astype(np.float64), contract_bound(what)
            judged = np.isfinite(exact) & np.isfinite(weight)
            assert (abs(weight[judged] - exact[judged]) <= bound[judged]).all()


@pytest.mark.parametrize(
    ("format", "form", "group_size", "bits"),
    [
        ("q4_0", None, None, 4.5),
        ("q4_1", None, None, 5.0),
        ("q5_0", None, None, 5.5),
        ("q8_0", None, None, 8.5),
        ("q4_k", None, None, 4.5),
        ("q5_k", None, None, 5.5),
        ("q6_k", None, None, 6.5625),
        ("gptq_v1", None, 128, 4.15625),  # 16 bits of scale and 4 of zero point, and below a g_idx for each of k
        ("gptq_v2", None, 32, 4.625),
        ("awq", None, 128, 4.15625),
        ("pack_quantized_4", "symmetric", 128, 4.125),
        ("pack_quantized_4", "zero_point", 128, 4.15625),
        ("pack_quantized_3", "symmetric", 64, 3.25),
        ("pack_quantized_8", "symmetric", -1, 8 + 16 / 768),
        ("nf4", "plain", 64, 4.5),
        ("fp4", "plain", 32, 5.0),
        ("nf4", "nested", 64, 4.125),  # 8 bits per block; 13 outer scales, code2 and offset below
        ("mxfp4", None, None, 4.25),
        ("nvfp4", None, None, 4.5),
        ("nvfp4_ct", None, None, 4.5),
        ("nvfp4_swizzled", None, None, 4.5),  # of the padded scales only those that there are
        ("fp8_e4m3", "tensor", None, 8.0),
        ("fp8_e5m2", "channel", None, 8 + 32 / 768),
        ("fp8_e4m3", "block", None, 8.0),  # 3 x 6 scales below
        ("int8", "tensor", None, 8.0),
        ("int8", "group", 128, 8.25),
        ("int8", "group_zero", 128, 8.3125),
    ],
)
def test_bytes_moved(format: str, form: str | None, group_size: int | None, bits: float) -> None:
    """The least that must move: each weight out in 2 bytes or 4, its packed bits and its share of the scales in."""
    n, k = 264, 768
    once = 4 if format.startswith(("nvfp4", "fp8_e4m3")) or form == "tensor" else 0
    once = {"block": 4 * 18, "nested": 4 * (13 + 256 + 1)}.get(form or "", once)
    once += 4 * k if format.startswith("gptq") else 0
    for dtype, written in ((FLOAT16, 2), (BFLOAT16, 2), (FLOAT32, 4)):
        what = make(format, form, shape=(n, k), group_size=group_size, dtype=dtype)
        if "g_idx" in what.packed:
            what.packed["g_idx"][:] = np.arange(k) // group_size if group_size else 0
        assert what.bytes_moved() == round((written + bits / 8) * n * k) + once
