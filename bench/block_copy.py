"""asv benchmarks of copy_blocks: device time on a GPU; validation and the NumPy reference on any machine."""

from bench._suite import PROVIDERS, _names, _OnDevice, _OnHost
from pagebench.reference.block_copy import copy_blocks


class CopyBlocksOnDevice(_OnDevice):
    params = (PROVIDERS, _names("copy_blocks"))


class CopyBlocksOnHost(_OnHost):
    params = (_names("copy_blocks"),)

    def time_reference(self, name: str) -> None:
        copy_blocks(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op
