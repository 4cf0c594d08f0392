"""Memory that starts unwritten, scratch and outputs, and which of its bytes have been written since."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.launch_buffers import Buffer, buffers_of, raw_memory
from pagebench.reference.dtypes import Array

SENTINEL = 0xFF  # a NaN of every float format, -1 as an integer
LARGEST = 1 << 30  # bytes; larger arrays are not filled and not followed: mostly untouched caches


class UninitialisedReadError(RuntimeError):
    """A kernel read scratch or output memory that nothing had written.

    `kernel`; `buffer` by the kernel's name for it; `index` of the element in the buffer; `kind` "load" or "atomic";
    `program` (program or block), `thread` (CUDA), `line` "FILE:LINE: SOURCE" or "".
    """

    def __init__(
        self,
        kernel: str,
        buffer: str,
        index: int,
        program: tuple[int, int, int],
        *,
        kind: str = "load",
        thread: tuple[int, int, int] | None = None,
        line: str = "",
    ) -> None:
        self.kernel, self.buffer, self.index, self.kind = kernel, buffer, index, kind
        self.program, self.thread, self.line = program, thread, line
        who = f"program {program}" + ("" if thread is None else f", thread {thread}")
        where = f", at {line}" if line else ""
        super().__init__(
            f"{kernel}: {kind} of memory that was never written, buffer {buffer!r} at element {index}, by {who}{where}"
        )


@dataclass(slots=True)
class FreshMemory:
    """One array from `provider.empty`: bytes [start, stop), and for each whether it has been `written` (uint8, 0 or 1).

    Every byte starts as `sentinel`, by which writes of the host between launches are seen.
    """

    array: Any  # kept alive, so that its memory is nobody else's
    start: int
    stop: int
    written: Array
    sentinel: int

    @classmethod
    def of(cls, array: Any) -> "FreshMemory | None":
        """Of a NumPy array or torch CPU tensor just made; None for anything else, a view with gaps, and above LARGEST.

        Fills it with the sentinel, unless one non-zero byte fills it already, which then is the sentinel.
        """
        if not isinstance(array, np.ndarray) and not hasattr(array, "data_ptr"):
            return None
        (buffer,) = buffers_of("empty", array)
        if buffer.rows()[1] or buffer.stop - buffer.start > LARGEST:
            return None
        raw = raw_memory(buffer)
        first = int(raw[0]) if raw.size else SENTINEL
        if first == 0 or not (raw == first).all():
            first = SENTINEL
            raw[:] = SENTINEL
        return cls(array, buffer.start, buffer.stop, np.zeros(raw.size, np.uint8), first)

    def note_host_writes(self) -> None:
        """Bytes that are no longer the sentinel have been written: by a launch, or by the host since the last one."""
        np.logical_or(self.written, self.raw != self.sentinel, out=self.written, casting="unsafe")

    @property
    def raw(self) -> Array:
        """uint8 [stop - start]: the memory itself."""
        return raw_memory(Buffer("", self.start, self.stop, 1, (self.stop - self.start,), (1,)))
