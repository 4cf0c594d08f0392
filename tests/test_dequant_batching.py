"""The figure of batching: its roofline is the problem's own bytes and operations, and stored results are shown."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import figures_batching as batching
from bench.workloads import BATCHES, LLAMA_3_8B, WORKLOADS, gemv, packed_weight, projections
from pagebench.reference.dtypes import FLOAT16


@pytest.mark.parametrize(("name", "format", "form"), [("MXFP4", "mxfp4", "plain"), ("FP8", "fp8_e4m3", "tensor")])
def test_the_roofline_is_that_of_the_problem(name: str, format: str, form: str) -> None:
    device = batching.DEVICE
    for m in (1, 16, 256):
        problem = gemv(packed_weight(format, form, 256, 512, FLOAT16), m)
        seconds = max(problem.bytes_moved() / device.bandwidth, problem.flops() / device.flop_rate)
        rate = batching.tokens_per_second(m, 256, 512, batching.WEIGHTS[name], device)
        assert np.isclose(rate, m / seconds, rtol=1e-4)  # but for the four bytes of a scale


def test_arithmetic_binds_from_there_on() -> None:
    n, k = projections(LLAMA_3_8B)["gate"]
    for nbytes in batching.WEIGHTS.values():
        binds = batching.rows_until_arithmetic_binds(n, k, nbytes, batching.DEVICE)
        before, after = int(binds), int(binds) + 1
        rates = [batching.tokens_per_second(m, n, k, nbytes, batching.DEVICE) for m in (before, after, 2 * after)]
        assert rates[0] < rates[1] == pytest.approx(rates[2])


def result(m: int, seconds: float, status: str = "passed") -> dict[str, object]:
    name = f"llama-3-8b-gemv-mxfp4-gate-m{m}-fp16"
    assert name in WORKLOADS
    return {
        "provider": "triton", "workload": name, "check": {"status": status}, "gpu": {"seconds": [seconds]}
    }  # fmt: skip


def test_stored_results_are_drawn(tmp_path: Path) -> None:
    assert batching.measured(tmp_path) is None
    processes = [{"rows": [result(m, (1 + i) * 1e-5) for m in BATCHES]} for i in range(3)]
    processes[0]["rows"].append(result(1, 1e-9, "failed"))
    document = {"machine": {"gpu": "NVIDIA H200"}, "processes": processes}
    (tmp_path / "one.json").write_text(json.dumps(document))
    found = batching.measured(tmp_path)
    assert found is not None
    assert found.rates["triton"] == {m: pytest.approx(m / 2e-5) for m in BATCHES}
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    axis = batching.tokens_against_rows(found, batching.DEVICE).axes[0]
    assert "measured on NVIDIA H200" in axis.get_title("left")
    assert "MXFP4, triton, measured" in axis.get_legend_handles_labels()[1]
