"""The array half of a provider whose kernels take torch tensors: derive from it, or copy what you need of it."""

from typing import Any

import numpy as np
import torch

from pagebench.kernels.triton_arrays import array_of, tensor_of, torch_dtype


class TorchArrays:
    """Conversions between host arrays and torch tensors on the GPU, or on the CPU where there is none."""

    @property
    def device(self) -> torch.device:
        """Where arrays live."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def unavailable(self) -> str | None:
        """None: tensors can live on any machine. A provider that needs a GPU says so here."""
        return None

    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return tensor_of(array, self.device)

    def to_pinned(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A contiguous copy in host memory that the GPU's copy engines can reach; any host memory without a GPU."""
        tensor = tensor_of(array, torch.device("cpu"))
        return tensor.pin_memory() if self.device.type == "cuda" and tensor.numel() else tensor

    def to_host(self, array: torch.Tensor) -> np.ndarray[Any, Any]:
        return array_of(array)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def as_strided(
        self, base: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A view of `base` (uint8 [nbytes] from `to_device`); strides and offset in elements of `dtype`."""
        whole = base[: base.numel() // dtype.itemsize * dtype.itemsize].view(torch_dtype(dtype))
        return whole.as_strided(shape, strides, offset)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)
