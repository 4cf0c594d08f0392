"""Triton's interpreter, computing what the GPU computes.

The interpreter runs each `tl` operation through an `InterpreterBuilder` on NumPy arrays. It keeps bfloat16 and float8
as raw codes and computes with the codes; `Builder` decodes them first, rounds results as the GPU does, and reports
every access to `memory` before it happens. Importing this module imports Triton: `triton_interpreter.activate()` does.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from pagebench.kernels import triton_numerics as numerics
from pagebench.kernels.triton_libdevice import extern_elementwise
from pagebench.kernels.triton_memory import LiveBuffers
from pagebench.kernels.triton_numerics import RAW_FORMATS, Array

Handle: TypeAlias = Any  # the interpreter's TensorHandle: `data`, a NumPy array, and Triton's `dtype`
_handle = interpreter.TensorHandle
_native = interpreter._interpreter
_np_dtype_uncached = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype[Any]] = {}


def np_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of the array that stands for Triton's `dtype`; the interpreter's own rule, remembered."""
    name = dtype.scalar.name
    found = _np_dtypes.get(name)
    if found is None:
        found = _np_dtypes[name] = _np_dtype_uncached(dtype.scalar)
    return found


def values(handle: Handle) -> Array:
    """What the handle holds as numbers: float32 where it holds raw codes."""
    name = handle.dtype.scalar.name
    return numerics.decode(handle.data, name) if name in RAW_FORMATS else handle.data


_LOG2_E = np.float32(1.4426950408889634)


def _is_float32(handle: Handle) -> bool:
    return bool(handle.data.dtype == np.float32)


def handle_of(array: Array, dtype: Any) -> Handle:
    """A handle of Triton's `dtype` holding the numbers `array`, rounded to it once."""
    if array.dtype == np.bool_:
        return _handle(array, tl.int1)
    if dtype.name in RAW_FORMATS:
        return _handle(numerics.encode(array, dtype.name), dtype)
    wanted = np_dtype(dtype)
    return _handle(array if array.dtype == wanted else array.astype(wanted), dtype)


def convert_float(data: Array, source: Any, target: Any, rounding: Any) -> Array:
    """Codes of `target` for the codes `data` of `source` (both Triton float types), rounded once."""
    known = (*RAW_FORMATS, "fp16", "fp32", "fp64")
    if source.name not in known or target.name not in known:
        codes: Array = _convert_float_uncorrected(data, source, target, rounding)
        return codes
    numbers = numerics.decode(data, source.name) if source.name in RAW_FORMATS else data.view(np_dtype(source))
    toward_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
    if target.name in RAW_FORMATS or (toward_zero and target.name == "fp16"):
        return numerics.encode(numbers, target.name, toward_zero)
    return numbers.astype(np_dtype(target))


_convert_float_uncorrected = interpreter._convert_float


