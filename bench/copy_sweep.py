"""Bandwidth of copy_blocks by block bytes, beside what one would otherwise call: `python -m bench.copy_sweep`.

Every method copies the same blocks of one cache to as many others, all scattered. Beside the providers' copy_blocks:

large copy     one copy of as many contiguous bytes: the roof of the same size
index_copy_    torch's `cache.index_copy_(0, dst, blocks)` from blocks that already lie side by side, in 8-byte elements
memcpy each    one `cudaMemcpyAsync` per block, which the host issues one after the other

GB/s counts each payload byte read once and written once. Without a GPU nothing is timed, and every figure is n/a.
`bench.gpu` runs it with the workloads.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench._device_time import LAUNCHES, DeviceTime, copies_needed, device_time, l2_bytes
from bench._table import table
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.reference.block_copy import CopyBlocks

PROVIDERS = ("triton", "cupy")
BASELINES = ("large copy", "index_copy_", "memcpy each")
METHODS = (*PROVIDERS, *BASELINES)
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
POINTS = (*((size, 64 * MIB) for size in BLOCK_BYTES), *((size, 512 * MIB) for size in (4 * KIB, 64 * KIB, 4 * MIB)))
GOAL = 0.9  # of the large copy, what a provider's copy_blocks is meant to reach at every point
MEMCPY_LAUNCHES = 20  # of "memcpy each": tens of milliseconds of the host's time where blocks are small
MOST_MEMCPYS = 1 << 15  # calls of one launch of it; beyond, nothing new is seen and the job runs out of time
SAMPLED = 16  # pairs looked at after timing
DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice

Timer = Callable[..., DeviceTime]  # as bench._device_time.device_time


@dataclass(frozen=True, slots=True)
class Point:
    """One method at one size: its seconds, or why there are none."""

    method: str
    block_bytes: int
    payload_bytes: int
    seconds: tuple[float, ...] = ()
    detail: str = ""

    @property
    def bytes_per_second(self) -> float:
        return 2 * self.payload_bytes / median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        data = {"method": self.method, "block_bytes": self.block_bytes, "payload_bytes": self.payload_bytes}
        return data | {"seconds": list(self.seconds), "detail": self.detail}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Point":
        """What `to_json` wrote."""
        return cls(**{**data, "seconds": tuple(data["seconds"])})


def problem(block_bytes: int, payload_bytes: int) -> CopyBlocks:
    """Half the blocks of one cache, random bytes in a random order, to the other half."""
    count = max(payload_bytes // block_bytes, 1)
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 2**64, 2 * count * block_bytes // 8, np.uint64).view(np.uint8).reshape(2 * count, -1)
    return CopyBlocks((cache,), rng.permutation(2 * count).astype(np.int64).reshape(count, 2))


def sweep(
    points: Sequence[tuple[int, int]] = POINTS, methods: Sequence[str] = METHODS, *, timer: Timer | None = None
) -> list[Point]:
    """Every method at every (block bytes, payload bytes); a method's failure is its detail, and the others go on.

    timer: what times `run(input)` on the device, `device_time` by default. None and no GPU: nothing is timed.
    """
    if timer is None and not gpu_present():
        return [Point(method, *sizes, detail="no GPU") for sizes in points for method in methods]
    found = []
    for sizes in points:
        full = problem(*sizes)
        for method in methods:
            try:
                found.append(Point(method, *sizes, _time(method, full, timer or device_time).samples))
            except Exception as error:  # of a library that is not installed, or of a kernel that is wrong
                found.append(Point(method, *sizes, detail=f"{type(error).__name__}: {error}"))
    return found


def one_point(method: str, block_bytes: int, payload_bytes: int, timer: Timer = device_time) -> Point:
    """One method at one size. Raises what fails."""
    return Point(method, block_bytes, payload_bytes, _time(method, problem(block_bytes, payload_bytes), timer).samples)


def _time(method: str, full: CopyBlocks, timer: Timer) -> DeviceTime:
    return _time_provider(method, full, timer) if method not in BASELINES else _time_baseline(method, full, timer)


def _time_provider(spec: str, full: CopyBlocks, timer: Timer) -> DeviceTime:
    """Time copy_blocks after a check of few blocks of the size; then look at some of the blocks that were timed."""
    provider: Any = load_provider(spec)
    reason = provider.unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    contracts.check(provider, problem(full.caches[0].shape[1], 3 * full.caches[0].shape[1]))
    placed = [full.on(provider) for _ in range(_copies(full))]
    timed = timer(provider.copy_blocks, placed, LAUNCHES)
    pairs = full.pairs[np.unique(np.linspace(0, full.pairs.shape[0] - 1, SAMPLED).astype(int))]
    for src, dst in pairs.tolist():
        block = provider.to_host(placed[0].caches[0][dst])
        assert np.array_equal(block, full.caches[0][src]), f"block {dst} is not what block {src} holds"
    return timed


def _copies(full: CopyBlocks) -> int:
    return copies_needed(full.bytes_moved(), l2_bytes()) if gpu_present() else 1


def _time_baseline(method: str, full: CopyBlocks, timer: Timer) -> DeviceTime:
    import torch

    device = torch.device("cuda" if gpu_present() else "cpu")
    count = full.pairs.shape[0]
    src, dst = (torch.from_numpy(np.ascontiguousarray(ids)).to(device) for ids in full.pairs.T)
    caches = [torch.from_numpy(full.caches[0].view(np.int64)).to(device, copy=True) for _ in range(_copies(full))]
    if method == "large copy":
        return timer(lambda cache: cache[:count].copy_(cache[count:]), caches, LAUNCHES)
    if method == "index_copy_":
        pairs_of_both = [(cache, cache[src]) for cache in caches]
        return timer(lambda both: both[0].index_copy_(0, dst, both[1]), pairs_of_both, LAUNCHES)
    if count > MOST_MEMCPYS:
        raise ValueError(f"{count} blocks are more than {MOST_MEMCPYS} calls")
    nbytes, listed, memcpy = full.caches[0].shape[1], full.pairs.tolist(), device_memcpy()

    def each(cache: Any) -> None:
        start = cache.data_ptr()
        for source, target in listed:
            memcpy(start + target * nbytes, start + source * nbytes, nbytes)

    return timer(each, caches, MEMCPY_LAUNCHES)


def device_memcpy() -> Callable[[int, int, int], Any]:
    """`cudaMemcpyAsync` of (dst, src, bytes) on the device, on torch's current stream."""
    import cupy
    import torch

    stream, memcpy = torch.cuda.current_stream().cuda_stream, cupy.cuda.runtime.memcpyAsync
    return lambda dst, src, nbytes: memcpy(dst, src, nbytes, DEVICE_TO_DEVICE, stream)


