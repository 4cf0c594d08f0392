"""The check before every access that a Triton kernel makes in the interpreter, and the seam for recording them."""

import linecache
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np

from pagebench.kernels.launch_buffers import Buffer, MemoryFault, StridedView, nearest_buffer
from pagebench.kernels.triton_numerics import Array

Program = tuple[int, int, int]
# Called with (kind, addresses, size, program) for every access that passed its check: kind "load", "store" or "atomic",
# `addresses` uint64 of the active lanes in any shape, `size` bytes each.
Observer = Callable[[str, Array, int, Program], None]
observers: list[Observer] = []

_OWN = ("builder", "language", "launch", "libdevice", "memory", "reductions", "rewrite")
_MACHINERY = (
    *(str(Path(__file__).with_name(f"triton_{part}.py")) for part in _OWN),
    str(Path(__file__).with_name("memory_trace")),
)


class LiveBuffers:
    """What one launch of `kernel` may touch: the bytes of its views' own elements, and nothing between them.

    Views without gaps that overlap (of one storage) count as one range.
    """

    def __init__(self, kernel: str, buffers: Iterable[Buffer]) -> None:
        self.kernel = kernel
        self.buffers = [b for b in buffers if b.stop > b.start]
        self.strided = [view for view in map(StridedView, self.buffers) if view.dims]
        self.starts: list[int] = []
        self.stops: list[int] = []
        for buffer in sorted((b for b in self.buffers if not b.rows()[1]), key=lambda b: b.start):
            if self.stops and buffer.start < self.stops[-1]:
                self.stops[-1] = max(self.stops[-1], buffer.stop)
            else:
                self.starts.append(buffer.start)
                self.stops.append(buffer.stop)

    def check(self, kind: str, addresses: Array, mask: Array | None, size: int, program: Program) -> None:
        """Raise MemoryFault unless [address, address + size) of every lane that `mask` leaves on is live."""
        if mask is not None and not mask.all():
            addresses = addresses[np.broadcast_to(mask, addresses.shape)]
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max()) + size
        i = bisect_right(self.starts, low) - 1
        if (i < 0 or high > self.stops[i]) and not self._in_one_view(addresses, size, low, high):
            self._check_each(kind, addresses, size, program)
        for observe in observers:
            observe(kind, addresses, size, program)

    def _in_one_view(self, addresses: Array, size: int, low: int, high: int) -> bool:
        """Whether the access lies in one strided view; that view is asked first the next time."""
        for i, view in enumerate(self.strided):
            if view.buffer.start <= low and high <= view.buffer.stop and view.holds(addresses, size).all():
                if i:
                    self.strided.insert(0, self.strided.pop(i))
                return True
        return False

    def _check_each(self, kind: str, addresses: Array, size: int, program: Program) -> None:
        live = np.zeros(addresses.shape, bool)
        if self.starts:
            starts, stops = np.array(self.starts, dtype=np.uint64), np.array(self.stops, dtype=np.uint64)
            i = np.searchsorted(starts, addresses, side="right") - 1
            live |= (i >= 0) & (addresses <= stops[i] - np.uint64(size))
        for view in self.strided:
            live |= view.holds(addresses, size)
        if not live.all():
            self._fault(kind, int(addresses[~live].flat[0]), size, program)

    def _fault(self, kind: str, address: int, size: int, program: Program) -> None:
        near = nearest_buffer(self.buffers, address)
        line = kernel_line()
        raise MemoryFault(self.kernel, kind, address, size, near, program, detail=f", at {line}" if line else "")


def kernel_line() -> str:
    """ "FILE:LINE: SOURCE" of the innermost frame that is neither Triton's nor ours; "" when there is none."""
    machinery = _machinery()
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        path = frame.f_code.co_filename
        if not path.startswith(machinery):
            return f"{path}:{frame.f_lineno}: {linecache.getline(path, frame.f_lineno).strip()}"
    return ""


@cache
def _machinery() -> tuple[str, ...]:
    return (str(Path(sys.modules["triton"].__file__ or "").parent), *_MACHINERY)
