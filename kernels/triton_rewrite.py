"""Python's control flow as a Triton kernel means it, where running its source would mean something else.

- `and`, `or`, `not` on tensors: elementwise, all operands evaluated (Python returns one operand and skips the rest);
- the variable of a `range` loop: an int32 (or wider) scalar tensor that wraps, not an unbounded Python int;
- `min`, `max` of tensors: elementwise;
- `if`, `while` on a tensor with more than one element: an error, as when compiling, not simply true.
"""

import ast
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_semantic = interpreter.interpreter_semantic


def _name(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=function, ctx=ast.Load()), args=list(args), keywords=[])


def _lazily(value: ast.expr) -> ast.Lambda:
    none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(args=none, body=value)


class Rewriter(interpreter.ASTTransformer):  # type: ignore[misc]  # Triton has no type information
    """The interpreter's own rewriting, and calls of the functions below. They reach a kernel by `KERNEL_NAMES`."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:  # noqa: N802  # the name that ast.NodeVisitor looks up
        if len(node.targets) > 1:
            raise ValueError(f"a kernel may assign one name at a time, got {ast.unparse(node)!r}")
        self.generic_visit(node)
        node.value = ast.copy_location(_name("_triton_value", node.value), node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:  # noqa: N802  # as above
        self.generic_visit(node)
        function = "_triton_and" if isinstance(node.op, ast.And) else "_triton_or"
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            return node  # a lambda would bind its own variable
        return ast.copy_location(_name(function, *map(_lazily, node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:  # noqa: N802  # as above
        self.generic_visit(node)
        return ast.copy_location(_name("_triton_not", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802  # as above
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            node.args.insert(0, node.func)
            node.func = ast.copy_location(ast.Name(id="_triton_extreme", ctx=ast.Load()), node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:  # noqa: N802  # as above
        self.generic_visit(node)
        call = node.iter
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) == "range":
            node.iter = ast.copy_location(_name("_triton_range", *call.args), call)
            node.iter.keywords = call.keywords
        return node

    def _visit_test(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = ast.copy_location(_name("_triton_test", node.test), node.test)
        return node

    visit_If = visit_While = visit_IfExp = _visit_test  # noqa: N815  # as above


def _triton_value(value: Any) -> Any:
    """What a name is bound to: numbers become tensors, as when compiling."""
    return _semantic.to_tensor(value, False)


def _all_of(method: str, deciding: bool, operands: tuple[Callable[[], Any], ...]) -> Any:
    """`operands` combined: a compile-time value that decides returns at once, tensors are combined elementwise."""
    tensors = []
    value: Any = None
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is deciding:
            return value
    if not tensors:
        return value
    result = tensors[0]
    for tensor in tensors[1:]:
        result = getattr(_semantic, method)(_as_int1(result), _as_int1(tensor))
    return result


def _as_int1(tensor: Any) -> Any:
    return tensor if tensor.dtype.name == "int1" else _semantic.cast(tensor, tl.int1)


def _triton_and(*operands: Callable[[], Any]) -> Any:
    return _all_of("logical_and", False, operands)


def _triton_or(*operands: Callable[[], Any]) -> Any:
    return _all_of("logical_or", True, operands)


def _triton_not(operand: Any) -> Any:
    return _semantic.not_(_as_int1(operand)) if isinstance(operand, tl.tensor) else not operand


def _triton_extreme(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`min(...)` or `max(...)`: of numbers as Python has it, of tensors elementwise; another function as it is."""
    elementwise = {min: tl.minimum, max: tl.maximum}.get(function)
    if elementwise is None or not any(isinstance(arg, tl.tensor) for arg in args):
        return function(*args, **options)
    return reduce(elementwise, args)


def _triton_test(condition: Any) -> Any:
    if isinstance(condition, tl.tensor) and condition.handle.data.size != 1:
        raise ValueError(f"condition must be a scalar, got a tensor of shape {condition.handle.data.shape}")
    return condition


def _triton_range(*bounds: Any, **options: Any) -> Iterator[Any]:
    """`range` or `tl.range`; `options` (num_stages, ...) only guide the compiler."""
    bounds = (*bounds, *(options[name] for name in ("arg2", "step") if name in options))
    typed = [_semantic.to_tensor(bound) for bound in bounds]
    dtype = tl.int32
    for bound in typed:
        if not bound.dtype.is_int() or bound.handle.data.size != 1:
            raise ValueError(f"loop bounds must be integer scalars, got {bound.type}")
        dtype = _semantic.integer_promote_impl(dtype, bound.dtype)
    array_dtype = interpreter._get_np_dtype(dtype)
    for i in range(*(int(bound.handle.data.item()) for bound in typed)):
        yield tl.tensor(interpreter.TensorHandle(np.array([i], dtype=array_dtype), dtype), dtype)


_HELPERS = (_triton_value, _triton_and, _triton_or, _triton_not, _triton_extreme, _triton_test, _triton_range)
KERNEL_NAMES = {helper.__name__: helper for helper in _HELPERS}
