"""asv benchmarks of the block operations: device time on a GPU; validation and the NumPy reference on any machine."""

from bench._suite import PROVIDERS, _names, _OnDevice, _OnHost
from pagebench.reference.block_copy import copy_blocks, swap_blocks
from pagebench.reference.block_copy_gather import gather_kv
from pagebench.reference.block_copy_write import write_kv


class CopyBlocksOnDevice(_OnDevice):
    params = (PROVIDERS, _names("copy_blocks"))


class CopyBlocksOnHost(_OnHost):
    params = (_names("copy_blocks"),)

    def time_reference(self, name: str) -> None:
        copy_blocks(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op


class SwapBlocksOnDevice(_OnDevice):
    params = (PROVIDERS, _names("swap_blocks"))


class SwapBlocksOnHost(_OnHost):
    params = (_names("swap_blocks"),)

    def time_reference(self, name: str) -> None:
        swap_blocks(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op


class WriteKVOnDevice(_OnDevice):
    params = (PROVIDERS, _names("write_kv"))


class WriteKVOnHost(_OnHost):
    params = (_names("write_kv"),)

    def time_reference(self, name: str) -> None:
        write_kv(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op


class GatherKVOnDevice(_OnDevice):
    params = (PROVIDERS, _names("gather_kv"))


class GatherKVOnHost(_OnHost):
    params = (_names("gather_kv"),)

    def time_reference(self, name: str) -> None:
        gather_kv(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op
