"""The drawn problems cross boundaries, meet each pair of features, and follow what a provider supports."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from claim_runner import claims
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy_kernels import Everything
from numpy_provider import Provider

from pagebench.properties import strategies
from pagebench.properties.block_copy_rows_recipes import DTYPES, QUANTISED
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.properties.subject import Subject
from pagebench.properties.support import everything, support
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.problem import Problem, from_text

OPS = ("paged_attention", "copy_blocks", "swap_blocks", "write_kv", "gather_kv", "dequantize")
SPLIT = 16  # the smallest split and tile that kernels offer among their variants


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """`count` examples, the same every time."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


def budget(op: str) -> int:
    """Examples that the claims about `op` draw by default."""
    return sum(getattr(test, "pagebench_examples", 0) for _, test in claims(op))


@functools.cache
def attention_recipes() -> list[AttentionRecipe]:
    """Recipes over the whole contract, as many as the claims draw."""
    return drawn(strategies.recipes("paged_attention", everything("paged_attention")), budget("paged_attention"))


def features(r: AttentionRecipe) -> set[str]:
    power_of_two: Callable[[int], bool] = lambda n: n & (n - 1) == 0  # noqa: E731  # used four times just below
    keys = [k for _, k in r.sequences]
    present = {
        r.dtype: True,
        "head size not a power of two": not power_of_two(r.head_size),
        "group of several": r.group > 1,
        "group not a power of two": not power_of_two(r.group),
        "several KV heads": r.num_kv_heads > 1,
        "block size not a power of two": not power_of_two(r.block_size),
        "several sequences": len(keys) > 1,
        "several blocks": max(keys, default=0) > r.block_size,
        "several splits": max(keys, default=0) > SPLIT,
        "no keys": 0 in keys,
        "no queries": any(q == 0 for q, _ in r.sequences),
        "several queries": any(q > 1 for q, _ in r.sequences),
        "strided cache": r.kv_layout != "contiguous",
        "strided query": r.query_layout != "contiguous",
        "strided table": r.table_layout != "contiguous",
        "shared blocks": r.shared,
        "wild table entries": r.garbage in ("minus one", "huge", "random"),
        "NaN in dead slots": r.dead == "nan",
        "window": r.window is not None,
        "soft cap": r.soft_cap is not None,
        "ALiBi": r.alibi,
        "sinks": r.sinks,
        "not causal": not r.causal,
        "quantised cache": r.cache_dtype is not None,
        "cache scales": r.kv_scale is not None,
    }
    return {name for name, there in present.items() if there}


EXCLUDED = {("window", "not causal"), ("ALiBi", "not causal")}
EXCLUDED |= set(itertools.combinations(("float16", "bfloat16", "float32"), 2))


@pytest.mark.parametrize("provider", [Everything(), Provider()], ids=["whole contract", "plain attention"])
def test_every_pair_of_features_occurs(provider: Any) -> None:
    within = support(provider, "paged_attention")
    assert within is not None
    recipes = drawn(strategies.recipes("paged_attention", within), budget("paged_attention"))
    pairs: Counter[tuple[str, str]] = Counter()
    for recipe in recipes:
        pairs.update(itertools.combinations(sorted(features(recipe)), 2))
    singles = sorted({name for recipe in recipes for name in features(recipe)})
    excluded = {tuple(sorted(pair)) for pair in EXCLUDED}
    missing = [pair for pair in itertools.combinations(singles, 2) if pair not in pairs and pair not in excluded]
    assert missing == []
    assert len(singles) >= (25 if isinstance(provider, Everything) else 18)


@pytest.mark.parametrize("boundary", ["several blocks", "several splits", "several sequences"])
def test_a_fifth_of_the_problems_cross(boundary: str) -> None:
    recipes = attention_recipes()
    assert sum(boundary in features(recipe) for recipe in recipes) >= len(recipes) / 5


def test_lengths_lie_on_and_beside_each_unit() -> None:
    recipes = attention_recipes()
    keys = {k for recipe in recipes for _, k in recipe.sequences}
    for tile in (16, 32, 64):
        assert {tile - 1, tile, tile + 1} <= keys
    beyond = Counter(
        k % r.block_size - r.block_size * (k % r.block_size > 1)
        for r in recipes
        for _, k in r.sequences
        if k > r.block_size
    )
    assert min(beyond[-1], beyond[0], beyond[1]) >= 10


