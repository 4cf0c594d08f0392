"""Paged attention in CUDA C++, every feature: edges of its own tiles and splits, and facts of its launcher."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench import _codegen
from bench.workloads import WORKLOADS
from pagebench.kernels import paged_attention_cupy
from pagebench.kernels.cupy_provider import provider
from pagebench.kernels.memory_trace import trace
from pagebench.properties import contracts, probes, relations, strategies
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.properties.support import everything
from pagebench.reference.dtypes import FLOAT16, FLOAT32
from pagebench.reference.paged_attention import PagedAttention

pytestmark = pytest.mark.skipif(provider.unavailable() is not None, reason=str(provider.unavailable()))

SMALL = {"split": 16, "tile": 16}
MIXED = ((1, 70), (20, 45), (0, 9), (3, 0), (35, 33), (1, 0), (2, 130))


def check(recipe: AttentionRecipe, **variant: Any) -> None:
    contracts.check_poison(provider, recipe.build(), variant=variant)


def test_nothing_is_rejected() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        recipe = strategies.attention_recipe(strategies.Picker(rng.bytes(64)), everything("paged_attention"))
        assert provider.rejects(recipe.build()) is None


@pytest.mark.parametrize("group", [1, 3, 17])
@pytest.mark.parametrize("variant", [{}, SMALL, {"split": 32, "row_warps": 4, "max_splits": 3}], ids=str)
def test_mixed_batches(group: int, variant: dict[str, Any]) -> None:
    """Tiles that end within a query's group, queries before the first key, tiles of two sequences in one launch."""
    for causal in (True, False):
        check(AttentionRecipe(group=group, block_size=3, sequences=MIXED, causal=causal), **variant)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_in_every_pair(dtype: str) -> None:
    features: dict[str, Any] = {"window": 17, "soft_cap": 2.0, "alibi": True, "sinks": True}
    names = list(features)
    for i, one in enumerate(names):
        for other in names[i:]:
            chosen = {one: features[one], other: features[other]}
            check(AttentionRecipe(dtype=dtype, group=2, sequences=((21, 60), (1, 50)), seed=i, **chosen), **SMALL)


def test_every_window_edge() -> None:
    """Counting: windows that end one key beside the edge of a tile, a split and a block."""
    for window in (1, 15, 16, 17, 31, 32, 33):
        problem = AttentionRecipe(group=2, sequences=((18, 66), (1, 49)), window=window, block_size=5).build()
        contracts.check(provider, probes.counting(problem), variant=SMALL)


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_code_is_decoded(cache_dtype: str) -> None:
    """One key each of 256, its value a code in each column: out is the code's number, bit for bit, NaN included."""
    for dtype in ("float16", "float32"):
        sequences = ((1, 1),) * 4
        problem = AttentionRecipe(dtype=dtype, sequences=sequences, cache_dtype=cache_dtype, block_size=1).build()
        problem.key_cache[...] = np.zeros(1, problem.key_cache.dtype)
        codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
        problem.value_cache.view(np.uint8)[problem.block_table[:4, 0], 0, 0] = codes
        out, lse = provider.paged_attention(problem.on(provider))
        expected = codes.view(problem.value_cache.dtype).astype(np.float32).astype(problem.query.dtype)
        assert np.array_equal(provider.to_host(out)[:, 0], expected, equal_nan=True)
        assert np.array_equal(provider.to_host(lse), np.zeros((4, 1)))


@pytest.mark.parametrize("kv_scale", ["scalar", "head", "slot"])
def test_scales_of_any_size(kv_scale: str) -> None:
    """Value scales that no float16 holds, and that differ from key to key by six orders of magnitude."""
    rng = np.random.default_rng(1)
    for cache_dtype, factor in (("int8", 1e-7), ("float8_e5m2", 1e-9), ("float8_e4m3fn", 50.0)):
        recipe = AttentionRecipe(group=2, num_kv_heads=2, sequences=((3, 40), (1, 33)), cache_dtype=cache_dtype)
        problem = dataclasses.replace(recipe, kv_scale=kv_scale, window=30).build()
        spread = rng.uniform(-3, 3, np.shape(problem.value_scale)) if kv_scale == "slot" else 0.0
        scale = np.asarray(problem.value_scale * factor * 10.0**spread, np.float32)
        check_within(dataclasses.replace(problem, value_scale=scale))


def test_a_scale_may_be_a_number() -> None:
    recipe = AttentionRecipe(sequences=((3, 40), (1, 33)), cache_dtype="int8", kv_scale="slot")
    problem = recipe.build()
    check_within(dataclasses.replace(problem, key_scale=np.float32(0.25), value_scale=np.float32(3)))
    check_within(dataclasses.replace(problem, value_scale=np.float32(3)))


def check_within(problem: PagedAttention) -> None:
    for variant in provider.variants(problem):
        contracts.check(provider, problem, variant=variant)


