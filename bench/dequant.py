"""asv benchmarks of dequantize: device time on a GPU; validation and the NumPy reference on any machine."""

from bench._suite import PROVIDERS, _names, _OnDevice, _OnHost
from pagebench.reference.dequant import dequantize


class DequantizeOnDevice(_OnDevice):
    params = (PROVIDERS, _names("dequantize"))


class DequantizeOnHost(_OnHost):
    params = (_names("dequantize"),)

    def time_reference(self, name: str) -> None:
        dequantize(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op