def test_a_fifth_of_the_cases_use_more_than_one_split_of_a_real_provider() -> None:
    """By the split and tile that the drawn variant names, on the providers of this package."""
    from pagebench.kernels.providers import load_provider

    for name in ("triton", "cupy"):
        cases = drawn(Subject(name, load_provider(name)).cases("paged_attention"), 100)
        for parameter in ("split", "tile"):
            several = [c for c in cases if c.problem.seq_lens.max(initial=0) > c.variant.get(parameter, 512)]
            assert len(several) >= len(cases) / 5, f"{name}: {parameter}"


def test_copies_hold_every_structure_of_pairs() -> None:
    problems = drawn(strategies.copy_blocks_problems(), budget("copy_blocks"))
    seen: Counter[str] = Counter()
    for problem in problems:
        src, dst = (set(column.tolist()) for column in problem.pairs.T)
        moving = [(s, d) for s, d in problem.pairs.tolist() if s != d]
        seen["chain"] += bool(src & dst and {d for _, d in moving} - {s for s, _ in moving})
        seen["cycle"] += len(moving) > 1 and {s for s, _ in moving} == {d for _, d in moving}
        seen["fan out"] += len({s for s, _ in moving}) < len(moving)
        seen["self"] += any(s == d for s, d in problem.pairs.tolist())
        seen["none"] += problem.pairs.shape[0] == 0
        seen["odd bytes"] += any(cache[:1].nbytes % 2 for cache in problem.caches)
        seen["strided"] += any(not cache.flags.c_contiguous for cache in problem.caches)
        seen["dtypes mixed"] += len({cache.dtype for cache in problem.caches}) > 1
    assert len(problems) >= 100
    assert min(seen.values()) >= 3, seen


def count_row(seen: Counter[str], r: Any) -> None:
    """Enter what a write or gather recipe's rows are like: their 16-byte words beside usual numbers of threads."""
    words = r.num_kv_heads * r.head_size * DTYPES[r.dtype].itemsize / 16
    for threads in (512, 1024):
        seen[f"below {threads} threads"] += threads - 64 <= words < threads
        seen[f"at {threads} threads"] += words == threads
        seen[f"beyond {threads} threads"] += threads < words <= threads + 64
    seen["odd head size"] += r.head_size % 2 == 1 and r.head_size > 1
    for layout in ("halves", "hnd", "dims apart"):
        seen[layout] += r.kv_layout == layout


def test_writes_reach_every_launch_boundary_and_conversion() -> None:
    recipes = drawn(strategies.recipes("write_kv", everything("write_kv")), budget("write_kv"))
    seen: Counter[str] = Counter()
    for r in recipes:
        count_row(seen, r)
        seen["no rows"] += r.num_rows == 0
        seen["one row"] += r.num_rows == 1
        seen["padded rows"] += 0 < r.mapped < r.num_rows
        seen["skipped rows"] += r.skip_every > 1
        seen["fused rows"] += r.row_layout == "fused"
        for name in QUANTISED:
            for scale in (None, "value", "scalar", "head", "computed"):
                seen[f"{name}, scale {scale}"] += r.cache_dtype == name and r.scale == scale
    assert min(seen.values()) >= 2, seen


def test_gathers_meet_every_conversion() -> None:
    recipes = drawn(strategies.recipes("gather_kv", everything("gather_kv")), budget("gather_kv"))
    seen = Counter((r.cache_dtype, r.dtype) for r in recipes)
    kinds = (None, *QUANTISED, "float16", "bfloat16", "float32")
    assert min(seen[kind, dtype] for kind in kinds for dtype in ("float16", "bfloat16", "float32")) >= 1, seen
    assert min(Counter(r.scale for r in recipes).values()) >= 5
    assert sum(0 in r.sequences for r in recipes) >= 10


