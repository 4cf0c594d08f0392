"""The checks and the trace over somebody else's kernel: vLLM's, where its wheel is at hand (see `vllm_peer`)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import _traffic
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.memory_trace import ratio, trace
from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.reference import error_bounds, paged_attention

load_provider("triton")  # turns the interpreter on, before the peer's kernels are decorated

import vllm_peer  # noqa: E402

STORED = Path(__file__).resolve().parent.parent / "results" / "peers.json"
WORKLOAD = "llama-3-8b-decode-b8-s4096-block16-fp16"


@pytest.fixture(scope="module")
def peer() -> Any:
    reason = vllm_peer.missing()
    if reason is not None:
        pytest.skip(reason)
    if gpu_present():
        pytest.skip("kernels are compiled here: a GPU is present")
    return vllm_peer.VllmProvider()


def measured(provider: Any) -> dict[str, Any]:
    """What `results/peers.json` holds of one version: exact bytes, and the largest error next to its bound."""
    problem = _traffic.scaled(WORKLOAD)
    placed = problem.on(provider)
    with trace(provider) as launches:
        out, _ = provider.paged_attention(placed)
    expected, _ = paged_attention.paged_attention(problem)
    bound, _ = error_bounds.paged_attention(problem)
    error = np.abs(provider.to_host(out).astype(np.float64) - expected)
    return {
        "workload": f"{WORKLOAD} at {_traffic.SCALES[problem.op]}",
        "how": launches[0].how,
        "kernels": [launch.kernel for launch in launches],
        "bytes_moved": problem.bytes_moved(),
        "bytes_requested": sum(launch.requested_bytes for launch in launches),
        "ratio": round(ratio(launches, problem), 6),
        "largest_error": float(f"{error.max():.2g}"),
        "largest_error_over_bound": float(f"{(error / bound).max():.2g}"),
    }


def test_traffic_and_error_are_as_stored(peer: Any) -> None:
    stored = json.loads(STORED.read_text())["vllm"].get(vllm_peer.version())
    if stored is None:
        pytest.skip(f"the peer's wheel is another version than those in results/peers.json: {vllm_peer.version()}")
    found = measured(peer)
    assert found["largest_error_over_bound"] <= 1
    for name, value in found.items():
        if "error" not in name:  # a last bit depends on the machine's exp
            assert value == stored[name], name


def test_ragged_lengths_pass_every_check(peer: Any) -> None:
    problem = _traffic.scaled(WORKLOAD)
    problem.seq_lens[:] = 4096 - 17
    with trace(peer):
        contracts.check(peer, problem)
