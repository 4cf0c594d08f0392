"""asv benchmarks of dequantize and dequant_gemv: device time on a GPU; validation and the reference on any machine.

`DequantGemvOnDevice` has the same weights with 1, 2, 4 ... 256 rows of x: what batching gains while the packed bytes
are read once for all rows, until arithmetic binds.
"""

from typing import Any

from bench._suite import PROVIDERS, _names, _OnDevice, _OnHost
from bench.workloads import WORKLOADS
from pagebench.reference.dequant import dequantize
from pagebench.reference.dequant_gemv import DequantGemv, dequant_gemv


class DequantizeOnDevice(_OnDevice):
    params = (PROVIDERS, _names("dequantize"))


class DequantizeOnHost(_OnHost):
    params = (_names("dequantize"),)

    def time_reference(self, name: str) -> None:
        dequantize(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op


class DequantGemvOnDevice(_OnDevice):
    params = (PROVIDERS, _names("dequant_gemv"))

    def setup(self, spec: str, name: str) -> None:
        super().setup(spec, name)
        problem: Any = WORKLOADS[name].check_problem()
        assert isinstance(problem, DequantGemv)
        self.rows = problem.m

    def track_seconds_per_row(self, spec: str, name: str) -> dict[str, Any]:
        """One over the tokens per second of a projection."""
        return {"samples": [seconds / self.rows for seconds in self.measured.time.samples], "number": 1}

    track_seconds_per_row.unit = "seconds / row of x"  # type: ignore[attr-defined]  # asv reads attributes


class DequantGemvOnHost(_OnHost):
    params = (_names("dequant_gemv"),)

    def time_reference(self, name: str) -> None:
        dequant_gemv(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op
