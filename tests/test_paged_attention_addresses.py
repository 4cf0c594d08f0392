"""Where attention reads: arrays of any strides, offsets beyond 2^31 along any axis, and edges of windows and splits."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from backends import PROVIDERS, supported

from pagebench.properties import contracts, far_blocks, probes, relations
from pagebench.properties.far_blocks import contiguous_strides
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.properties.runs import Run, results_of
from pagebench.reference import error_bounds
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.placement import Placement, place


def spaced(array: Any) -> Any:
    """The same numbers, every second element along each axis, NaN or -1 between them."""
    room = np.full([2 * n + 1 for n in array.shape], -1, array.dtype)
    view = room[tuple(slice(1, None, 2) for _ in array.shape)]
    view[...] = array
    return view


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("kv_scale", ["head", "slot"])
def test_every_small_array_may_have_any_stride(name: str, kv_scale: str) -> None:
    """Lengths, starts, table, slopes, sinks and scales, as a slice of a larger array is."""
    provider = supported(name)
    recipe = AttentionRecipe(head_size=16, group=2, num_kv_heads=2, block_size=8, sequences=((1, 37), (3, 20), (1, 5)))
    problem = dataclasses.replace(recipe, alibi=True, sinks=True, cache_dtype="int8", kv_scale=kv_scale).build()
    names = ("block_table", "seq_lens", "query_start", "alibi_slopes", "sinks", "key_scale", "value_scale")
    problem = dataclasses.replace(problem, **{n: spaced(getattr(problem, n)) for n in names})
    for variant in ({}, {"split": 16, "tile": 16}):
        contracts.check(provider, problem, variant=variant)


def check_far(
    provider: Any, problem: Any, strides: dict[str, tuple[int, ...]], variant: dict[str, Any] | None = None
) -> None:
    """The result is right with these arrays in memory that is never touched in between, strides in elements."""
    placed = place(problem, provider).problem
    size = max(sum((n - 1) * s for n, s in zip(getattr(problem, f).shape, strides[f], strict=True)) for f in strides)
    room = far_blocks._room(provider, 4 * size + 2**18)
    far = {
        field: far_blocks.strided_copy(provider, room, getattr(problem, field), steps, i * 2**14)
        for i, (field, steps) in enumerate(strides.items())
    }
    placement = Placement(far_blocks._replaced(placed, far), (), provider)
    returned = getattr(provider, problem.op)(placement.problem, **(variant or {}))
    contracts.expectation(problem)(Run(results_of(provider, problem, placement, returned), ()))


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize(
    ("axis", "step"),
    [(axis, step) for axis in (1, 2) for step in (2**30 + 1, 2**30 + 2**12, 2**33 + 2**15)] + [(3, 2**30 + 1)],
)
def test_offsets_do_not_wrap_along_any_axis(name: str, axis: int, step: int) -> None:
    """Slots, heads and elements of K and V, heads and elements of the query, in elements or in units of 16 bytes."""
    problem = AttentionRecipe(head_size=16, group=3, num_kv_heads=3, block_size=3, sequences=((1, 8),)).build()
    strides = {}
    for field in ("key_cache", "value_cache", "query"):
        steps = list(contiguous_strides(getattr(problem, field)))
        if axis - 4 + len(steps) >= 1:
            steps[axis - 4] = step
        strides[field] = tuple(steps)
    check_far(supported(name), problem, strides)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("given", ["head", "slot"])
def test_offsets_of_scales_slopes_and_sinks_do_not_wrap(name: str, given: str) -> None:
    """Of heads 2^30 elements apart; of scales of slots also slots and blocks."""
    recipe = AttentionRecipe(head_size=16, num_kv_heads=3, block_size=3, sequences=((1, 8),), alibi=True, sinks=True)
    problem = dataclasses.replace(recipe, cache_dtype="int8", kv_scale=given).build()
    fields = ("key_scale", "value_scale", "alibi_slopes", "sinks")
    arrays = {field: getattr(problem, field) for field in fields}
    for axis in range(arrays["key_scale"].ndim):
        strides = {}
        for field, array in arrays.items():
            steps = list(contiguous_strides(array))
            steps[min(axis, array.ndim - 1)] = 2**30 + 2**12
            strides[field] = tuple(steps)
        check_far(supported(name), problem, strides)


@pytest.mark.parametrize("name", PROVIDERS)
def test_default_splits_do_not_depend_on_the_batch(name: str) -> None:
    """Of 1,100 keys, several splits of the default size, in company of any number."""
    provider = supported(name)
    many = AttentionRecipe(group=2, num_kv_heads=2, sequences=((1, 1100), *[(1, 3)] * 11), block_size=100).build()
    alone = None
    for count in (1, 2, 3, 5, 8, 12):
        some = relations.subset(many, np.arange(count))
        results = [provider.to_host(x)[:1] for x in provider.paged_attention(some.on(provider))]
        alone = alone or results
        for got, own in zip(results, alone, strict=True):
            error_bounds.assert_same_bits(f"in a batch of {count}", got, own)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("window", [31, 32, 33])
def test_a_window_as_wide_as_the_table(name: str, window: int) -> None:
    """One key less hides the first, of the last query alone; the table has room for no more keys than there are."""
    problem = AttentionRecipe(group=2, sequences=((1, 32), (2, 32)), window=window, spare_entries=0).build()
    contracts.check(supported(name), probes.counting(problem))


def test_rows_of_codes_at_odd_addresses() -> None:
    """Strides are even, so that pairs of codes would be aligned if the first were."""
    problem = AttentionRecipe(head_size=32, group=2, sequences=((3, 40), (1, 33)), cache_dtype="int8").build()
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = getattr(problem, name)
        caches[name] = np.full((*cache.shape[:3], 36), 99, cache.dtype)[..., 1:33]
        caches[name][...] = cache
    for name in PROVIDERS:
        contracts.check(supported(name), dataclasses.replace(problem, **caches))


@pytest.mark.parametrize("name", PROVIDERS)
def test_alibi_over_distances_that_float16_does_not_hold(name: str) -> None:
    problem = AttentionRecipe(head_size=16, dtype="float32", sequences=((1, 2500),), block_size=100, alibi=True).build()
    problem.alibi_slopes[...] = -0.01  # the farthest keys count most
    contracts.check(supported(name), problem)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_window_and_its_queries_take_one_split_more(name: str) -> None:
    """A window of one split, of three queries: 18 keys."""
    problem = AttentionRecipe(group=2, sequences=((3, 40), (1, 33)), window=16).build()
    contracts.check(supported(name), problem, variant={"split": 16, "tile": 16})


@pytest.mark.parametrize(("dtype", "group"), [("float16", 2), ("float32", 3), ("float16", 17)])
def test_heads_larger_than_a_tile_in_groups_and_with_gaps(dtype: str, group: int) -> None:
    recipe = AttentionRecipe(dtype=dtype, head_size=300, group=group, sequences=((2, 18),), kv_layout="padded")
    contracts.check(supported("triton"), recipe.build(), variant={"split": 16, "tile": 16})


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize(
    ("axis", "step"), [*((1, step) for step in (2**30 + 1, 2**30 + 2**12, 2**33 + 2**15)), (2, 2**30 + 1)]
)
def test_offsets_of_merging_do_not_wrap_along_any_axis(name: str, axis: int, step: int) -> None:
    """Heads of outs and lses, and elements of outs, in elements or in units of 16 bytes."""
    problem = MergeRecipe(dtype="float32", num_heads=3, head_size=16).build()
    strides = {}
    for field in ("out_a", "out_b", "lse_a", "lse_b"):
        steps = list(contiguous_strides(getattr(problem, field)))
        if axis < len(steps):
            steps[axis] = step
        strides[field] = tuple(steps)
    check_far(supported(name), problem, strides)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("fields", [("block_table",), ("sinks",)])
def test_offsets_of_tables_and_of_sinks_of_several_splits_do_not_wrap(name: str, fields: tuple[str, ...]) -> None:
    recipe = AttentionRecipe(head_size=16, num_kv_heads=3, block_size=20, sequences=((1, 40), (1, 21), (1, 60)))
    problem = dataclasses.replace(recipe, sinks=True).build()
    strides = {}
    for field in fields:
        steps = list(contiguous_strides(getattr(problem, field)))
        steps[-1] = 2**30 + 2**12
        strides[field] = tuple(steps)
    check_far(supported(name), problem, strides, {"split": 16, "tile": 16})


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize(("first", "size"), [(1, 64), (0, 33), (0, 36)])
def test_merging_rows_that_do_not_begin_or_end_at_16_bytes(name: str, first: int, size: int) -> None:
    """Strides are multiples of 16 bytes, the first address or the length is none."""
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((5, 2, 72)).astype(np.float16)[..., first : first + size] for _ in "ab"]
    lses = [rng.standard_normal((5, 2)).astype(np.float32) for _ in "ab"]
    contracts.check(supported(name), MergeStates(outs[0], lses[0], outs[1], lses[1]))


@pytest.mark.parametrize("window", [15, 16, 17])
def test_a_window_and_the_queries_of_a_tile_take_splits_more(window: int) -> None:
    """Where rows are several tiles, whose splits are counted together, in CUDA."""
    problem = AttentionRecipe(group=2, sequences=((100, 120), (1, 33)), window=window).build()
    contracts.check(supported("cupy"), problem, variant={"split": 16, "tile": 16})
