"""Rows move in 16-byte accesses whenever all of a token's heads together are aligned, also where one head is not.

Triton's launches are compiled, not run: what their machine code loads and stores says it, not what they were meant to.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench._launch import CompiledLaunch
from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.properties.block_copy_rows_recipes import GatherRecipe, WriteRecipe

ROOT = Path(__file__).resolve().parent.parent
RECORD = """
import json, tempfile
from bench._codegen import _isolate, triton_launches
with tempfile.TemporaryDirectory() as cache:
    _isolate(90, cache)
    from pagebench.kernels.providers import load_provider
    from pagebench.properties.block_copy_rows_recipes import GatherRecipe, WriteRecipe
    provider = load_provider("triton")
    rows = dict(num_rows=64, mapped=64, block_size=16)
    long = dict(sequences=(512,), block_size=16)
    odd = dict(num_kv_heads=8, head_size=20)
    recipes = {
        "write": WriteRecipe(**rows, **odd),
        "write fused": WriteRecipe(**rows, **odd, row_layout="fused"),
        "write 128 heads of 4": WriteRecipe("bfloat16", None, 128, 4, **rows),
        "write int8": WriteRecipe("float16", "int8", 8, 20, **rows, scale="value"),
        "write int8, a scale for each head": WriteRecipe("float16", "int8", 8, 20, **rows, scale="head"),
        "write heads apart": WriteRecipe(**rows, **odd, kv_layout="hnd"),
        "gather": GatherRecipe(**long, **odd),
        "gather e4m3": GatherRecipe("float16", "float8_e4m3fn", 8, 20, **long),
        "gather e4m3, a scale for each head": GatherRecipe("float16", "float8_e4m3fn", 8, 20, **long, scale="head"),
    }
    def launches(recipe):
        placed = recipe.build().on(provider)
        return [found.to_json() for found in triton_launches(lambda: getattr(provider, placed.op)(placed), 90)]
    print(json.dumps({name: launches(recipe) for name, recipe in recipes.items()}))
"""


@pytest.fixture(scope="module")
def launches() -> dict[str, CompiledLaunch]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", RECORD], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    recorded: dict[str, list[Any]] = json.loads(done.stdout)
    assert all(len(found) == 1 for found in recorded.values())
    return {name: CompiledLaunch.from_json(found[0]) for name, found in recorded.items()}


ALIGNED = (
    "write",
    "write fused",
    "write 128 heads of 4",
    "write int8",
    "gather",
    "gather e4m3",
)


@pytest.mark.parametrize("name", ALIGNED)
def test_aligned_tokens_move_in_16_bytes(launches: dict[str, CompiledLaunch], name: str) -> None:
    stats = launches[name].stats
    assert set(stats.global_stores) == {128}
    narrow = {width: count for width, count in stats.global_loads.items() if width < 128}
    assert sum(narrow.values()) <= 9  # slots, or the table and the lengths
    assert stats.global_loads[128] >= 4
    assert stats.spills == 0


@pytest.mark.parametrize("name", ["write heads apart", "write int8, a scale for each head"])
def test_heads_that_must_stay_apart_move_as_wide_as_they_are_aligned(
    launches: dict[str, CompiledLaunch], name: str
) -> None:
    """40 bytes of float16, 20 of codes: 8 and 4 at once."""
    assert set(launches[name].stats.global_stores) == {64 if "apart" in name else 32}


@pytest.mark.parametrize(("heads", "size"), [(8, 20), (6, 20), (128, 4), (16, 1), (5, 600), (1, 20), (3, 5), (64, 17)])
def test_regrouped_heads_move_the_same_bytes(heads: int, size: int) -> None:
    provider: Any = load_provider("triton")
    kinds: list[dict[str, Any]] = [{}, {"kv_layout": "halves"}, {"kv_layout": "padded"}, {"cache_dtype": "int8"}]
    kinds.append({"cache_dtype": "float8_e4m3fn", "scale": "value"})
    for kind in kinds:
        write = WriteRecipe("bfloat16", num_kv_heads=heads, head_size=size, num_rows=5, mapped=4, skip_every=3, **kind)
        gather = GatherRecipe("bfloat16", num_kv_heads=heads, head_size=size, **kind)
        for recipe in (write, gather):
            contracts.check_variants(provider, recipe.build())
