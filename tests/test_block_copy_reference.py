"""Swap, write and gather: their meaning against other formulations, their bytes, what they refuse."""

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pagebench.reference import block_copy, dtypes
from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.block_copy_gather import GatherKV, gather_kv
from pagebench.reference.block_copy_quantise import dequantise, quantise, row_scales
from pagebench.reference.block_copy_write import WriteKV, write_kv, write_kv_
from pagebench.reference.problem import from_text

E4M3, E5M2, INT8 = dtypes.FLOAT8_E4M3FN, dtypes.FLOAT8_E5M2, dtypes.INT8
FLOAT16, FLOAT32, BFLOAT16 = dtypes.FLOAT16, dtypes.FLOAT32, dtypes.BFLOAT16


@functools.cache
def stored_numbers(dtype: Any) -> tuple[Any, Any]:
    """(float64 values, codes) of every finite number of a quantised dtype, from its definition."""
    codes = np.arange(256)
    if dtype == INT8:
        values = codes.astype(np.uint8).view(np.int8).astype(np.float64)
        return values, codes
    mantissa, bias = (3, 7) if dtype == E4M3 else (2, 15)
    exponent, fraction = (codes & 0x7F) >> mantissa, codes & (1 << mantissa) - 1
    normal = exponent > 0
    magnitude = (fraction + (normal << mantissa)) * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    finite = (codes & 0x7F) < (0x7F if dtype == E4M3 else 0x7C)
    return np.where(codes & 0x80, -magnitude, magnitude)[finite], codes[finite]


def nearest_code(quotient: float, dtype: Any) -> int:
    """The code by definition: the nearest stored number, the even one of two as near, the sign of zero kept."""
    if np.isnan(quotient):
        return 0 if dtype == INT8 else 0x7F
    values, codes = stored_numbers(dtype)
    if dtype != INT8:
        same_sign = np.signbit(quotient) == (codes >= 0x80)
        values, codes = values[same_sign], codes[same_sign]
    if np.isinf(quotient):
        return int(codes[np.argmax(values) if quotient > 0 else np.argmin(values)])
    order = np.argsort(values)
    above = int(np.searchsorted(values[order], quotient))
    near = order[max(above - 1, 0) : above + 1]
    distance = [abs(Fraction(values[i]) - Fraction(quotient)) for i in near.tolist()]
    nearest = [int(codes[i]) for i, d in zip(near, distance, strict=True) if d == min(distance)]
    return next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=str)
def test_quantise_takes_the_nearest_code_of_the_rounded_quotient(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    values, _ = stored_numbers(dtype)
    values = np.unique(values)
    ties = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([ties, np.nextafter(ties.astype(FLOAT32), np.float32(np.inf)), values[[0, -1]] * 1.04])
    edges = np.concatenate([edges, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38]])
    rows = np.concatenate([edges, rng.standard_normal(200) * 3]).astype(FLOAT32)
    for scale in (None, np.float32(1), np.float32(0.3), np.float32(1e-40)):
        with np.errstate(all="ignore"):
            quotient = rows if scale is None else rows / scale
        chosen = rng.choice(rows.size, 150, replace=False) if scale is not None else np.arange(rows.size)
        got = quantise(rows, scale, dtype).view(np.uint8)
        assert [got[i] for i in chosen] == [nearest_code(float(quotient[i]), dtype) for i in chosen]


def test_quantise_agrees_with_torch_where_torch_saturates() -> None:
    import torch

    rows = np.random.default_rng(1).standard_normal(4000).astype(FLOAT32) * 100
    for dtype, other in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        cast = torch.from_numpy(rows).to(other).view(torch.uint8).numpy()
        np.testing.assert_array_equal(quantise(rows, None, dtype).view(np.uint8), cast)


def test_division_is_not_by_a_reciprocal() -> None:
    rows = np.random.default_rng(2).standard_normal(5000).astype(FLOAT32)
    scale = np.float32(0.003)
    wrong = quantise(rows * (np.float32(1) / scale), None, INT8)
    assert (wrong != quantise(rows, scale, INT8)).any() or ((rows / scale) != rows * (np.float32(1) / scale)).any()


def test_a_computed_scale_maps_the_largest_magnitude_to_the_highest_number() -> None:
    rows = np.random.default_rng(3).standard_normal((50, 3, 17)).astype(FLOAT16)
    rows[0] = 0
    for dtype, highest in ((E4M3, 448), (E5M2, 57344), (INT8, 127)):
        scales = row_scales(rows, dtype)
        assert scales.dtype == FLOAT32
        assert (scales[0] == 1).all()
        stored = dtypes.to_float64(quantise(rows, scales[..., None], dtype))
        np.testing.assert_array_equal(np.abs(stored[1:]).max(axis=-1), highest)


