"""Triton's reductions and scans in the interpreter, on numbers and not on codes, in the order and rounding of a GPU."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from pagebench.kernels.triton_builder import handle_of, values
from pagebench.kernels.triton_numerics import RAW_FORMATS, Array

Handle = interpreter.TensorHandle


class ReduceOps(interpreter.ReduceOps):  # type: ignore[misc]  # Triton has no type information
    """Reductions on numbers: max and min ignore NaN as the GPU's do, 16-bit sums round at every step of a tree."""

    def sum(self, input: Any) -> Any:
        name = input.dtype.scalar.name
        if name in RAW_FORMATS or name == "fp16":
            return self.to_tensor(self._tree_sum(input.handle), input.dtype)
        return super().sum(input)

    def _tree_sum(self, handle: Any) -> Array:
        dtype = handle.dtype.scalar
        axis = 0 if self.axis is None else self.axis
        parts: Array = handle.data.reshape(-1) if self.axis is None else handle.data
        while parts.shape[axis] > 1:
            left, right = np.split(parts, 2, axis)
            parts = handle_of(values(Handle(left, dtype)) + values(Handle(right, dtype)), dtype).data
        if not self.keep_dims:
            return np.squeeze(parts, axis)
        return np.reshape(parts, (1,) * handle.data.ndim) if self.axis is None else parts

    def generic_reduce(self, input: Any) -> list[Any]:
        """Combine neighbours, all rows at once, until one is left; Triton's own way takes each element alone."""
        tensors, axis = self.unravel(input, self.axis)
        parts = tuple(tensor.handle.data for tensor in tensors)
        combine = self.combine_fn.rewrite()
        while parts[0].shape[axis] > 1:
            halves = [[np.take(p, range(i, p.shape[axis], 2), axis) for p in parts] for i in (0, 1)]
            pairs = [self.to_tensor(p, t.dtype) for half in halves for p, t in zip(half, tensors, strict=True)]
            combined = combine(*pairs)
            combined = combined if isinstance(combined, tuple | tl.core.tuple) else (combined,)
            parts = tuple(c.handle.data.astype(p.dtype, copy=False) for c, p in zip(combined, parts, strict=True))
        if not self.keep_dims:
            parts = tuple(p.squeeze(axis) for p in parts)
        elif self.axis is None:
            parts = tuple(p.reshape((1,) * input[0].handle.data.ndim) for p in parts)
        return [self.to_tensor(p, t.dtype) for p, t in zip(parts, tensors, strict=True)]

    def min_max(self, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        input = input[0] if isinstance(input, tuple) else input
        numbers = values(input.handle)
        largest = val_reduce_op is np.nanmax
        pick = np.fmax if largest else np.fmin
        best = handle_of(pick.reduce(numbers, axis=self.axis, keepdims=self.keep_dims), input.dtype.scalar)
        result = self.to_tensor(best.data, input.dtype)
        if idx_reduce_op is None:
            return result
        if numbers.dtype.kind == "f":
            numbers = np.where(np.isnan(numbers), -np.inf if largest else np.inf, numbers)
        place = (np.argmax if largest else np.argmin)(numbers, axis=self.axis, keepdims=self.keep_dims)
        return result, self.to_tensor(place, tl.int32)


class ScanOps(interpreter.ScanOps):  # type: ignore[misc]  # Triton has no type information
    """Running sums and products on numbers; those of 16-bit floats round at every step."""

    def cumsum(self, input: Any) -> Any:
        return [self._scan(np.add, input)]

    def cumprod(self, input: Any) -> Any:
        return [self._scan(np.multiply, input)]

    def _scan(self, op: np.ufunc, input: Any) -> Any:
        dtype = input.dtype.scalar
        if dtype.name not in RAW_FORMATS:
            return self.to_tensor(op.accumulate(input.handle.data, axis=self.axis), input.dtype)
        steps = np.moveaxis(values(input.handle), self.axis, 0).copy()
        for i in range(1, len(steps)):
            steps[i] = values(handle_of(op(steps[i - 1], steps[i]), dtype))
        return self.to_tensor(handle_of(np.moveaxis(steps, 0, self.axis), dtype).data, input.dtype)
