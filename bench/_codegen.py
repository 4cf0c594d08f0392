"""Code generation of the real launches of a provider, on any machine: registers, spills, instruction mix, occupancy.

`record("triton", ["llama3-8b-decode"], 90)` starts a process in which Triton compiles instead of interpreting and no
GPU is visible, lets the provider run the workload there, and returns every launch as it was compiled for sm_90. The
answer is kept for the session, and a workload is only ever recorded once for the same sources.

On the command line, `python -m bench._codegen --provider triton --arch 90` prints the same as JSON or as a table.
"""

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._launch import CompiledLaunch
from bench._record_cuda import (
    CompiledModule,
    CudaToolsMissingError,
    RecordingRawModule,
    nvrtc_compile,
    recording_module,
)
from bench._record_triton import recording_triton, triton_launches
from bench._sass import ARCHS, SM_LIMITS, limits_of

__all__ = [
    "ARCHS",
    "CompiledLaunch",
    "CompiledModule",
    "Recording",
    "RecordingRawModule",
    "nvrtc_compile",
    "record",
    "table",
    "triton_launches",
]

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("triton", "cupy", "torch")
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Recording:
    """What became of one workload: its launches, or one reason why there are none.

    `unavailable`: a package that the provider needs is not installed. `rejected`: the provider does not support the
    problem. `error`: a traceback; the kernel does not compile, or its launcher fails.
    """

    launches: tuple[CompiledLaunch, ...] = ()
    unavailable: str | None = None
    rejected: str | None = None
    error: str | None = None

    def to_json(self, *, with_ptx: bool = True) -> dict[str, Any]:
        """Plain data, without the reasons that do not apply."""
        data: dict[str, Any] = {name: getattr(self, name) for name in ("unavailable", "rejected", "error")}
        data = {name: reason for name, reason in data.items() if reason is not None}
        return {"launches": [launch.to_json(with_ptx=with_ptx) for launch in self.launches], **data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Recording":
        """The recording that `to_json` wrote."""
        reasons = {name: data.get(name) for name in ("unavailable", "rejected", "error")}
        return cls(tuple(CompiledLaunch.from_json(item) for item in data["launches"]), **reasons)


_recorded: dict[tuple[str, str, int, str], Recording] = {}


def record(provider: str, workloads: Iterable[str], arch: int = 90) -> dict[str, Recording]:
    """Every launch of `provider` (a name, MODULE:NAME or PATH.py:NAME) for each workload, compiled for `arch`.

    One process records all workloads that this session has not recorded yet. RuntimeError if that process dies.
    """
    limits_of(arch)
    names, sources = list(workloads), _fingerprint(provider)
    missing = [name for name in names if (provider, name, arch, sources) not in _recorded]
    if missing:
        for name, recording in _record_in_process(provider, missing, arch).items():
            _recorded[provider, name, arch, sources] = recording
    return {name: _recorded[provider, name, arch, sources] for name in names}


def _record_in_process(provider: str, workloads: Sequence[str], arch: int) -> dict[str, Recording]:
    with tempfile.TemporaryDirectory(prefix="pagebench-codegen-") as folder:
        out = Path(folder) / "launches.json"
        command = [sys.executable, "-P", "-m", "bench._codegen", "--provider", provider, "--arch", str(arch)]
        command += ["--ptx", "--out", str(out), *(word for name in workloads for word in ("--workload", name))]
        search = [str(ROOT), os.environ.get("PYTHONPATH", ""), os.getcwd()]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in search if path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if not out.is_file():
            said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            raise RuntimeError(f"recording {provider} for sm_{arch} exited with {done.returncode}:\n{said}")
        data = json.loads(out.read_text())
    return {name: Recording.from_json(item) for name, item in data["workloads"].items()}


def _fingerprint(provider: str) -> str:
    """Changes with the sources that decide what is compiled: ours, and a provider named by its path."""
    import pagebench.kernels
    import pagebench.reference

    digest = hashlib.sha256()
    folders = [*pagebench.kernels.__path__, *pagebench.reference.__path__, str(ROOT / "bench")]
    files = [path for folder in folders for path in sorted(Path(folder).glob("*")) if path.is_file()]
    named = Path(provider.rpartition(":")[0])
    for path in [*files, *([named] if named.suffix == ".py" and named.is_file() else [])]:
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# What follows runs in the recording process.


def _isolate(arch: int, cache: str) -> None:
    """Make what is compiled depend on the sources and on `arch` alone; before Triton, torch or CuPy is imported."""
    loaded = sorted({"triton", "torch", "cupy"} & set(sys.modules))
    if loaded:
        raise RuntimeError(f"recording needs a process of its own; this one has imported {loaded}")
    for name in [name for name in os.environ if name.startswith(("TRITON_", "CUPY_", "NVRTC_", "PTXAS_", "LLVM_"))]:
        del os.environ[name]
    os.environ |= {
        "TRITON_CACHE_DIR": cache,
        "TRITON_DEFAULT_FP_FUSION": "1",  # the default flips in Triton 3.10
        "TRITON_DISABLE_LINE_INFO": "1",  # else moving a line changes the binary
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "PAGEBENCH_SM_COUNT": str(SM_LIMITS[arch].sm_count),
    }


@contextmanager
def _recording(arch: int) -> Iterator[list[CompiledLaunch]]:
    """Record what either backend launches. One list for all workloads, since launchers keep the modules they built."""
    launches: list[CompiledLaunch] = []
    with recording_triton(arch, launches), _recording_cuda(arch, launches):
        yield launches


@contextmanager
def _recording_cuda(arch: int, launches: list[CompiledLaunch]) -> Iterator[None]:
    """Let every RawModule of the host runs compile with NVRTC and record, however its class is referred to."""
    from pagebench.kernels.cuda_host import RawModule

    host: Any = RawModule  # its methods are replaced, so that a class imported by name records too
    methods = {name: getattr(host, name) for name in ("__init__", "get_function")}
    record = recording_module(arch, launches)

    def create(self: Any, code: str, **arguments: Any) -> None:
        self.recording = record(code=code, **arguments)

    host.__init__ = create
    host.get_function = lambda self, name: self.recording.get_function(name)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(host, name, method)


def _record_workload(provider: Any, problem: Any, launches: list[CompiledLaunch]) -> Recording:
    reason = provider.rejects(problem)
    if reason is not None:
        return Recording(rejected=reason)
    op = getattr(provider, problem.op, None)
    if op is None:
        return Recording(rejected=f"{provider.name} has no {problem.op}")
    launches.clear()
    try:
        op(problem.on(provider))
    except CudaToolsMissingError as error:
        return Recording(unavailable=str(error))
    if not launches:
        return Recording(rejected=f"{provider.name} launched no Triton or CUDA C++ kernel for {problem.op}")
    return Recording(tuple(launches))


def _record_all(spec: str, workloads: Sequence[str], arch: int) -> dict[str, Recording]:
    from bench.workloads import WORKLOADS
    from pagebench.kernels.providers import load_provider

    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"workload must be one of {sorted(WORKLOADS)}, got {unknown}")
    try:
        provider = load_provider(spec)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in BACKENDS:
            raise
        return dict.fromkeys(workloads, Recording(unavailable=f"{error.name} is not installed"))
    recordings: dict[str, Recording] = {}
    with _recording(arch) as launches:
        for name in workloads:
            try:
                recordings[name] = _record_workload(provider, WORKLOADS[name].codegen_problem(), launches)
            except Exception:  # reported for this workload; the others still count
                recordings[name] = Recording(error=traceback.format_exc())
    return recordings


