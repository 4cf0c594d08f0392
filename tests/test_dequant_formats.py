"""What each packed format means, what its contracts round, and what its validation refuses."""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dequant_by_hand import ELEMENT

from pagebench.reference import placement
from pagebench.reference.dequant import CONTRACTS, Dequantize, contract_bound, decode, default_contract, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32, UINT8, Array, as_bits, round_to
from pagebench.reference.problem import from_text

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
EVERY_FORM = pytest.mark.parametrize(
    ("format", "form"), [(name, form) for name, f in FORMATS.items() for form in f.forms]
)


def shape_of(format: str) -> tuple[int, int]:
    """Odd where the format allows it, with a partial last group or block of every size."""
    chosen = FORMATS[format]
    n = {1: 133, 8: 24}[chosen.n_multiple]
    k = {1: 150, 8: 200, 16: 208, 32: 160, 256: 512}[chosen.k_multiple]
    return n, k


def group_size_of(format: str, form: str) -> int | None:
    if not FORMATS[format].grouped(form):
        return None
    return 50 if format.startswith("pack") else 64


def make(format: str, form: str | None = None, *, seed: int = 0, **changes: Any) -> Dequantize:
    """A random problem; scales are of any bits unless `scales` says otherwise."""
    form = form or next(iter(FORMATS[format].forms))
    shape = changes.pop("shape", shape_of(format))
    group_size = changes.pop("group_size", group_size_of(format, form))
    options = {name: changes.pop(name) for name in ("number", "finite") if name in changes}
    scales = changes.pop("scales", "bits")
    packed = random_packed(format, shape, group_size, np.random.default_rng(seed), form=form, scales=scales, **options)
    what = Dequantize(format, packed, shape, group_size, np.dtype(FLOAT32), default_contract(format))
    return dataclasses.replace(what, **changes)


def same(a: Array, b: Array) -> bool:
    """Equal bits; any NaN equals any NaN."""
    return a.dtype == b.dtype and bool(((as_bits(a) == as_bits(b)) | (np.isnan(a) & np.isnan(b))).all())


# --- meaning


@pytest.mark.parametrize(
    ("format", "form"), [(name, form) for name, f in FORMATS.items() if name in ELEMENT for form in f.forms]
)
def test_exact_is_exact(format: str, form: str) -> None:
    """Contract `exact` is the real number, as fractions computed one element at a time from the specification."""
    what = make(format, form, scales="normal", finite=True, contract="exact")
    weight = decode(what)
    rng = np.random.default_rng(1)
    for row, column in zip(rng.integers(0, what.shape[0], 150), rng.integers(0, what.shape[1], 150), strict=True):
        expected = ELEMENT[format](what.packed, int(row), int(column), what.shape, what.group_size)
        if format == "nvfp4_ct":  # a quotient is not a float64; its nearest is what counts
            assert weight[row, column] == float(expected)
        else:
            assert Fraction(float(weight[row, column])) == expected


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


@EVERY_FORM
def test_strides_do_not_matter(format: str, form: str) -> None:
    what = make(format, form)
    views = {name: _every_second(array) for name, array in what.packed.items()}
    assert same(dequantize(dataclasses.replace(what, packed=views)), dequantize(what))


def _every_second(array: Array) -> Array:
    """The same values in a view of an array with twice as many along each axis."""
    wide = np.zeros([2 * size for size in array.shape], array.dtype)
    view = wide[(..., *(slice(None, None, 2) for _ in array.shape))]
    view[...] = array
    return view


@EVERY_FORM
def test_dead_elements_do_not_matter(format: str, form: str) -> None:
    what = make(format, form, scales="normal")
    if "g_idx" in what.packed:
        what.packed["g_idx"][...] = 1
    before = dequantize(what)
    for name, array in what.packed.items():
        dead = np.ones(array.shape, bool)
        dead[what.live(name)] = False
        array.reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)[dead] ^= 0xFF
    assert same(dequantize(what), before)


@EVERY_FORM
def test_text_form_and_placement(format: str, form: str) -> None:
    """A repro rebuilds the problem, and it can be placed: arrays without dimensions too."""
    what = make(format, form, shape=_small(format))
    assert same(dequantize(from_text(what.to_text())), dequantize(what))

    class Host:
        def to_device(self, array: Array) -> Array:
            return array.copy()

        def as_strided(self, base: Array, dtype: Any, shape: Any, strides: Any, offset: int) -> Array:
            steps = tuple(s * dtype.itemsize for s in strides)
            return np.ndarray(shape, dtype, buffer=base, offset=offset * dtype.itemsize, strides=steps)

    assert same(dequantize(placement.place(what, Host()).problem), dequantize(what))


def _small(format: str) -> tuple[int, int]:
    return FORMATS[format].n_multiple, FORMATS[format].k_multiple * (50 if format.startswith("pack") else 1)


