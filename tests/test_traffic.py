"""The bytes that our kernels request for the tracked workloads, and what the table and asv make of them."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from bench import _traffic, traffic
from bench.run import Row, cells
from bench.workloads import FUSED, PACKED, WORKLOADS, gemv, packed_weight
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.memory_trace import LaunchTrace, requested_bytes, trace
from pagebench.kernels.providers import load_provider, ops_of
from pagebench.properties import contracts
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference.dtypes import FLOAT16
from pagebench.reference.problem import Problem

pytestmark = pytest.mark.skipif(gpu_present(), reason="kernels are compiled here: a GPU is present")

# The scratch of a split reduction, by the kernels' own names for it.
SCRATCH = {
    "triton": ("part_sum", "part_max", "part_denominator"),
    "cupy": ("partials", "states"),
}
# One workload for each kernel; a larger group has more scratch and query for the same keys.
TRACKED = (
    "llama-3-8b-decode-b8-s4096-block16-fp16",
    "qwen2.5-7b-decode-b8-s4096-block16-fp16",
    "llama-3-8b-merge-64-fp16",
    "llama-3-8b-copy-64x16-fp16",
    "llama-3-8b-copy-64x16-fork-fp16",
    "llama-3-8b-copy-64x16-chain-fp16",
    "llama-3-8b-write-64-fp16",
    "llama-3-8b-write-8192-int8-computed",
    "llama-3-8b-gather-b8-s4096-e4m3",
)
# Of a packed weight, the array that is as large as the weight, by our kernels' names; the others hold its scales.
CODES = {"triton": ("packed[0]",), "cupy": ("codes", "bytes")}


@cache
def provider_of(name: str) -> Any:
    return load_provider(name)


def traced(provider: str, problem: Problem) -> list[LaunchTrace]:
    placed = problem.on(provider_of(provider))
    with trace(provider_of(provider), races=False, uninitialised=False) as launches:
        getattr(provider_of(provider), problem.op)(placed)
    return launches


def checked(provider: str, problem: Problem) -> list[LaunchTrace]:
    """The same, and the result is right."""
    with trace(provider_of(provider), races=False, uninitialised=False) as launches:
        contracts.check(provider_of(provider), problem)
    return launches


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less batch and fewer heads, never shorter, than for the figures that are stored."""
    monkeypatch.setattr(_traffic, "OUTPUT_FEATURES", 256)
    monkeypatch.setattr(_traffic, "INDEXED_FEATURES", 256)
    monkeypatch.setattr(_traffic, "CACHES", 2)
    monkeypatch.setattr(_traffic, "TOKENS", 16)