def table(recordings: dict[str, Recording]) -> str:
    """One line per launch; the columns are explained in results/README.md."""
    head = ("workload", "kernel", "grid", "thr", "regs", "spill", "shared", "instr", "LDG+STG<16B", "matrix", "prog/SM")
    rows: list[tuple[str, ...]] = [head]
    for name, recording in recordings.items():
        for launch in recording.launches:
            rows.append((name, *_row(launch)))
        reason = recording.unavailable or recording.rejected or (recording.error or "").strip().rpartition("\n")[2]
        if reason:
            rows.append((name, reason, *[""] * (len(head) - 2)))
    widths = [max(len(row[i]) for row in rows if i != 1 or row[2]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _row(launch: CompiledLaunch) -> tuple[str, ...]:
    stats = launch.stats
    matrix = "+".join(f"{count} {name}" for name, count in stats.matrix.items()) or "-"
    grid = "x".join(str(count) for count in launch.grid)
    figures = (launch.threads, stats.registers, stats.spills, launch.shared_bytes, stats.instructions)
    return (launch.kernel, grid, *map(str, figures), str(stats.narrow_accesses), matrix, str(launch.programs_per_sm))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when every workload compiled or was rejected with a reason, 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench._codegen", description=__doc__.partition("\n")[0])
    parser.add_argument("--provider", required=True, help="name, MODULE:NAME or PATH.py:NAME")
    parser.add_argument("--arch", type=int, default=90, choices=ARCHS)
    parser.add_argument("--workload", action="append", default=[], help="name in bench/workloads.py; all by default")
    parser.add_argument("--ptx", action="store_true", help="put each kernel's PTX into the JSON")
    parser.add_argument("--table", action="store_true", help="print a table instead of JSON")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of printing it")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pagebench-triton-") as cache:
        _isolate(chosen.arch, cache)
        workloads = chosen.workload or list(importlib.import_module("bench.workloads").WORKLOADS)
        recordings = _record_all(chosen.provider, workloads, chosen.arch)
    items = {name: recording.to_json(with_ptx=chosen.ptx) for name, recording in recordings.items()}
    text = json.dumps({"provider": chosen.provider, "arch": chosen.arch, "workloads": items}, indent=1)
    if chosen.out:
        chosen.out.write_text(text)
    if chosen.table or not chosen.out:
        print(table(recordings) if chosen.table else text)
    return int(any(recording.error for recording in recordings.values()))


if __name__ == "__main__":
    sys.exit(main())
