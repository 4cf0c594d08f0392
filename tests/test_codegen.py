"""Every kernel of both providers compiles for every target, without a GPU, and as it was meant to be compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import _codegen, _sass, codegen
from bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
PROVIDERS = ("triton", "cupy")
# One workload for each kernel and dtype; the others of an op differ in grid and strides only.
WORKLOADS_COMPILED = (
    "llama-3-8b-decode-b8-s4096-block16-fp16",
    "llama-3-8b-decode-b8-s32768-block16-bf16",
    "qwen2.5-7b-decode-b8-s4096-block16-fp16",
    "llama-2-13b-decode-b64-s4096-block16-fp16",
    "llama-3-8b-prefill-b4-q512-s4096-block16-fp16",
    "llama-3-8b-copy-64x16-fp16",
    "llama-3-8b-copy-64x16-chain-fp16",
    "llama-3-8b-write-64-fp16",
    "llama-3-8b-gather-b8-s4096-fp16",
    "llama-3-8b-gptq-gate-fp16",
    "llama-3-8b-q8_0-gate-fp16",
)
CUDA_PROVIDER = """
import functools
import numpy as np
from pagebench.kernels.cuda_host import RawModule

CODE = "template <typename T> __global__ void copy(const T* a, T* b) { b[threadIdx.x] = a[threadIdx.x]; }"

@functools.cache
def module():
    return RawModule(code=CODE, name_expressions=["copy<uint4>"])

class Provider:
    name = "outside"
    def unavailable(self): return "never asked when recording"
    def rejects(self, problem): return None if problem.op == "copy_blocks" else "copies only"
    def to_device(self, array): return array.copy()
    def to_host(self, array): return array
    def synchronize(self): pass
    def copy_blocks(self, problem):
        module().get_function("copy<uint4>")((len(problem.pairs),), (128,), problem.caches[:2])