def by_size(processes: Sequence[Sequence[Point]]) -> Iterator[tuple[tuple[int, int], dict[str, float | None]]]:
    """((block bytes, payload bytes), bytes/s by method, None where not timed): medians over processes."""
    points = [point for process in processes for point in process]
    for sizes in dict.fromkeys((point.block_bytes, point.payload_bytes) for point in points):
        here = [point for point in points if (point.block_bytes, point.payload_bytes) == sizes]
        yield sizes, {method: _rate(here, method) for method in METHODS}


def rows(processes: Sequence[Sequence[Point]]) -> Iterator[tuple[str, ...]]:
    """A line per size: GB/s of each method, and of the large copy what fraction."""
    for sizes, rates in by_size(processes):
        roof = rates["large copy"]
        cells = []
        for method, rate in rates.items():
            share = f" ({rate / roof:.0%})" if rate and roof and method != "large copy" else ""
            cells.append(f"{rate / 1e9:.0f}{share}" if rate else "n/a")
        yield _size(sizes[0]), _size(sizes[1]), *cells


def _rate(points: Sequence[Point], method: str) -> float | None:
    rates = [point.bytes_per_second for point in points if point.method == method and point.seconds]
    return median(rates) if rates else None


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB" if nbytes >= KIB else f"{nbytes} B"


def shown(processes: Sequence[Sequence[Point]]) -> str:
    """The table, and below it why figures are missing and which are short of the goal."""
    head = ("block", "payload", *(f"{method}, GB/s" for method in METHODS))
    lines = ["copy_blocks by block size; in brackets: of the large copy", table(head, list(rows(processes)))]
    points = [point for process in processes for point in process]
    missing = dict.fromkeys(f"n/a: {point.method}: {point.detail}" for point in points if not point.seconds)
    if points and all(point.detail == "no GPU" for point in points):
        missing = {"n/a: there is no GPU here, so nothing was timed": None}
    return "\n".join([*lines, *missing, *short_of_goal(processes)])


def short_of_goal(processes: Sequence[Sequence[Point]]) -> list[str]:
    """The points at which a provider copies at less than GOAL of the large copy of the same size."""
    found = []
    for sizes, rates in by_size(processes):
        roof = rates["large copy"]
        for method in PROVIDERS:
            rate = rates[method]
            if roof and rate and rate < GOAL * roof:
                where = f"{method} at blocks of {_size(sizes[0])}, {_size(sizes[1])}"
                found.append(f"below {GOAL:.0%} of the large copy: {where}: {rate / roof:.0%}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 also without a GPU, where it says that nothing was timed."""
    parser = argparse.ArgumentParser(prog="python -m bench.copy_sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample here too")
    chosen = parser.parse_args(arguments)
    points = sweep()
    print(shown([points]))
    if chosen.json:
        chosen.json.write_text(json.dumps([point.to_json() for point in points], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