def test_gathers_reach_every_launch_boundary() -> None:
    recipes = drawn(strategies.recipes("gather_kv", everything("gather_kv")), budget("gather_kv"))
    seen: Counter[str] = Counter()
    for r in recipes:
        count_row(seen, r)
        seen["no tokens"] += sum(r.sequences) == 0
        seen["one token"] += sum(r.sequences) == 1
    assert min(seen.values()) >= 1, seen


def test_copies_are_of_one_layer_and_of_several() -> None:
    """80 layers are a claim of their own, `test_many_layers`, of copies and of swaps."""
    recipes = drawn(strategies.recipes("copy_blocks", everything("copy_blocks")), budget("copy_blocks"))
    assert min(Counter(len(r.caches) for r in recipes).values()) >= 10
    for op in ("copy_blocks", "swap_blocks"):
        assert "test_many_layers" in {name for name, _ in claims(op)}


def test_swaps_hold_adjacent_and_scattered_pairs_between_all_layouts() -> None:
    recipes = drawn(strategies.recipes("swap_blocks", everything("swap_blocks")), budget("swap_blocks"))
    assert min(Counter((r.direction, r.adjacent) for r in recipes).values()) >= 5
    assert len({(src, dst) for r in recipes for _, _, src, dst in r.caches}) >= 20


def test_dequantisation_meets_every_class_of_scale_and_layout() -> None:
    recipes = drawn(strategies.recipes("dequantize", everything("dequantize")), budget("dequantize"))
    for name in ("form", "dtype", "scales", "order", "bits", "layout", "group_size", "scale_dtype"):
        counts = Counter(getattr(recipe, name) for recipe in recipes)
        assert min(counts.values()) >= 5, counts
    assert len({recipe.format for recipe in recipes}) >= 20  # `test_every_code` has all 26
    groups = [(p.shape[1], p.group_size) for p in (recipe.build() for recipe in recipes) if (p.group_size or 0) > 0]
    assert sum(k % size > 0 for k, size in groups) >= 5, groups


def test_fused_products_meet_every_number_of_rows_and_kind_of_input() -> None:
    recipes = drawn(strategies.recipes("dequant_gemv", everything("dequant_gemv")), budget("dequant_gemv"))
    for name in ("m", "x", "dtype", "scales"):
        counts = Counter(getattr(recipe, name) for recipe in recipes)
        assert min(counts.values()) >= 3, counts


@pytest.mark.parametrize("op", [*OPS, "dequant_gemv"])
def test_drawn_problems_survive_their_text(op: str) -> None:
    for recipe in drawn(strategies.recipes(op, everything(op)), 10):
        problem = recipe.build()
        assert_same_problem(from_text(problem.to_text()), problem)


def assert_same_problem(got: Problem, expected: Problem) -> None:
    """Bytes, strides and aliasing are those of the original."""
    from pagebench.properties.host_arrays import copy_of

    assert got.describe() == expected.describe()
    for new, old in zip(copy_of(got).bases, copy_of(expected).bases, strict=True):
        assert new.device.tobytes() == old.device.tobytes()


def test_a_narrow_provider_keeps_its_budget() -> None:
    """One in four cases may be rejected first; every one ends in a supported problem."""
    subject = Subject("narrow", Provider())
    cases = drawn(subject.cases("paged_attention"), 100)
    assert len(cases) == 100
    assert all(subject.provider.rejects(case.problem) is None for case in cases)
    assert subject.tally.rejected.total() > 0


class OnlyBigHeads(Provider):
    """Supports nothing that resembles the default sample."""

    def rejects(self, problem: Any) -> str | None:
        if not isinstance(problem, PagedAttention):
            return "attention only"
        fits = problem.head_size == 128 and problem.block_size == 32 and problem.query.dtype != "float16"
        return super().rejects(problem) if fits else "head size 128, block size 32, bfloat16 or float32"


def test_support_far_from_the_default_is_found() -> None:
    found = support(OnlyBigHeads(), "paged_attention")
    assert found is not None
    assert found.axes["head_size"] == (128,)
    assert found.axes["block_size"] == (32,)
    assert set(found.axes["dtype"]) == {"bfloat16", "float32"}
    assert support(OnlyBigHeads(), "copy_blocks") is None
