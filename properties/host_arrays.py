"""Problems as plain NumPy arrays whose bytes may be overwritten: copies that keep every view on its base."""

from typing import Any, TypeVar

import numpy as np

from pagebench.reference import placement
from pagebench.reference.dtypes import Array
from pagebench.reference.problem import Problem

P = TypeVar("P", bound=Problem)


class HostArrays:
    """The part of a provider that placement needs, over NumPy: the device is the host."""

    def to_device(self, array: Array) -> Array:
        return array.copy()

    def to_host(self, array: Array) -> Array:
        return array

    def as_strided(
        self, base: Array, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Array:
        if 0 in shape:
            return np.empty(shape, dtype)  # NumPy refuses a view of nothing whose strides pass the buffer's end
        size = dtype.itemsize
        return np.ndarray(shape, dtype, buffer=base, offset=offset * size, strides=tuple(s * size for s in strides))


def copy_of(problem: P) -> placement.Placement[P]:
    """A writable host copy of `problem`, views rebuilt with their strides and aliasing on copies of their bases."""
    return placement.place(problem, HostArrays())


def member(value: Any, name: str) -> Any:
    """The array of problem `value` that `placement.arrays_of` calls `name`: key_cache, caches[3], packed[scales]."""
    field, _, key = name.rstrip("]").partition("[")
    found = getattr(value, field)
    if not key:
        return found
    return found[int(key)] if isinstance(found, tuple) else found[key]