"""


@pytest.fixture(scope="module", params=[(p, a) for p in PROVIDERS for a in _sass.ARCHS], ids=lambda x: f"{x[0]}-{x[1]}")
def recordings(request: pytest.FixtureRequest) -> dict[str, _codegen.Recording]:
    return _codegen.record(request.param[0], WORKLOADS_COMPILED, request.param[1])


def test_every_kernel_compiles(recordings: dict[str, _codegen.Recording]) -> None:
    for name, recording in recordings.items():
        assert recording.error is None, recording.error
        assert recording.launches, f"{name}: {recording.unavailable or recording.rejected}"


def test_no_kernel_spills_or_is_too_large(recordings: dict[str, _codegen.Recording]) -> None:
    for name, recording in recordings.items():
        for launch in recording.launches:
            assert launch.stats.spills == 0, (name, launch.kernel)
            assert launch.programs_per_sm >= 1, (name, launch.kernel)


def test_a_decode_multiplies_on_tensor_cores(recordings: dict[str, _codegen.Recording]) -> None:
    """In 16 bits: a float32 product of float16 inputs compiles to half as many, of another type.

    Of the decodes, those with more than one query head per KV head.
    """
    for name in (name for name in WORKLOADS_COMPILED if ("decode" in name and "13b" not in name) or "prefill" in name):
        found = [launch.stats.matrix for launch in recordings[name].launches]
        assert max(sum(matrix.values()) for matrix in found) >= 16, (name, found)


# What a thread holds at once, in 16 bytes.
HELD = {"triton": 8, "cupy": 4}


def test_blocks_and_rows_move_in_16_bytes(recordings: dict[str, _codegen.Recording], request: Any) -> None:
    """As many loads as stores move a block; narrower loads are of pairs, slots, tables and strides."""
    held = HELD[request.node.callspec.params["recordings"][0]]
    for name in ("copy-64x16-fp16", "write-64-fp16", "gather-b8-s4096-fp16"):
        (launch,) = recordings[f"llama-3-8b-{name}"].launches
        both = 2 if "copy" not in name and launch.backend == "triton" else 1  # keys, then values
        assert launch.stats.global_loads[128] in (held, both * held // 2), (name, launch.stats.global_loads)
        assert launch.stats.global_stores == {128: launch.stats.global_loads[128]}, (name, launch.stats.global_stores)
    walk = recordings["llama-3-8b-copy-64x16-chain-fp16"].launches[-1].stats
    assert walk.global_loads[128] >= held
    assert set(walk.global_stores) == {128}


def test_a_chained_copy_keeps_its_walk_and_its_barriers(
    recordings: dict[str, _codegen.Recording], request: Any
) -> None:
    """The threads of a program move blocks in turn, and no run on a CPU shows whether they wait for one another.

    Triton: a block is read only once all threads have written the one before, and the next only when it is written.
    CUDA C++: a thread reads the bytes that it writes, so that only the plan of the walk needs barriers. Both hold a
    cycle's source while they move what is on the walk (Triton 3.9 can drop a loop's variable, and with it the loop).
    """
    provider, _ = request.node.callspec.params["recordings"]
    plan, copy = (launch.stats for launch in recordings["llama-3-8b-copy-64x16-chain-fp16"].launches)
    (apart,) = (launch.stats for launch in recordings["llama-3-8b-copy-64x16-fp16"].launches)
    assert apart.barriers == 0
    if provider == "triton":
        assert re.search(r"\[L+\[BL+B\[S+\]\]BL+B\[S+\]B", copy.order), copy.order
        assert plan.barriers >= 4, plan.order  # after each step, and after each round of the last
    else:
        assert re.search(r"L+\[L+\]?L*\[S+\]{2,3}L+\[S+\]", copy.order), copy.order
        assert plan.barriers == 4, plan.order
        assert copy.barriers == 0


def test_an_outside_provider_is_recorded_too(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(CUDA_PROVIDER)
    copy, decode = "llama-3-8b-copy-64x16-fp16", "llama-3-8b-decode-b8-s4096-block16-fp16"
    other_copy = "qwen2.5-7b-copy-64x16-fp16"
    found = _codegen.record(f"{tmp_path / 'outside.py'}:Provider", [copy, decode, other_copy])
    assert found[decode].rejected == "copies only"
    for name in (copy, other_copy):  # the second time from the launcher's own cache
        (launch,) = found[name].launches
        assert (launch.backend, launch.threads, launch.stats.global_loads) == ("cuda", 128, {128: 1})
    assert "copies only" in _codegen.table(found)


def test_recorded_once_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside.py").write_text(CUDA_PROVIDER)
    spec, name = f"{tmp_path / 'outside.py'}:Provider", "llama-3-8b-copy-64x16-fp16"
    asked: list[list[str]] = []

    def instead(provider: str, workloads: list[str], arch: int) -> dict[str, _codegen.Recording]:
        asked.append(workloads)
        return dict.fromkeys(workloads, _codegen.Recording(rejected="not really"))

    monkeypatch.setattr(_codegen, "_record_in_process", instead)
    for _ in range(2):
        _codegen.record(spec, [name])
    _codegen.record(spec, [name, "qwen2.5-7b-copy-64x16-fp16"])
    assert asked == [[name], ["qwen2.5-7b-copy-64x16-fp16"]]
    (tmp_path / "outside.py").write_text(CUDA_PROVIDER + "\n# edited\n")
    _codegen.record(spec, [name])
    assert len(asked) == 3


def test_command_line_reports_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    broken = CUDA_PROVIDER.replace("b[threadIdx.x] =", "nonsense =")
    (tmp_path / "outside.py").write_text(broken)
    name = "llama-3-8b-copy-64x16-fp16"
    command = [sys.executable, "-P", "-m", "bench._codegen", "--provider", "outside.py:Provider", "--workload", name]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'identifier \\"nonsense\\" is undefined' in done.stdout


def test_unknown_workload_is_named() -> None:
    with pytest.raises(RuntimeError, match="workload must be one of"):
        _codegen.record("cupy", ["no-such-workload"])


def test_series_show_a_missing_backend_as_not_available() -> None:
    """asv writes n/a for NotImplementedError, and keeps the series; anything else is a failure."""
    suite = codegen.Codegen()
    name = next(iter(WORKLOADS))
    outcomes = {("triton", name): (NotImplementedError, "triton is not installed"), ("cupy", name): (RuntimeError, "x")}
    with pytest.raises(NotImplementedError, match="not installed"):
        suite.setup(outcomes, "triton", name)
    with pytest.raises(RuntimeError):
        suite.setup(outcomes, "cupy", name)


def test_figures_of_several_launches() -> None:
    launches = _codegen.record("triton", WORKLOADS_COMPILED[:1])[WORKLOADS_COMPILED[0]].launches
    figures = {name: of(launches) for name, of in codegen.FIGURES.items()}
    assert all(type(value) is int for value in figures.values())
    assert figures["registers"] == max(launch.stats.registers for launch in launches)
    assert figures["instructions"] == sum(launch.stats.instructions for launch in launches)
    assert figures["spills"] == 0
    assert 0 <= figures["empty_warps"] < 64
