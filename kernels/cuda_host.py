"""CUDA C++ without a GPU, behind CuPy's RawModule interface.

    module = RawModule(code=text, options=("-std=c++17", "-I."), name_expressions=["scale<float>"])
    kernel = module.get_function("scale<float>")
    kernel((grid,), (block,), (array, np.float32(2), np.int32(n)), shared_mem=0)

The text that NVRTC compiles on a GPU is compiled here by g++ and run on NumPy arrays, each thread a fiber. Every access
is checked before it happens; what would crash, hang or read garbage on a GPU is an exception here, and the process goes
on. Blocks run one after another, so a kernel whose blocks wait for each other ends in a KernelTimeout. Inside a `trace`
of memory_trace.py a launch also reports races, reads of what nobody wrote, and its traffic; cuda_host_trace.hpp and
cuda_host_traffic.hpp say what counts as a race and as a request.

What is not seen:
- An access before the start of a thread's own array, or past its end by a pointer that went through a call which g++
  did not inline: both stay on that thread's stack. Indexing an array by its name is always checked.
- g++ leaves out the check of a store, or of a second load, that follows a load of the same address in a basic block
  (`x[i] += 1`). Outside a trace such a store to a read-only array is missed. In a trace such stores are found by the
  bytes that they changed, and counted; one that writes what was there, and the second load, are not, so that the
  traffic of a kernel that does either is counted too low.
- Clusters, device-side launches, streams and textures are not there; `malloc` and `new` do not compile.

A barrier waits for the threads of its block that have not exited, as since sm_70; what those that exited did before
counts as done before it.

On a GPU CuPy rounds a grid or block extent of 0 up to 1, and so does this.
"""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    KernelFault,
    KernelTimeout,
    MisalignedAccess,
    SourceText,
    UndefinedBehaviour,
    raise_fault,
)
from pagebench.kernels.cuda_host_source import expand, has_c_linkage, is_toolkit, parameter_names
from pagebench.kernels.cuda_host_trace import HostTrace
from pagebench.kernels.cuda_toolkit import HeadersMissing, include_dirs
from pagebench.kernels.launch_buffers import MemoryFault
from pagebench.kernels.memory_trace import recorder

__all__ = [
    "BarrierDivergence",
    "CompileError",
    "CompilerMissing",
    "HeadersMissing",
    "KernelAborted",
    "KernelFault",
    "KernelTimeout",
    "MemoryFault",
    "MisalignedAccess",
    "RawKernel",
    "RawModule",
    "UndefinedBehaviour",
    "threads_in_reverse",
    "unavailable",
]

MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_STATIC_SHARED = 48 * 1024  # bytes; more, dynamic, needs max_dynamic_shared_size_bytes, as on a GPU
MAX_SHARED = 227 * 1024  # bytes of static and dynamic shared memory that a block can have on sm_90 and sm_100

# Options of NVRTC that say nothing to g++: the language and floating-point rules are fixed here.
_IGNORED = ("-std", "--std", "-arch", "--gpu-architecture", "-fmad", "--fmad", "-lineinfo", "--generate-line-info")

time_limit_s = 120.0  # of one launch; beyond it KernelTimeout

_descending = False
_one_launch_at_a_time = threading.Lock()  # a module's shared memory and threads are static variables


class _Launch(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_uint64),
        ("num_buffers", ctypes.c_uint64),
        ("trace", ctypes.c_void_p),
        ("dynamic_shared", ctypes.c_uint64),
        ("time_limit", ctypes.c_double),
        ("descending", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
    )


