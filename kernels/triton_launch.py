"""One launch in Triton's interpreter: arguments, live buffers, the loop over programs, and a clean state afterwards.

Replaces the interpreter's own `GridExecutor`, which hands float arguments to the kernel as Python numbers (on a GPU
they are float32 tensors) and copies each whole storage onto itself after a launch on the CPU (which commits every page
of a large untouched cache).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import triton.knobs
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import _normalize_ty

from pagebench.kernels import memory_trace, triton_memory
from pagebench.kernels.launch_buffers import Buffer, MemoryFault, buffers_of
from pagebench.kernels.memory_trace_accesses import LaunchRecorder
from pagebench.kernels.triton_builder import Builder
from pagebench.kernels.triton_language import language_patched
from pagebench.kernels.triton_memory import LiveBuffers

_builder: Builder = interpreter.interpreter_builder
_unpatched_convert = interpreter._implicit_cvt


class Launch(interpreter.GridExecutor):  # type: ignore[misc]  # Triton has no type information
    """`kernel[grid](...)` on this machine.

    Raises what the checks of memory find (MemoryFault, and in a trace RaceError and UninitialisedReadError) as itself,
    anything else as Triton's InterpreterError.
    """

    def __init__(self, fn: Callable[..., Any], arg_names: Sequence[str], grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.constexprs = _signature(fn).constexprs

    def __call__(self, *args_dev: Any, **kwargs: Any) -> None:
        signature = _signature(self.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in signature.names}
        on_cpu = _on_cpu((*args_dev, *kwargs.values()))
        args, named = (args_dev, kwargs) if on_cpu else self._init_args_hst(args_dev, kwargs)
        for hook in self.pre_run_hooks:
            hook(*args, **named)
        self._run(inspect.getcallargs(self.fn, *args, **named))
        if not on_cpu:
            self._restore_args_dev(args_dev, args, kwargs, named)

    def _run(self, arguments: Mapping[str, Any]) -> None:
        memory = LiveBuffers(self.fn.__name__, _buffers(arguments))
        with language_patched(), np.errstate(all="ignore"), _running(memory):
            grid = self.grid(dict(arguments)) if callable(self.grid) else self.grid
            x, y, z = (*(int(n) for n in grid), 1, 1)[:3]
            sizes = (x, y, z)
            if not (0 <= sizes[0] < 2**31 and 0 <= sizes[1] < 2**16 and 0 <= sizes[2] < 2**16):
                raise ValueError(f"grid must be at most (2**31 - 1, 65535, 65535), got {sizes}")
            _builder.set_grid_dim(*sizes)
            tensors = {name: arg if name in self.constexprs else convert(arg) for name, arg in arguments.items()}
            try:
                with _recorded(memory, sizes):
                    for program in np.ndindex(sizes):
                        _builder.grid_idx = program
                        self.fn(**tensors)
            except (MemoryFault, memory_trace.RaceError, memory_trace.UninitialisedReadError):
                raise
            except Exception as error:
                if triton.knobs.compilation.front_end_debugging:
                    raise
                raise interpreter.InterpreterError(repr(error)) from error


def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A `@triton.jit` function called from a kernel; the language is patched and errors are wrapped by the launch."""
    with language_patched():
        return function.rewrite()(*args, **kwargs)


def convert(arg: Any) -> Any:
    """An argument as the kernel sees it: numbers typed as the compiled launcher types them, arrays as their address."""
    if isinstance(arg, float):
        return _scalar(arg, np.float32, tl.float32)
    if isinstance(arg, int) and not isinstance(arg, bool) and not -(2**31) <= arg < 2**31:
        return _scalar(arg, np.int64, tl.int64) if arg < 2**63 else _scalar(arg, np.uint64, tl.uint64)
    return _unpatched_convert(arg)


def _scalar(value: float, dtype: Any, triton_dtype: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(np.array([value]).astype(dtype), triton_dtype), triton_dtype)


class _Signature:
    def __init__(self, fn: Callable[..., Any]) -> None:
        spec = inspect.getfullargspec(fn)
        self.names = frozenset((*spec.args, *spec.kwonlyargs))
        types = {name: _normalize_ty(ty) for name, ty in inspect.get_annotations(fn).items()}
        self.constexprs = frozenset(name for name, ty in types.items() if ty == "constexpr")


_signature = cache(_Signature)


def _tensors(name: str, arg: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(arg, tuple):
        for i, item in enumerate(arg):
            yield from _tensors(f"{name}[{i}]", item)
    elif isinstance(arg, interpreter.TensorDescriptor):
        yield name, interpreter._unwrap_tensor(arg.base)
    elif hasattr(arg, "data_ptr"):
        yield name, interpreter._unwrap_tensor(arg)


def _buffers(arguments: Mapping[str, Any]) -> Iterator[Buffer]:
    for name, arg in arguments.items():
        for tensor_name, tensor in _tensors(name, arg):
            yield from buffers_of(tensor_name, tensor)


def _on_cpu(args: Sequence[Any]) -> bool:
    return all(tensor.device.type == "cpu" for arg in args for _, tensor in _tensors("", arg))


@contextmanager
def _recorded(memory: LiveBuffers, grid: tuple[int, int, int]) -> Iterator[None]:
    """Report the launch and its accesses to the trace that is running, if any."""
    recorder = memory_trace.recorder()
    if recorder is None:
        yield
        return
    launch = recorder.begin(memory.kernel, grid, "interpreter", memory.buffers)
    observe = LaunchRecorder(recorder, launch, memory.buffers, triton_memory.kernel_line).access
    triton_memory.observers.append(observe)
    try:
        yield
    finally:
        triton_memory.observers.remove(observe)


@contextmanager
def _running(memory: LiveBuffers) -> Iterator[None]:
    """Make `memory` what accesses are checked against; put back what was there, program ids included."""
    before = _builder.memory, _builder.grid_idx, getattr(_builder, "grid_dim", None)
    _builder.memory = memory
    try:
        yield
    finally:
        _builder.memory, _builder.grid_idx, _builder.grid_dim = before
