"""Compile CUDA C++ with NVRTC, for any NVIDIA architecture, without a driver, and record its launches.

`RecordingRawModule` has the call interface of CuPy's `RawModule`, so the launcher that runs on a GPU is the one that
is recorded: the instances that it names, the grid, the block and the dynamic shared memory are what it chose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from bench._launch import CompiledLaunch, full_grid
from bench._sass import KernelStats, disassemble, limits_of
from pagebench.kernels import cuda_toolkit

# What a kernel may use of dynamic shared memory before its launcher raises the limit.
DEFAULT_DYNAMIC_SHARED_BYTES = 48 * 1024


class CudaToolsMissingError(RuntimeError):
    """CuPy, NVRTC or NVIDIA's headers are not installed; the message names the package."""


class CudaCompileError(RuntimeError):
    """NVRTC refused the source; the message is its log."""


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """One source compiled for `arch`: `kernels` and `ptx` by the name in the symbol table, `lowered` from the name
    expression to that name."""

    arch: int
    cubin: bytes
    ptx: str
    lowered: dict[str, str]
    kernels: dict[str, KernelStats]

    def symbol(self, name: str) -> str:
        """The kernel's symbol for `name`, a name expression or already a symbol; KeyError names what there is."""
        symbol = self.lowered.get(name, name)
        if symbol not in self.kernels:
            raise KeyError(f"no kernel {name!r} in this module; it has {sorted({*self.lowered, *self.kernels})}")
        return symbol

    def ptx_of(self, name: str) -> str:
        """PTX of one kernel, from its `.entry` line on."""
        symbol = self.symbol(name)
        for part in self.ptx.split(".entry ")[1:]:
            if part.startswith(symbol) and not (part[len(symbol)].isalnum() or part[len(symbol)] in "_$"):
                return ".entry " + part
        raise KeyError(f"no .entry {symbol} in the PTX")


def include_options() -> tuple[str, ...]:
    """`-I` options for NVIDIA's headers. CudaToolsMissingError where they are not installed."""
    try:
        return tuple(f"-I{folder}" for folder in cuda_toolkit.include_dirs())
    except cuda_toolkit.HeadersMissing as error:
        raise CudaToolsMissingError(str(error)) from error


def nvrtc_compile(
    code: str, options: Sequence[str] = (), name_expressions: Sequence[str] | None = None, arch: int = 90
) -> CompiledModule:
    """Compile CUDA C++ `code` for `arch` (80, 90, 100), as CuPy's RawModule does on such a GPU.

    `name_expressions` name the template instances to build; without any, every `extern "C"` kernel is there. An
    architecture among `options` is replaced. Raises CudaCompileError with NVRTC's log.
    """
    limits_of(arch)
    own = tuple(option for option in options if "-arch" not in option and "gpu-architecture" not in option)
    return _nvrtc_compile(code, own, tuple(name_expressions or ()), arch)


@cache
def _nvrtc_compile(code: str, options: tuple[str, ...], names: tuple[str, ...], arch: int) -> CompiledModule:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (f"-arch=sm_{arch}", *options, *include_options()))
        except nvrtc.NVRTCError as error:
            raise CudaCompileError(f"{error}\n{nvrtc.getProgramLog(program)}") from None
        lowered = {name: _text(nvrtc.getLoweredName(program, name)) for name in names}
        cubin = _padded(bytes(nvrtc.getCUBIN(program)))
        ptx = _text(nvrtc.getPTX(program))
    finally:
        nvrtc.destroyProgram(program)
    return CompiledModule(arch, cubin, ptx, lowered, disassemble(cubin, arch))


def _nvrtc() -> ModuleType:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:  # CuPy without its NVRTC says so in either way
        raise CudaToolsMissingError(f"NVRTC needs cupy-cuda13x and nvidia-cuda-nvrtc: {error}") from error
    return nvrtc  # type: ignore[no-any-return]  # CuPy has no type stubs


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.rstrip(b"\0").decode()


def _padded(cubin: bytes) -> bytes:
    """CuPy 14.2 drops the last byte, which the disassembler misses; one zero too many does no harm."""
    return cubin + b"\0"


class RecordingRawModule:
    """CuPy's `RawModule(code=, options=, name_expressions=)` that compiles for `arch` and appends to `launches`."""

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] | None = None,
        backend: str = "nvrtc",
        arch: int = 90,
        launches: list[CompiledLaunch] | None = None,
        **_ignored: Any,
    ) -> None:
        if backend != "nvrtc":
            raise ValueError(f"backend must be 'nvrtc' to compile without a CUDA toolkit, got {backend!r}")
        self.module = nvrtc_compile(code, options, name_expressions, arch)
        self.launches = [] if launches is None else launches

    def get_function(self, name: str) -> "RecordingFunction":
        return RecordingFunction(self.module, name, self.launches)


class RecordingFunction:
    """A kernel of a `RecordingRawModule`; calling it records the launch and runs nothing.

    Has the attributes of CuPy's function that a launcher may read (`num_regs`, `shared_size_bytes`,
    `local_size_bytes`, `max_threads_per_block`) or set (`max_dynamic_shared_size_bytes`,
    `preferred_shared_memory_carveout`).
    """

    def __init__(self, module: CompiledModule, name: str, launches: list[CompiledLaunch]) -> None:
        self.name = name
        self._module, self._launches = module, launches
        self._stats = module.kernels[module.symbol(name)]
        self._limit = DEFAULT_DYNAMIC_SHARED_BYTES
        self.preferred_shared_memory_carveout = -1
        self.num_regs = self._stats.registers
        self.shared_size_bytes = self._stats.static_shared_bytes
        self.local_size_bytes = self._stats.stack_bytes
        self.max_threads_per_block = 1024

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        most = limits_of(self._module.arch).shared_bytes_per_program - self._stats.static_shared_bytes
        if not 0 <= size <= most:
            raise ValueError(f"max_dynamic_shared_size_bytes must lie in 0..{most} on this GPU, got {size}")
        self._limit = int(size)

    def __call__(
        self, grid: Any, block: Any, args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None, **_ignored: Any
    ) -> None:
        x, y, z = full_grid(block)
        if not 1 <= x * y * z <= self.max_threads_per_block:
            raise ValueError(f"block must have 1..{self.max_threads_per_block} threads, got {block!r}")
        if not 0 <= shared_mem <= self._limit:
            raise ValueError(
                f"shared_mem must lie in 0..{self._limit}, the kernel's max_dynamic_shared_size_bytes, got {shared_mem}"
            )
        self._launches.append(
            CompiledLaunch(
                kernel=self.name,
                backend="cuda",
                arch=self._module.arch,
                grid=full_grid(grid),
                threads=x * y * z,
                dynamic_shared_bytes=int(shared_mem),
                tensor_memory_columns=0,
                num_warps=None,
                num_stages=None,
                stats=self._stats,
                ptx=self._module.ptx_of(self.name),
            )
        )


def recording_module(arch: int, launches: list[CompiledLaunch]) -> Callable[..., RecordingRawModule]:
    """A stand-in for the class `cupy.RawModule` whose modules record into `launches`."""

    def make(**arguments: Any) -> RecordingRawModule:
        return RecordingRawModule(**arguments, arch=arch, launches=launches)

    return make
