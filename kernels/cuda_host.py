"""CUDA C++ without a GPU, behind CuPy's RawModule interface.

    module = RawModule(code=text, options=("-std=c++17", "-I."), name_expressions=["scale<float>"])
    kernel = module.get_function("scale<float>")
    kernel((grid,), (block,), (array, np.float32(2), np.int32(n)), shared_mem=0)

The text that NVRTC compiles on a GPU is compiled here by g++ and run on NumPy arrays, each thread a fiber. Every access is
checked before it happens; what would crash, hang or read garbage on a GPU is an exception here, and the process goes on.
Blocks run one after another, so a kernel whose blocks wait for each other never returns.

On a GPU CuPy rounds a grid or block extent of 0 up to 1, and so does this.
"""

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagebench.kernels import cuda_host_build
from pagebench.kernels.cuda_host_arguments import ArgumentBlock, KernelInfo, KernelParam
from pagebench.kernels.cuda_host_build import CompileError, CompilerMissing
from pagebench.kernels.cuda_host_faults import (
    BarrierDivergence,
    Fault,
    KernelAborted,
    MisalignedAccess,
    UndefinedBehaviour,
    raise_fault,
)
from pagebench.kernels.cuda_host_source import expand, has_c_linkage, is_toolkit, parameter_names
from pagebench.kernels.cuda_toolkit import HeadersMissing, include_dirs
from pagebench.kernels.launch_buffers import MemoryFault

__all__ = [
    "BarrierDivergence",
    "CompileError",
    "CompilerMissing",
    "HeadersMissing",
    "KernelAborted",
    "MemoryFault",
    "MisalignedAccess",
    "RawKernel",
    "RawModule",
    "UndefinedBehaviour",
    "unavailable",
]

MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
DEFAULT_DYNAMIC_SHARED = 48 * 1024  # bytes; more needs max_dynamic_shared_size_bytes, as on a GPU
MAX_DYNAMIC_SHARED = 227 * 1024  # bytes a block can opt into on sm_90 and sm_100

# Options of NVRTC that say nothing to g++: the language and floating-point rules are fixed here.
_IGNORED = ("-std", "--std", "-arch", "--gpu-architecture", "-fmad", "--fmad", "-lineinfo", "--generate-line-info", "-w")

_one_launch_at_a_time = threading.Lock()  # a module's shared memory and threads are static variables


class _Launch(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_uint64),
        ("dynamic_shared", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
    )


def unavailable() -> str | None:
    """Why kernels cannot be compiled for the host here, naming what to install; None when they can."""
    try:
        cuda_host_build.compiler()
        include_dirs()
    except (CompilerMissing, HeadersMissing) as error:
        return str(error)
    return None


