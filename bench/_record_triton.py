"""Compile what a Triton launcher launches, for any NVIDIA architecture, without a GPU and without running it.

A stand-in driver answers Triton's question for the target. The real launcher then calls `kernel[grid](...)` on CPU
tensors, and every launch is turned into a compilation: the specialisation (which pointers are divisible by 16, which
integers are 1), the number of warps and stages and the grid are exactly those that the launcher chose.

Interpretation is decided when `@triton.jit` runs, so this works only in a process in which `TRITON_INTERPRET` was off
when the kernels were imported. `bench._codegen` starts such a process.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench._launch import CompiledLaunch, full_grid
from bench._sass import KernelStats, disassemble, limits_of

_REQUIRED_THREADS = re.compile(r"^\.reqntid\s+(\d+)", re.MULTILINE)


def triton_launches(fn: Callable[[], object], arch: int) -> list[CompiledLaunch]:
    """Call `fn`, which launches Triton kernels on CPU tensors; each launch, in order, compiled for `arch`.

    Nothing runs, so what `fn` returns is not computed. Raises what Triton's compiler raises.
    """
    with recording_triton(arch) as launches:
        fn()
    return launches


@contextmanager
def recording_triton(arch: int, launches: list[CompiledLaunch] | None = None) -> Iterator[list[CompiledLaunch]]:
    """Record instead of running, within the block; `launches` (a new list by default) fills as launches come."""
    limits_of(arch)
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches = [] if launches is None else launches
    stats: dict[Any, KernelStats] = {}
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        key = compiled.metadata.hash
        if key not in stats:
            stats[key] = disassemble(compiled.asm["cubin"], arch)[compiled.metadata.name]
        launches.append(_launch(compiled, _grid(self, grid, args, kwargs), arch, stats[key]))
        return compiled

    previous = driver._active
    JITFunction.run = record
    driver.set_active(_StandInDriver(arch))
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = previous


class _StandInDriver:
    """The three answers that a launch needs before it compiles. The device number is the architecture, since Triton
    keeps its compiled kernels by device, and each target must have its own."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a launcher asked the GPU driver for {name!r}, which a recording without a GPU cannot answer "
            "(an autotuned kernel times its candidates: give it a fixed configuration)"
        )


def _grid(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, int]:
    """The launch's grid; a callable one gets every argument of the kernel by name, as Triton gives it."""
    if callable(grid):
        own = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **own)
        bound.apply_defaults()
        grid = grid(dict(bound.arguments))
    return full_grid(grid)


def _launch(compiled: Any, grid: tuple[int, int, int], arch: int, stats: KernelStats) -> CompiledLaunch:
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    required = _REQUIRED_THREADS.search(ptx)
    return CompiledLaunch(
        kernel=metadata.name,
        backend="triton",
        arch=arch,
        grid=grid,
        threads=int(required.group(1)) if required else metadata.num_warps * 32,
        dynamic_shared_bytes=metadata.shared,
        tensor_memory_columns=getattr(metadata, "tmem_size", 0) or 0,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        stats=stats,
        ptx=ptx,
    )
