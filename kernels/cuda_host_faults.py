"""What a kernel did wrong, as exceptions that say where."""

import ctypes
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pagebench.kernels.cuda_host_build import source_line
from pagebench.kernels.launch_buffers import Buffer, MemoryFault, nearest_buffer

_ACCESS = ("load", "store", "atomic")
_NONE, _MEMORY, _READ_ONLY, _MISALIGNED, _DIVERGENCE, _INDEX, _UNDEFINED, _ABORTED, _SIGNAL, _TIMEOUT = range(10)
_GLOBAL, _STATIC_SHARED, _DYNAMIC_SHARED, _STACK, _MODULE = range(5)


class KernelFault(RuntimeError):  # noqa: N818  # a fault of the kernel, named like MemoryFault
    """A kernel was stopped: `kernel` by name, which `block` and `thread`, at which `line` (FILE:LINE, or "")."""

    def __init__(self, kernel: str, what: str, block: tuple[int, ...], thread: tuple[int, ...], line: str) -> None:
        self.kernel, self.block, self.thread, self.line = kernel, block, thread, line
        super().__init__(f"{kernel}: {what}, by block {block}, thread {thread}{_at(line)}")


class MisalignedAccess(KernelFault):
    """An access at an address that its type's alignment does not divide; a GPU stops with the same error."""


class BarrierDivergence(KernelFault):
    """Threads wait at a barrier or warp operation that others never reach."""


class UndefinedBehaviour(KernelFault):
    """Integer arithmetic without a defined result: a signed overflow, a division by zero."""


class KernelTimeout(KernelFault):
    """The launch ran longer than `cuda_host.time_limit_s`: an endless loop, or blocks that wait for each other."""


class KernelAborted(KernelFault):
    """assert, __trap(), or a signal (a stack overflow, say)."""


class Fault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("space", ctypes.c_int32),
        ("source_line", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("object_lo", ctypes.c_uint64),
        ("object_hi", ctypes.c_uint64),
        ("index", ctypes.c_int64),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("object", ctypes.c_char * 128),
        ("file", ctypes.c_char * 256),
        ("message", ctypes.c_char * 1536),
    )


def raise_fault(kernel: str, fault: Fault, buffers: Sequence[Buffer], path: Path) -> NoReturn:
    """Raises the exception of `fault`; `buffers` are the launch's, `path` the kernel's module."""
    line = _line(fault, path)
    block, thread = _triple(fault.block), _triple(fault.thread)
    message = fault.message.decode(errors="replace")
    if fault.kind in (_MEMORY, _READ_ONLY, _INDEX):
        raise _memory_fault(kernel, fault, buffers, line, message)
    if fault.kind == _MISALIGNED:
        target = _object(fault, buffers)
        name = "" if target is None else f" in {target.name!r} at element {target.index(fault.address)}"
        kind = f" of {message}" if message else ""
        what = f"misaligned {_ACCESS[fault.access]}{kind} at {fault.address:#x}{name}, not a multiple of {fault.index}"
        raise MisalignedAccess(kernel, what, block, thread, line)
    if fault.kind == _DIVERGENCE:
        raise BarrierDivergence(kernel, message, block, thread, line)
    if fault.kind == _UNDEFINED:
        raise UndefinedBehaviour(kernel, message, block, thread, line)
    if fault.kind == _TIMEOUT:
        raise KernelTimeout(kernel, "time limit exceeded", block, thread, line)
    if fault.kind == _SIGNAL:
        message = f"{signal.Signals(fault.index).name} at {fault.address:#x} {message}".rstrip()
    raise KernelAborted(kernel, message, block, thread, line)


def _memory_fault(kernel: str, fault: Fault, buffers: Sequence[Buffer], line: str, message: str) -> MemoryFault:
    kind = _ACCESS[fault.access]
    address, size = fault.address, fault.size
    buffer = _object(fault, buffers)
    detail = f" ({message})" if message else ""
    if fault.kind == _READ_ONLY:
        detail = " (it is read-only)"
    if fault.kind == _INDEX:  # an array of known extent, in registers or shared memory: no address yet
        kind, size, address = "index", 0, fault.index
        name = f"array {fault.object.decode()}".replace("'", "")
        extent = int(name.split("[")[1].split("]")[0]) if "[" in name else 0
        buffer = Buffer(name, 0, extent, 1, (extent,), (1,))
    return MemoryFault(
        kernel, kind, address, size, buffer, _triple(fault.block), _triple(fault.thread), detail=detail + _at(line)
    )


def _object(fault: Fault, buffers: Sequence[Buffer]) -> Buffer | None:
    """What the access was aimed at: a shared array or module variable, else the nearest buffer of the launch."""
    if fault.space == _GLOBAL:
        return nearest_buffer(buffers, fault.address)
    kind = {_STATIC_SHARED: "__shared__ ", _MODULE: "__device__ "}.get(fault.space, "")
    itemsize = max(int(fault.size), 1)
    count = (fault.object_hi - fault.object_lo) // itemsize
    name = kind + fault.object.decode()
    return Buffer(name, fault.object_lo, fault.object_hi, itemsize, (count,), (itemsize,))


def _line(fault: Fault, path: Path) -> str:
    if fault.pc:
        return source_line(str(path), fault.pc - 1)  # it is a return address: the call lies before it
    if fault.file:
        return f"{fault.file.decode()}:{fault.source_line}"
    return f"line {fault.source_line}" if fault.source_line else ""


def _at(line: str) -> str:
    return f", at {line}" if line else ""


def _triple(values: Any) -> tuple[int, int, int]:
    return (int(values[0]), int(values[1]), int(values[2]))
