"""Quantised caches: value scales of any size in both backends, and how Triton reads codes, as compiled."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import supported

from bench import _sass
from bench._launch import CompiledLaunch
from pagebench.properties import contracts
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference.paged_attention import paged_attention

ROOT = Path(__file__).resolve().parent.parent
CACHES = (("float8_e4m3fn", "scalar"), ("float8_e5m2", "head"), ("int8", "slot"))

# A decode of 8 KV heads and 4,096 keys, group 4; the cache behind the table is small and is not read.
RECORD = """
import json, sys, tempfile
from bench._codegen import _isolate
arch, head_sizes, caches = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
with tempfile.TemporaryDirectory() as cache:
    _isolate(arch, cache)
    from bench._record_triton import triton_launches
    from pagebench.kernels.providers import load_provider
    from pagebench.properties.paged_attention_recipes import AttentionRecipe
    triton, found = load_provider("triton"), []
    for head_size in head_sizes:
        for name, scale in caches:
            recipe = AttentionRecipe(head_size=head_size, group=4, num_kv_heads=8, sequences=((1, 1024),))
            problem = recipe.__class__(**{f: getattr(recipe, f) for f in recipe.__slots__} | {
                "cache_dtype": name, "kv_scale": scale}).build().on(triton)
            launches = triton_launches(lambda: triton.paged_attention(problem), arch)
            found.append(launches[0].to_json(with_ptx=False))
print(json.dumps(found))
"""


@pytest.mark.parametrize("arch", _sass.ARCHS)
def test_triton_copies_codes_in_16_bytes(arch: int) -> None:
    """K and V by LDGSTS.128 alone (4 bytes are block ids and scales of slots), on tensor cores, no spill."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", RECORD, str(arch), json.dumps([128]), json.dumps(CACHES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for launch in map(CompiledLaunch.from_json, json.loads(done.stdout)):
        assert launch.stats.spills == 0, launch
        assert set(launch.stats.async_copies) == {32, 128}, launch.stats.async_copies
        assert launch.stats.async_copies[128] >= 6, "a prologue of two tiles and the loop, K and V"
        assert launch.stats.matrix["HMMA"] >= 16
        assert launch.programs_per_sm >= 3


# Of values: what their scales are multiplied with, and the orders of magnitude between keys, either way.
SIZES = {"small": (1e-7, 3), "mixed": (0.05, 3), "tiny": (1e-20, 10), "large": (1e6, 1)}


@pytest.mark.parametrize("name", ["triton", "cupy"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", SIZES)
def test_value_scales_of_any_size(name: str, dtype: str, size: str) -> None:
    """Also those that float16 does not hold, each alone or with a code; a result that it does not hold is infinite."""
    provider = supported(name)
    factor, orders = SIZES[size]
    rng = np.random.default_rng(1)
    for cache_dtype in ("int8", "float8_e5m2", "float8_e4m3fn"):
        recipe = AttentionRecipe(dtype=dtype, head_size=32, group=2, sequences=((3, 40), (1, 33)), window=30)
        problem = dataclasses.replace(recipe, cache_dtype=cache_dtype, kv_scale="slot").build()
        spread = 10.0 ** rng.uniform(-orders, orders, problem.value_scale.shape)
        scaled = (problem.value_scale * factor * spread).astype(np.float32)
        problem = dataclasses.replace(problem, value_scale=scaled)
        assert (abs(paged_attention(problem)[0]) > 65520).any() == (size == "large")
        contracts.check(provider, problem, variant={"split": 16, "tile": 16})


@pytest.mark.parametrize("name", ["triton", "cupy"])
def test_a_value_that_float16_does_not_hold_may_have_a_small_weight(name: str) -> None:
    """code * scale is 448 * 1e4 there, and the result is a thousandth of it: no infinity on the way."""
    provider = supported(name)
    recipe = AttentionRecipe(head_size=32, sequences=((1, 2),), cache_dtype="float8_e4m3fn", kv_scale="slot", scale=1.0)
    problem: Any = recipe.build()
    blocks, offsets = problem.slots(0)
    problem.query[...] = 1
    for key, (code, value, scale) in enumerate(((0.25, 1, 1.0), (-0.0625, 448, 1e4))):
        at = blocks[key], offsets[key]
        problem.key_cache[at], problem.value_cache[at] = code, value
        problem.key_scale[at], problem.value_scale[at] = 1.0, scale
    contracts.check(provider, problem)


@pytest.mark.parametrize("head_size", [33, 34])
def test_rows_with_room_behind_them(head_size: int) -> None:
    """Rows of 48 bytes, which are aligned, hold heads of an odd and of an even number of codes."""
    provider = supported("triton")
    problem = AttentionRecipe(head_size=head_size, group=2, sequences=((3, 40), (1, 33)), cache_dtype="int8").build()
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = getattr(problem, name)
        caches[name] = np.full((*cache.shape[:3], 48), 99, cache.dtype)[..., :head_size]
        caches[name][...] = cache
    contracts.check(provider, dataclasses.replace(problem, **caches))


def test_a_single_head_may_have_any_stride() -> None:
    """An odd one, which no address depends on, and of which no half is a stride of pairs of codes."""
    provider = supported("triton")
    problem = AttentionRecipe(head_size=32, group=2, sequences=((1, 33),), cache_dtype="int8").build()
    cache = problem.value_cache
    odd = np.lib.stride_tricks.as_strided(cache, strides=(*cache.strides[:2], 33, 1))
    contracts.check(provider, dataclasses.replace(problem, value_cache=odd))