# --- single facts of single formats


def test_nibble_orders() -> None:
    """Which element a nibble is: one nibble of a word is 1, all others and every zero point 0."""
    assert _lit("gptq_v2", "qweight", (8, 8), {"scales": 1}) == [(0, slot) for slot in range(8)]
    assert _lit("awq", "qweight", (8, 8), {"scales": 1}) == [(row, 0) for row in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert _lit("nvfp4", "weight_packed", (1, 16), {"weight_scale": 0x38, "global_scale": 1}) == [
        (0, column) for column in range(8)
    ]
    assert _lit("mxfp4", "blocks", (1, 32), {"scales": 127}) == [(0, column) for column in range(8)]


def _lit(format: str, name: str, shape: tuple[int, int], scales: dict[str, Any]) -> list[tuple[int, int]]:
    """The place of the only weight that is not 0, as each nibble of the first four bytes of `name` is 1 in turn."""
    found = []
    for nibble in range(8):
        what = make(format, shape=shape, group_size=-1 if FORMATS[format].grouped("plain") else None)
        for array in what.packed.values():
            array[...] = 0
        for other, value in scales.items():
            what.packed[other][...] = value
        what.packed[name].reshape(-1)[:4].view(np.uint8)[nibble // 2] = 1 << 4 * (nibble % 2)
        found.append(tuple(int(i) for i in np.argwhere(dequantize(what))[0]))
    return found


def test_bitsandbytes_puts_the_first_element_high() -> None:
    what = make("nf4", shape=(1, 3), group_size=32)
    what.packed["packed"][:] = (0x0F, 0x7F)  # the last nibble is padding
    what.packed["absmax"][...] = 2
    assert dequantize(what).tolist() == [[-2, 2, 0]]


def test_bitsandbytes_blocks_cross_rows() -> None:
    what = make("nf4", shape=(3, 24), group_size=32)
    what.packed["packed"][...] = 0xFF
    what.packed["absmax"][:] = (1, 2, 3)
    assert dequantize(what).reshape(-1).tolist() == [1] * 32 + [2] * 32 + [3] * 8


def test_nested_absmax_rounds_twice() -> None:
    """absmax = code2 * absmax2 + offset, the product rounded before the sum: a fused multiply-add gives 2^-24 more."""
    what = make("nf4", "nested", shape=(1, 64), group_size=32)
    what.packed["packed"][...] = 0xFF
    what.packed["code2"][...] = 1 + 2.0**-12
    what.packed["absmax2"][...] = 1 + 2.0**-12
    what.packed["offset"][...] = -1
    assert (dequantize(what) == 2.0**-11).all()


def test_nested_uses_an_outer_scale_for_256_blocks() -> None:
    what = make("fp4", "nested", shape=(1, 257 * 32), group_size=32)
    what.packed["packed"][...] = 0x33  # 1
    what.packed["code2"][...] = 1
    what.packed["absmax2"][:] = (2, 3)
    what.packed["offset"][...] = 0.5
    assert dequantize(what)[0, [0, 256 * 32 - 1, 256 * 32]].tolist() == [2.5, 2.5, 3.5]


def test_gptq_zero_points() -> None:
    """Version 1 stores zero - 1 and wraps; version 2 and AWQ store the zero."""
    for format, expected in (("gptq_v1", [-1, 0]), ("gptq_v2", [0, -15]), ("awq", [0, -15])):
        what = make(format, shape=(8, 8), group_size=-1)
        for name, value in (("qweight", 0), ("scales", 1)):
            what.packed[name][...] = value
        found = []
        for stored in (0, -1):
            what.packed["qzeros"][...] = stored
            found.append(int(dequantize(what)[0, 0]))
        assert found == expected


def test_words_with_the_sign_bit() -> None:
    what = make("gptq_v2", shape=(8, 8), group_size=-1)
    what.packed["qweight"][...] = -1
    what.packed["qzeros"][...] = np.int32(-(2**31))
    what.packed["scales"][...] = 1
    assert dequantize(what)[:, 0].tolist() == [15] * 7 + [15 - 8]


@pytest.mark.parametrize("format", ["gptq_v2", "awq", "int8"])
@pytest.mark.parametrize("group_size", [-1, 8, 24, 32, 64, 128, 1000])
def test_group_sizes(format: str, group_size: int) -> None:
    """A scale for each group, the last one partial; groups larger than k, and one group for all of k."""
    n, k = 8, 136
    form = "group" if format == "int8" else "plain"
    what = make(format, form, shape=(n, k), group_size=group_size)
    groups = 1 if group_size == -1 else -(-k // group_size)
    scale = what.packed["scale" if format == "int8" else "scales"]
    scale[...] = np.arange(1, groups + 1) if format == "int8" else np.arange(1, groups + 1)[:, None]
    for name in ("weight", "qweight"):
        if name in what.packed:
            what.packed[name][...] = 0x11111111 if name == "qweight" else 1
    if "qzeros" in what.packed:
        what.packed["qzeros"][...] = 0
    if "g_idx" in what.packed:
        what.packed["g_idx"][...] = np.arange(k) // (k if group_size == -1 else group_size)
    expected = np.arange(k) // (k if group_size == -1 else group_size) + 1
    assert (dequantize(what) == expected).all()


def test_act_order() -> None:
    """g_idx may name the groups in any order, repeat them and leave some out."""
    what = make("gptq_v2", shape=(8, 64), group_size=16, scales="normal")
    what.packed["g_idx"][:] = np.random.default_rng(3).integers(0, 3, 64)
    natural = dataclasses.replace(what, packed={**what.packed, "g_idx": np.arange(64, dtype=np.int32) // 16})
    order = what.packed["g_idx"]
    for column in range(64):
        moved = {**natural.packed, "g_idx": np.full(64, order[column], np.int32)}
        expected = dequantize(dataclasses.replace(natural, packed=moved))[:, column]
        assert (dequantize(what)[:, column] == expected).all()


def test_fp8_blocks_are_128_square() -> None:
    what = make("fp8_e4m3", "block", shape=(130, 300))
    what.packed["weight"][...] = 0x38  # 1
    what.packed["scale"][...] = [[1, 2, 3], [4, 5, 6]]
    weight = dequantize(what)
    assert weight[0, [0, 127, 128, 255, 256, 299]].tolist() == [1, 1, 2, 2, 3, 3]
    assert weight[[0, 127, 128, 129], 0].tolist() == [1, 1, 4, 4]


@pytest.mark.parametrize(
    ("format", "bytes_", "values"),
    [
        (
            "fp8_e4m3",
            (0x00, 0x80, 0x01, 0x07, 0x08, 0x7E, 0x7F, 0xFF),
            (0.0, -0.0, 2**-9, 7 * 2**-9, 2**-6, 448, None, None),
        ),
        (
            "fp8_e5m2",
            (0x00, 0x80, 0x01, 0x03, 0x04, 0x7B, 0x7C, 0xFD),
            (0.0, -0.0, 2**-16, 3 * 2**-16, 2**-14, 57344, float("inf"), None),
        ),
    ],
)
def test_fp8_codes(format: str, bytes_: tuple[int, ...], values: tuple[float | None, ...]) -> None:
    what = make(format, shape=(1, 8))
    what.packed["weight"][0] = bytes_
    what.packed["scale"][...] = 1
    assert same(dequantize(what)[0], np.array([np.nan if v is None else v for v in values], FLOAT32))


def test_e8m0_scales() -> None:
    """0 is 2^-127, a float32 subnormal; 254 is 2^127; 255 is NaN. Under 2^127 the codes 2, 3, 4 and 6 overflow."""
    what = make("mxfp4", shape=(1, 128))
    what.packed["blocks"][...] = 0x72  # 1 and 6
    what.packed["scales"][0] = (0, 1, 254, 255)
    assert same(dequantize(what)[0, ::32], np.array([2.0**-127, 2.0**-126, 2.0**127, np.nan], FLOAT32))
    assert dequantize(what)[0, 65] == np.inf
    assert dequantize(dataclasses.replace(what, dtype=BFLOAT16))[0, 0].astype(FLOAT32) == 2.0**-127


def test_swizzle_is_one_to_one() -> None:
    for shape in ((1, 16), (128, 64), (129, 80), (300, 2880)):
        n, blocks = shape[0], shape[1] // 16
        what = make("nvfp4_swizzled", shape=shape)
        places = what.live("weight_scale")
        flat = np.ravel_multi_index(places, what.packed["weight_scale"].shape)
        assert np.unique(flat).size == n * blocks


@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_quantized_is_signed(bits: int) -> None:
    """Without zero point the codes 0 and 2^bits - 1 are the ends of a two's complement range."""
    what = make(f"pack_quantized_{bits}", shape=(2, 7), group_size=7)
    what.packed["weight_scale"][...] = 1
    what.packed["weight_packed"][0] = 0
    what.packed["weight_packed"][1] = -1
    half = 1 << bits - 1
    assert dequantize(what).tolist() == [[-half] * 7, [half - 1] * 7]


# --- contracts


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
        what = make(format, form, contract=contract, shape=_small(format))
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


# --- bytes


@pytest.mark.parametrize(
    ("format", "group_size", "per_element"),
    [
        ("q4_0", None, 2.5625),
        ("q4_k", None, 2.5625),
        ("q6_k", None, 2 + 210 / 256),
        ("q8_0", None, 3.0625),
        ("awq", 128, 2 + 0.5 + (2 + 0.5) / 128),
        ("nf4", 64, 2.5625),
        ("nvfp4", None, 2.5625),
        ("nvfp4_swizzled", None, 2.5625),
        ("mxfp4", None, 2.53125),
        ("fp8_e4m3", None, 3.0),
    ],
)
def test_bytes_moved(format: str, group_size: int | None, per_element: float) -> None:
    n, k = 264, 512 + 256
    what = make(format, shape=(n, k), group_size=group_size, dtype=FLOAT16)
    common = 4 if format.startswith(("nvfp4", "fp8")) else 0
    assert what.bytes_moved() == per_element * n * k + common


# --- validation


def _wrong_arrays() -> Iterator[tuple[str, str, str]]:
    for format, chosen in FORMATS.items():
        for form, names in chosen.forms.items():
            yield from ((format, form, name) for name in names)


@pytest.mark.parametrize(("format", "form", "name"), list(_wrong_arrays()))
def test_every_array_is_checked(format: str, form: str, name: str) -> None:
    """Each one missing, of another dtype, one longer or shorter along any axis, with another axis, or not an array."""
    what = make(format, form)
    array = what.packed[name]
    rest = {other: kept for other, kept in what.packed.items() if other != name}
    if "zero_point" not in name:  # the other form
        with pytest.raises(ValueError, match="packed must hold exactly"):
            dataclasses.replace(what, packed=rest)
    bad = [np.zeros(array.shape, np.int64), np.zeros(array.shape, np.float64), array[None, None], array.tolist()]
    for axis in range(array.ndim):
        bad += [np.repeat(array, 2, axis=axis), np.delete(array, -1, axis=axis)]
    for each in bad:
        with pytest.raises(ValueError, match=r"packed|group_size"):
            dataclasses.replace(what, packed={**rest, name: each})


@EVERY_FORM
def test_sizes_are_checked(format: str, form: str) -> None:
    what = make(format, form)
    n, k = what.shape
    for shape in ((n, k + 1), (n + 1, k), (n, k - 1), (0, k), (n, 0), (n, -k), (n, float(k)), [n, k], (n,), (n, k, 1)):
        with pytest.raises(ValueError, match=r"shape|packed|group_size"):
            dataclasses.replace(what, shape=shape)


@EVERY_FORM
def test_group_size_is_checked(format: str, form: str) -> None:
    what = make(format, form)
    grouped = FORMATS[format].grouped(form)
    for group_size in (0, -2, 1.5, -1.0, 64.0, True, *((None,) if grouped else (32, -1))):
        with pytest.raises(ValueError, match=r"group_size|packed"):
            dataclasses.replace(what, group_size=group_size)


def test_extra_arrays_are_refused() -> None:
    what = make("q8_0")
    with pytest.raises(ValueError, match=r"packed must hold exactly \['blocks'\], got \['blocks', 'g_idx'\]"):
        dataclasses.replace(what, packed={**what.packed, "g_idx": np.zeros(3, np.int32)})


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("format", ["gptq_v1", "gptq_v2"])
def test_g_idx_out_of_range(format: str, wrong: int) -> None:
    what = make(format)  # 200 input features in groups of 64
    what.packed["g_idx"][17] = wrong
    with pytest.raises(ValueError, match=rf"packed\['g_idx'\] must be in \[0, 4\), got .*{wrong}.* at index \[17\]"):
        what.validate()


@pytest.mark.parametrize("group_size", [16, 48, 8192, -1])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_bitsandbytes_block_sizes(format: str, group_size: int) -> None:
    with pytest.raises(ValueError, match="group_size"):
        make(format, group_size=group_size)


def test_pack_quantized_groups_divide_k() -> None:
    """compressed-tensors refuses others too."""
    with pytest.raises(ValueError, match=r"group_size must divide shape\[1\] \(k\) = 150, got 64"):
        make("pack_quantized_4", group_size=64)


def test_unknown_format_and_contract() -> None:
    what = make("q8_0")
    with pytest.raises(ValueError, match=r"format must be one of \[.*\], got 'q9_0'"):
        dataclasses.replace(what, format="q9_0")
    with pytest.raises(ValueError, match=r"contract must be one of \('exact', 'f32', 'half'\) for q8_0, got 'fast'"):
        dataclasses.replace(what, contract="fast")
    with pytest.raises(ValueError, match="contract"):
        make("nf4", contract="exact")
    with pytest.raises(ValueError, match="dtype"):
        dataclasses.replace(what, dtype=np.dtype(np.float64))


def test_zero_point_has_the_scale_s_shape() -> None:
    what = make("int8", "channel_zero")
    with pytest.raises(ValueError, match=r"packed\['zero_point'\] must have shape \[133\], got \(\)"):
        dataclasses.replace(what, packed={**what.packed, "zero_point": np.array(0, np.int8)})