@pytest.mark.parametrize("name", TRACKED)
@pytest.mark.parametrize("provider", SCRATCH)
def test_our_kernels_ask_for_little_more_than_they_must(
    provider: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider == "triton" or "gather" in name:  # where splits do not depend on the number of heads
        monkeypatch.setattr(_traffic, "KV_HEADS", 1)
    found = _traffic.measure(provider, name)
    assert found.launches, found
    scratch = requested_bytes(found.launches, only=SCRATCH[provider]) / found.bytes_moved
    assert scratch <= 0.05
    assert found.ratio - scratch <= 1.02
    assert found.sector_ratio >= found.ratio


FORMS: dict[str, dict[str, Any]] = {
    **{f"{dtype}-{n}": {"dtype": dtype, "head_size": n} for dtype in ("float16", "float32") for n in (64, 256)},
    "e4m3-128": {"cache_dtype": "float8_e4m3fn", "kv_scale": "slot", "head_size": 128},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [7, 17, 64, 71, 128])
@pytest.mark.parametrize("provider", SCRATCH)
def test_a_group_of_any_size_reads_k_and_v_once(provider: str, group: int, form: str) -> None:
    problem: Any = AttentionRecipe(group=group, sequences=((1, 100),), **FORMS[form]).build()
    launches = checked(provider, problem)
    read = requested_bytes(launches, only=("key_cache", "value_cache", "keys", "values"))
    times = 2 if form == "float32-256" and group > 64 else 1  # 128 KB of queries, for which sm_80 has no room
    assert read == times * 2 * 100 * problem.head_size * problem.key_cache.itemsize


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("provider", SCRATCH)
def test_dequantisation_reads_each_packed_byte_once(provider: str, name: str) -> None:
    # As wide as a tile of the workload's is, across output features or along k; fewer tiles.
    across = PACKED[name][0] in ("gptq_v2", "awq")
    problem = packed_weight(*PACKED[name], *((1024, 128) if across else (64, 1024)), FLOAT16)
    launches = traced(provider, problem)
    assert requested_bytes(launches) <= 1.02 * problem.bytes_moved()
    assert requested_bytes(launches, only=CODES[provider]) <= max(array.nbytes for array in problem.packed.values())


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("provider", SCRATCH)
def test_the_fused_product_reads_each_packed_byte_once(provider: str, name: str) -> None:
    """The packed buffers are counted; x is read for every tile of features, from the caches."""
    problem = gemv(packed_weight(*PACKED[name], 128, 1024, FLOAT16), 1)
    launches = traced(provider, problem)
    sizes = [array.nbytes for array in problem.packed.values()]
    assert requested_bytes(launches, only=CODES[provider]) == max(sizes)
    packed = requested_bytes(launches, without=_traffic.NOT_PACKED) / sum(sizes)
    assert packed <= 1.02, packed


@pytest.mark.parametrize("m", [1, 4])
def test_triton_reads_the_groups_of_rows_once_for_many_features(m: int) -> None:
    provider = provider_of("triton")
    from pagebench.kernels import dequant_gemv_triton

    assert dequant_gemv_triton._named_features(4096, 4096 // 128) == 512
    problem: Any = gemv(packed_weight("gptq_v2", "plain", 1024, 256, FLOAT16), m)
    with trace(provider, races=False, uninitialised=False) as launches:
        dequant_gemv_triton.dequant_gemv(problem.on(provider), provider.empty, features=512)
    packed = requested_bytes(launches, without=_traffic.NOT_PACKED) / sum(a.nbytes for a in problem.packed.values())
    assert packed <= 1.02, packed


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("provider", SCRATCH)
def test_codes_are_read_once_whatever_groups_their_rows_name(provider: str, m: int) -> None:
    """Half of the tiles in order, half of them mixed: neither is read as if it were the other as well."""
    weight = packed_weight("gptq_v2", "plain", 128, 512, FLOAT16)
    names = weight.packed["g_idx"].copy()
    names[256:] = np.random.default_rng(0).permutation(names[256:])
    problem = gemv(dataclasses.replace(weight, packed={**weight.packed, "g_idx": names}), m)
    read = requested_bytes(traced(provider, problem), only=CODES[provider])
    assert read == problem.packed["qweight"].nbytes


def test_swapping_blocks_launches_no_kernel_of_ours() -> None:
    """Copy engines do it, which move every byte of a block once."""
    found = _traffic.measure("cupy", "llama-3-8b-swap-64x16-fp16")
    assert found.rejected == "cupy launched no Triton or CUDA C++ kernel for swap_blocks"


def test_every_op_of_ours_is_tracked() -> None:
    ops = {"paged_attention", "merge_states", "copy_blocks", "swap_blocks", "write_kv", "gather_kv", "dequantize"}
    ops.add("dequant_gemv")
    assert {WORKLOADS[name].op for name in traffic.NAMES.values()} == ops
    assert all(set(ops_of(provider_of(name))) <= ops for name in SCRATCH)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_keeps_its_lengths(name: str) -> None:
    assert WORKLOADS[name].op in _traffic.SCALES
    full, problem = WORKLOADS[name].codegen_problem(), _traffic.scaled(name)
    kept = {
        "paged_attention": lambda p: (p.block_table.shape[1], p.block_size, p.head_size, int(p.seq_lens[0]), p.group),
        "merge_states": lambda p: (p.num_heads, p.head_size, p.out_a.dtype),
        "copy_blocks": lambda p: p.caches[0].shape[1:],
        "swap_blocks": lambda p: p.src_caches[0].shape[1:],
        "write_kv": lambda p: (p.key.shape[1:], p.key_cache.shape, p.key_cache.dtype, p.compute_scales),
        "gather_kv": lambda p: (p.block_table.shape[1], p.key_cache.shape[1::2], int(p.seq_lens[0]), p.dtype),
        "dequantize": lambda p: (p.shape[1], p.format, p.group_size, p.packed.keys()),
        "dequant_gemv": lambda p: (p.shape[1], p.format, p.group_size, p.packed.keys(), p.m),
    }[problem.op]
    assert kept(problem) == kept(full)


def test_a_process_of_its_own_says_the_same() -> None:
    name = "llama-2-13b-decode-b8-s4096-block16-fp16"
    (found,) = _traffic.record("cupy", [name]).values()
    assert found == _traffic.measure("cupy", name)
    assert found.scale == "batch 1, at most 8 KV heads"
    assert traffic._figures(found) == (found.ratio, found.sector_ratio, found.ratio, 0.0)
    *lines, last = _traffic.rows(name, found)
    assert {line[1].split("<")[0] for line in lines} == {"paged_attention", "reduce_splits"}
    assert last[6] == f"{found.ratio:.4f}"


def test_a_fused_product_is_judged_by_its_packed_buffers() -> None:
    """All of it and the reads of x, again for every tile of output features, are figures of their own."""
    name = "llama-3-8b-gemv-mxfp4-gate-m1-fp16"
    found = _traffic.measure("cupy", name)
    problem: Any = _traffic.scaled(name)
    packed = sum(array.nbytes for array in problem.packed.values())
    names = {buffer for launch in found.launches for buffer in launch.buffers}
    read = requested_bytes(found.launches, only=("x",))
    assert (found.packed_bytes, found.x_bytes) == (packed, problem.x.nbytes)
    assert found.ratio == requested_bytes(found.launches, only=names - {*_traffic.NOT_PACKED}) / packed <= 1.02
    assert found.x_ratio == read / problem.x.nbytes >= 1
    assert found.whole_ratio == requested_bytes(found.launches) / problem.bytes_moved() > 1
    assert traffic._figures(found) == (found.ratio, found.sector_ratio, found.whole_ratio, found.x_ratio)
    assert [line[2] for line in _traffic.rows(name, found)[-3:]] == ["x, times read", "all", "packed"]
    assert _traffic.Traffic.from_json(found.to_json()) == found


def test_what_did_not_run_is_told_apart() -> None:
    name = TRACKED[0]
    rejected = _traffic.Traffic(rejected="only copies")
    assert traffic._figures(rejected) == (NotImplementedError, "only copies")  # n/a, and the series goes on
    assert _traffic.rows(name, rejected)[0][:2] == (name, "only copies")
    failed = dataclasses.replace(rejected, rejected=None, error="Traceback\nAssertionError: wrong")
    assert traffic._figures(failed)[0] is RuntimeError
    assert _traffic.rows(name, failed)[0][1] == "AssertionError: wrong"
    suite = traffic.Ratio()
    with pytest.raises(NotImplementedError, match="only copies"):
        suite.setup({("triton", name): traffic._figures(rejected)}, "triton", name)


def test_the_table_has_a_column_for_it() -> None:
    from bench._measure import Verdict
    from bench.run import HEAD

    workload = WORKLOADS[TRACKED[0]]
    shown: dict[Any, str] = {}
    for found in (None, _traffic.Traffic(rejected="no"), _traffic.Traffic(error="x")):
        line = cells(Row("triton", workload, Verdict("passed", "interpreter"), None, None, found), None)
        shown[found] = line[HEAD.index("traffic")]
    assert list(shown.values()) == ["n/a", "n/a", "error"]


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
@pytest.mark.parametrize("provider", SCRATCH)
def test_merging_does_not_read_the_out_of_a_side_without_keys(provider: str, layout: str) -> None:
    problem: Any = MergeRecipe(num_tokens=9, num_heads=2, empty="either", layout=layout).build()
    launches = checked(provider, problem)
    row = problem.head_size * problem.out_a.itemsize
    for side in "ab":
        there = int(np.isfinite(getattr(problem, f"lse_{side}")).sum())
        assert requested_bytes(launches, only=(f"out_{side}",)) == there * row