def test_dequantise_rounds_the_float32_product() -> None:
    stored = np.arange(256, dtype=np.uint8).view(E4M3)
    scale = np.float32(0.1)
    values, codes = stored_numbers(E4M3)
    got = dequantise(stored, scale, BFLOAT16)
    expected = dtypes.round_to((values.astype(FLOAT32) * scale), BFLOAT16)
    np.testing.assert_array_equal(got[codes].view(np.uint16), expected.view(np.uint16))
    assert np.isnan(got[[0x7F, 0xFF]].astype(FLOAT32)).all()


def write_problem(**change: Any) -> WriteKV:
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((2, 4, 2, 6)).astype(FLOAT16)
    caches = np.zeros((3, 2, 4, 2, 6), FLOAT16)
    fields: dict[str, Any] = {
        "key": rows[0],
        "value": rows[1],
        "key_cache": caches[:, 0],
        "value_cache": caches[:, 1],
        "slot_mapping": np.array([9, -1, 0], np.int64),
    }
    return WriteKV(**{**fields, **change})


def quantised(dtype: Any) -> dict[str, Any]:
    return {name: np.zeros((3, 4, 2, 6), dtype) for name in ("key_cache", "value_cache")}


def scales() -> dict[str, Any]:
    return {name: np.zeros((3, 4, 2), FLOAT32) for name in ("key_scale", "value_scale")}


def test_write_skips_negative_slots_and_rows_past_the_mapping() -> None:
    problem = write_problem()
    write_kv_(problem)
    np.testing.assert_array_equal(problem.key_cache[2, 1], problem.key[0])
    np.testing.assert_array_equal(problem.value_cache[0, 0], problem.value[2])
    assert np.count_nonzero(problem.key_cache.any(axis=(2, 3))) == 2


def test_write_computes_each_row_s_scale_in_its_slot() -> None:
    after = write_kv(write_problem(**quantised(INT8), **scales(), compute_scales=True))
    assert np.count_nonzero(after["key_scale"]) == 2 * 2
    assert np.abs(after["key_cache"][2, 1].astype(int)).max() == 127
    assert after["key_scale"][0, 1, 0] == 0


def test_write_counts_only_the_rows_it_writes() -> None:
    elements = 2 * 2 * 2 * 6
    assert write_problem().bytes_moved() == 3 * 8 + elements * 4
    with_scales = write_problem(**quantised(E4M3), **scales(), compute_scales=True)
    assert with_scales.bytes_moved() == 3 * 8 + elements * 3 + 2 * 2 * 2 * 4
    assert write_problem(**quantised(E4M3), key_scale=np.float32(2)).bytes_moved() == 3 * 8 + elements * 3 + 4


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"slot_mapping": np.array([1, 1], np.int64)}, "slot_mapping must not repeat"),
    ({"slot_mapping": np.array([12], np.int64)}, "slot_mapping must be below"),
    ({"slot_mapping": np.zeros(5, np.int64)}, "slot_mapping must have at most"),
    ({"slot_mapping": np.zeros(1, np.int32)}, "slot_mapping must have dtype int64"),
    ({"key_scale": np.float32(1)}, "key_scale must be None for an unquantised"),
    ({"compute_scales": True, **scales()}, "compute_scales must be False"),
    ({**quantised(INT8), "key_scale": np.float32(0)}, "key_scale must be finite and > 0"),
    ({**quantised(INT8), "key_scale": 1.0}, "key_scale must be float32"),
    ({**quantised(INT8), "key_scale": np.ones((3, 4, 2), FLOAT32)}, "key_scale must have one of the shapes"),
    ({**quantised(INT8), "compute_scales": True}, "key_scale must be a NumPy array"),
    (
        {**quantised(INT8), **scales(), "compute_scales": True, "key": np.full((4, 2, 6), np.nan, FLOAT16)},
        "key must be finite",
    ),
    ({"key_cache": np.zeros((3, 4, 2, 6), FLOAT32)}, "key_cache must have dtype"),
    ({"value_cache": read_only(np.zeros((3, 4, 2, 6), FLOAT16))}, "value_cache must be writeable"),
    (
        {**quantised(INT8), **scales(), "compute_scales": True, "key_scale": read_only(np.zeros((3, 4, 2), FLOAT32))},
        "key_scale must be writeable",
    ),
    ({"key": np.zeros((4, 2, 6), object)}, "key must have dtype float16 or"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_an_invalid_write_names_the_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_problem(**change)


def test_a_write_onto_its_own_input_is_refused() -> None:
    base = np.zeros((3, 4, 2, 6), FLOAT16)
    with pytest.raises(ValueError, match="key_cache must not overlap other arguments, got key in its memory"):
        write_problem(key_cache=base, key=base[0])
    with pytest.raises(ValueError, match="key_cache must not overlap other arguments, got value_cache"):
        write_problem(key_cache=base, value_cache=base)


def test_a_row_whose_scale_rounds_to_zero_is_refused() -> None:
    tiny = np.full((4, 2, 6), 1e-45, FLOAT32)
    change = {"key": tiny, "value": tiny, **quantised(E4M3), **scales(), "compute_scales": True}
    with pytest.raises(ValueError, match="computed scale must not round to 0"):
        write_problem(**change)


def gather_problem(**change: Any) -> GatherKV:
    caches = np.arange(2 * 3 * 4 * 2 * 5).reshape(2, 3, 4, 2, 5).astype(FLOAT32)
    fields: dict[str, Any] = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": np.array([[2, 0], [-7, 99], [1, 99]], np.int32),
        "seq_lens": np.array([6, 0, 4], np.int32),
        "dtype": FLOAT32,
    }
    return GatherKV(**{**fields, **change})