class RawModule:
    """A CUDA C++ module for the CPU; constructor and `get_function` as cupy.RawModule's.

    Each name is compiled when it is first asked for, into a shared object of its own, so `__device__` variables are
    not shared between kernels. `options` takes -I, -D and -U; -std, -arch, -fmad and the like are accepted and mean nothing.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        if code is None or path is not None:
            raise ValueError("code must be the CUDA C++ text: a compiled module (path) cannot run on a CPU")
        if backend not in ("nvrtc", "nvcc"):
            raise ValueError(f"backend must be 'nvrtc' or 'nvcc', not {backend!r}")
        self.code, self.options, self.backend = code, tuple(options), backend
        self.name_expressions = None if name_expressions is None else tuple(name_expressions)
        self._search, self._defines = _parse_options(self.options)
        self._kernels: dict[str, RawKernel] = {}

    def get_function(self, name: str) -> "RawKernel":
        """The kernel of a name expression, or of an `extern "C"` function. Raises ValueError, CompileError, CompilerMissing."""
        if name not in self._kernels:
            self._kernels[name] = self._compile(name)
        return self._kernels[name]

    def compile(self, log_stream: Any = None) -> None:
        """Compiles every name expression now."""
        for name in self.name_expressions or ():
            self.get_function(name)

    def _compile(self, name: str) -> "RawKernel":
        source = expand(self.code, _file_name(self.code, self._search), self._search)
        if name not in (self.name_expressions or ()) and not has_c_linkage(source.text, name):
            raise ValueError(
                f'name must be an extern "C" kernel or one of name_expressions {list(self.name_expressions or ())}, not {name!r}'
            )
        text = name.replace("\\", "\\\\").replace('"', '\\"')
        entry = (
            'extern "C" __attribute__((visibility("default"))) const cuda_host::Kernel cuda_host_kernel = '
            f'cuda_host::Describe<&{name}>::named("{text}");\n'
        )
        library = cuda_host_build.build(source, entry, self._defines, [p for p in self._search if is_toolkit(p)])
        return RawKernel._loaded(name, library, parameter_names(source.text, name.split("<")[0].split("::")[-1].strip()))


class RawKernel:
    """One kernel; called as cupy.RawKernel: `kernel(grid, block, args, shared_mem=bytes)`.

    Arguments: NumPy arrays for pointers (a PointerTable for pointers to pointers), None for a null pointer, NumPy or Python
    scalars by value with CuPy's types (int is int64, float is float64), structured scalars for struct parameters.

    Raises ValueError for arguments that do not fit the kernel's parameters (silent garbage on a GPU), MemoryFault,
    MisalignedAccess, BarrierDivergence, UndefinedBehaviour or KernelAborted for what the kernel does.
    """

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        other = RawModule(code=code, options=options, backend=backend).get_function(name)
        self.__dict__.update(other.__dict__)

    @classmethod
    def _loaded(cls, name: str, library: Path, names: list[str]) -> "RawKernel":
        kernel = cls.__new__(cls)
        kernel._library_path = library
        kernel._library = ctypes.CDLL(str(library))
        kernel._info = KernelInfo.in_dll(kernel._library, "cuda_host_kernel")
        kernel._entry = kernel._library.cuda_host_launch
        kernel._entry.restype = ctypes.POINTER(Fault)
        kernel.name = name
        kernel.params = tuple(
            KernelParam.read(kernel._info.params[i], names[i] if len(names) == kernel._info.num_params else f"argument {i}")
            for i in range(kernel._info.num_params)
        )
        kernel._max_dynamic_shared = DEFAULT_DYNAMIC_SHARED
        return kernel

    name: str
    params: tuple[KernelParam, ...]
    _library_path: Path
    _library: ctypes.CDLL
    _info: KernelInfo
    _entry: Any
    _max_dynamic_shared: int

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Most dynamic shared memory that a launch may ask for, in bytes (48 KiB until set)."""
        return self._max_dynamic_shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        if not 0 <= nbytes <= MAX_DYNAMIC_SHARED:
            raise ValueError(f"max_dynamic_shared_size_bytes must be 0 to {MAX_DYNAMIC_SHARED}, not {nbytes}")
        self._max_dynamic_shared = nbytes

    @property
    def max_threads_per_block(self) -> int:
        return MAX_THREADS_PER_BLOCK

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        launch = _Launch(grid=_extent("grid", grid, MAX_GRID), block=_extent("block", block, MAX_BLOCK))
        threads = int(np.prod(launch.block))
        if threads > MAX_THREADS_PER_BLOCK:
            raise ValueError(f"block must have at most {MAX_THREADS_PER_BLOCK} threads, not {threads} {tuple(block)}")
        if not 0 <= shared_mem <= self._max_dynamic_shared:
            raise ValueError(
                f"shared_mem must be 0 to max_dynamic_shared_size_bytes = {self._max_dynamic_shared}, not {shared_mem}"
            )
        arguments = ArgumentBlock(self.name, self.params, args)
        launch.call, launch.args = self._info.call, arguments.address
        launch.ranges, launch.num_ranges = ctypes.addressof(arguments.ranges), len(arguments.ranges)
        launch.dynamic_shared = shared_mem
        with _one_launch_at_a_time:
            fault = self._entry(ctypes.byref(launch))
            if fault:
                raise_fault(self.name, fault.contents, arguments.buffers, self._library_path)


def _extent(name: str, extent: Sequence[int], limits: tuple[int, int, int]) -> tuple[int, ...]:
    full = tuple(max(1, int(n)) for n in (*extent, 1, 1)[:3])
    if len(extent) > 3 or any(n > limit for n, limit in zip(full, limits, strict=True)):
        raise ValueError(f"{name} must have at most 3 extents within {limits}, not {tuple(extent)}")
    return full


def _parse_options(options: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """The -I folders, and the -D and -U options."""
    search: list[Path] = []
    defines: list[str] = []
    rest = list(options)
    while rest:
        option = rest.pop(0)
        for long, short in (("--include-path=", "-I"), ("--define-macro=", "-D"), ("--undefine-macro=", "-U")):
            if option.startswith(long):
                option = short + option.removeprefix(long)
        if option in ("-I", "-D", "-U") and rest:
            option += rest.pop(0)
        if option.startswith("-I"):
            search.append(Path(option[2:]))
        elif option.startswith(("-D", "-U")):
            defines.append(option)
        elif not option.startswith(_IGNORED):
            raise ValueError(f"options must be -I, -D, -U or one of {_IGNORED} on the host, not {option!r}")
    return search, defines


def _file_name(code: str, search: Sequence[Path]) -> str:
    """The .cu file of the include folders that holds exactly `code`: RawModule is given the text alone."""
    for folder in search:
        for path in () if is_toolkit(folder) else sorted(folder.glob("*.cu")):
            if path.stat().st_size == len(code.encode()) and path.read_text() == code:
                return path.name
    return "kernel.cu"
