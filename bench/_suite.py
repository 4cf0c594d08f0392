"""What the asv benchmarks of every op share. Names start with an underscore, so that asv does not take them as its own.

asv's regression detection knows only "lower is better": seconds, and time over a floor. GB/s is for the eye.
"""

from typing import Any

from bench._measure import throughput, verdict
from bench.workloads import WORKLOADS
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.providers import load_provider
from pagebench.reference.problem import Problem

PROVIDERS = ["triton", "cupy"]


def _names(op: str) -> list[str]:
    return [name for name, workload in WORKLOADS.items() if workload.op == op]


class _OnDevice:
    """Device time of one op on a GPU, after the check; n/a on a machine without one, so that the series survives."""

    param_names = ("provider", "workload")
    timeout = 600
    rounds = 1

    def setup(self, spec: str, name: str) -> None:
        if not gpu_present():
            raise NotImplementedError("no GPU: a time from a CPU is not kernel speed")
        provider, workload = load_provider(spec), WORKLOADS[name]
        said = verdict(provider, workload)
        if said.status == "failed":
            raise RuntimeError(said.detail)
        if said.status != "passed":
            raise NotImplementedError(said.detail)
        self.measured = throughput(provider, workload.problem())

    def track_seconds(self, spec: str, name: str) -> dict[str, Any]:
        return {"samples": list(self.measured.time.samples), "number": 1}

    def track_over_copy(self, spec: str, name: str) -> float:
        from bench._device_time import copy_bandwidth

        return copy_bandwidth() / self.measured.bytes_per_second

    def track_gigabytes_per_second(self, spec: str, name: str) -> float:
        return self.measured.bytes_per_second / 1e9

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]  # asv reads attributes of the function
    track_over_copy.unit = "time / time of a copy of as many bytes"  # type: ignore[attr-defined]
    track_gigabytes_per_second.unit = "GB/s"  # type: ignore[attr-defined]


class _OnHost:
    """What every machine can time: building (and so validating) a problem, and the reference itself."""

    param_names = ("workload",)

    def setup(self, name: str) -> None:
        self.problem: Problem = WORKLOADS[name].check_problem()

    def time_validate(self, name: str) -> None:
        self.problem.validate()

    def time_bytes_moved(self, name: str) -> None:
        self.problem.bytes_moved()
