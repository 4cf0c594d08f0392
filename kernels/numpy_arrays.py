"""The array half of a provider that works on NumPy arrays: derive from it, or copy what you need of it."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class NumpyArrays:
    """Device arrays are host arrays."""

    def unavailable(self) -> str | None:
        return None

    def to_device(self, array: Array) -> Array:
        return array.copy()

    def to_host(self, array: Array) -> Array:
        return array

    def synchronize(self) -> None:
        pass

    def as_strided(
        self, base: Array, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Array:
        """A view of `base` (uint8 [nbytes] from `to_device`); strides and offset in elements of `dtype`."""
        in_bytes = tuple(stride * dtype.itemsize for stride in strides)
        return np.ndarray(shape, dtype, base.data, offset * dtype.itemsize, in_bytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)
