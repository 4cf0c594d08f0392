"""Kernel arguments on the host: CuPy's conversions, checked against the kernel's parameter types."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.launch_buffers import Buffer, buffers_of

_KINDS = {
    "p": "a pointer",
    "i": "a signed integer",
    "u": "an unsigned integer",
    "b": "a bool",
    "f": "a float",
    "h": "a __half",
    "g": "a __nv_bfloat16",
    "s": "a struct",
}


class _ParamStruct(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("pointee_size", ctypes.c_uint32),
        ("kind", ctypes.c_char),
        ("pointee", ctypes.c_char),
        ("padding", ctypes.c_char * 6),
    )


class KernelInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("params", ctypes.POINTER(_ParamStruct)),
        ("num_params", ctypes.c_uint64),
    )


class _Dimension(ctypes.Structure):
    _fields_ = (("stride", ctypes.c_uint64), ("count", ctypes.c_uint64))


class Range(ctypes.Structure):
    _fields_ = (
        ("lo", ctypes.c_uint64),
        ("hi", ctypes.c_uint64),
        ("writable", ctypes.c_uint64),
        ("run", ctypes.c_uint64),
        ("num_dims", ctypes.c_uint64),
        ("dims", ctypes.POINTER(_Dimension)),
    )

    @classmethod
    def of(cls, buffer: Buffer, writable: bool) -> "Range":
        """The elements of a view."""
        run, dims = buffer.rows()
        found = (_Dimension * len(dims))(*(_Dimension(stride, count) for stride, count in dims))
        return cls(buffer.start, buffer.stop, int(writable), run, len(dims), found)


@dataclass(frozen=True, slots=True)
class KernelParam:
    """One parameter: `kind` is a letter of _KINDS, `pointee` the same of what a pointer points to ("v": void).

    Sizes are in bytes.
    """

    name: str
    kind: str
    size: int
    pointee: str
    pointee_size: int

    @classmethod
    def read(cls, raw: Any, name: str) -> "KernelParam":
        pointee = raw.pointee.decode() if raw.kind == b"p" else ""
        return cls(name, raw.kind.decode(), raw.size, pointee, raw.pointee_size)

    def __str__(self) -> str:
        return f"{_KINDS[self.kind]} of {self.size} bytes"


class ArgumentBlock:
    """One launch's arguments: `address` of the pointers to their bytes; the `buffers` they bring, and the `ranges`.

    The last range is the argument block itself, the others are the buffers'.
    """

    def __init__(self, kernel: str, params: Sequence[KernelParam], args: Sequence[Any]) -> None:
        if len(args) != len(params):
            names = ", ".join(p.name for p in params)
            raise ValueError(f"args must be {len(params)} values ({names}) for {kernel}, not {len(args)}")
        self._kept = tuple(args)
        self.buffers: list[Buffer] = []
        ranges: list[Range] = []
        values = [self._value(kernel, p, a, ranges) for p, a in zip(params, args, strict=True)]
        self._fill(values)
        ranges.append(Range(self.address, ctypes.addressof(self._memory) + ctypes.sizeof(self._memory)))
        self.ranges = (Range * len(ranges))(*ranges)

    def _fill(self, values: list[bytes]) -> None:
        """The pointer array, then each value on a boundary of 64 bytes (no parameter type needs more)."""
        head = -(-8 * max(len(values), 1) // 64) * 64
        offsets = [head]
        for value in values:
            offsets.append(offsets[-1] + -(-len(value) // 64) * 64)
        self._memory = (ctypes.c_char * (offsets[-1] + 64))()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        # Alignment moves the block by less than the 64 spare bytes at its end.
        for i, (value, offset) in enumerate(zip(values, offsets, strict=False)):
            ctypes.c_uint64.from_address(self.address + 8 * i).value = self.address + offset
            ctypes.memmove(self.address + offset, value, len(value))

    def _value(self, kernel: str, param: KernelParam, arg: Any, ranges: list[Range]) -> bytes:
        where = f"{kernel}: argument {param.name!r}"
        if isinstance(arg, np.ndarray) and not (arg.ndim == 0 and param.kind == "s"):
            return self._array(where, param, arg, ranges)
        scalar = _as_scalar(where, arg)
        if param.kind == "p":
            if arg is not None and scalar.dtype.itemsize != 8:
                raise ValueError(f"{where} must be an array, None or a 64-bit address for a pointer, not {arg!r}")
            return scalar.tobytes()
        if arg is None:
            raise ValueError(f"{where} must be {param}, not None")
        if scalar.dtype.itemsize != param.size or not _same_kind(param.kind, scalar.dtype):
            raise ValueError(f"{where} must be {param} (the kernel's parameter type), not {scalar.dtype.name} {arg!r}")
        return scalar.tobytes()

    def _array(self, where: str, param: KernelParam, array: Any, ranges: list[Range]) -> bytes:
        if param.kind != "p":
            raise ValueError(f"{where} must be {param}, not an array of {array.dtype.name}")
        if any(stride < 0 for stride in array.strides):
            raise ValueError(f"{where} must have no negative strides, not {array.strides}")
        if not _may_hold(param, array.dtype):
            wanted = f"{param.pointee_size}-byte values" if param.pointee in "ip" else _KINDS[param.pointee].split()[1]
            raise ValueError(f"{where} must hold {wanted} (the kernel's pointer type), not {array.dtype.name}")
        views = (array, *getattr(array, "targets", ()))
        for buffer, view in zip(buffers_of(param.name, array), views, strict=True):
            self.buffers.append(buffer)
            ranges.append(Range.of(buffer, view.flags.writeable))
        return int(array.ctypes.data).to_bytes(8, "little")


def _as_scalar(where: str, arg: Any) -> np.ndarray[Any, Any]:
    """The 0-d array of a scalar argument, in the type that CuPy passes."""
    if arg is None:
        return np.array(0, np.int64)
    if isinstance(arg, np.generic):
        return np.asarray(arg)
    if isinstance(arg, np.ndarray) and arg.ndim == 0:
        return arg
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64)):
        if isinstance(arg, kind):
            return np.array(arg, dtype)
    raise TypeError(f"{where} must be a NumPy array, a NumPy or Python scalar or None, not {type(arg).__name__}")


def _same_kind(kind: str, dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "iub":
        return kind in "iubs"
    return kind == "s" or kind == _float_kind(dtype)


def _may_hold(param: KernelParam, dtype: np.dtype[Any]) -> bool:
    """Whether an array of `dtype` can be meant for a pointer of this type.

    Bytes, integers behind an unsigned or struct pointer and bits behind a float pointer of their size are taken as raw
    data. Indices (signed) and floats of another type are a mistake, and silent garbage on a GPU.
    """
    if dtype.itemsize == 1 or param.pointee in "vsub":
        return True
    if dtype.itemsize != param.pointee_size:
        return param.pointee_size == 1
    return param.pointee in "ip" or dtype.kind in "iu" or param.pointee == _float_kind(dtype)


def _float_kind(dtype: np.dtype[Any]) -> str:
    return {"float16": "h", "bfloat16": "g"}.get(dtype.name, "f" if dtype.kind == "f" else "s")
