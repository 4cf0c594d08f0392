"""Triton on a machine without a GPU, made truthful: it computes what a GPU computes, and checks every access first.

`activate()` must run before any `@triton.jit`. What differs from Triton's own interpreter, for every launch in the
process, kernels of other packages included:

- bfloat16 and float8 operands are decoded before arithmetic, comparisons, reductions, dots and atomics; results and
  casts round as the GPU does (`triton_numerics`, `triton_builder`, `triton_reductions`);
- float32 `/` is the multiplication by a rounded reciprocal that it compiles to, `exp(x)` is `exp2(x * log2(e))`, and
  exp2, sqrt and rsqrt flush subnormal numbers;
- float arguments are float32 tensors, as compiled kernels get them; a float32 `tl.dot` reads its operands as TF32
  unless `input_precision="ieee"`; float to integer saturates;
- `and`, `or`, `not`, `min`, `max`, loop variables and conditions mean what the compiler makes of them
  (`triton_rewrite`);
- libdevice functions run (`triton_libdevice`);
- an access outside the launch's buffers raises `MemoryFault` and does not happen (`triton_memory`);
- a launch on CPU tensors copies nothing (`triton_launch`), and operations cost a fifth (`triton_language`).

Still hidden: the last bit or two of exp2 and rsqrt, the contraction of `a * b + c`, the order of float32 sums, shared
memory and its limits, and that programs run at the same time.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pagebench.kernels.devices import gpu_present

_TRUE = ("1", "true", "on", "yes", "y")


def activate(*, overflow: bool | None = None) -> bool:
    """Interpret Triton kernels if no GPU is present; returns whether they are interpreted.

    Sets TRITON_INTERPRET=1 when no GPU is present; a value already set wins. Idempotent. With `overflow=True` every
    int32 (or narrower) add, subtract and multiply that wraps raises, in masked-off lanes too, in twice the time; None
    leaves that as it was, at first off.
    RuntimeError when a kernel was decorated before, for the GPU, or when this Triton's interpreter is too old.
    """
    if "TRITON_INTERPRET" not in os.environ:
        if gpu_present():
            return False
        os.environ["TRITON_INTERPRET"] = "1"
    if os.environ["TRITON_INTERPRET"].lower() not in _TRUE:
        return False
    global _installed
    if not _installed:
        _install()
        _installed = True
    if overflow is not None:
        _report_overflow(overflow)
    return True


@contextmanager
def overflow_reported(on: bool) -> Iterator[None]:
    """Inside, wrapping arithmetic raises if `on` (see `activate`); as it was where kernels are not interpreted."""
    if not on or not _installed:
        yield
        return
    from triton.runtime import interpreter

    before = interpreter.interpreter_builder.options
    _report_overflow(True)
    try:
        yield
    finally:
        interpreter.interpreter_builder.options = before


_installed = False


def _report_overflow(on: bool) -> None:
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=on, sanitize_overflow=on)


def _install() -> None:
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 8):
        raise RuntimeError(f"interpreting kernels needs triton >= 3.8, this is {triton.__version__}")
    _interpret_standard_library()
    if early := _compiled_kernels():
        raise RuntimeError(
            "activate() must run before kernels are decorated; imported too early, for the GPU: " + ", ".join(early)
        )
    from triton.backends.nvidia.compiler import min_dot_size
    from triton.runtime import interpreter

    from pagebench.kernels import (
        triton_builder,
        triton_language,
        triton_launch,
        triton_libdevice,
        triton_reductions,
        triton_rewrite,
    )

    interpreter.interpreter_builder.__class__ = triton_builder.Builder
    interpreter.interpreter_builder.codegen_fns["min_dot_size"] = min_dot_size(None)
    _report_overflow(False)
    interpreter.interpreter_semantic.__class__ = triton_language.Semantic
    interpreter.FunctionRewriter.ast_transformer = triton_rewrite.Rewriter()
    vars(interpreter).update(triton_rewrite.KERNEL_NAMES)  # its module-level names are what rewritten kernels see
    interpreter._convert_float = triton_builder.convert_float
    interpreter._get_np_dtype = triton_builder.np_dtype
    interpreter.ReduceOps = triton_reductions.ReduceOps
    interpreter.ScanOps = triton_reductions.ScanOps
    interpreter.GridExecutor = triton_launch.Launch
    interpreter._implicit_cvt = triton_launch.convert
    triton_libdevice.install()
    interpreter.InterpretedFunction.__call__ = triton_launch.call_device_function


def _interpret_standard_library() -> None:
    """`tl.sum` and the like are kernels too: if triton was imported before, they were decorated for the GPU."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, InterpretedFunction] = {}
    owners = [m for name, m in list(sys.modules.items()) if name == "triton" or name.startswith("triton.")]
    import triton.language as tl

    for owner in (*owners, tl.core.tensor):
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                new = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(owner, name, new)


def _compiled_kernels() -> list[str]:
    """Names of kernels outside Triton's and torch's own modules that were decorated for the GPU."""
    from triton.runtime.jit import JITFunction

    names = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("triton", "torch"):
            names |= {
                f"{module_name}.{name}" for name, value in list(vars(module).items()) if isinstance(value, JITFunction)
            }
    return sorted(names)