class Builder(interpreter.InterpreterBuilder):  # type: ignore[misc]  # Triton has no type information
    """Every operation on numbers, not codes. `memory` holds the buffers of the launch that is running."""

    memory: LiveBuffers = LiveBuffers("", ())
    grid_idx: tuple[int, int, int] = (0, 0, 0)

    def get_bf16(self, value: float) -> Handle:
        return handle_of(np.array([value], dtype=np.float64), tl.bfloat16)

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source.is_floating() and target.is_floating():
            return _handle(convert_float(src.data, source, target, None), target)
        if source.is_floating() and target.is_int() and target.name != "int1":
            return _handle(numerics.to_integer(values(src), np_dtype(target)), target)
        if target.name in RAW_FORMATS:
            return handle_of(src.data.astype(np.float64), target)
        return _handle(src.data.astype(np_dtype(target)), target)

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
        target = dst_type.scalar
        return _handle(convert_float(src.data, src.dtype.scalar, target, rounding_mode).view(np_dtype(target)), target)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Any]) -> Handle:
        if lhs.data.dtype == np.bool_:
            return super().binary_op(lhs, rhs, op)
        return handle_of(op(values(lhs), values(rhs)), lhs.dtype.scalar)

    def unary_op(self, arg: Handle, op: Callable[..., Any]) -> Handle:
        return handle_of(op(values(arg)), arg.dtype.scalar)

    def create_fdiv(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, numerics.divide_full if _is_float32(lhs) else np.divide)

    def create_exp(self, arg: Handle) -> Handle:
        return self.unary_op(arg, (lambda x: np.exp2(x * _LOG2_E)) if _is_float32(arg) else np.exp)

    def create_exp2(self, arg: Handle) -> Handle:
        exp2 = self.unary_op(arg, np.exp2)
        return self.unary_op(exp2, numerics.flush_subnormal) if _is_float32(arg) else exp2

    def create_sqrt(self, arg: Handle) -> Handle:
        return super().create_sqrt(self.unary_op(arg, numerics.flush_subnormal) if _is_float32(arg) else arg)

    def create_rsqrt(self, arg: Handle) -> Handle:
        return super().create_rsqrt(self.unary_op(arg, numerics.flush_subnormal) if _is_float32(arg) else arg)

    def create_clampf(self, arg: Handle, lo: Handle, hi: Handle, propagate_nans: Any) -> Handle:
        if propagate_nans == interpreter._ir.PROPAGATE_NAN.NONE:
            clamped = np.fmin(np.fmax(values(arg), values(lo)), values(hi))
        else:
            clamped = np.clip(values(arg), values(lo), values(hi))
        return handle_of(clamped, arg.dtype.scalar)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if z.dtype.scalar.name not in RAW_FORMATS:
            return super().create_fma(x, y, z)
        product = values(x).astype(np.float64) * values(y)  # 16 bits: exact
        return handle_of(product + values(z), z.dtype.scalar)

    def create_extern_elementwise(self, _: Any, __: Any, symbol: str, args: Any, ret_type: Any, ___: Any) -> Handle:
        dtype = ret_type.scalar
        return _handle(extern_elementwise(symbol, [values(arg) for arg in args], np_dtype(dtype)), dtype)

    def create_splat(self, ret_ty: Any, arg: Handle) -> Handle:
        data = np.empty(tuple(ret_ty.shape), dtype=np_dtype(arg.dtype))
        data[...] = arg.data
        return _handle(data, arg.dtype.scalar)

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        if a.dtype.scalar.is_int() or a.dtype.scalar.name == "fp64":
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        left, right = values(a).astype(np.float32, copy=False), values(b).astype(np.float32, copy=False)
        if a.dtype.scalar.name == "fp32" and input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            left, right = numerics.to_tensorfloat32(left), numerics.to_tensorfloat32(right)
        return handle_of(np.matmul(left, right) + d.data, d.dtype.scalar)

    def create_load(self, ptr: Handle, *_: Any) -> Handle:
        return self._load(ptr, None, None)

    def create_masked_load(self, ptrs: Handle, mask: Handle, other: Handle | None, *_: Any, **__: Any) -> Handle:
        return self._load(ptrs, np.asarray(mask.data), other)  # 3.8 passes bare arrays

    def _load(self, ptrs: Handle, mask: Array | None, other: Handle | None) -> Handle:
        element = ptrs.get_element_ty()
        dtype = np_dtype(element)
        self.memory.check("load", ptrs.data, mask, dtype.itemsize, self.grid_idx)
        if mask is None:
            mask = np.ones(ptrs.data.shape, dtype=bool)
        fill = np.zeros(ptrs.data.shape, dtype=dtype) if other is None else other.data
        return _handle(_native.load(ptrs.data, mask, fill, dtype), element)

    def create_store(self, ptr: Handle, val: Handle, *_: Any) -> None:
        self._store(ptr, val, None)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *_: Any) -> None:
        self._store(ptrs, value, np.asarray(mask.data))

    def _store(self, ptrs: Handle, value: Handle, mask: Array | None) -> None:
        dtype = np_dtype(ptrs.get_element_ty())
        self.memory.check("store", ptrs.data, mask, dtype.itemsize, self.grid_idx)
        if mask is None:
            mask = np.ones(ptrs.data.shape, dtype=bool)
        _native.store(ptrs.data, value.data.astype(dtype, copy=False), mask)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Handle:
        self.memory.check("atomic", ptr.data, None, np_dtype(ptr.get_element_ty()).itemsize, self.grid_idx)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_rmw(self, op: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        self.memory.check("atomic", ptr.data, mask.data, np_dtype(ptr.get_element_ty()).itemsize, self.grid_idx)
        if val.dtype.scalar.name in RAW_FORMATS:
            return self._atomic_add_lane_by_lane(ptr, val, mask)
        return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    def _atomic_add_lane_by_lane(self, ptr: Handle, val: Handle, mask: Handle) -> Handle:
        """Triton allows only `add` on bfloat16. Lanes may share an address, so each sees what the one before left."""
        before = np.zeros(ptr.data.shape, dtype=val.data.dtype)
        on = np.ones(1, dtype=bool)
        for lane in np.ndindex(ptr.data.shape):
            if mask.data[lane]:
                address = ptr.data[lane].reshape(1)
                old = _native.load(address, on, before[lane].reshape(1), before.dtype)
                before[lane] = old[0]
                total = self.create_fadd(_handle(old, val.dtype), _handle(val.data[lane].reshape(1), val.dtype))
                _native.store(address, total.data, on)
        return _handle(before, val.dtype.scalar)
