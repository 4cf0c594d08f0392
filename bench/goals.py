"""What our kernels are meant to reach on a GPU, and whether they do: `python -m bench.goals`.

A goal compares a workload with something measured in the same process: the bandwidth of a device copy; the same
decode with blocks of 128 keys, or with every sequence in one piece; or, of a fused product at m = 1, `torch.matmul` of
the same shape in float16, which is to lose by the ratio of the bytes. `bench.gpu` judges its timings by the same goals.
Without a GPU nothing is timed, and every figure is n/a.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench._measure import freed_after
from bench._table import table
from bench.run import OURS, Row, as_json, copy_roof, measure
from bench.workloads import COUNTERPARTS, FUSED, JUDGED_DECODES, LLAMA_3_8B, WORKLOADS, Workload, projections
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.providers import load_provider

COPY, MATMUL = "a device copy", "torch.matmul in fp16"
DECODE_OF_COPY, DEQUANTIZE_OF_COPY, FUSED_OF_COPY = 0.85, 0.85, 0.75
LAYOUT_SLACK, MATMUL_SLACK = 0.05, 0.25  # by how much a time may exceed the one that it is compared with
ITEM_BYTES = 2  # of x, y and a dense weight in float16

Process = Mapping[str, Any]  # what one process timed: as `measured` returns it, and "matmul" as `matmul_times` does


@dataclass(frozen=True, slots=True)
class Goal:
    """The speed of `workload` is to be at least `at_least` of the speed of `beside`.

    beside: COPY or MATMUL, compared by bytes per second, or the name of a workload of the same sizes, compared by time.
    shape: (n, k) of a fused product's weight. Of the product, which has one row, only the packed bytes count.
    """

    workload: str
    beside: str
    at_least: float
    shape: tuple[int, int] | None = None

    def share(self, process: Process, provider: str) -> float | None:
        """Of the speed of `beside`, in that process; None where one of the two was not timed."""
        own, other = _timed(process, provider, self.workload), _timed(process, provider, self.beside)
        if own is not None and other is not None:
            return other["seconds"] / own["seconds"]
        rate = {COPY: process["copy_bytes_per_second"], MATMUL: self._matmul_rate(process)}.get(self.beside)
        if own is None or not rate:
            return None
        return float((own["bytes"] - self._xy_bytes()) / own["seconds"] / rate)

    def _matmul_rate(self, process: Process) -> float | None:
        times = process.get("matmul", {}).get(matmul_name(self.shape)) if self.shape else None
        return dense_bytes(*self.shape) / median(times) if self.shape and times else None

    def _xy_bytes(self) -> int:
        return ITEM_BYTES * sum(self.shape or ())


def _timed(process: Process, provider: str, workload: str) -> dict[str, float] | None:
    for row in process["rows"]:
        if (row["provider"], row["workload"]) == (provider, workload) and "gpu" in row:
            return {"seconds": median(row["gpu"]["seconds"]), "bytes": row["gpu"]["bytes_moved"]}
    return None


def dense_bytes(n: int, k: int) -> int:
    """What x [1, k] times a float16 weight [n, k] has to read and write."""
    return ITEM_BYTES * (n * k + n + k)


def matmul_name(shape: tuple[int, int]) -> str:
    """(n, k) as a key in JSON."""
    return "x".join(map(str, shape))


def _goals() -> Iterator[Goal]:
    for model, batch, keys in JUDGED_DECODES:
        name = f"{model.name}-decode-b{batch}-s{keys}-{{}}-fp16"
        yield Goal(name.format("block16"), COPY, DECODE_OF_COPY)
        for layout in ("block128", "contiguous"):
            yield Goal(name.format("block16"), name.format(layout), 1 / (1 + LAYOUT_SLACK))
    for name, workload in WORKLOADS.items():
        if workload.op == "dequantize":
            yield Goal(name, COPY, DEQUANTIZE_OF_COPY)
    shapes = projections(LLAMA_3_8B)
    for format, projection in (*((name, "gate") for name in FUSED), *(("awq", p) for p in ("qo", "kv", "down"))):
        name, shape = f"{LLAMA_3_8B.name}-gemv-{format}-{projection}-m1-fp16", shapes[projection]
        yield Goal(name, COPY, FUSED_OF_COPY, shape)
        yield Goal(name, MATMUL, 1 / (1 + MATMUL_SLACK), shape)


GOALS = tuple(_goals())


def measured(names: Iterable[str]) -> dict[str, Any]:
    """Every workload (or counterpart) of `names`, and the copy bandwidth, in this process."""
    return as_json(timed(names), copy_roof())


def timed(names: Iterable[str]) -> list[Row]:
    """Every workload (or counterpart) of `names` on both providers, checked and timed in this process."""
    providers = {spec: load_provider(spec) for spec in OURS}
    rows = []
    for name in names:
        workload = once_built((WORKLOADS | COUNTERPARTS)[name])
        rows += [measure(spec, provider, workload, None) for spec, provider in providers.items()]
    return rows


def once_built(workload: Workload) -> Workload:
    """The same, whose full-size problem is built once: gigabytes, of which no provider writes the host's."""
    return dataclasses.replace(workload, problem=functools.cache(workload.problem))


def matmul_times(goals: Iterable[Goal] = GOALS) -> dict[str, list[float]]:
    """Seconds of each launch of `torch.matmul` of x [1, k] with a float16 weight [n, k] of the goals', by
    `matmul_name`.
    """
    import torch

    from bench._device_time import copies_needed, device_time, l2_bytes

    found = {}
    for n, k in dict.fromkeys(goal.shape for goal in goals if goal.shape):
        copies = range(copies_needed(dense_bytes(n, k), l2_bytes()))
        x = torch.randn(1, k, dtype=torch.float16, device="cuda")
        with freed_after():
            weights = [torch.randn(n, k, dtype=torch.float16, device="cuda") for _ in copies]
            times = device_time(lambda weight, x=x: torch.matmul(x, weight.T), weights)  # type: ignore[misc]
            found[matmul_name((n, k))] = list(times.samples)
    return found


def shown(processes: Sequence[Process]) -> str:
    """A line per goal and provider: the median over processes of what was reached, and whether that is enough."""
    head = ("workload", "beside", "at least", *OURS)
    lines = []
    for goal in GOALS:
        cells = []
        for provider in OURS:
            shares = [share for process in processes if (share := goal.share(process, provider)) is not None]
            reached = median(shares) if shares else None
            cells.append(
                "n/a" if reached is None else f"{reached:.0%} {'met' if reached >= goal.at_least else 'SHORT'}"
            )
        lines.append((goal.workload, goal.beside, f"{goal.at_least:.0%}", *cells))
    return "speed of a workload, of that of what it is compared with\n" + table(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 also without a GPU, where it says that nothing was timed, and 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.goals", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample here too")
    chosen = parser.parse_args(arguments)
    processes: list[dict[str, Any]] = []
    if gpu_present():
        names = dict.fromkeys(name for goal in GOALS for name in (goal.workload, goal.beside))
        times = measured(name for name in names if name not in (COPY, MATMUL))
        processes = [times | {"matmul": matmul_times()}]
    print(shown(processes))
    if not processes:
        print("n/a: there is no GPU here, so nothing was timed")
    if chosen.json:
        chosen.json.write_text(json.dumps(processes, indent=1))
    red = [row for process in processes for row in process["rows"] if row["check"]["status"] != "passed"]
    for row in red:
        print(f"FAILED {row['provider']}, {row['workload']}: {row['check']['detail']}", file=sys.stderr)
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
