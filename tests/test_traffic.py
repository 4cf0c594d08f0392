"""The bytes that our kernels request for the tracked workloads, and what the table and asv make of them."""

import dataclasses
from typing import Any

import pytest

from bench import _traffic, traffic
from bench.run import Row, cells
from bench.workloads import WORKLOADS
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.memory_trace import requested_bytes

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
    "llama-3-8b-copy-64x16-fp16",
    "llama-3-8b-gptq-gate-fp16",
    "llama-3-8b-q8_0-gate-fp16",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer output features and caches than the figures that are stored."""
    monkeypatch.setattr(_traffic, "OUTPUT_FEATURES", 256)
    monkeypatch.setattr(_traffic, "CACHES", 2)


@pytest.mark.parametrize("name", TRACKED)
@pytest.mark.parametrize("provider", SCRATCH)
def test_our_kernels_ask_for_little_more_than_they_must(
    provider: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider == "triton":  # whose splits do not depend on the number of heads
        monkeypatch.setattr(_traffic, "KV_HEADS", 1)
    found = _traffic.measure(provider, name)
    assert found.launches, found
    scratch = requested_bytes(found.launches, only=SCRATCH[provider]) / found.bytes_moved
    assert scratch <= 0.05
    assert found.ratio - scratch <= 1.02
    assert found.sector_ratio >= found.ratio


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_keeps_its_lengths(name: str) -> None:
    assert WORKLOADS[name].op in _traffic.SCALES
    full, problem = WORKLOADS[name].codegen_problem(), _traffic.scaled(name)
    kept = {
        "paged_attention": lambda p: (p.block_table.shape[1], p.block_size, p.head_size, int(p.seq_lens[0]), p.group),
        "copy_blocks": lambda p: p.caches[0].shape[1:],
        "swap_blocks": lambda p: p.src_caches[0].shape[1:],
        "write_kv": lambda p: (p.key.shape[1:], p.key_cache.shape, p.key_cache.dtype, p.compute_scales),
        "gather_kv": lambda p: (p.block_table.shape[1], p.key_cache.shape[1:], int(p.seq_lens[0]), p.dtype),
        "dequantize": lambda p: (p.shape[1], p.format, p.group_size, p.packed.keys()),
        "dequant_gemv": lambda p: (p.shape[1], p.format, p.group_size, p.packed.keys(), p.m),
    }[problem.op]
    assert kept(problem) == kept(full)


def test_a_process_of_its_own_says_the_same() -> None:
    name = "llama-2-13b-decode-b8-s4096-block16-fp16"
    (found,) = _traffic.record("cupy", [name]).values()
    assert found == _traffic.measure("cupy", name)
    assert found.scale == "batch 1, at most 8 KV heads"
    assert traffic._figures(found) == (found.ratio, found.sector_ratio)
    *lines, last = _traffic.rows(name, found)
    assert {line[1].split("<")[0] for line in lines} == {"paged_attention", "reduce_splits"}
    assert last[6] == f"{found.ratio:.4f}"


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
