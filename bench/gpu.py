"""`nox -s gpu`: prove every kernel on this machine's GPU, then time the workloads, and write it all as JSON.

Needs torch, triton, cupy, pytest and hypothesis, but no network, no nox and no installed pagebench:
`python -m bench.gpu` from a checkout is enough. Timings are taken in several fresh processes, since two processes
differ by more than two launches do. Exits with 3 where there is no GPU, 1 when a check fails, 0 otherwise.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "kernels", "properties")
PROVIDERS = ("triton", "cupy")
PACKAGES = ("torch", "triton", "cupy", "numpy", "hypothesis", "pytest")
BUDGET_S = 540  # the whole job
PROPERTIES_S = 240
PROCESSES = 3
NO_GPU = 3
NONE_FINISHED = "no timing process finished"


def make_importable(root: Path = ROOT) -> None:
    """Let this process and its children import `pagebench.*` from the checkout, where it is not installed."""
    if importlib.util.find_spec("pagebench") is not None:
        return
    package = root / ".typing" / "pagebench"
    package.mkdir(parents=True, exist_ok=True)
    for room in ROOMS:
        if not (package / room).exists():
            (package / room).symlink_to(root / room, target_is_directory=True)
    sys.path.insert(0, str(package.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])


def run_properties(out: Path, seconds: float) -> dict[str, Any]:
    """The property suite on the GPU, over both providers; its report goes to `out`."""
    command = [sys.executable, "-m", "pytest", str(ROOT / "properties"), "-q", f"--junitxml={out / 'properties.xml'}"]
    command += ["--pagebench-profile", "quick"]  # each new head size or dtype is a compilation here
    if importlib.util.find_spec("pagebench.properties.plugin") and not _entry_point_installed():
        command += ["-p", "pagebench.properties.plugin"]
    command += [argument for provider in PROVIDERS for argument in ("--provider", provider)]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]  # compiling is what takes the time
    begin = time.perf_counter()
    log = out / "properties.log"
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    tail = log.read_text().splitlines()[-40:]
    print("\n".join(tail), flush=True)
    return {"exit_code": code, "seconds": time.perf_counter() - begin, "timed_out": code == -1, "tail": tail}


def _entry_point_installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.name == "pagebench" for entry in entry_points(group="pytest11"))


def workload_times(names: Sequence[str]) -> dict[str, Any]:
    """Every workload on both providers, in this process."""
    from bench.goals import measured

    return measured(names)


def swept() -> list[dict[str, Any]]:
    """Bandwidth of copy_blocks by block bytes, in this process: points as `bench.copy_sweep` writes them."""
    from bench._measure import freed_after
    from bench.copy_sweep import sweep

    with freed_after():
        return [point.to_json() for point in sweep()]


def _keep(path: Path, times: dict[str, Any]) -> None:
    """Write it whole, or, when the process is stopped meanwhile, leave what was there."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(times))
    part.replace(path)


def compared(names: Sequence[str]) -> dict[str, Any]:
    """What the goals of those workloads compare them with, in this process."""
    from bench.goals import GOALS, matmul_times, timed
    from bench.run import as_json
    from bench.workloads import COUNTERPARTS

    goals = [goal for goal in GOALS if goal.workload in names]
    counterparts = dict.fromkeys(goal.beside for goal in goals if goal.beside in COUNTERPARTS)
    rows = as_json(timed(counterparts), None)["rows"]  # the copy bandwidth is measured already
    return {"counterparts": rows, "matmul": matmul_times(goals)}


def with_counterparts(process: dict[str, Any]) -> dict[str, Any]:
    """A timing process's results, what `compared` had measured by its end among the rows."""
    return process | {"rows": process["rows"] + process.get("counterparts", [])}


def run_timings(names: Sequence[str], out: Path, deadline: float) -> tuple[list[dict[str, Any]], list[int | None]]:
    """`workload_times` in PROCESSES fresh processes, as far as the deadline allows, and their exit codes (None: out of
    time; what a process had measured by then is kept).
    """
    results: list[dict[str, Any]] = []
    codes: list[int | None] = []
    for number in range(PROCESSES):
        path, left = out / f"times-{number}.json", deadline - time.perf_counter()
        if left < 30:
            print(f"out of time after {number} of {PROCESSES} timing processes", flush=True)
            break
        command = [sys.executable, "-m", "bench.gpu", "--times-only", str(path)]
        command += [argument for name in names for argument in ("--workload", name)]
        try:
            codes.append(subprocess.run(command, cwd=ROOT, timeout=left).returncode)
        except subprocess.TimeoutExpired:
            codes.append(None)
            print("a timing process ran out of time", flush=True)
        if path.exists():
            results.append(json.loads(path.read_text()))
            path.unlink()
    return results, codes


