"""The trace of a launch that reports each access with the addresses of its lanes, as Triton's interpreter does."""

from collections.abc import Callable, Sequence

import numpy as np

from pagebench.kernels.launch_buffers import Buffer, StridedView, nearest_buffer
from pagebench.kernels.memory_trace import SECTOR, BufferTraffic, FreshMemory, LaunchTrace, Recorder
from pagebench.kernels.memory_trace_fresh import UninitialisedReadError
from pagebench.kernels.memory_trace_races import Access, ByteOwners, Program, RaceError
from pagebench.reference.dtypes import Array


class LaunchRecorder:
    """Call `access` for each access of the launch, after its bounds were checked and before it happens.

    line: says where in the kernel the access is, "FILE:LINE: SOURCE" or "".
    """

    def __init__(
        self, recording: Recorder, launch: LaunchTrace, buffers: Sequence[Buffer], line: Callable[[], str]
    ) -> None:
        self.kernel, self._line = launch.kernel, line
        self._buffers = [b for b in buffers if b.stop > b.start]
        self._counters = [_Counter(launch.buffers[b.name], b) for b in self._buffers] if recording.traffic else []
        self._owners = ByteOwners(self._buffers) if recording.races and self._buffers else None
        self._fresh = [m for m in recording.fresh if any(b.start < m.stop and m.start < b.stop for b in self._buffers)]

    def access(self, kind: str, addresses: Array, size: int, program: Program) -> None:
        """Lanes at `addresses` (uint64, any shape, not empty) touch `size` bytes each: one request."""
        each = _distinct(addresses)
        low, high = int(each[0]), int(each[-1]) + size
        for memory in self._fresh:
            if low < memory.stop and memory.start < high:
                self._check_written(memory, kind, each, size, program)
        if self._owners is not None:
            access = Access(kind, program, line=self._line())
            conflict = self._owners.touch(access, each, size)
            if conflict is not None:
                buffer, index = self._place(conflict[0])
                raise RaceError(self.kernel, buffer, index, conflict[1], access)
        if self._counters:
            self._count(kind, each, size, low, high)

    def _check_written(self, memory: FreshMemory, kind: str, addresses: Array, size: int, program: Program) -> None:
        inside = addresses[(addresses >= memory.start) & (addresses < memory.stop)]
        offsets = (inside - np.uint64(memory.start)).astype(np.int64)
        at = offsets[:, None] + np.arange(size) if size > 1 else offsets[:, None]
        if kind != "store" and not (written := memory.written[at].all(axis=1)).all():
            buffer, index = self._place(int(inside[~written][0]))
            raise UninitialisedReadError(self.kernel, buffer, index, program, kind=kind, line=self._line())
        if kind != "load":
            memory.written[at] = 1

    def _place(self, address: int) -> tuple[str, int]:
        """Name of the buffer that `address` is in, and the element's index there."""
        one = np.array([address], np.uint64)
        found = next(
            (b for b in self._buffers if b.start <= address < b.stop and StridedView(b).holds(one, 1)[0]), None
        )
        buffer = found or nearest_buffer(self._buffers, address)
        assert buffer is not None  # the access passed its check
        return buffer.name, buffer.index(address)

    def _count(self, kind: str, addresses: Array, size: int, low: int, high: int) -> None:
        for counter in self._counters:
            if counter.holds_all(addresses, size, low, high):
                counter.add(kind, addresses, size)
                return
        left = addresses  # of several buffers
        for counter in self._counters:
            mine = counter.view.holds(left, size)
            if mine.any():
                counter.add(kind, left[mine], size)
                left = left[~mine]


class _Counter:
    """One buffer's traffic, and the sectors of it that were touched."""

    def __init__(self, traffic: BufferTraffic, buffer: Buffer) -> None:
        self.traffic, self.view = traffic, StridedView(buffer)
        self._first_sector = buffer.start // SECTOR
        self._touched = np.zeros((buffer.stop - 1) // SECTOR - self._first_sector + 1, bool)

    def holds_all(self, addresses: Array, size: int, low: int, high: int) -> bool:
        buffer = self.view.buffer
        if low < buffer.start or buffer.stop < high:
            return False
        return not self.view.dims or bool(self.view.holds(addresses, size).all())

    def add(self, kind: str, addresses: Array, size: int) -> None:
        """Distinct `addresses` in ascending order."""
        steps = np.minimum(addresses[1:] - addresses[:-1], np.uint64(size))
        nbytes = size + int(steps.sum())  # each byte once, also where lanes overlap
        traffic = self.traffic
        if kind == "load":
            traffic.loaded_bytes += nbytes
        elif kind == "store":
            traffic.stored_bytes += nbytes
        else:
            traffic.atomic_bytes += nbytes
        sectors = self._sectors(addresses, size)
        traffic.requests += 1
        traffic.sectors_requested += sectors.size
        traffic.sectors += sectors.size - int(np.count_nonzero(self._touched[sectors]))
        self._touched[sectors] = True

    def _sectors(self, addresses: Array, size: int) -> Array:
        first = (addresses // np.uint64(SECTOR)).astype(np.int64) - self._first_sector
        last = ((addresses + np.uint64(size - 1)) // np.uint64(SECTOR)).astype(np.int64) - self._first_sector
        if (first != last).any():
            first = np.sort(np.concatenate([first, last]))
        distinct: Array = first[np.concatenate([[True], first[1:] != first[:-1]])]
        return distinct


def _distinct(addresses: Array) -> Array:
    """The distinct addresses in ascending order, uint64 [n]."""
    flat = addresses.reshape(-1).astype(np.uint64, copy=False)
    if flat.size > 1:
        flat = flat[np.concatenate([[True], flat[1:] != flat[:-1]])]  # mostly all there is to do
        if not (flat[1:] > flat[:-1]).all():
            flat = np.unique(flat)
    return flat