@contextmanager
def threads_in_reverse() -> Iterator[None]:
    """Launches inside run blocks and threads from the last to the first.

    A kernel whose result depends on the order has a race: a barrier is missing, or two threads write one place.
    """
    global _descending
    before, _descending = _descending, True
    try:
        yield
    finally:
        _descending = before


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
    not shared between kernels. `options` takes -I, -D and -U; -std, -arch, -fmad and -lineinfo are accepted and mean
    nothing here: the language is C++20, and float arithmetic is IEEE without contraction.
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
        """The kernel of a name expression, or of an `extern "C"` function.

        Raises ValueError for an unknown name, CompileError, CompilerMissing or HeadersMissing.
        """
        if name not in self._kernels:
            self._kernels[name] = self._compile(name)
        return self._kernels[name]

    def compile(self, log_stream: Any = None) -> None:
        """Compiles every name expression now."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.get_function, self.name_expressions or ()))

    def _compile(self, name: str) -> "RawKernel":
        source = expand(self.code, _file_name(self.code, self._search), self._search, self._defines)
        expressions = self.name_expressions or ()
        if name not in expressions and not has_c_linkage(source.text, name):
            raise ValueError(
                f'name must be an extern "C" kernel or one of name_expressions {expressions}, not {name!r}'
            )
        text = name.replace("\\", "\\\\").replace('"', '\\"')
        entry = (
            'extern "C" __attribute__((visibility("default"))) const cuda_host::Kernel cuda_host_kernel = '
            f'cuda_host::Describe<&{name}>::named("{text}");\n'
        )
        toolkits = [path for path in self._search if is_toolkit(path)]
        function = name.split("<")[0].split("::")[-1].strip()

        def load() -> RawKernel:
            library = cuda_host_build.build(source, entry, self._defines, toolkits)
            try:
                return RawKernel(name, library, parameter_names(source.text, function), SourceText(source.text))
            except OSError:
                cuda_host_build.discard(library)
                raise

        try:
            return load()
        except OSError:  # built against libraries that this machine does not have, in a cache that it shares
            return load()


class RawKernel:
    """One kernel, made by RawModule.get_function; called as `kernel(grid, block, args, shared_mem=bytes)`.

    Arguments: NumPy arrays for pointers (a PointerTable for pointers to pointers), None for a null pointer, NumPy or
    Python scalars by value with CuPy's types (int is int64, float is float64), structured scalars for structs.

    Raises ValueError for arguments that do not fit the kernel's parameters (silent garbage on a GPU), and MemoryFault,
    MisalignedAccess, BarrierDivergence, UndefinedBehaviour, KernelAborted or KernelTimeout for what the kernel does;
    while a memory trace is running, RaceError and UninitialisedReadError too.
    """

    def __init__(self, name: str, library: Path, parameters: Sequence[str], source: SourceText) -> None:
        self.name, self._source = name, source
        self._path, self._library = library, ctypes.CDLL(str(library))
        self._info = KernelInfo.in_dll(self._library, "cuda_host_kernel")
        self._run = self._library.cuda_host_launch
        self._run.restype = ctypes.POINTER(Fault)
        count = self._info.num_params
        names = parameters if len(parameters) == count else [f"argument {i}" for i in range(count)]
        self.params = tuple(KernelParam.read(self._info.params[i], names[i]) for i in range(count))
        self.shared_size_bytes = _static_shared(name, self._library)
        self._max_dynamic_shared = MAX_STATIC_SHARED - self.shared_size_bytes

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Most dynamic shared memory that a launch may ask for, in bytes (48 KiB less the static until set)."""
        return self._max_dynamic_shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        most = MAX_SHARED - self.shared_size_bytes
        if not 0 <= nbytes <= most:
            raise ValueError(f"max_dynamic_shared_size_bytes must be 0 to {most}, not {nbytes}")
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
        launch.num_buffers = len(arguments.buffers)
        launch.dynamic_shared, launch.time_limit, launch.descending = shared_mem, time_limit_s, _descending
        with _one_launch_at_a_time:
            recording = recorder()
            traced = recording and HostTrace(recording, self.name, launch.grid, arguments.buffers)
            launch.trace = traced.address if traced else None
            fault = self._run(ctypes.byref(launch))
            if traced:
                traced.finish()
            if fault:
                raise_fault(self.name, fault.contents, arguments.buffers, self._path, self._source)


def _static_shared(name: str, library: ctypes.CDLL) -> int:
    library.cuda_host_static_shared.restype = ctypes.c_uint64
    nbytes = int(library.cuda_host_static_shared())
    if nbytes > MAX_STATIC_SHARED:
        raise CompileError(f"{name}: {nbytes} bytes of static shared memory, more than {MAX_STATIC_SHARED}")
    return nbytes


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