def summary(processes: Sequence[dict[str, Any]]) -> str:
    """One line per op, provider and workload: the median over processes of each process's median."""
    from bench._table import table

    head = ("op", "provider", "workload", "check", "time", "GB/s", "of copy", "processes, spread")
    rows = []
    for index, first in enumerate(processes[0]["rows"]):
        same = [process["rows"][index] for process in processes if "gpu" in process["rows"][index]]
        label = (first["op"], first["provider"], first["workload"], first["check"]["status"])
        if not same:
            rows.append((*label, "n/a", "n/a", "n/a", first["check"]["detail"]))
            continue
        times = [median(row["gpu"]["seconds"]) for row in same]
        rate = same[0]["gpu"]["bytes_moved"] / median(times)
        roof = median(process["copy_bytes_per_second"] for process in processes)
        spread = (max(times) - min(times)) / median(times)
        rows.append(
            (
                *label,
                f"{median(times) * 1e6:.1f} us",
                f"{rate / 1e9:.0f}",
                f"{rate / roof:.0%}",
                f"{len(times)}, {spread:.1%}",
            )
        )
    return table(head, rows)


def sweep_summary(processes: Sequence[dict[str, Any]]) -> str:
    """Bandwidth of copy_blocks by block bytes, the median over processes of each process's median."""
    from bench.copy_sweep import Point, shown

    return shown([[Point.from_json(item) for item in process.get("copy_sweep", ())] for process in processes])


def goals_summary(processes: Sequence[dict[str, Any]]) -> str:
    """What the kernels are meant to reach, and whether they do."""
    from bench.goals import shown

    return shown([with_counterparts(process) for process in processes])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version("cupy-cuda13x" if package == "cupy" else package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver, max clocks": driver,
        "python": platform.python_version(),
        "packages": versions,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    make_importable()
    from bench.run import commit
    from bench.workloads import WORKLOADS
    from pagebench.kernels.devices import gpu_present

    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "local" / "gpu", help="folder for the JSON and the logs"
    )
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="all by default")
    parser.add_argument("--times-only", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not gpu_present():
        print(
            "no GPU here: nothing was checked and nothing was timed (is it visible to this process?)", file=sys.stderr
        )
        return NO_GPU
    names = chosen.workload or list(WORKLOADS)
    if chosen.times_only:
        times = workload_times(names)
        _keep(chosen.times_only, times)  # if there is no time left for more
        times["copy_sweep"] = swept()
        _keep(chosen.times_only, times)
        _keep(chosen.times_only, times | compared(names))
        return 0
    deadline = time.perf_counter() + BUDGET_S
    chosen.out.mkdir(parents=True, exist_ok=True)
    checked = run_properties(chosen.out, PROPERTIES_S)
    processes, codes = run_timings(names, chosen.out, deadline)
    document = {
        "commit": commit(),
        "machine": machine(),
        "properties": checked,
        "processes": processes,
        "timing_exit_codes": codes,
    }
    (chosen.out / "gpu.json").write_text(json.dumps(document, indent=1))
    print(
        *([sum_up(processes) for sum_up in (summary, sweep_summary, goals_summary)] if processes else [NONE_FINISHED]),
        f"written: {chosen.out / 'gpu.json'}",
        sep="\n",
    )
    timed = [row for process in processes for row in with_counterparts(process)["rows"]]
    red = [row for row in timed if row["check"]["status"] != "passed"]
    for row in red:
        print(
            f"FAILED {row['provider']}, {row['workload']}: {row['check']['status']}: {row['check']['detail']}",
            file=sys.stderr,
        )
    broken = [code for code in codes if code]
    if broken:
        print(f"FAILED: {len(broken)} of {len(codes)} timing processes, exit codes {broken}", file=sys.stderr)
    return int(checked["exit_code"] != 0 or not processes or bool(red) or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
