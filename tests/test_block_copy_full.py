"""Block operations over their whole contract: nothing is rejected; launches and bytes are as few as promised."""

import itertools
from typing import Any

import numpy as np
import pytest

from pagebench.kernels import block_copy_cupy
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.memory_trace import LaunchTrace, requested_bytes, trace
from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.properties.block_copy_rows_recipes import GatherRecipe, WriteRecipe
from pagebench.properties.strategies import Picker, recipe
from pagebench.properties.support import everything
from pagebench.reference.block_copy import CopyBlocks

PROVIDERS: dict[str, Any] = {name: load_provider(name) for name in ("triton", "cupy")}
from pagebench.kernels import block_copy_triton  # noqa: E402  # once interpretation is activated

pytestmark = pytest.mark.skipif(gpu_present(), reason="kernels are traced here: a GPU is present")

OPS = ("copy_blocks", "swap_blocks", "write_kv", "gather_kv")
DRAWN = 1000


@pytest.mark.parametrize("op", OPS)
def test_nothing_drawn_is_rejected(op: str) -> None:
    rng, whole = np.random.default_rng(0), everything(op)
    for _ in range(DRAWN):
        problem = recipe(op, Picker(rng.bytes(64)), whole).build()
        for provider in PROVIDERS.values():
            assert provider.rejects(problem) is None, problem.describe()


# --- launches and bytes of a copy

PAIRS = {
    "apart": [(0, 1), (2, 3), (4, 4)],
    "fan out": [(0, 1), (2, 3), (0, 5), (2, 6), (0, 7)],
    "chain": [(3, 4), (1, 2), (0, 1), (2, 3)],
    "cycle": [(0, 1), (1, 2), (2, 0), (5, 6)],
    "chain and fan out": [(0, 1), (1, 2), (1, 3), (0, 4), (5, 6), (5, 7)],
    "cycle with trees": [(0, 1), (1, 0), (0, 2), (2, 3), (2, 4), (1, 5)],
}
BLOCKS = {"16 bytes": (4096, 48), "odd": (3, 17), "none": (0,)}


def traced_copy(name: str, pairs: Any, sizes: tuple[int, ...]) -> tuple[CopyBlocks, list[LaunchTrace]]:
    rng = np.random.default_rng(0)
    caches = tuple(rng.integers(0, 256, (8, size), np.uint8) for size in sizes)
    problem = CopyBlocks(caches, np.array(pairs, np.int64))
    placed = problem.on(PROVIDERS[name])
    with trace(PROVIDERS[name]) as launches:
        PROVIDERS[name].copy_blocks(placed)
    return problem, launches


@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("name", PROVIDERS)
def test_one_launch_or_two_and_each_source_read_once(name: str, pairs: Any, sizes: tuple[int, ...]) -> None:
    """Whatever the caches: one launch, behind a plan where pairs are chained; exactly the bytes of distinct blocks."""
    problem, launches = traced_copy(name, pairs, sizes)
    assert len(launches) == (0 if not any(sizes) else 2 if problem.chained else 1)
    own = ("ids", "pairs", "table", "nodes", "rounds", "of_block", "layouts", "addresses")
    of_caches = requested_bytes(launches, without=own)
    assert of_caches == problem.bytes_moved() - problem.pairs.nbytes


@pytest.mark.parametrize("name", PROVIDERS)
def test_what_a_launch_looks_up_grows_with_the_pairs(name: str) -> None:
    """Not with their square: a chain, which has to be planned, and pairs apart."""
    for step in (1, 2):  # of the ids: a chain, pairs apart
        looked_up = []
        for count in (16, 64):
            src = step * np.arange(count)
            problem = CopyBlocks((np.zeros((2 * count + 1, 16), np.uint8),), np.stack([src, src + 1], 1))
            placed = problem.on(PROVIDERS[name])
            with trace(PROVIDERS[name], races=False, uninitialised=False) as launches:
                PROVIDERS[name].copy_blocks(placed)
            looked_up.append(requested_bytes(launches) - problem.bytes_moved())
        assert looked_up[1] <= 4 * 1.5 * looked_up[0], looked_up  # log2(pairs) rounds


# --- bytes of rows

