"""The reference against closed forms, plain loops and PyTorch; validation at the door; placement; the text form."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from pagebench.properties.block_copy_recipes import CopyRecipe
from pagebench.properties.dequant_recipes import DequantRecipe
from pagebench.properties.host_arrays import HostArrays, copy_of
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference import block_copy, dtypes, placement
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import MAX_KEYS, PagedAttention, paged_attention
from pagebench.reference.problem import from_text


def attention(**choices: Any) -> PagedAttention:
    return AttentionRecipe(**{"dtype": "float32", "head_size": 8, "sequences": ((1, 5),), **choices}).build()


def keys_and_values(p: PagedAttention, seq: int) -> tuple[Any, Any]:
    """float64 [keys, num_query_heads, head_size] by a loop over the definition."""
    found: list[list[Any]] = [[], []]
    for position in range(int(p.seq_lens[seq])):
        block, offset = p.block_table[seq, position // p.block_size], position % p.block_size
        for rows, cache in zip(found, (p.key_cache, p.value_cache), strict=True):
            rows.append([cache[block, offset, head // p.group].astype(np.float64) for head in range(p.num_query_heads)])
    return np.array(found[0]), np.array(found[1])


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_pytorch(causal: bool) -> None:
    p = attention(sequences=((7, 7), (3, 3), (20, 20)), group=2, num_kv_heads=2, block_size=3, causal=causal)
    out, _ = paged_attention(p)
    for seq in range(p.num_seqs):
        key, value = keys_and_values(p, seq)
        query = p.query[p.query_rows(seq)].astype(np.float64)
        tensors = [torch.from_numpy(array).transpose(0, 1) for array in (query, key, value)]
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal, scale=p.scale)
        np.testing.assert_allclose(out[p.query_rows(seq)], expected.transpose(0, 1).numpy(), rtol=1e-12, atol=1e-14)


def test_decode_by_the_formula() -> None:
    p = attention(sequences=((1, 37), (1, 1)), group=3, block_size=5, sinks=True, alibi=True, soft_cap=2.0)
    out, lse = paged_attention(p)
    for seq in range(2):
        key, value = keys_and_values(p, seq)
        for head in range(3):
            score = [p.scale * float(np.dot(p.query[seq, head].astype(np.float64), k[head])) for k in key]
            score = [2.0 * math.tanh(s / 2.0) for s in score]
            score = [s + float(p.alibi_slopes[head]) * (j - (len(key) - 1)) for j, s in enumerate(score)]
            total = sum(math.exp(s) for s in score) + math.exp(float(p.sinks[head]))
            expected = sum(math.exp(s) * v[head] for s, v in zip(score, value, strict=True)) / total
            np.testing.assert_allclose(out[seq, head], expected, rtol=1e-12)
            assert lse[seq, head] == pytest.approx(math.log(total), rel=1e-12)


def test_window_of_one_gives_the_own_value() -> None:
    p = attention(sequences=((4, 9),), window=1)
    out, _ = paged_attention(p)
    _, value = keys_and_values(p, 0)
    np.testing.assert_allclose(out, value[5:], rtol=1e-12)


def test_a_query_that_sees_nothing() -> None:
    p = attention(sequences=((1, 0), (3, 2)))
    out, lse = paged_attention(p)
    assert not out[:2].any()
    assert np.isneginf(lse[:2]).all()
    assert np.isfinite(lse[2:]).all()
    p = attention(sequences=((1, 0),), sinks=True)
    out, lse = paged_attention(p)
    assert not out.any()
    np.testing.assert_array_equal(lse[0], p.sinks)


def test_cache_scales_multiply() -> None:
    plain = attention(cache_dtype="float8_e4m3fn")
    two = np.float32(2.0) * np.ones((), np.float32)
    scaled = dataclasses.replace(plain, key_scale=np.asarray(two), value_scale=np.asarray(two))
    doubled = dataclasses.replace(plain, scale=2 * plain.scale)
    np.testing.assert_allclose(paged_attention(scaled)[0], 2 * paged_attention(doubled)[0], rtol=1e-12)


def test_attention_counts_bytes_and_operations() -> None:
    p = attention(sequences=((1, 5), (1, 0)), block_size=4, group=2)
    one_key = 2 * 8 * 4
    small = 2 * 4 + 3 * 4 + 2 * 4  # seq_lens, query_start, two used entries of the table
    assert p.bytes_moved() == 5 * one_key + 2 * (2 * 2 * 8 * 4) + 2 * 2 * 4 + small
    assert p.flops() == 4 * 8 * 2 * 5


@pytest.mark.parametrize("seed", range(5))
def test_copy_is_simultaneous(seed: int) -> None:
    p = CopyRecipe((("int64", (3,), "contiguous"),), num_blocks=6, count=6, seed=seed).build()
    (copied,) = block_copy.copy_blocks(p)
    expected = p.caches[0].copy()
    for src, dst in p.pairs:
        expected[dst] = p.caches[0][src]
    np.testing.assert_array_equal(copied, expected)


def test_copy_counts_each_source_once() -> None:
    p = CopyBlocks((np.zeros((4, 10), np.uint8),), np.array([[0, 1], [0, 2], [3, 3]], np.int64))
    assert p.bytes_moved() == 3 * 16 + 10 * (1 + 2)


def test_bfloat16_is_rounded_once() -> None:
    """A float64 just above a tie goes up; through float32 it would fall on the tie and go down to even."""
    value = np.array([1 + 2.0**-8 + 2.0**-40])
    assert dtypes.round_to(value, dtypes.BFLOAT16).astype(np.float64)[0] == 1 + 2.0**-7
    assert dtypes.round_to(value - 2 * 2.0**-40, dtypes.BFLOAT16).astype(np.float64)[0] == 1


INVALID: list[tuple[str, Any, str]] = [
    ("seq_lens", lambda p: p.seq_lens - 100, "seq_lens must be >= 0"),
    ("seq_lens", lambda p: p.seq_lens + 100, "seq_lens must fit"),
    ("seq_lens", lambda p: p.seq_lens.astype(np.int64), "seq_lens must have dtype int32"),
    ("query_start", lambda p: p.query_start + 1, "query_start must begin with 0"),
    ("query_start", lambda p: np.array([0, 0], np.int32), "query_start must end with 1"),
    ("block_table", lambda p: p.block_table - 9, r"block_table\[0\] must hold block ids"),
    ("query", lambda p: p.query[..., :7], "key_cache must have head_size 7"),
    ("query", lambda p: p.query.astype(np.float64), "query must have dtype"),
    ("value_cache", lambda p: p.value_cache[:-1], "value_cache must have shape"),
    ("scale", lambda p: math.inf, "scale must be finite"),
    ("scale", lambda p: -3e38, r"scale must be within float32 when multiplied by key_scale and log2\(e\), got -3e\+38"),
    ("soft_cap", lambda p: 1e-39, "soft_cap must not be so small that"),
    ("soft_cap", lambda p: 3e38, "soft_cap must be within float32 when multiplied"),
    ("window", lambda p: 0, "window must be an integer >= 1"),
    ("soft_cap", lambda p: -1.0, "soft_cap must be finite and > 0"),
    ("sinks", lambda p: np.full(1, np.nan, np.float32), "sinks must be finite"),
    ("alibi_slopes", lambda p: np.zeros(2, np.float32), "alibi_slopes must have shape"),
    ("alibi_slopes", lambda p: np.full(1, 3e38, np.float32), "alibi_slopes must be within float32 when multiplied"),
    ("scale", lambda p: 1e-50, "scale must be 0 or at least 1.175e-38, a normal number of float32, got 1e-50"),
    ("seq_lens", lambda p: np.array([2**30 + 1], np.int32), "seq_lens must be at most 1073741824"),
    ("scale", lambda p: 10**400, "scale must be finite and within float32"),
    ("soft_cap", lambda p: np.float16(np.inf), "soft_cap must be finite and within float32"),
    ("key_scale", lambda p: np.ones((), np.float32), "key_scale must be None for an unquantised cache"),
]


@pytest.mark.parametrize(("field", "change", "message"), INVALID, ids=[f"{f}: {m[-25:]}" for f, _, m in INVALID])
def test_invalid_attention_problem_names_the_argument(field: str, change: Any, message: str) -> None:
    p = attention()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(p, **{field: change(p)})


CODES = {"cache_dtype": "int8"}
LARGE = np.full(1, 1e20, np.float32)
INVALID_TOGETHER: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"sequences": ((1, 5), (1, 5))},
        lambda p: {"query_start": np.array([0, 3, 2], np.int32)},
        "query_start must not decrease",
    ),
    ({}, lambda p: {"causal": False, "window": 4}, "window must be None unless causal"),
    ({"alibi": True}, lambda p: {"causal": False}, "alibi_slopes must be None unless causal"),
    ({}, lambda p: {"causal": 1}, "causal must be a bool"),
    ({"num_kv_heads": 2}, lambda p: {"query": p.query[:, :1]}, "query must have a multiple of 2 heads"),
    (
        {},
        lambda p: {n: getattr(p, n)[..., :0] for n in ("query", "key_cache", "value_cache")},
        "query must have a head_size >= 1",
    ),
    (
        {},
        lambda p: {n: getattr(p, n)[:, :0] for n in ("key_cache", "value_cache")},
        "key_cache must have a block_size >= 1",
    ),
    (
        {},
        lambda p: {n: getattr(p, n)[:, :, :0] for n in ("key_cache", "value_cache")},
        "key_cache must have num_kv_heads >= 1",
    ),
    ({}, lambda p: {"query_start": np.array([0, 1, 1], np.int32)}, r"query_start must have shape \[2\]"),
    ({}, lambda p: {"block_table": np.concatenate([p.block_table] * 2)}, "block_table must have shape"),
    ({}, lambda p: {"block_table": np.full_like(p.block_table, p.num_blocks)}, r"block_table\[0\] must hold block ids"),
    (CODES, lambda p: {"key_scale": 1.0}, "key_scale must be float32, got 'float'"),
    (CODES, lambda p: {"key_scale": np.ones(1)}, "key_scale must be float32, got 'float64'"),
    (CODES, lambda p: {"value_scale": np.ones(2, np.float32)}, "value_scale must have one of the shapes"),
    *(
        (CODES, lambda p, bad=bad: {"value_scale": np.full(1, bad, np.float32)}, "value_scale must be finite and > 0")
        for bad in (0, -1, np.inf, np.nan)
    ),
    (
        CODES,
        lambda p: {"scale": 1e20, "key_scale": LARGE},
        r"scale must be within float32 when multiplied by key_scale and log2",
    ),
    (
        CODES,
        lambda p: {"scale": 1e20, "key_scale": LARGE, "soft_cap": 1e30},
        "scale must be within float32 when multiplied by key_scale",
    ),
    ({}, lambda p: {"scale": 1e20, "soft_cap": 1e-20}, "soft_cap must not be so small that"),
    (
        {},
        lambda p: {n: getattr(p, n).astype(np.float16) for n in ("key_cache", "value_cache")},
        "key_cache must have dtype",
    ),
]


@pytest.mark.parametrize(
    ("choices", "change", "message"), INVALID_TOGETHER, ids=[message for _, _, message in INVALID_TOGETHER]
)
def test_invalid_attention_problems_of_several_arguments(choices: Any, change: Any, message: str) -> None:
    p = attention(**choices)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(p, **change(p))


def test_values_whose_sum_float32_does_not_hold_are_refused() -> None:
    p = attention()
    with pytest.raises(ValueError, match=r"value_cache must keep the sum of \|value\|"):
        paged_attention(dataclasses.replace(p, value_cache=np.full_like(p.value_cache, 1e38)))


def test_a_window_moves_its_own_keys_alone() -> None:
    p = attention(sequences=((1, 9), (2, 9)), window=3, block_size=2)
    assert [p.first_visible(seq) for seq in range(2)] == [6, 5]
    keys, small = 3 + 4, 2 * 4 + 3 * 4 + (2 + 3) * 4
    assert p.bytes_moved() == keys * 2 * 8 * 4 + 2 * p.query.nbytes + 4 * 3 + small


def test_merging_counts_bytes_and_checks_shapes() -> None:
    out, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    lse[0, 0] = -np.inf
    assert MergeStates(out, lse, out, np.zeros((2, 3), np.float32)).bytes_moved() == (5 + 6 + 6) * 16 + 3 * 6 * 4
    with pytest.raises(ValueError, match="out_a must have a head_size >= 1"):
        MergeStates(out[..., :0], lse, out[..., :0], lse)
    with pytest.raises(ValueError, match="lse_b must have shape"):
        MergeStates(out, lse, out, lse[:, :2])


@pytest.mark.parametrize("change", [{"scale": 2e38}, {"query": 1e38, "scale": 1e-30}, {"query": -1e35, "scale": 1e3}])
def test_scores_that_float32_does_not_hold_are_refused(change: dict[str, float]) -> None:
    p = attention()
    query = np.full(p.query.shape, change.get("query", 4.0), np.float32)
    keys = np.full(p.key_cache.shape, 4.0, np.float32)
    wide = dataclasses.replace(p, query=query, key_cache=keys, value_cache=keys, scale=change["scale"])
    with pytest.raises(ValueError, match=r"query must keep .*sum \|q\|\|k\|.* in sequence 0, got \d"):
        paged_attention(wide)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [([[0, 1], [2, 1]], "not repeat"), ([[0, 9]], r"be in \[0, 4\)"), ([[-1, 0]], r"be in \[0, 4\)")],
)
def test_invalid_pairs(pairs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CopyBlocks((np.zeros((4, 2), np.int8),), np.array(pairs, np.int64))


def test_overlapping_caches_are_refused_and_interleaved_ones_are_not() -> None:
    base = np.zeros((4, 2, 8), np.float16)
    none = np.zeros((0, 2), np.int64)
    CopyBlocks((base[:, 0], base[:, 1]), none)
    with pytest.raises(ValueError, match="not overlap"):
        CopyBlocks((base[:, 0], base), none)
    with pytest.raises(ValueError, match="not overlap"):
        CopyBlocks((base[:, 0], base[:, 0]), none)


def test_placement_keeps_views_on_one_base() -> None:
    p = attention(kv_layout="halves")
    placed = copy_of(p)
    assert np.shares_memory(placed.problem.key_cache.base, placed.problem.value_cache.base)
    assert placed.problem.key_cache.strides == p.key_cache.strides
    placed.problem.key_cache[...] = 0
    assert p.key_cache.any(), "the host's own arrays must not change"
    np.testing.assert_array_equal(placed.problem.value_cache, p.value_cache)


def test_a_write_beside_an_array_breaks_its_fence() -> None:
    placed = copy_of(attention())
    placed.check_fences()
    base = placed.bases[0]
    base.device[placement.FENCE - 1] ^= 1
    with pytest.raises(placement.FenceError, match="1 bytes written before the array, the nearest at -1"):
        placed.check_fences()


def test_without_as_strided_arrays_are_contiguous() -> None:
    class Plain:
        to_device = HostArrays.to_device
        to_host = HostArrays.to_host

    placed = placement.place(attention(kv_layout="interleaved"), Plain())
    assert placed.problem.key_cache.flags.c_contiguous
    assert placed.bases == ()


@pytest.mark.parametrize(
    "recipe", [AttentionRecipe(kv_layout="halves"), CopyRecipe(), DequantRecipe(format="gptq_v2", columns=4)]
)
def test_text_round_trip(recipe: Any) -> None:
    p = recipe.build()
    again = from_text(p.to_text())
    assert again.describe() == p.describe()
    for (name, old), (_, new) in zip(placement.arrays_of(p), placement.arrays_of(again), strict=True):
        assert old.tobytes() == new.tobytes(), name


def test_text_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="must be the text of a problem"):
        from_text("certainly not")


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, 2.0**-126, -(2.0**-126)])
def test_scales_at_the_limits_are_accepted(scale: float) -> None:
    dataclasses.replace(attention(), scale=scale)


def test_a_sequence_of_the_largest_length_is_accepted() -> None:
    p = attention()
    cache = np.broadcast_to(p.key_cache[:1, :1], (1, 2**20, *p.key_cache.shape[2:]))
    table = np.zeros((1, MAX_KEYS // 2**20), np.int32)
    lengths = np.array([MAX_KEYS], np.int32)
    dataclasses.replace(p, key_cache=cache, value_cache=cache, block_table=table, seq_lens=lengths)


def test_dot_products_are_looked_at_before_their_scales() -> None:
    """Of codes, whose scale makes them small; and each for itself, as large elements may not meet."""
    p = attention(cache_dtype="int8", kv_scale="head")
    large = dataclasses.replace(
        p,
        query=np.full_like(p.query, 1e37),
        key_cache=np.full_like(p.key_cache, 100),
        key_scale=np.full_like(p.key_scale, 1e-36),
    )
    with pytest.raises(ValueError, match=r"query must keep sum \|q\|\|k\|, before any scale"):
        paged_attention(large)
    p = attention()
    query, keys = np.zeros_like(p.query), np.zeros_like(p.key_cache)
    query[..., 0], keys[..., 1] = 1e30, 1e30
    paged_attention(dataclasses.replace(p, query=query, key_cache=keys))