@pytest.mark.parametrize("head_size", [1, 24, 257, 576])
def test_head_sizes_that_are_not_usual(head_size: int) -> None:
    recipe = AttentionRecipe(head_size=head_size, group=3, sequences=((1, 40), (17, 20)), kv_layout="padded")
    check(recipe, **SMALL)
    check(dataclasses.replace(recipe, kv_layout="hnd", cache_dtype="int8", kv_scale="slot", alibi=True))


def test_extreme_sinks() -> None:
    """Alone where nothing is seen; 1e5 leaves the keys no weight, -1e5 none to itself; nor does float32 overflow."""
    problem = AttentionRecipe(group=4, sequences=((1, 40), (5, 3)), sinks=True).build()
    sinks = np.array([1e5, -1e5, 3.4e38, -3.4e38], np.float32)
    check_within(dataclasses.replace(problem, sinks=sinks))


def test_bitwise_the_same_in_any_company() -> None:
    assert provider.batch_invariant
    problem = AttentionRecipe(group=5, sequences=(*MIXED, (1, 300)), sinks=True).build()
    for variant in ({}, SMALL, {"split": 32, "max_splits": 4}):
        relations.check_batch_split(provider, problem, variant=variant)
        relations.check_batch_permutation(provider, problem, variant=variant)


def test_a_window_reads_its_keys_alone() -> None:
    """A decoding sequence of 700 keys and a window of 64 loads 64 keys and values, from their blocks."""
    problem = AttentionRecipe(group=2, sequences=((1, 700),), window=64).build()
    with trace(provider, races=False, uninitialised=False) as launches:
        contracts.check(provider, problem)
    loaded = {name: buffer.loaded_bytes for name, buffer in launches[0].buffers.items()}
    assert loaded["keys"] == loaded["values"] == 64 * 64 * 2
    assert launches[0].buffers["block_table"].sectors <= 2


def test_codes_are_loaded_once_in_16_bytes() -> None:
    problem = AttentionRecipe(group=4, sequences=((1, 96),), cache_dtype="float8_e4m3fn", kv_scale="slot").build()
    with trace(provider, races=False, uninitialised=False) as launches:
        contracts.check(provider, problem)
    keys = launches[0].buffers["keys"]
    assert keys.loaded_bytes == 96 * 64
    assert keys.sectors_per_request == 16  # of 32 bytes: a warp's 32 threads ask for 16 bytes each


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32])
@pytest.mark.parametrize("head_size", [32, 64, 128, 192, 256, 576])
def test_a_program_fits_as_often_on_an_sm_whatever_its_rows(dtype: Any, head_size: int) -> None:
    """Tiles of more rows have fewer keys, so that decode keeps its programs per SM when the batch has long queries."""
    problem = AttentionRecipe(dtype=dtype.name, head_size=head_size, group=4, sequences=((1, 40),)).build()
    cut = paged_attention_cupy.plan(problem)
    per_sm = {64: 4, 128: 3, 256: 2}[cut.padded]
    assert (cut.shared_bytes(problem.query.itemsize, factors=False) + 2048) * per_sm <= 228 * 1024
    assert all(tile % 16 == 0 and tile >= 16 for tile in cut.tiles)


def test_decode_fills_a_gpu() -> None:
    """Two programs for each of 132 SMs, and 25 KB of loads in flight on each, at batch 8 x 4k and 1 x 32k."""
    names = ("llama-3-8b-decode-b8-s4096-block16-fp16", "llama-3-8b-decode-b1-s32768-block16-fp16")
    for name, recording in _codegen.record("cupy", names, 90).items():
        assert recording.launches, recording
        launch = recording.launches[0]
        cut = paged_attention_cupy.plan(WORKLOADS[name].codegen_problem())
        resident = min(launch.programs_per_sm, launch.programs // 132)
        assert resident >= 2
        assert resident * cut.tiles[0] * 2 * 128 * 2 >= 25 * 1024  # one tile of K and V each
        assert launch.stats.matrix["HMMA"] == 48  # 16 for scores, for values, and for values with scales of slots
        assert set(launch.stats.async_copies) == {128}
        assert launch.stats.spills == 0


def test_scratch_is_bounded_by_what_splits() -> None:
    """Decode: a row for each split, query head and sequence. A long prompt beside it does not multiply that."""
    few = AttentionRecipe(group=4, num_kv_heads=2, sequences=((1, 2000),) * 3, block_size=100).build()
    cut = paged_attention_cupy.plan(few, split=100)
    assert cut.scratch[3] == 3 * 8 * cut.splits
    start = np.array([0, 1, 2, 3000], np.int32)
    prompt = dataclasses.replace(few, query=np.repeat(few.query, 1000, axis=0), query_start=start)
    assert paged_attention_cupy.plan(prompt, split=100).scratch[3] == 3 * 16 * 2 * cut.max_splits