def test_gather_lays_sequences_one_after_the_other() -> None:
    problem = gather_problem()
    key, value = gather_kv(problem)
    assert key.shape == (10, 2, 5)
    rows = [(2, 0), (2, 1), (2, 2), (2, 3), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    np.testing.assert_array_equal(key, [problem.key_cache[slot] for slot in rows])
    np.testing.assert_array_equal(value, [problem.value_cache[slot] for slot in rows])
    assert problem.num_tokens == 10
    assert problem.bytes_moved() == 2 * 2 * 10 * 2 * 5 * 4 + 3 * 4 + 3 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": E4M3}, "dtype must be float16"),
        ({"dtype": "float16"}, "dtype must be float16 or bfloat16 or float32 as a numpy.dtype, got 'float16'"),
        ({"dtype": np.float16}, r"dtype must be float16 .* as a numpy.dtype, got <class 'numpy.float16'>"),
        ({"dtype": np.zeros(2)}, r"dtype must be float16 .* as a numpy.dtype, got array"),
        ({"seq_lens": np.array([9, 0, 4], np.int32)}, "seq_lens must fit the block table's 8 slots"),
        ({"seq_lens": np.array([6, 1, 4], np.int32)}, "block_table must hold block ids"),
        ({"value_scale": np.float32(1)}, "value_scale must be None for an unquantised"),
    ],
)
def test_an_invalid_gather_names_the_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather_problem(**change)


def test_scales_of_slots_that_nobody_reads_may_be_anything() -> None:
    slot = np.full((3, 4, 2), np.nan, FLOAT32)
    slot[[2, 1]] = 1
    slot[0, :2] = 1
    int8 = np.zeros((3, 4, 2, 5), INT8)
    gather_problem(key_cache=int8, value_cache=int8.copy(), key_scale=slot)
    with pytest.raises(ValueError, match="key_scale must be finite and > 0"):
        gather_problem(key_cache=int8, value_cache=int8.copy(), key_scale=np.full_like(slot, np.nan))


def swap_problem(**change: Any) -> SwapBlocks:
    rng = np.random.default_rng(5)
    fields: dict[str, Any] = {
        "src_caches": (rng.random((3, 4)), rng.random((3, 2, 2))[:, ::2]),
        "dst_caches": (rng.random((5, 4)), rng.random((5, 1, 2))),
        "pairs": np.array([[0, 4], [1, 1], [0, 0]], np.int64),
        "direction": "out",
    }
    return SwapBlocks(**{**fields, **change})


def test_swap_copies_between_pools() -> None:
    problem = swap_problem()
    swapped = block_copy.swap_blocks(problem)
    for src, before, after in zip(problem.src_caches, problem.dst_caches, swapped, strict=True):
        np.testing.assert_array_equal(after, [src[0], src[1], before[2], before[3], src[0]])
    assert problem.bytes_moved() == 3 * 16 + (2 + 3) * (32 + 16)
    assert problem.pinned_fields == ("pairs", "dst_caches")
    assert swap_problem(direction="in").pinned_fields == ("pairs", "src_caches")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "up"}, "direction must be 'out' or 'in'"),
        ({"direction": np.array(["out", "in"])}, "direction must be 'out' or 'in', got array"),
        ({"dst_caches": (np.zeros((5, 4)),)}, "dst_caches must be 2 like src_caches"),
        ({"dst_caches": (np.zeros((5, 4)), np.zeros((5, 2)))}, r"dst_caches\[1\] must have blocks of float64"),
        ({"pairs": np.array([[0, 1], [1, 1]], np.int64)}, "not repeat"),
        ({"pairs": np.array([[3, 1]], np.int64)}, r"\(src\) must be in \[0, 3\)"),
        (
            {"dst_caches": (np.zeros((5, 4)), read_only(np.zeros((5, 1, 2))))},
            r"dst_caches\[1\] must be writeable.*, got 'a read-only array \[5, 1, 2\]'",
        ),
        (
            {"src_caches": (np.zeros((3, 4), object),)},
            r"src_caches\[0\] must have a dtype that devices know.*, got 'object'",
        ),
    ],
)
def test_an_invalid_swap_names_the_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swap_problem(**change)


