"""The reference of paged attention against other formulations, and our kernels where a property has no say.

torch's `scaled_dot_product_attention` and FlexAttention in float64 know causal masks, windows, groups, soft caps and
ALiBi; sinks and what those two cannot express are written out below in a few lines each, straight from the definitions.
"""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from backends import supported

from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts, merge_states_relations, relations, strategies
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.properties.support import everything
from pagebench.reference import error_bounds, merge_states
from pagebench.reference import paged_attention as attention
from pagebench.reference.dtypes import COMPUTE_DTYPES, to_float64
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention

Array = np.ndarray[Any, Any]
SEQUENCES = ((1, 33), (5, 20), (20, 20), (7, 3), (3, 0), (0, 9), (2, 17))
FEATURES = {
    "plain": {},
    "window": {"window": 6},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 0.5},
    "ALiBi": {"alibi": True},
    "not causal": {"causal": False},
    "window and ALiBi and soft cap": {"window": 6, "alibi": True, "soft_cap": 2.0},
    "int8": {"cache_dtype": "int8", "kv_scale": "slot"},
    "fp8": {"cache_dtype": "float8_e4m3fn", "kv_scale": "head"},
}


def problem_of(**choices: Any) -> PagedAttention:
    recipe = AttentionRecipe(head_size=24, group=3, num_kv_heads=2, block_size=4, sequences=SEQUENCES)
    return dataclasses.replace(recipe, **choices).build()


def dense(problem: PagedAttention, seq: int) -> tuple[Array, Array, Array]:
    """q [heads, rows, head_size], k and v [KV heads, keys, head_size] of a sequence, float64, gathered key by key."""
    keys, values = [], []
    for position in range(int(problem.seq_lens[seq])):
        # Entries that no query uses may hold anything.
        used = problem.first_visible(seq) <= position
        block = problem.block_table[seq, position // problem.block_size] if used else 0
        at = (block, position % problem.block_size)
        for rows, cache, scale in (
            (keys, problem.key_cache, problem.key_scale),
            (values, problem.value_cache, problem.value_scale),
        ):
            row = to_float64(cache[at]) if used else np.zeros(cache.shape[2:])
            factor = 1.0 if scale is None else np.asarray(scale[at] if np.ndim(scale) == 3 else scale, np.float64)
            rows.append(row * np.reshape(factor, (-1, 1)))
    shape = (problem.num_kv_heads, 0, problem.head_size)
    k, v = (np.stack(rows, 1) if rows else np.zeros(shape) for rows in (keys, values))
    return to_float64(problem.query[problem.query_rows(seq)]).swapaxes(0, 1), k, v


def assert_agree(name: str, got: Array, expected: Array) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12, err_msg=name)


def mask_of(problem: PagedAttention, seq: int) -> Array:
    """bool [rows, keys], by the definition: position i sees j <= i, and of those the last `window`."""
    n, length = problem.positions(seq).size, int(problem.seq_lens[seq])
    mask = np.zeros((n, length), bool)
    for row in range(n):
        for key in range(length):
            at = length - n + row
            mask[row, key] = not problem.causal or (key <= at and (problem.window is None or at - key < problem.window))
    return mask


@pytest.mark.parametrize("features", ["plain", "window", "window of one", "ALiBi", "not causal", "int8", "fp8"])
def test_reference_agrees_with_torch_sdpa(features: str) -> None:
    problem = problem_of(**FEATURES[features])
    out, _ = attention.paged_attention(problem)
    for seq in range(problem.num_seqs):
        q, k, v = (torch.from_numpy(x.copy())[None] for x in dense(problem, seq))
        seen = torch.from_numpy(mask_of(problem, seq))
        if not seen.numel():
            continue
        bias = torch.zeros(problem.num_query_heads, *seen.shape, dtype=torch.float64)
        if problem.alibi_slopes is not None:
            distance = np.arange(seen.shape[1])[None, :] - problem.positions(seq)[:, None]
            bias += torch.from_numpy(problem.alibi_slopes.astype(np.float64)[:, None, None] * distance)
        bias = bias.masked_fill(~seen, -math.inf)
        got = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias[None], scale=problem.scale, enable_gqa=True
        )[0]
        rows = seen.any(dim=1).numpy()  # torch gives NaN to a query that sees no key
        own = out[problem.query_rows(seq)]
        assert_agree(f"sequence {seq}", got.numpy().swapaxes(0, 1)[rows], own[rows])
        assert not own[~rows].any()


