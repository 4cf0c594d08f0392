"""What each packed format means."""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dequant_by_hand import ELEMENT
from dequant_cases import EVERY_FORM, make, same, small

from pagebench.reference import placement
from pagebench.reference.dequant import decode, dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dtypes import BFLOAT16, FLOAT32, Array
from pagebench.reference.problem import from_text


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
    what = make(format, form, shape=small(format))
    assert same(dequantize(from_text(what.to_text())), dequantize(what))

    class Host:
        def to_device(self, array: Array) -> Array:
            return array.copy()

        def as_strided(self, base: Array, dtype: Any, shape: Any, strides: Any, offset: int) -> Array:
            steps = tuple(s * dtype.itemsize for s in strides)
            return np.ndarray(shape, dtype, buffer=base, offset=offset * dtype.itemsize, strides=steps)

    assert same(dequantize(placement.place(what, Host()).problem), dequantize(what))


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