def test_a_swap_only_reads_its_source() -> None:
    problem = swap_problem()
    swap_problem(src_caches=tuple(read_only(cache) for cache in problem.src_caches))


def test_a_copy_refuses_what_it_cannot_write() -> None:
    pairs = np.zeros((0, 2), np.int64)
    with pytest.raises(ValueError, match=r"caches\[1\] must be writeable.*, got 'a read-only array \[3\]'"):
        CopyBlocks((np.zeros(3), read_only(np.zeros(3))), pairs)
    for dtype in (object, [("number", np.int32), ("other", np.int32)], ">f4", "M8[s]", "S3", np.longdouble):
        with pytest.raises(ValueError, match=r"caches\[0\] must have a dtype that devices know; a view as uint8"):
            CopyBlocks((np.zeros(3, dtype),), pairs)


@pytest.mark.parametrize(
    ("pairs", "chained", "fans_out"),
    [
        ([], False, False),
        ([(0, 0), (1, 1)], False, False),
        ([(0, 0), (0, 1)], False, False),
        ([(0, 1), (2, 3)], False, False),
        ([(0, 1), (0, 2)], False, True),
        ([(0, 1), (1, 2)], True, False),
        ([(0, 1), (1, 0), (0, 2)], True, True),
    ],
)
def test_a_copy_knows_how_its_pairs_depend_on_each_other(pairs: Any, chained: bool, fans_out: bool) -> None:
    problem = CopyBlocks((np.zeros((4, 1)),), np.array(pairs, np.int64).reshape(-1, 2))
    assert (problem.chained, problem.fans_out) == (chained, fans_out)
    again = from_text(problem.to_text())
    assert (again.chained, again.fans_out) == (chained, fans_out)


def test_pools_that_share_memory_are_refused() -> None:
    base = np.zeros((6, 4))
    with pytest.raises(ValueError, match=r"shared memory in src_caches\[0\] and dst_caches\[0\]"):
        swap_problem(src_caches=(base[:4],), dst_caches=(base[2:],), pairs=np.zeros((0, 2), np.int64))


def test_pairs_lie_in_no_cache_that_is_written() -> None:
    cache = np.zeros((8, 2), np.int64)
    cache[:2] = [[1, 0], [2, 1]]
    pairs, other = cache[:2], np.ones((8, 2), np.int64)
    with pytest.raises(ValueError, match=r"pairs must not lie in a cache that is written.*in caches\[1\]"):
        CopyBlocks((other, cache), pairs)
    with pytest.raises(ValueError, match=r"pairs must not lie in a cache that is written.*in dst_caches\[0\]"):
        SwapBlocks((other,), (cache,), pairs, "out")
    swapped = block_copy.swap_blocks(SwapBlocks((cache,), (other,), pairs, "out"))  # it is only read there
    assert swapped[0][:2].tolist() == [[2, 1], [0, 0]]
    beside = np.zeros((8, 4), np.int64)  # interleaved, but no byte is shared
    beside[:2, 2:] = pairs
    CopyBlocks((beside[:, :2],), beside[:2, 2:])


@pytest.mark.parametrize(
    "problem", [write_problem(**quantised(E5M2), key_scale=np.float32(0.1)), gather_problem(), swap_problem()]
)
def test_problems_survive_their_text(problem: Any) -> None:
    assert from_text(problem.to_text()).describe() == problem.describe()


def test_placement_pins_the_host_s_pool_only() -> None:
    from pagebench.properties.host_arrays import HostArrays
    from pagebench.reference.placement import place

    class Pinning(HostArrays):
        def __init__(self) -> None:
            self.pinned = 0

        def to_pinned(self, array: Any) -> Any:
            self.pinned += 1
            return array.copy()

    provider = Pinning()
    place(swap_problem(), provider)
    assert provider.pinned == 3  # two caches, the pairs
    place(dataclasses.replace(write_problem()), provider)
    assert provider.pinned == 3
