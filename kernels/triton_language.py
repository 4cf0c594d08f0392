"""`triton.language` as it is while a kernel runs in the interpreter: it computes at once instead of building IR.

The interpreter finds what to patch anew for every launch and every device function, and its types and tensors check
their shapes each time one is made; together that is two thirds of its time. Here both are found once and remembered.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_depth = 0


@contextmanager
def language_patched() -> Iterator[None]:
    """Patch `triton.language` for the duration, so that compiling still works outside; may be nested."""
    global _depth
    if _depth == 0:
        for owner, name, patched, _ in _patches():
            setattr(owner, name, patched)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _restore()


def _restore() -> None:
    for owner, name, _, original in _patches():
        if original is interpreter._MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@cache
def _patches() -> list[tuple[Any, str, Any, Any]]:
    """(owner, attribute, patched, original): what the interpreter's `_patch_lang` sets, and the faster constructors."""

    class SeesBoth:
        __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012  # read only, in the shape of a function's globals

    scope = interpreter._patch_lang(SeesBoth)
    found: dict[tuple[int, str], Any] = {}
    for owner, name, original in scope._changes:
        found.setdefault((id(owner), name), (owner, name, _direct(vars(owner)[name]), original))
    scope.restore()
    shorter = [
        (tl.tensor, "__init__", _init_tensor),
        (tl.block_type, "__init__", _init_block_type),
        (tl.block_type, "to_ir", lambda self, builder: self),  # types are their own representation here
    ]
    return [*found.values(), *((owner, name, new, vars(owner)[name]) for owner, name, new in shorter)]


# Types that an operation on two tensors of the type, or on one and a number of these Python types, leaves as they are.
_PLAIN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), (int,)),
    **dict.fromkeys(("fp16", "fp32", "fp64"), (int, float)),
}
_DIVIDED_AS_FLOAT32 = ("fp16",)
_MOST_CONSTANTS = 4096
_constants: dict[tuple[str, type, float], Any] = {}  # a scalar's handle; nothing writes to a handle's array


class Semantic(interpreter.TritonSemantic):  # type: ignore[misc]  # Triton has no type information
    """The rules of `tl` operations, with those that every operation goes through made short."""

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is tl.tensor and not (div_or_mod and lhs.dtype.name in _DIVIDED_AS_FLOAT32):
            name = lhs.dtype.name
            if type(rhs) is tl.tensor:
                if rhs.dtype.name == name and name in _PLAIN:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) in _PLAIN.get(name, ()):
                return self.broadcast_impl_value(lhs, self._constant(rhs, lhs.dtype))
        both: tuple[Any, Any] = super().binary_op_type_checking_impl(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )
        return both

    def _constant(self, value: float, dtype: Any) -> Any:
        key = (dtype.name, type(value), value)
        handle = _constants.get(key) if value else None
        if handle is None:
            constant = self._cast_to_computation_type(value, dtype)  # raises where the type does not hold it
            handle = constant.handle
            if value and len(_constants) < _MOST_CONSTANTS:  # 0.0 and -0.0 are one key
                _constants[key] = handle
        return self.tensor(handle, dtype)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if not right.is_block():
            return (lhs, self._splat(rhs, left)) if left.is_block() else (lhs, rhs)
        if not left.is_block():
            return self._splat(lhs, right), rhs
        if left.shape is right.shape:
            return lhs, rhs
        a, b = tuple(left.shape), tuple(right.shape)
        if len(a) != len(b) or any(n != m and 1 not in (n, m) for n, m in zip(a, b, strict=True)):
            both: tuple[Any, Any] = super().broadcast_impl_value(lhs, rhs)  # adds axes, or raises
            return both
        shape = tuple(map(max, a, b))
        return self._expand(lhs, a, shape), self._expand(rhs, b, shape)

    def _splat(self, scalar: Any, like: Any) -> Any:
        block = tl.block_type(scalar.type.scalar, like.shape)
        return self.tensor(self.builder.create_splat(block, scalar.handle), block)

    def _expand(self, value: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        if sizes == shape:
            return value
        handle = self.builder.create_broadcast(value.handle, shape)
        return self.tensor(handle, tl.block_type(value.type.scalar, shape))


_BUILTIN_CODE = tl.core.builtin(lambda: None).__code__


def _direct(patched: Any) -> Any:
    """The interpreter's replacement of a builtin, without the two wrappers around the builtin; others as they are."""
    member: Any = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    if getattr(member, "__code__", None) is not _BUILTIN_CODE:
        return patched
    function, semantic = member.__wrapped__, interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {(): (tl.core.tuple([]), tl.constexpr(1))}
_block_type_init = tl.block_type.__init__


def _init_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    """`tl.block_type.__init__`, checking each shape only once."""
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    if sizes not in _shapes:
        _block_type_init(self, element_ty, list(sizes))
        _shapes[sizes] = self.shape, self.numel
    self.element_ty = element_ty
    self.shape, self.numel = _shapes[sizes]
    self.name = f"<{sizes}, {element_ty.name}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tl.tensor.__init__`, making each shape only once."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = tuple(type.shape) if type.is_block() else ()
    found = _tensor_shapes.get(sizes)
    if found is None:
        shape = tl.core.tuple([tl.constexpr(s) for s in sizes])
        found = _tensor_shapes[sizes] = shape, type.numel
    self.shape, self.numel = found
