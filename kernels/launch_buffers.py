"""The memory that one launch on a CPU may touch, and the error when it touches anything else.

Both ways of running a kernel without a GPU (Triton's interpreter, CUDA C++ compiled for the host) check every access
against the buffers of the launch before it happens. A buffer is an array argument, or an array that a pointer table
argument points to.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NEAR = 1 << 16  # bytes from a buffer: a miss by no more, or by no more than the buffer's size, was aimed at it


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array of a launch: addresses in bytes, `shape` and `strides` (bytes, none negative) of the view."""

    name: str
    start: int
    stop: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def index(self, address: int) -> int:
        """Offset of `address` from the view's first element, in elements (floor; negative when before it)."""
        return (address - self.start) // self.itemsize

    def rows(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """How the view's own bytes lie between start and stop: (run, dims).

        run: bytes of a contiguous run; dims: (stride in bytes, count) of what repeats it, outermost first, none for a
        view without gaps. Dimensions that interleave with one another (no allocator makes such) count as without gaps.
        """
        if self.stop <= self.start:
            return 0, ()
        run, dims = self.itemsize, list[tuple[int, int]]()
        span = run  # from the first to the last byte of the dimensions so far
        for stride, count in sorted(zip(self.strides, self.shape, strict=True)):
            if count == 1 or stride == 0:
                continue
            if stride < span:
                return self.stop - self.start, ()
            span += stride * (count - 1)
            if stride == run and not dims:
                run *= count
            elif dims and stride == dims[-1][0] * dims[-1][1]:
                dims[-1] = dims[-1][0], dims[-1][1] * count
            else:
                dims.append((stride, count))
        return run, tuple(reversed(dims))


class StridedView:
    """Which addresses are a view's own elements."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.run, self.dims = buffer.rows()

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """bool like `addresses`: whether [address, address + size) lies in one run of the view."""
        rest = addresses - np.uint64(self.buffer.start)  # wraps to something huge below the start
        inside = rest < np.uint64(self.buffer.stop - self.buffer.start)
        for stride, count in self.dims:
            index = np.minimum(rest // np.uint64(stride), np.uint64(count - 1))
            rest -= index * np.uint64(stride)
        inside &= rest <= np.uint64(self.run - size) if size <= self.run else False
        return inside


class MemoryFault(RuntimeError):  # noqa: N818  # a fault is what the kernel committed
    """A kernel was about to access memory outside every buffer of its launch; the access did not happen.

    The gaps between the elements of a strided view are outside it. `buffer` is the nearest buffer (or None), `index`
    the element offset from its first element, `kind` one of "load", "store", "atomic" or "index" (of an array in
    registers, size 0), `program` the program or block id, `thread` the CUDA thread (None for Triton).
    """

    def __init__(
        self,
        kernel: str,
        kind: str,
        address: int,
        size: int,
        buffer: Buffer | None,
        program: tuple[int, int, int],
        thread: tuple[int, int, int] | None = None,
        detail: str = "",
    ) -> None:
        self.kernel, self.kind, self.address, self.size = kernel, kind, address, size
        self.buffer, self.program, self.thread = buffer, program, thread
        self.index = None if buffer is None else buffer.index(address)
        where = f"program {program}" + ("" if thread is None else f", thread {thread}")
        if buffer is None:
            what = f"address {address:#x}, near no buffer of the launch"
        else:
            what = _place(buffer, address)
            if buffer.start <= address and address + max(size, 1) <= buffer.stop:
                what += f" (between the elements of a view of shape {buffer.shape}, strides {buffer.strides} bytes)"
        width = f" of {size} bytes" if size else ""
        super().__init__(f"{kernel}: out-of-bounds {kind}{width}, {what}, by {where}{detail}")


def _place(buffer: Buffer, address: int) -> str:
    """Where a faulty address lies. Farther away than the buffer is long, it was hardly meant to be there."""
    count = (buffer.stop - buffer.start) // buffer.itemsize
    where = f"buffer {buffer.name!r} at element {buffer.index(address)} of {count}"
    before, behind = buffer.start - address, address - buffer.stop
    if max(before, behind) <= max(NEAR, buffer.stop - buffer.start):
        return where
    side = f"{before} bytes before the start" if before > 0 else f"{behind} bytes past the end"
    return f"address {address:#x}, in no buffer of the launch: {side} of {buffer.name!r} is the nearest ({where})"


class PointerTable(np.ndarray):
    """int64 host array of addresses; `targets` are the arrays they point to (kept alive, and live in a launch)."""

    targets: tuple[Any, ...] = ()

    def __array_finalize__(self, other: Any) -> None:
        self.targets = getattr(other, "targets", ())


def host_pointer_table(arrays: Sequence[np.ndarray]) -> PointerTable:
    """int64 [len(arrays)]: the address of each host array, for a kernel that walks many arrays in one launch."""
    table = np.array([array.ctypes.data for array in arrays], dtype=np.int64).view(PointerTable)
    table.targets = tuple(arrays)
    return table


def torch_pointer_table(tensors: Sequence[Any]) -> Any:
    """The same as an int64 torch tensor on the tensors' device, its `targets` attribute set likewise."""
    import torch

    table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=tensors[0].device)
    table.targets = tuple(tensors)
    return table


def buffers_of(name: str, array: Any) -> Iterable[Buffer]:
    """The buffers that argument `array` (NumPy array or torch CPU tensor) brings to a launch, its targets included."""
    yield _buffer(name, array)
    for i, target in enumerate(getattr(array, "targets", ())):
        yield _buffer(f"{name}[{i}]", target)


def _buffer(name: str, array: Any) -> Buffer:
    if isinstance(array, np.ndarray):
        itemsize, start, strides = array.itemsize, array.ctypes.data, array.strides
    else:
        itemsize, start = array.element_size(), array.data_ptr()
        strides = tuple(s * itemsize for s in array.stride())
    shape = tuple(array.shape)
    empty = any(n == 0 for n in shape)
    span = 0 if empty else itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return Buffer(name, start, start + span, itemsize, shape, strides)


def raw_memory(buffer: Buffer) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """uint8 [stop - start]: the memory from the first to the last byte of a buffer, which must stay alive meanwhile."""
    span = buffer.stop - buffer.start
    memory: Any = (ctypes.c_uint8 * span).from_address(buffer.start)
    raw: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(memory, np.uint8)
    return raw


def nearest_buffer(buffers: Sequence[Buffer], address: int) -> Buffer | None:
    """The buffer whose range lies closest to `address`; None when there is none within 8 GiB.

    An offset of 16-bit elements that wraps in 32 bits lands 4 or 8 GiB away.
    """

    def distance(b: Buffer) -> int:
        return max(b.start - address, address - b.stop + 1, 0)

    best = min(buffers, key=distance, default=None)
    return best if best is not None and distance(best) <= 1 << 33 else None
