"""The array half of a provider whose kernels take CuPy arrays: derive from it, or copy what you need of it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import Device


class CupyArrays:
    """Conversions between host arrays and CuPy arrays; where there is no GPU, device arrays are NumPy arrays.

    raw_module: see `cupy_launch.Device`.
    """

    def __init__(self, raw_module: Callable[..., Any] | None = None) -> None:
        self.device = Device(raw_module)

    def to_device(self, array: np.ndarray) -> Any:
        return self.device.to_device(array)

    def to_pinned(self, array: np.ndarray) -> np.ndarray:
        return self.device.to_pinned(array)

    def to_host(self, array: Any) -> np.ndarray:
        return self.device.to_host(array)

    def as_strided(self, base: Any, dtype: Any, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        return self.device.as_strided(base, dtype, shape, strides, offset)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.device.empty(shape, dtype)

    def synchronize(self) -> None:
        self.device.synchronize()
