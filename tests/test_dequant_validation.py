"""Malformed packed data is a ValueError that names the argument, the rule and the value."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from dequant_cases import EVERY_FORM, make

from pagebench.reference.dequant_formats import FORMATS


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


def test_names_are_strings() -> None:
    what = make("q8_0")
    with pytest.raises(ValueError, match=r"packed must hold exactly \['blocks'\], got \[0, 'blocks'\]"):
        dataclasses.replace(what, packed={**what.packed, 0: what.packed["blocks"]})


def test_scales_in_the_other_order() -> None:
    """Padded to tiles of 128 x 4, swizzled scales are more than linear ones: neither is taken for the other."""
    linear, swizzled = make("nvfp4"), make("nvfp4_swizzled")  # of 133 rows of 13 blocks
    for what, rows, other in ((linear, r"133, 13", swizzled), (swizzled, r"256, 16", linear)):
        with pytest.raises(ValueError, match=rf"packed\['weight_scale'\] must have shape \[{rows}\], got"):
            dataclasses.replace(what, packed=other.packed)


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
    with pytest.raises(ValueError, match=r"format must be one of \[.*\], got \['q8_0'\]"):
        dataclasses.replace(what, format=["q8_0"])  # type: ignore[arg-type]  # what is tested
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


def test_masked_arrays_are_refused() -> None:
    """Kernels would read what the mask hides."""
    what = make("q8_0")
    with pytest.raises(ValueError, match="must be a NumPy array, got 'MaskedArray'"):
        dataclasses.replace(what, packed={"blocks": np.ma.masked_array(what.packed["blocks"])})