ROWS = ("key", "value", "key_cache", "value_cache")


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (3, 33), (33, 1)])
@pytest.mark.parametrize("name", PROVIDERS)
def test_each_row_is_read_once_and_written_once(name: str, heads: int, size: int, cache_dtype: str | None) -> None:
    """Rows and caches exactly, whatever the head size; scales, slots and tables are looked up beside them."""
    scale = None if cache_dtype is None else "computed"
    written = WriteRecipe("float16", cache_dtype, heads, size, num_rows=9, mapped=8, skip_every=3, scale=scale).build()
    scale = None if cache_dtype is None else "slot"
    gathered = GatherRecipe("float16", cache_dtype, heads, size, sequences=(3, 0, 6), scale=scale).build()
    for problem, rows in ((written, written.rows().size), (gathered, 9)):
        placed = problem.on(PROVIDERS[name])
        with trace(PROVIDERS[name]) as launches:
            getattr(PROVIDERS[name], problem.op)(placed)
        assert len(launches) == 1
        each = 2 + problem.key_cache.dtype.itemsize  # in and out
        assert requested_bytes(launches, only=ROWS) == 2 * rows * heads * size * each


# --- blocks beyond what 32 bits count


def runs_of(layout: block_copy_cupy.Layout) -> list[tuple[int, int]]:
    return [
        (layout.offset + inner * layout.inner_stride + outer * layout.outer_stride, layout.run)
        for outer in range(layout.outer)
        for inner in range(layout.inner)
    ]


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((2, 5 * 2**30 + 3), slice(None)),
        ((2, 3, 2**31 + 2**29), slice(1, None)),
        ((2, 3, 5, 2**30), slice(0, 2**30 - 16)),
        ((2, 3, 5, 2**30), slice(0, 2**29)),
    ],
    ids=str,
)
def test_layouts_of_huge_blocks_are_counted_in_32_bits(shape: tuple[int, ...], part: slice) -> None:
    cache = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, _dense(shape))[..., part]
    found = list(block_copy_cupy.layouts_of(0, cache))
    assert all(layout.nbytes <= block_copy_cupy.MAX_BYTES for layout in found)
    runs = sorted(run for layout in found for run in runs_of(layout))
    assert all(at + n <= start for (at, n), (start, _) in itertools.pairwise(runs))
    assert sum(n for _, n in runs) == cache[0].nbytes
    lines = list(block_copy_triton._runs(0, cache.shape, cache.strides, 1))
    assert sum(line.rows * line.run for line in lines) == cache[0].nbytes
    assert all(line.rows <= block_copy_triton.MOST_ROWS for line in lines)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))


def test_many_rows_are_cut_by_both() -> None:
    shape, strides = (2, 6, 2**28, 3), (2**40, 2**35, 2**6, 1)
    cache = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, strides)
    layouts = list(block_copy_cupy.layouts_of(0, cache))
    assert sum(layout.nbytes for layout in layouts) == 6 * 2**28 * 3
    assert all(layout.nbytes <= block_copy_cupy.MAX_BYTES for layout in layouts)
    assert sorted({layout.offset for layout in layouts}) == [i * 2**35 for i in range(6)]
    lines = list(block_copy_triton._runs(0, shape, strides, 1))
    assert [(line.address, line.rows) for line in lines] == [(0, 2**30), (4 * 2**35, 2**29)]


@pytest.mark.parametrize("name", ["triton", "cupy"])
@pytest.mark.parametrize("run", [4097, 4100, 4111, 17, 15, 33])
def test_the_tail_of_a_padded_block_does_not_narrow_the_rest(name: str, run: int) -> None:
    """What is whole 16 bytes moves in 16 bytes: in Triton a line of the table of its own, in CUDA a layout."""
    rng = np.random.default_rng(0)
    stride = -(-run // 16) * 16
    caches = tuple(rng.integers(0, 256, (6, 3, stride), np.uint8)[:, :, :run] for _ in range(2))
    pairs = np.array([[0, 3], [3, 1], [4, 5], [2, 2]], np.int64)
    provider = load_provider(name)
    for each in (pairs, pairs[2:3]):
        contracts.check(provider, CopyBlocks(caches, each))
    found = list(block_copy_triton._runs(1 << 20, (6, 3, run), (3 * stride, stride, 1), 1))
    assert sum(each.run for each in found) == run
    assert found[0].alignment == (16 if run > 16 else 1)
    assert [each.run for each in found][1:] == ([run % 16] if run > 16 else [])