@pytest.mark.parametrize("features", ["soft cap", "window and ALiBi and soft cap"])
def test_reference_agrees_with_flex_attention(features: str) -> None:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    problem = problem_of(**FEATURES[features])
    out, lse = attention.paged_attention(problem)
    for seq in (0, 1, 6):  # sequences all of whose queries see a key
        q, k, v = (torch.from_numpy(x.copy())[None] for x in dense(problem, seq))
        mask, cap = torch.from_numpy(mask_of(problem, seq)), problem.soft_cap
        first = int(problem.positions(seq)[0])
        slopes = torch.zeros(problem.num_query_heads, dtype=torch.float64)
        if problem.alibi_slopes is not None:
            slopes = torch.from_numpy(problem.alibi_slopes.astype(np.float64))

        def modify(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
            score = score if cap is None else cap * torch.tanh(score / cap)  # noqa: B023  # called within the loop
            score = score + slopes[head] * (key - row - first)  # noqa: B023  # called within the loop
            return torch.where(mask[row, key], score, -math.inf)  # noqa: B023  # called within the loop

        options = {"scale": problem.scale, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        got, aux = flex_attention(q, k, v, score_mod=modify, **options)
        rows = problem.query_rows(seq)
        assert_agree("out", got[0].numpy().swapaxes(0, 1), out[rows])
        assert_agree("lse", aux.lse[0].numpy().T, lse[rows])


@pytest.mark.parametrize("features", sorted(FEATURES))
@pytest.mark.parametrize("sinks", [False, True])
def test_reference_agrees_with_the_definitions(features: str, sinks: bool) -> None:
    """One query, one head and one key at a time."""
    problem = problem_of(**FEATURES[features], sinks=sinks)
    out, lse = attention.paged_attention(problem)
    for seq in range(problem.num_seqs):
        q, k, v = dense(problem, seq)
        mask = mask_of(problem, seq)
        for row, at in enumerate(problem.positions(seq)):
            for head in range(problem.num_query_heads):
                scores, of_keys = [], v[head // problem.group][mask[row]]
                for key in np.flatnonzero(mask[row]):
                    s = problem.scale * float(q[head, row] @ k[head // problem.group, key])
                    s = s if problem.soft_cap is None else problem.soft_cap * math.tanh(s / problem.soft_cap)
                    scores.append(s if problem.alibi_slopes is None else s + problem.alibi_slopes[head] * (key - at))
                weights = np.exp(np.array(scores, np.float64))
                total = weights.sum() + (0.0 if problem.sinks is None else math.exp(problem.sinks[head]))
                token = problem.query_rows(seq).start + row
                expected = weights @ of_keys / total if len(scores) else np.zeros(problem.head_size)
                assert_agree("out", out[token, head], expected)
                assert_agree("lse", lse[token, head], math.log(total) if total else -math.inf)


# --- our kernels


def test_every_valid_problem_is_accepted() -> None:
    providers, rng = [load_provider(name) for name in ("triton", "cupy")], np.random.default_rng(0)
    for _ in range(1000):
        pick = strategies.Picker(rng.integers(0, 256, 64, np.uint8).tobytes())
        problem = strategies.attention_recipe(pick, everything("paged_attention")).build()
        pick = strategies.Picker(rng.integers(0, 256, 64, np.uint8).tobytes())
        merge = strategies.merge_recipe(pick, everything("merge_states")).build()
        assert [provider.rejects(each) for provider in providers for each in (problem, merge)] == [None] * 4


MODIFIERS: dict[str, Any] = {"window": 6, "soft_cap": 1.0, "alibi": True, "sinks": True}


@pytest.mark.parametrize("name", ["triton", "cupy"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("pair", list(itertools.combinations(MODIFIERS, 2)), ids=" and ".join)
def test_modifiers_in_every_pair(name: str, dtype: str, pair: tuple[str, str]) -> None:
    """Prefill and decode in one batch, several tiles and splits each."""
    provider = supported(name)
    chosen = {each: MODIFIERS[each] for each in pair}
    problem = problem_of(dtype=dtype, num_kv_heads=1, sequences=((1, 37), (5, 21), (0, 5), (2, 1)), **chosen)
    contracts.check(provider, problem, variant={"split": 16, "tile": 16})


@pytest.mark.parametrize("name", ["triton", "cupy"])
@pytest.mark.parametrize("modifier", ["window", "ALiBi", "window and ALiBi"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_halves_with_a_window_or_alibi_make_the_whole(name: str, modifier: str, dtype: str) -> None:
    """A decode over 40 keys, whose query sits at the last of them, merged with one over the 21 keys behind those.

    The first half's window ends 21 keys earlier. Its ALiBi counts from 21 keys before the query's true position, which
    adds slope * 21 to its lse; its sink, which has no position, must be raised by as much.
    """
    provider = supported(name)
    before, behind, size = 40, 21, 4
    window = 45 if "window" in modifier else None
    alibi = "ALiBi" in modifier
    whole = problem_of(sequences=((1, before + behind),), dtype=dtype, alibi=alibi, window=window, sinks=True)
    moved = whole.alibi_slopes[None] * np.float32(behind) if alibi else np.zeros((1, 6), np.float32)
    first = dataclasses.replace(
        whole,
        seq_lens=np.array([before], np.int32),
        window=None if window is None else window - behind,
        sinks=whole.sinks + moved[0],
    )
    rest = dataclasses.replace(
        whole,
        seq_lens=np.array([behind], np.int32),
        block_table=np.ascontiguousarray(whole.block_table[:, before // size :]),
        window=None,
        sinks=None,
    )
    (out, lse), other = ([provider.to_host(x) for x in provider.paged_attention(p.on(provider))] for p in (first, rest))
    merge = MergeStates(out, lse - moved, *other)
    got = [provider.to_host(x) for x in provider.merge_states(merge.on(provider))]
    of_moving = 2 * error_bounds.U * (abs(moved) + abs(merge.lse_a) + abs(first.sinks))
    sizes = (of_moving[..., None] * (abs(to_float64(merge.out_a)) + abs(to_float64(merge.out_b))), of_moving)
    bounds = merge_states_relations._bounds(merge, (first, rest))
    for each, result, right, bound, more in zip(
        ("out", "lse"), got, attention.paged_attention(whole), bounds, sizes, strict=True
    ):
        error_bounds.assert_close(each, result, right, bound + more)


PAIRS = [
    {"window": 5, "soft_cap": 1.0, "sinks": True},
    {"window": 5, "alibi": True, "cache_dtype": "int8", "kv_scale": "slot"},
    {"soft_cap": 1.0, "alibi": True, "sinks": True, "dtype": "bfloat16", "cache_dtype": "float8_e4m3fn"},
    {"causal": False, "soft_cap": 3.0, "sinks": True, "dtype": "float32", "cache_dtype": "float8_e5m2"},
]


@pytest.mark.parametrize("features", PAIRS, ids=lambda f: " ".join(f))
def test_short_and_long_sequences_of_one_batch(features: dict[str, Any]) -> None:
    """Splits of the short sequences, tiles of rows of the long ones, and both kinds of launch at once."""
    provider = load_provider("triton")
    problem = problem_of(**features)
    contracts.check(provider, problem, variant={"split": 16, "tile": 16, "rows": 16, "split_queries": 3})


def test_more_sequences_than_tokens_and_one_of_many_queries() -> None:
    """Where tiles beyond the first of a sequence must be searched for."""
    provider = load_provider("triton")
    sequences = ((0, 5), (9, 30), (0, 0), (0, 1), (1, 18), *[(0, 2)] * 9)
    problem = problem_of(sequences=sequences, group=7, num_kv_heads=1)
    assert problem.num_tokens < problem.num_seqs
    contracts.check(provider, problem, variant={"split": 16, "tile": 16})


@pytest.mark.parametrize("head_size", [1, 8, 300])
def test_heads_smaller_and_larger_than_a_tile(head_size: int) -> None:
    provider = load_provider("triton")
    for dtype in COMPUTE_DTYPES:
        recipe = AttentionRecipe(dtype=dtype.name, head_size=head_size, sequences=((2, 18),), kv_layout="halves")
        contracts.check(provider, recipe.build(), variant={"split": 16, "tile": 16})


@pytest.mark.parametrize("logit", [1e5, -1e5])
def test_sinks_of_a_hundred_thousand(logit: float) -> None:
    provider = load_provider("triton")
    problem = problem_of(sinks=True, sequences=((1, 20), (2, 1)))
    problem.sinks[::2] = logit
    contracts.check(provider, problem, variant={"split": 16, "tile": 16})


def test_sinks_beyond_float32_in_base_2() -> None:
    """Of short sequences of one split and of several, and of long ones; also where no key is seen."""
    provider = load_provider("triton")
    problem = AttentionRecipe(group=4, sequences=((1, 40), (5, 3)), sinks=True).build()
    problem.sinks[...] = np.array([1e5, -1e5, 3.4e38, -3.4e38], np.float32)
    for variant in ({}, {"split": 16, "tile": 16, "split_queries": 1}):
        contracts.check(provider, problem, variant=variant)


def test_codes_that_are_not_a_number_stay_so() -> None:
    provider = load_provider("triton")
    problem = problem_of(cache_dtype="float8_e4m3fn", sequences=((1, 20),))
    block = problem.block_table[0, 0]
    problem.value_cache[block, 0, 0, 5] = np.nan
    out, _ = provider.paged_attention(problem.on(provider))
    expected, _ = attention.paged_attention(problem)
    assert (np.isnan(provider.to_host(out)) == np.isnan(expected)).all()
    assert np.isnan(expected).any()


# --- merging


def test_merging_agrees_with_the_definition() -> None:
    rng = np.random.default_rng(0)
    out_a, out_b = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    lse_a, lse_b = (3 * rng.standard_normal((2, 4, 3))).astype(np.float32)
    lse_a[0, 0], lse_b[0, 1], lse_a[1], lse_b[1] = -np.inf, -np.inf, -np.inf, -np.inf
    out_a[1], out_b[0, 1] = np.nan, np.inf
    problem = MergeStates(out_a, lse_a, out_b, lse_b)
    out, lse = merge_states.merge_states(problem)
    for at in np.ndindex(4, 3):
        sides = [(o[at], math.exp(w[at])) for o, w in ((out_a, lse_a), (out_b, lse_b)) if np.isfinite(w[at])]
        total = sum(w for _, w in sides)
        assert_agree("out", out[at], sum((w / total * o.astype(np.float64) for o, w in sides), np.zeros(8)))
        assert_agree("lse", lse[at], math.log(total) if total else -math.inf)
    alone, sure, _ = merge_states.one_sided(problem)
    assert alone.sum() == 5
    error_bounds.assert_same_bits("the other side", sure[0, 0], out_b[0, 0])


def test_merging_rejects_an_lse_that_cannot_be() -> None:
    out, lse = np.zeros((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    for bad in (np.inf, np.nan):
        with pytest.raises(ValueError, match="lse_b must be finite or -inf"):
            MergeStates(out, lse, out.copy(), np.full((1, 1), bad, np.float32))
    with pytest.raises(ValueError, match="out_b must have dtype"):
        MergeStates(out, lse, out.astype(np.float16), lse.copy())


@pytest.mark.parametrize("name", ["triton", "cupy"])
@pytest.mark.parametrize("window", [np.int64(5), 2**31 - 20, 2**31 - 1, 2**63 - 1, 2**64])
def test_a_window_may_be_any_integer(name: str, window: Any) -> None:
    """Also with more queries than keys, where the first key seen lies far below 0."""
    sequences = ((6, 3), (40, 5), (5, 3), (1, 40))
    contracts.check(
        load_provider(name), dataclasses.replace(AttentionRecipe(group=2, sequences=sequences).build(), window=window)
    )


@pytest.mark.parametrize("name", ["triton", "cupy"])
def test_a_soft_cap_of_float16_is_computed_with_in_float32(name: str) -> None:
    problem = AttentionRecipe(group=2, sequences=((1, 40),)).build()
    contracts.check(load_provider(name), dataclasses.replace(problem, soft_cap=np.float16(30), scale=1.0))


@pytest.mark.parametrize("name", ["triton", "cupy"])
def test_bitwise_the_same_in_any_company(name: str) -> None:
    """Batches of even and odd sizes, whatever Hypothesis draws."""
    provider = load_provider(name)
    sequences = ((1, 300), (1, 40), (3, 70), (1, 33))
    for some in (sequences, sequences[:3]):
        problem = AttentionRecipe(group=5, sequences=some, sinks=True).build()
        for variant in ({}, *provider.variants(problem)):
            relations.check_batch_split(provider, problem, variant=variant)
            relations.check_batch_permutation(provider, problem, variant=variant)


@pytest.mark.parametrize(
    "lses", [(4e9, -4e8), (1e10, -1e10), (3e38, -3e38), (3e38, 3e38), (-3e38, -3e38), (1e17, 1e17)]
)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["triton", "cupy"])
def test_states_merge_at_any_lse(name: str, dtype: Any, lses: tuple[float, float]) -> None:
    """A mean where they are equal, however large; the larger one's where they are far apart; bounds that bound."""
    outs = [np.full((1, 2, 16), value, dtype) for value in (1, -1)]
    lse_a, lse_b = (np.full((1, 2), lse, np.float32) for lse in lses)
    problem = MergeStates(outs[0], lse_a, outs[1], lse_b)
    expected = 0.0 if lses[0] == lses[1] else 1.0
    assert (merge_states.merge_states(problem)[0] == expected).all()
    assert all(np.isfinite(bound).all() for bound in merge_states.bound(problem))
    contracts.check(load_provider(name), problem)


def test_a_bound_of_nan_bounds_nothing() -> None:
    with pytest.raises(AssertionError, match="out: the bound is NaN"):
        error_bounds.assert_close("out", np.ones(2), np.zeros(2), np.array([1.0, np.nan]))


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("triton", {"split": 0}, r"split must be an integer from 1 to \d+, got 0"),
        ("triton", {"max_splits": -1}, r"max_splits must be an integer from 1 to \d+, got -1"),
        ("triton", {"split": 2**40}, r"split must be an integer from 1 to \d+, got \d+"),
        ("triton", {"tile": "16"}, "tile must be a power of two from 16 to 128, got '16'"),
        ("triton", {"tile": 7}, "tile must be a power of two from 16 to 128, got 7"),
        ("triton", {"rows": 24}, "rows must be a power of two from 16 to 128, got 24"),
        ("triton", {"split": True}, r"split must be an integer from 1 to \d+, got True"),
        ("triton", {"tile": 256}, "tile must be a power of two from 16 to 128, got 256"),
        ("triton", {"num_warps": 3}, "num_warps must be a power of two from 1 to 32, got 3"),
        ("triton", {"num_stages": 0}, "num_stages must be an integer from 1 to 8, got 0"),
        ("cupy", {"split": -5}, r"split must be an integer from 1 to \d+, got -5"),
        ("cupy", {"split": 2.5}, r"split must be an integer from 1 to \d+, got 2.5"),
        ("cupy", {"max_splits": 2**40}, r"max_splits must be an integer from 1 to \d+, got \d+"),
        ("cupy", {"tile": 7}, "tile must be a multiple of 16 up to 128, or None, got 7"),
        ("cupy", {"tile": 256}, "tile must be a multiple of 16 up to 128, or None, got 256"),
        ("cupy", {"row_warps": 3}, "row_warps must be a power of two from 1 to 4, got 3"),
    ],
)
def test_a_variant_that_cannot_be_is_refused(name: str, variant: dict[str, Any], message: str) -> None:
    provider = load_provider(name)
    with pytest.raises(ValueError, match=message):
        provider.paged_attention(problem_of().on(provider), **variant)


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("triton", {"columns": 24}, "columns must be a power of two from 1 to 512, got 24"),
        ("triton", {"tile_bytes": 100}, r"tile_bytes must be a power of two from 16 to \d+, got 100"),
        ("triton", {"num_warps": 0}, "num_warps must be a power of two from 1 to 32, got 0"),
        ("cupy", {"threads": 33}, "threads must be a multiple of 32 up to 1024, got 33"),
    ],
)
def test_a_variant_of_merging_that_cannot_be_is_refused(name: str, variant: dict[str, Any], message: str) -> None:
    provider = load_provider(name)
    with pytest.raises(ValueError, match=message):
        provider.merge_states(MergeRecipe().build().on(provider), **variant)


def test_a_tile_that_no_gpu_has_shared_memory_for_is_refused() -> None:
    provider = load_provider("cupy")
    problem = problem_of(dtype="float32", head_size=256, group=33)
    with pytest.raises(ValueError, match=r"tile must need at most \d+ bytes of shared memory, not \d+, got 128"):
        provider.paged_attention(problem.on(provider), tile=128)


LIMITS: list[tuple[str, dict[str, int]]] = [
    ("triton", {"split": 1, "max_splits": 1, "split_queries": 1, "tile": 16, "rows": 16}),
    ("triton", {"split": 1, "num_warps": 1, "num_stages": 1}),
    ("triton", {"split": 2**30, "max_splits": 2**30, "split_queries": 2**30, "num_warps": 32, "num_stages": 8}),
    ("triton", {"split_queries": 1, "tile": 128, "rows": 128}),
    ("cupy", {"split": 1, "max_splits": 1, "tile": 16, "row_warps": 1}),
    ("cupy", {"split": 2**30, "max_splits": 2**28, "tile": 128, "row_warps": 4}),
]


@pytest.mark.parametrize(("name", "variant"), LIMITS)
def test_a_variant_at_the_limits_is_right(name: str, variant: dict[str, int]) -> None:
    problem = AttentionRecipe(head_size=16, group=2, sequences=((1, 37), (3, 20))).build()
    contracts.check(load_provider(name), problem, variant=variant)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("triton", {"columns": 1, "tile_bytes": 16, "num_warps": 1}),
        ("triton", {"columns": 512, "tile_bytes": 2**16, "num_warps": 32}),
        ("cupy", {"threads": 32}),
        ("cupy", {"threads": 1024}),
    ],
)
def test_a_variant_of_merging_at_the_limits_is_right(name: str, variant: dict[str, int]) -> None:
    contracts.check(load_provider(name), MergeRecipe(head_size=24, num_heads=3).build(), variant=variant)
