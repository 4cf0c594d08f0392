"""Torch tensors as the Triton kernels take them: dtypes, conversions, and how wide their accesses may be."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from pagebench.reference import dtypes

_TORCH = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int8): torch.int8,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.uint16): torch.uint16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.uint64,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.complex64): torch.complex64,
    np.dtype(np.complex128): torch.complex128,
    dtypes.BFLOAT16: torch.bfloat16,
    dtypes.FLOAT8_E4M3FN: torch.float8_e4m3fn,
    dtypes.FLOAT8_E5M2: torch.float8_e5m2,
    np.dtype(ml_dtypes.float8_e4m3fnuz): torch.float8_e4m3fnuz,
    np.dtype(ml_dtypes.float8_e5m2fnuz): torch.float8_e5m2fnuz,
    np.dtype(ml_dtypes.float8_e8m0fnu): torch.float8_e8m0fnu,
}
_NUMPY = {torch_dtype: dtype for dtype, torch_dtype in _TORCH.items()}


def knows(dtype: np.dtype[Any]) -> bool:
    """Whether torch has `dtype`, in the machine's byte order."""
    return dtype in _TORCH and dtype.isnative


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """torch's name of a NumPy dtype. Raises ValueError for one that torch lacks."""
    if not knows(dtype):
        raise ValueError(f"dtype must be one that torch has, got {dtype}")
    return _TORCH[dtype]


def numpy_dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    """The NumPy dtype (of `ml_dtypes` for bfloat16 and float8) of a tensor's elements."""
    dtype: np.dtype[Any] = _NUMPY[tensor.dtype]
    return dtype


def tensor_of(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A contiguous tensor on `device` with the array's bits, never sharing its memory."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    tensor = torch.empty(array.shape, dtype=torch_dtype(array.dtype), device=device)
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(flat.copy()))
    return tensor


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A fresh NumPy array with the tensor's bits; waits for the device."""
    host = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    flat: np.ndarray[Any, Any] = host.view(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(tensor)).reshape(tuple(tensor.shape))


def vector_elements(tensor: torch.Tensor) -> int:
    """Elements of a 16-byte access along the last dimension where every row allows it, else 1.

    Every row does where the last dimension is contiguous, and the address and all other strides are multiples of 16
    bytes.
    """
    width = 16 // tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1
    *outer, _ = zip(tensor.shape, tensor.stride(), strict=True)
    return width if aligned and all(n == 1 or stride % width == 0 for n, stride in outer) else 1
