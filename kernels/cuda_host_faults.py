"""What a kernel did wrong, as exceptions that say where."""

import ctypes
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pagebench.kernels.cuda_host_build import source_line
from pagebench.kernels.launch_buffers import Buffer, MemoryFault, StridedView, nearest_buffer
from pagebench.kernels.memory_trace_fresh import UninitialisedReadError
from pagebench.kernels.memory_trace_races import Access, RaceError

_ACCESS = ("load", "store", "atomic", "cp.async in flight")
_NONE, _MEMORY, _READ_ONLY, _MISALIGNED, _DIVERGENCE, _INDEX, _UNDEFINED, _ABORTED, _SIGNAL, _TIMEOUT = range(10)
_RACE, _UNINITIALISED = 10, 11
_GLOBAL, _STATIC_SHARED, _DYNAMIC_SHARED, _STACK, _MODULE = range(5)


class KernelFault(RuntimeError):  # noqa: N818  # a fault of the kernel, named like MemoryFault
    """A kernel was stopped: `kernel` by name, which `block` and `thread`, at which `line` (FILE:LINE, or "")."""

    def __init__(self, kernel: str, what: str, block: tuple[int, ...], thread: tuple[int, ...], line: str) -> None:
        self.kernel, self.block, self.thread, self.line = kernel, block, thread, line
        super().__init__(f"{kernel}: {what}, by block {block}, thread {thread}{_at(line)}")


class MisalignedAccess(KernelFault):
    """An access at an address that its type's alignment does not divide; a GPU stops with the same error."""


class BarrierDivergence(KernelFault):
    """Threads wait at a barrier or warp operation that others never reach, or shuffle from a lane that is not there."""


class UndefinedBehaviour(KernelFault):
    """Arithmetic without a defined result.

    A signed overflow, a division by zero, a shift by as many bits as there are, a number converted to an integer type
    that has no room for it. PTX defines the last two (it clamps), C++ does not: the compiler may assume they never
    happen. The intrinsics, such as __float2int_rn and __funnelshift_lc, are defined.
    """


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
        ("other_pc", ctypes.c_uint64),
        ("other_access", ctypes.c_int32),
        ("other_block", ctypes.c_uint32 * 3),
        ("other_thread", ctypes.c_uint32 * 3),
        ("object", ctypes.c_char * 128),
        ("file", ctypes.c_char * 256),
        ("message", ctypes.c_char * 1536),
    )


class SourceText:
    """The lines of an expanded module by file and number, as its #line directives say."""

    def __init__(self, text: str) -> None:
        self._text = text

    def at(self, line: str) -> str:
        """`line`, FILE:NUMBER, with the source that stands there."""
        file, _, wanted = line.rpartition(":")
        here, number = "", 0
        for text in self._text.split("\n"):
            directive = re.match(r'#line (\d+) "(.*)"$', text)
            if directive:
                here, number = directive[2], int(directive[1]) - 1
                continue
            if here == file and str(number + 1) == wanted:
                return f"{line}: {text.strip()}"
            number += 1
        return line


def raise_fault(kernel: str, fault: Fault, buffers: Sequence[Buffer], path: Path, source: SourceText) -> NoReturn:
    """Raises the exception of `fault`; `buffers` are the launch's, `path` the kernel's module."""
    line = _line(fault, path)
    if fault.kind in (_RACE, _UNINITIALISED):
        _raise_of_trace(kernel, fault, buffers, source.at(line), path, source)
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


def _raise_of_trace(
    kernel: str, fault: Fault, buffers: Sequence[Buffer], line: str, path: Path, source: SourceText
) -> NoReturn:
    buffer = _object(fault, buffers)
    name, index = ("?", 0) if buffer is None else (buffer.name, buffer.index(fault.address))
    kind, block, thread = _ACCESS[fault.access], _triple(fault.block), _triple(fault.thread)
    if fault.kind == _UNINITIALISED:
        raise UninitialisedReadError(kernel, name, index, block, kind=kind, thread=thread, line=line)
    before = source.at(source_line(str(path), fault.other_pc - 1)) if fault.other_pc else ""
    first = Access(_ACCESS[fault.other_access], _triple(fault.other_block), _triple(fault.other_thread), before)
    raise RaceError(kernel, name, index, first, Access(kind, block, thread, line))


def _memory_fault(kernel: str, fault: Fault, buffers: Sequence[Buffer], line: str, message: str) -> MemoryFault:
    kind = _ACCESS[fault.access]
    address, size = fault.address, fault.size
    buffer = _object(fault, buffers)
    detail = f" ({message})" if message else ""
    if fault.kind == _READ_ONLY:
        detail = " (it is read-only)"
    if fault.space == _DYNAMIC_SHARED and buffer is not None:
        detail = f" (the launch provides {buffer.stop - buffer.start} bytes of it){detail}"
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
        return _holder(buffers, fault.address) or nearest_buffer(buffers, fault.address)
    kind = {_STATIC_SHARED: "__shared__ ", _MODULE: "__device__ "}.get(fault.space, "")
    itemsize = max(int(fault.size), 1)
    count = (fault.object_hi - fault.object_lo) // itemsize
    name = kind + fault.object.decode()
    return Buffer(name, fault.object_lo, fault.object_hi, itemsize, (count,), (itemsize,))


def _holder(buffers: Sequence[Buffer], address: int) -> Buffer | None:
    """The first buffer one of whose own elements is at `address`."""
    one = np.array([address], np.uint64)
    return next((b for b in buffers if b.start <= address < b.stop and StridedView(b).holds(one, 1)[0]), None)


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
