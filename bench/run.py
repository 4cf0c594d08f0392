"""`nox -s bench`: check every op of every provider, measure what this machine can, print one table.

On a GPU: device time, GB/s, and the fraction of the copy bandwidth measured in the same run. On any machine: bytes
requested, and registers, spills and load widths of the launches as compiled for sm_90. A time from Triton's interpreter
or from CUDA C++ on the host is the time of a check, and shown as that only. Exits with 1 if a check failed or nothing
ran.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench._codegen import Recording, record
from bench._machine import pin
from bench._measure import Throughput, Verdict, freed_after, throughput, verdict
from bench._table import table
from bench._traffic import SCALES, Traffic
from bench._traffic import record as record_traffic
from bench.workloads import WORKLOADS, Workload
from pagebench.kernels.devices import gpu_name, gpu_present
from pagebench.kernels.providers import Provider, load_provider

ROOT = Path(__file__).resolve().parent.parent
LOCAL_RESULTS = ROOT / "results" / "local"  # git-ignored
OURS = ("triton", "cupy")
QUICK = (
    "llama-3-8b-decode-b8-s4096-block16-fp16",
    "llama-3-8b-merge-64-fp16",
    "llama-3-8b-copy-64x16-fp16",
    "llama-3-8b-swap-64x16-fp16",
    "llama-3-8b-write-8192-e4m3-tensor",
    "llama-3-8b-gather-b8-s4096-e4m3",
    "llama-3-8b-gptq-gate-fp16",
    "llama-3-8b-gemv-mxfp4-gate-m1-fp16",
)
ARCH = 90
HEAD = (
    "op",
    "provider",
    "workload",
    "runs on",
    "check",
    "time",
    "GB/s",
    "of copy",
    "traffic",
    "regs",
    "spills",
    "instr",
    "<16B",
    "matrix",
)
LEGEND = f"""
runs on   gpu; interpreter (Triton kernels on this CPU); host (the same CUDA C++, compiled for this CPU)
check     against the float64 reference, within the derived bound or bit for bit; the seconds are the check's own
time      median device time of one call with a cold L2, on a GPU only: n/a elsewhere, whatever the check took
GB/s      the fewest bytes any kernel must move over that time; "of copy" is against a device copy in the same run
traffic   bytes requested over the fewest bytes, traced on a CPU, at
          {"; ".join(f"{op}: {scale}" for op, scale in SCALES.items())}
regs...   the op's largest launch as compiled for sm_{ARCH}: registers per thread, spill loads and stores, instructions,
          global accesses narrower than 16 bytes, tensor-core instructions"""


@dataclass(frozen=True, slots=True)
class Row:
    """One op of one provider on one workload."""

    provider: str
    workload: Workload
    verdict: Verdict
    throughput: Throughput | None
    codegen: Recording | None
    traffic: Traffic | None = None


def measure(
    spec: str,
    provider: Provider,
    workload: Workload,
    codegen: Recording | None,
    traffic: Traffic | None = None,
) -> Row:
    """Check, and time at full size where the check passed on a GPU."""
    said = verdict(provider, workload)
    if said.status != "passed" or said.runs != "gpu":
        return Row(spec, workload, said, None, codegen, traffic)
    try:
        with freed_after():
            return Row(spec, workload, said, throughput(provider, workload.problem()), codegen, traffic)
    except Exception as error:  # a wrong result at full size is a failed check, and gets no number
        failed = Verdict("failed", said.runs, said.seconds, f"{type(error).__name__}: {error}")
        return Row(spec, workload, failed, None, codegen, traffic)


def cells(row: Row, roof: float | None) -> tuple[str, ...]:
    """The row's table cells, in the order of HEAD."""
    said, timed = row.verdict, row.throughput
    check = f"{said.status} ({said.seconds:.1f} s)" if said.runs != "-" else said.status
    speed = ("n/a", "n/a", "n/a")
    if timed is not None and roof is not None:
        rate = timed.bytes_per_second
        speed = (f"{timed.time.median * 1e6:.1f} us", f"{rate / 1e9:.0f}", f"{rate / roof:.0%}")
    described = (row.workload.op, row.provider, row.workload.name, said.runs, check)
    return (*described, *speed, _traffic_cell(row.traffic), *_codegen_cells(row.codegen))


def _traffic_cell(traffic: Traffic | None) -> str:
    if traffic is None or not traffic.launches:
        return "n/a" if traffic is None or not traffic.error else "error"
    return f"{traffic.ratio:.4f}"


def _codegen_cells(recording: Recording | None) -> tuple[str, ...]:
    if recording is None or not recording.launches:
        return ("n/a",) * 5 if recording is None or not recording.error else ("error",) * 5
    stats = max(recording.launches, key=lambda launch: launch.programs * launch.threads).stats
    matrix = "+".join(f"{count} {name}" for name, count in stats.matrix.items()) or "-"
    spills = sum(launch.stats.spills for launch in recording.launches)
    return (str(stats.registers), str(spills), str(stats.instructions), str(stats.narrow_accesses), matrix)


