"""Put a host problem's arrays on a provider's device: fresh copies, fences around them, every view rebuilt.

Each base allocation is copied once into a longer one with FENCE bytes of a known pattern on both sides, and every view
of it is rebuilt on the copy with the provider's `as_strided`. Strides, offsets and aliasing (K and V as halves of one
tensor) are thus what the kernel sees. A provider without `as_strided` gets contiguous arrays, without fences. What a
problem calls pinned goes through the provider's `to_pinned`, where it has one, instead of `to_device`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from pagebench.reference.dtypes import Array

FENCE = 1024  # bytes; a multiple of 256, so that a base keeps its alignment
FENCE_BYTE = 0xA5
ALIGNMENT = 256

P = TypeVar("P")


class FenceError(AssertionError):
    """A kernel wrote next to an array it was given."""


@dataclass(frozen=True, slots=True)
class Base:
    """One base allocation on the device: uint8 [FENCE + nbytes (rounded up) + FENCE]."""

    name: str
    host: Array  # the host array that owns the memory
    device: Any


@dataclass(frozen=True, slots=True)
class Placement(Generic[P]):
    """A problem with device arrays, and the bases behind them (empty for a provider without `as_strided`)."""

    problem: P
    bases: tuple[Base, ...]
    provider: Any

    def host_bytes(self, base: Base) -> Array:
        """uint8 [nbytes]: what the base holds now, gaps between views included. FenceError for a broken fence."""
        everything = np.asarray(self.provider.to_host(base.device)).view(np.uint8)
        stop = FENCE + base.host.nbytes
        for side, fence in (("before", everything[:FENCE]), ("after", everything[stop:])):
            broken = np.flatnonzero(fence != FENCE_BYTE)
            if broken.size:
                at = int(broken[-1]) - FENCE if side == "before" else int(broken[0])
                raise FenceError(f"{base.name}: {broken.size} bytes written {side} the array, the nearest at {at:+d}")
        return everything[FENCE:stop]

    def check_fences(self) -> None:
        """Raise FenceError if a byte around any array changed."""
        for base in self.bases:
            self.host_bytes(base)


def place(problem: P, provider: Any, resident: Mapping[str, Any] | None = None) -> Placement[P]:
    """Copy `problem` to the provider's device. Host arrays are never written, nor shared with the device's.

    resident: arrays by name, as `arrays_of` has it, that are on the device already and are taken as they are.
    """
    pinned = getattr(problem, "pinned_fields", ())
    there = resident or {}

    def put(array: Array, on_host: bool) -> Any:
        return getattr(provider, "to_pinned" if on_host else "to_device", provider.to_device)(array)

    if not hasattr(provider, "as_strided"):

        def move_contiguous(name: str, array: Array) -> Any:
            return there[name] if name in there else put(array.copy(), name.partition("[")[0] in pinned)

        return Placement(_map_arrays(problem, move_contiguous), (), provider)
    bases: dict[tuple[int, bool], Base] = {}

    def move(name: str, array: Array) -> Any:
        if name in there:
            return there[name]
        on_host = name.partition("[")[0] in pinned
        if array.size == 0:
            return put(np.empty(array.shape, array.dtype), on_host)  # nothing to fence, its address is arbitrary
        if any(s % array.itemsize for s in array.strides):
            array = array.copy()  # no device can express such a view
        owner = owner_of(array)
        key = (owner.ctypes.data, on_host)
        base = bases.get(key)
        if base is None or base.host.nbytes < owner.nbytes:
            base = bases[key] = Base(name, owner, put(fenced_bytes(owner), on_host))
        strides = tuple(s // array.itemsize for s in array.strides)
        offset = (FENCE + array.ctypes.data - owner.ctypes.data) // array.itemsize
        return provider.as_strided(base.device, array.dtype, array.shape, strides, offset)

    return Placement(_map_arrays(problem, move), tuple(bases.values()), provider)


def fenced_bytes(owner: Array) -> Array:
    """uint8 [FENCE + nbytes rounded up to ALIGNMENT + FENCE]: the bytes of contiguous `owner` between two fences."""
    inner = -(-owner.nbytes // ALIGNMENT) * ALIGNMENT
    room = np.empty(inner + 2 * FENCE + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    out = room[start : start + inner + 2 * FENCE]
    out[:FENCE] = FENCE_BYTE
    out[FENCE + owner.nbytes :] = FENCE_BYTE
    out[FENCE : FENCE + owner.nbytes] = raw_bytes(owner)
    return out


def raw_bytes(owner: Array) -> Array:
    """uint8 [nbytes] view of an array whose elements fill its memory, in memory order."""
    order = np.argsort([-s for s in owner.strides], kind="stable")
    return owner.transpose(order).reshape(-1).view(np.uint8)


def owner_of(array: Array) -> Array:
    """The array that owns `array`'s memory; a copy of the view's span where that is not a plain NumPy array."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    usable = _fills_its_memory(owner) and (array.ctypes.data - owner.ctypes.data) % array.itemsize == 0
    if usable and owner.ctypes.data <= array.ctypes.data:
        return owner
    return _span(array)


def _fills_its_memory(array: Array) -> bool:
    dense = 1
    for n, stride in sorted(zip(array.shape, array.strides, strict=True), key=lambda x: x[1]):
        if n > 1 and stride != dense * array.itemsize:
            return False
        dense *= n
    return True


def _span(array: Array) -> Array:
    """uint8 view from the first to the last byte that `array` covers."""
    if array.size == 0:
        return np.empty(0, np.uint8)
    nbytes = array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (nbytes // array.itemsize,), (array.itemsize,))
    return flat.view(np.uint8)


def arrays_of(problem: Any) -> Iterator[tuple[str, Array]]:
    """(name, array) of every array of a host problem, in field order; members of tuples and dicts as name[key]."""
    for field in fields(problem):
        for name, value in _members(field.name, getattr(problem, field.name)):
            if isinstance(value, np.ndarray):
                yield name, value


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key}]", item) for key, item in value.items())
    elif isinstance(value, tuple):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    else:
        yield name, value


def _map_arrays(problem: P, move: Callable[[str, Array], Any]) -> P:
    """The same dataclass with every array moved; not validated, since device arrays are not the host's to check."""
    moved = object.__new__(type(problem))
    for field in fields(problem):  # type: ignore[arg-type]  # P is a dataclass
        value = getattr(problem, field.name)
        object.__setattr__(moved, field.name, _map_value(field.name, value, move))
    return moved


def _map_value(name: str, value: Any, move: Callable[[str, Array], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return move(name, value)
    if isinstance(value, dict):
        return {key: _map_value(f"{name}[{key}]", item, move) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_map_value(f"{name}[{i}]", item, move) for i, item in enumerate(value))
    return value
