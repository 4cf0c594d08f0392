"""asv benchmarks of the block operations: device time on a GPU; validation and the NumPy reference on any machine."""

from typing import Any

from bench._device_time import copy_bandwidth
from bench._suite import PROVIDERS, _names, _OnDevice, _OnHost
from bench.copy_sweep import BASELINES, BLOCK_BYTES, MIB, one_point
from pagebench.kernels.devices import gpu_present
from pagebench.reference.block_copy import copy_blocks, swap_blocks
from pagebench.reference.block_copy_gather import gather_kv
from pagebench.reference.block_copy_write import write_kv


class CopyBlocksOnDevice(_OnDevice):
    params = (PROVIDERS, _names("copy_blocks"))


class CopySweepOnDevice:
    """copy_blocks by block bytes at a payload of 64 MiB, and what one would otherwise call; see bench/copy_sweep.py."""

    params = ([*PROVIDERS, *BASELINES], list(BLOCK_BYTES))
    param_names = ("method", "block_bytes")
    timeout = 600
    rounds = 1

    def setup(self, method: str, block_bytes: int) -> None:
        if not gpu_present():
            raise NotImplementedError("no GPU: a time from a CPU is not kernel speed")
        self.point = one_point(method, block_bytes, 64 * MIB)

    def track_seconds(self, method: str, block_bytes: int) -> dict[str, Any]:
        return {"samples": list(self.point.seconds), "number": 1}

    def track_over_copy(self, method: str, block_bytes: int) -> float:
        return copy_bandwidth() / self.point.bytes_per_second

    def track_gigabytes_per_second(self, method: str, block_bytes: int) -> float:
        return self.point.bytes_per_second / 1e9

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]  # asv reads attributes of the function
    track_over_copy.unit = "time / time of a copy of as many bytes"  # type: ignore[attr-defined]
    track_gigabytes_per_second.unit = "GB/s"  # type: ignore[attr-defined]


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