def as_json(rows: Sequence[Row], roof: float | None) -> dict[str, Any]:
    """Everything measured, as plain data; how each figure came about is said beside it."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {"cpu": platform.processor() or platform.machine(), "gpu": gpu_name()},
        "copy_bytes_per_second": roof,
        "rows": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = {
        "op": row.workload.op,
        "provider": row.provider,
        "workload": row.workload.name,
        "check": asdict(row.verdict),
    }
    if row.throughput is not None:
        samples = row.throughput.time.samples
        data["gpu"] = {"seconds": samples, "bytes_moved": row.throughput.bytes_moved, "flops": row.throughput.flops}
    if row.codegen is not None:
        data[f"codegen_sm_{ARCH}"] = row.codegen.to_json(with_ptx=False)
    if row.traffic is not None:
        data["traffic"] = row.traffic.to_json()
    return data


def commit() -> str:
    """The checked-out commit, `-dirty` behind it when the working tree differs; "unknown" outside a checkout."""
    if shutil.which("git") is None:
        return "unknown"
    asked = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


def failed(rows: Sequence[Row]) -> list[str]:
    """Why the run as a whole is not good; empty when it is."""
    reasons = [
        f"{row.provider}, {row.workload.name}: {row.verdict.detail}" for row in rows if row.verdict.status == "failed"
    ]
    reasons += [
        f"{row.provider}, {row.workload.name}: code generation failed: {row.codegen.error}"
        for row in rows
        if row.codegen is not None and row.codegen.error
    ]
    reasons += [
        f"{row.provider}, {row.workload.name}: tracing failed: {row.traffic.error}"
        for row in rows
        if row.traffic is not None and row.traffic.error
    ]
    reasons += [
        f"{row.provider}, {row.workload.name}: rejected, and ours reject nothing: {row.verdict.detail}"
        for row in rows
        if row.provider in OURS and row.verdict.status == "rejected"
    ]
    if not any(row.verdict.status == "passed" for row in rows):
        reasons.append("nothing ran: no provider accepted any workload")
    if os.environ.get("REQUIRE_GPU") == "1" and not any(row.throughput for row in rows):
        reasons.append("REQUIRE_GPU=1, but nothing was timed on a GPU")
    for spec in {row.provider for row in rows}:
        statuses = {row.verdict.status for row in rows if row.provider == spec}
        if "passed" not in statuses and "failed" not in statuses:
            details = {row.verdict.detail for row in rows if row.provider == spec}
            reasons.append(f"{spec} ran nothing: {'; '.join(sorted(details))}")
    return reasons


def store_history(machine: str) -> int:
    """Measure the checked-out commit with asv, into results/asv/<machine>."""
    if commit().endswith("-dirty"):
        print("note: asv measures the commit, not the uncommitted changes in the working tree", file=sys.stderr)
    pin(machine, ROOT / "results" / "asv")
    command = ["asv", "run", "HEAD^!", "--machine", machine, "--launch-method", "forkserver", "--show-stderr"]
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        help="a kernel of yours, measured beside ours: MODULE:NAME or PATH.py:NAME",
    )
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="all by default")
    parser.add_argument("--quick", action="store_true", help="one workload of each op")
    parser.add_argument("--no-codegen", action="store_true", help="leave out the sm_90 columns")
    parser.add_argument("--no-traffic", action="store_true", help="leave out the bytes requested")
    parser.add_argument("--machine", help="also measure the checked-out commit into results/asv under this name")
    chosen = parser.parse_args(arguments)
    names = chosen.workload or (QUICK if chosen.quick else list(WORKLOADS))
    specs = [*OURS, *(spec for spec in chosen.provider if spec not in OURS)]
    if chosen.machine is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", chosen.machine):
        parser.error(f"--machine must be a plain folder name, got {chosen.machine!r}")
    try:
        providers = {spec: load_provider(spec) for spec in specs}
    except ValueError as error:
        parser.error(str(error))
    roof = copy_roof()
    generated = {spec: {} if chosen.no_codegen else record(spec, names, ARCH) for spec in specs}
    traced = {spec: {} if chosen.no_traffic else record_traffic(spec, names) for spec in specs}
    rows = []
    for name in names:
        for spec in specs:
            found = generated[spec].get(name), traced[spec].get(name)
            rows.append(measure(spec, providers[spec], WORKLOADS[name], *found))
            print(f"[{len(rows)}/{len(names) * len(specs)}] {spec} {name}: {rows[-1].verdict.status}", file=sys.stderr)
    print(table(HEAD, [cells(row, roof) for row in rows]), LEGEND, sep="\n")
    print(f"\ncopy bandwidth: {'n/a, no GPU' if roof is None else f'{roof / 1e9:.0f} GB/s'}")
    path = LOCAL_RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(rows, roof), indent=1))
    print(f"written: {path.relative_to(ROOT)}")
    reasons = failed(rows)
    for reason in reasons:
        print(f"FAILED {reason}", file=sys.stderr)
    if reasons:
        return 1
    return store_history(chosen.machine) if chosen.machine else 0


def copy_roof() -> float | None:
    """Copy bandwidth in bytes per second; None without a GPU."""
    if not gpu_present():
        return None
    from bench._device_time import copy_bandwidth

    return copy_bandwidth()


if __name__ == "__main__":
    sys.exit(main())
