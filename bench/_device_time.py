"""Time an op on a GPU: CUDA events around every launch, a queue that never runs dry, a cold L2.

The host queues all launches of a round behind a spinning kernel, so that the device goes from one to the next without
waiting for Python. Each launch gets the next of several placed copies of the problem, together more than twice the L2.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

WARMUP_SECONDS = 0.2  # clocks reach their steady state within this, launches are compiled before it
ROUND = 20  # launches queued behind one spin
LAUNCHES = 60


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds of each launch."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, _, high = quantiles(self.samples, n=4)
        return (high - low) / self.median


def copies_needed(nbytes: int, l2_bytes: int) -> int:
    """How many copies of a problem of `nbytes` it takes to exceed twice the L2 between two visits of one copy."""
    return 1 if nbytes > 2 * l2_bytes else math.ceil(2 * l2_bytes / max(nbytes, 1)) + 1


def device_time(run: Callable[[Any], Any], inputs: Sequence[Any], launches: int = LAUNCHES) -> DeviceTime:
    """Time `run(inputs[i % len(inputs)])` for `launches` launches after a warm-up, on the current CUDA device."""
    import torch

    queue_seconds = _warm_up(run, inputs)
    cycles_per_second = 1.98e9  # an upper estimate only makes the spin longer
    samples: list[float] = []
    while len(samples) < launches:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUND)]
        torch.cuda._sleep(int(1.5 * ROUND * queue_seconds * cycles_per_second))
        for start, stop in events:
            start.record()
            run(inputs[len(samples) % len(inputs)])
            stop.record()
            samples.append(0.0)
        torch.cuda.synchronize()
        samples[-ROUND:] = [start.elapsed_time(stop) * 1e-3 for start, stop in events]
    return DeviceTime(tuple(samples))


def _warm_up(run: Callable[[Any], Any], inputs: Sequence[Any]) -> float:
    """Run for WARMUP_SECONDS; the seconds that the host needs to queue one launch."""
    import torch

    for value in inputs:
        run(value)
    torch.cuda.synchronize()
    begin, queued = time.perf_counter(), 0
    host = 0.0
    while time.perf_counter() - begin < WARMUP_SECONDS:
        before = time.perf_counter()
        for _ in range(ROUND):
            run(inputs[queued % len(inputs)])
            queued += 1
        host += time.perf_counter() - before
        torch.cuda.synchronize()
    return host / queued + 2e-5  # two event records beside each launch


def l2_bytes() -> int:
    """Size of the current device's L2 cache in bytes."""
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def copy_bandwidth(nbytes: int = 1 << 31) -> float:
    """Bytes per second, read and written counted, of one large device-to-device copy: the roof of every figure here."""
    import torch

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / device_time(lambda _: target.copy_(source), [None], launches=ROUND).median
