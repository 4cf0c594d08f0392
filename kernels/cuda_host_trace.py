"""The memory trace of a launch on the host: what C++ is asked for, and what it found."""

import ctypes
from collections.abc import Sequence
from typing import Any

from pagebench.kernels.launch_buffers import Buffer
from pagebench.kernels.memory_trace import BufferTraffic, LaunchTrace, Recorder


class _Traffic(ctypes.Structure):
    _fields_ = (
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("atomic", ctypes.c_uint64),
        ("requests", ctypes.c_uint64),
        ("sectors_requested", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
    )


class _Fresh(ctypes.Structure):
    _fields_ = (("lo", ctypes.c_uint64), ("hi", ctypes.c_uint64), ("written", ctypes.c_void_p))


class _Trace(ctypes.Structure):
    _fields_ = (
        ("races", ctypes.c_uint64),
        ("uninitialised", ctypes.c_uint64),
        ("fresh", ctypes.c_void_p),
        ("num_fresh", ctypes.c_uint64),
        ("traffic", ctypes.c_void_p),
    )


class HostTrace:
    """One launch's request to record: `address` of the struct; `finish` takes over what was counted."""

    def __init__(self, recording: Recorder, kernel: str, grid: Sequence[int], buffers: Sequence[Buffer]) -> None:
        x, y, z = grid
        self._launch: LaunchTrace = recording.begin(kernel, (x, y, z), "host", buffers)
        self._names = [buffer.name for buffer in buffers]
        self._traffic = (_Traffic * max(len(buffers), 1))()
        live = [m for m in recording.fresh if any(m.start < b.stop and b.start < m.stop for b in buffers)]
        self._kept = live
        self._fresh = (_Fresh * max(len(live), 1))(*[_Fresh(m.start, m.stop, m.written.ctypes.data) for m in live])
        self._trace = _Trace(
            recording.races,
            recording.uninitialised,
            ctypes.addressof(self._fresh),
            len(live),
            ctypes.addressof(self._traffic) if recording.traffic else None,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._trace)

    def finish(self) -> None:
        for name, counted in zip(self._names, self._traffic, strict=False):
            _add(self._launch.buffers[name], counted)


def _add(traffic: BufferTraffic, counted: Any) -> None:
    traffic.loaded_bytes += counted.loaded
    traffic.stored_bytes += counted.stored
    traffic.atomic_bytes += counted.atomic
    traffic.requests += counted.requests
    traffic.sectors_requested += counted.sectors_requested
    traffic.sectors += counted.sectors
