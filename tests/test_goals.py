"""What is to be reached on a GPU: the arithmetic of every goal, on made-up seconds; nothing here is a speed."""

import json
from typing import Any

import pytest

from bench import goals, gpu, run
from bench.goals import COPY, GOALS, MATMUL, Goal, dense_bytes, matmul_name
from bench.workloads import COUNTERPARTS, FUSED, WORKLOADS
from pagebench.properties import contracts
from pagebench.reference.paged_attention import PagedAttention

DECODE = "llama-3-8b-decode-b64-s4096-block16-fp16"
FUSED_NAME = "llama-3-8b-gemv-awq-gate-m1-fp16"
ROOF = 4e12


def row(workload: str, seconds: float, nbytes: int, provider: str = "triton") -> dict[str, Any]:
    gpu_times = {"seconds": [seconds] * 3, "bytes_moved": nbytes}
    return {"provider": provider, "workload": workload, "gpu": gpu_times, "check": {"status": "passed", "detail": ""}}


def process(*rows: dict[str, Any], matmul: dict[str, list[float]] | None = None) -> dict[str, Any]:
    return {"rows": list(rows), "copy_bytes_per_second": ROOF, "matmul": matmul or {}}


def goal(workload: str, beside: str) -> Goal:
    (found,) = (goal for goal in GOALS if (goal.workload, goal.beside) == (workload, beside))
    return found


def test_every_line_of_the_goals_is_there() -> None:
    judged = [(m, *size) for m in ("llama-3-8b", "llama-2-13b") for size in ((64, 4096), (8, 32768))]
    for model, batch, keys in judged:
        name = f"{model}-decode-b{batch}-s{keys}"
        assert goal(f"{name}-block16-fp16", COPY).at_least == 0.85
        for layout in ("block128", "contiguous"):
            assert goal(f"{name}-block16-fp16", f"{name}-{layout}-fp16").at_least == pytest.approx(1 / 1.05)
    for name, workload in WORKLOADS.items():
        if workload.op == "dequantize":
            assert goal(name, COPY).at_least == 0.85
    for name in FUSED:
        assert goal(f"llama-3-8b-gemv-{name}-gate-m1-fp16", COPY).at_least == 0.75
        assert goal(f"llama-3-8b-gemv-{name}-gate-m1-fp16", MATMUL).at_least == 0.8
    known = {*WORKLOADS, *COUNTERPARTS, COPY, MATMUL}
    assert {name for goal in GOALS for name in (goal.workload, goal.beside)} <= known


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_counterpart_is_the_same_decode_in_other_blocks(name: str) -> None:
    other: Any = COUNTERPARTS[name].codegen_problem()
    own: Any = WORKLOADS[next(g.workload for g in GOALS if g.beside == name)].codegen_problem()
    for field in ("num_seqs", "group", "head_size", "num_kv_heads"):
        assert getattr(other, field) == getattr(own, field)
    assert other.seq_lens.tolist() == own.seq_lens.tolist()
    if "contiguous" in name:
        assert (other.block_table.shape[1], other.block_size) == (1, own.seq_lens[0])
    else:
        assert other.block_size == 128
    small: Any = COUNTERPARTS[name].check_problem()
    assert isinstance(small, PagedAttention)
    assert small.seq_lens.max() > 512  # more than a split holds


def test_shares() -> None:
    decoded, copied = 10**9, 10**9 / ROOF
    times = process(row(DECODE, 1.25 * copied, decoded), row(DECODE.replace("16-", "128-"), copied, decoded))
    assert goal(DECODE, COPY).share(times, "triton") == pytest.approx(0.8)
    assert goal(DECODE, DECODE.replace("block16-", "block128-")).share(times, "triton") == pytest.approx(0.8)
    assert goal(DECODE, COPY).share(times, "cupy") is None
    assert goal(DECODE, DECODE.replace("block16", "contiguous")).share(times, "triton") is None


def test_a_fused_product_counts_by_its_packed_bytes() -> None:
    fused = goal(FUSED_NAME, MATMUL)
    assert fused.shape == (14336, 4096)
    packed, dense = 30_000_000, dense_bytes(14336, 4096)
    times = process(
        row(FUSED_NAME, 1e-5, packed + 2 * (14336 + 4096)),
        matmul={matmul_name((14336, 4096)): [dense / packed * 1e-5] * 3},  # slower by just the ratio of the bytes
    )
    assert fused.share(times, "triton") == pytest.approx(1)
    assert goal(FUSED_NAME, COPY).share(times, "triton") == pytest.approx(packed / 1e-5 / ROOF)
    assert fused.share(process(row(FUSED_NAME, 1e-5, packed)), "triton") is None


def test_what_is_short_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    nbytes = 10**9
    processes = [process(row(DECODE, nbytes / (share * ROOF), nbytes)) for share in (0.5, 0.86, 0.9)]
    processes[0]["rows"].append(row(DECODE, nbytes / (0.84 * ROOF), nbytes, "cupy"))
    (line,) = (line for line in goals.shown(processes).splitlines() if line.startswith(DECODE) and COPY in line)
    assert "86% met" in line
    assert "84% SHORT" in line


def test_without_a_gpu_nothing_is_timed_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goals, "gpu_present", lambda: False)
    assert goals.main([]) == 0
    said = capsys.readouterr().out
    assert said.count("n/a") == 2 * len(GOALS) + 1
    assert "there is no GPU here, so nothing was timed" in said


def test_a_failed_check_fails_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    red = row(DECODE, 1e-3, 10**9) | {"check": {"status": "failed", "detail": "wrong"}}
    asked: list[str] = []
    monkeypatch.setattr(goals, "gpu_present", lambda: True)
    monkeypatch.setattr(goals, "measured", lambda names: asked.extend(names) or process(red))
    monkeypatch.setattr(goals, "matmul_times", dict)
    assert goals.main(["--json", str(tmp_path / "goals.json")]) == 1
    assert set(COUNTERPARTS) < set(asked) <= {*WORKLOADS, *COUNTERPARTS}
    assert json.loads((tmp_path / "goals.json").read_text())[0]["rows"] == [red]


def test_the_gpu_job_times_what_the_goals_of_its_workloads_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "timed", list)
    monkeypatch.setattr(run, "as_json", lambda rows, roof: {"rows": rows})
    monkeypatch.setattr(goals, "matmul_times", lambda chosen: [goal.workload for goal in chosen])
    found = gpu.compared([DECODE])
    assert found["counterparts"] == [DECODE.replace("block16", layout) for layout in ("block128", "contiguous")]
    assert set(gpu.compared(list(WORKLOADS))["counterparts"]) == set(COUNTERPARTS)
    nbytes = 10**9
    one = process(row(DECODE, 1e-3, nbytes)) | {"counterparts": [row(found["counterparts"][0], 1e-3, nbytes)]}
    assert "100% met" in gpu.goals_summary([one, process(row(DECODE, 1e-3, nbytes))])


@pytest.mark.parametrize("name", ["llama-3-8b-decode-b64-s4096-contiguous-fp16"])
def test_a_counterpart_passes_its_check(name: str) -> None:
    contracts.check(goals.load_provider("cupy"), COUNTERPARTS[name].check_problem())


def test_a_large_problem_is_built_once() -> None:
    workload = goals.once_built(WORKLOADS["llama-3-8b-merge-64-fp16"])
    assert workload.problem() is workload.problem()
