"""The sweep of copies by block bytes: its whole path on a CPU, by a clock that stands still; nothing is a speed."""

import ctypes
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bench import copy_sweep, gpu
from bench._device_time import DeviceTime
from bench.copy_sweep import KIB, METHODS, MIB, POINTS, Point, sweep
from pagebench.kernels.devices import gpu_present

needs_no_gpu = pytest.mark.skipif(gpu_present(), reason="kernels are run here: a GPU is present")
SMALL = ((4 * KIB, 16 * KIB), (8 * KIB, 64 * KIB))


def stopped_clock(run: Callable[[Any], Any], inputs: Sequence[Any], launches: int) -> DeviceTime:
    """Run once, as if each launch took a millisecond."""
    assert launches > 0
    for value in inputs:
        run(value)
    return DeviceTime((1e-3,) * 4)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_sweep, "device_memcpy", lambda: ctypes.memmove)


@needs_no_gpu
def test_every_method_copies_at_every_point(on_a_cpu: None) -> None:
    found = sweep(SMALL, timer=stopped_clock)
    assert [(p.block_bytes, p.payload_bytes, p.method) for p in found] == [(*s, m) for s in SMALL for m in METHODS]
    assert [point.detail for point in found] == [""] * len(found)
    assert all(point.bytes_per_second == 2 * point.payload_bytes / 1e-3 for point in found)
    text = copy_sweep.shown([found])
    assert "n/a" not in text
    assert "4 KiB" in text
    assert "(100%)" in text
    assert [Point.from_json(json.loads(json.dumps(point.to_json()))) for point in found] == found


@needs_no_gpu
@pytest.mark.parametrize("method", ["index_copy_", "memcpy each"])
def test_a_baseline_copies_the_same_blocks(method: str, on_a_cpu: None) -> None:
    full, seen = copy_sweep.problem(4 * KIB, 16 * KIB), list[Any]()

    def look(run: Callable[[Any], Any], inputs: Sequence[Any], launches: int) -> DeviceTime:
        seen.append(inputs[0][0] if method == "index_copy_" else inputs[0])
        return stopped_clock(run, inputs, launches)

    copy_sweep._time_baseline(method, full, look)
    src, dst = full.pairs.T
    assert np.array_equal(seen[0].numpy().view(np.uint8)[dst], full.caches[0][src])


@needs_no_gpu
def test_a_wrong_kernel_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that fails its check, nor one that is wrong in the blocks that are timed."""
    provider = copy_sweep.load_provider("cupy")
    monkeypatch.setattr(type(provider), "copy_blocks", lambda self, problem: None)
    (point,) = sweep(SMALL[:1], ("cupy",), timer=stopped_clock)
    assert not point.seconds
    assert "AssertionError" in point.detail
    monkeypatch.setattr(copy_sweep.contracts, "check", lambda *_: ())
    (point,) = sweep(SMALL[:1], ("cupy",), timer=stopped_clock)
    assert "is not what block" in point.detail
    assert "n/a: cupy: AssertionError" in copy_sweep.shown([[point]])


def test_without_a_gpu_nothing_is_timed_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(copy_sweep, "gpu_present", lambda: False)
    assert copy_sweep.main(["--json", str(tmp_path / "sweep.json")]) == 0
    said = capsys.readouterr().out
    assert "there is no GPU here, so nothing was timed" in said
    assert said.count("n/a") == len(POINTS) * len(METHODS) + 1
    assert all(not point["seconds"] for point in json.loads((tmp_path / "sweep.json").read_text()))


def test_the_gpu_job_sums_processes_up_and_names_what_is_slow() -> None:
    def process(slow: float) -> dict[str, Any]:
        seconds = {"triton": slow, "cupy": 1.05e-3}
        points = [Point(m, 4 * KIB, 64 * MIB, (seconds.get(m, 1e-3),) * 3) for m in METHODS]
        return {"copy_sweep": [point.to_json() for point in points]}

    said = gpu.sweep_summary([process(2e-3), process(2e-3), process(1e-3)])
    assert "134 (100%)" in said  # GB/s of index_copy_, as fast as the large copy
    assert "below 90% of the large copy: triton at blocks of 4 KiB, 64 MiB: 50%" in said
    assert "cupy at" not in said
    assert gpu.sweep_summary([{}]).count("\n") == 2  # a process that had no time left for it


def test_the_gpu_job_writes_the_sweep_beside_the_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from pagebench.kernels import devices

    monkeypatch.setattr(devices, "gpu_present", lambda: True)
    monkeypatch.setattr(gpu, "workload_times", lambda names: {"rows": list(names)})
    monkeypatch.setattr(copy_sweep, "sweep", lambda: [Point("triton", 4 * KIB, 64 * MIB, (1e-3,))])
    out, name = tmp_path / "times.json", "llama-3-8b-copy-64x16-fp16"
    assert gpu.main(["--times-only", str(out), "--workload", name]) == 0
    written = json.loads(out.read_text())
    assert written["rows"] == [name]
    assert Point.from_json(written["copy_sweep"][0]).seconds == (1e-3,)


def test_points_cover_what_is_promised() -> None:
    assert {size for size, payload in POINTS if payload == 64 * MIB} >= {4 * KIB, 64 * KIB, MIB, 4 * MIB}
    assert min(payload for _, payload in POINTS) == 64 * MIB


def test_series_are_not_available_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import block_copy

    monkeypatch.setattr(block_copy, "gpu_present", lambda: False)
    suite = block_copy.CopySweepOnDevice()
    with pytest.raises(NotImplementedError, match="no GPU"):
        suite.setup("triton", 4 * KIB)
    monkeypatch.setattr(block_copy, "gpu_present", lambda: True)
    monkeypatch.setattr(block_copy, "one_point", lambda *sizes: Point(*sizes, (1e-3, 1e-3)))
    monkeypatch.setattr(block_copy, "copy_bandwidth", lambda: 1e12)
    suite.setup("triton", 4 * KIB)
    assert suite.track_seconds("triton", 4 * KIB) == {"samples": [1e-3, 1e-3], "number": 1}
    assert suite.track_over_copy("triton", 4 * KIB) == pytest.approx(1e12 * 1e-3 / (128 * MIB))
    assert suite.track_gigabytes_per_second("triton", 4 * KIB) == pytest.approx(128 * MIB / 1e6)
