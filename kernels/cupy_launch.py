"""What the CUDA C++ launchers share: compiled modules, device arrays, small tables.

One launcher serves a GPU and a CPU. On a GPU arrays are `cupy.ndarray` and modules `cupy.RawModule`; elsewhere arrays
are NumPy arrays and a module class with the same call interface compiles the same source for the host, or records it.
"""

import hashlib
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pagebench.kernels.devices import gpu_present
from pagebench.kernels.launch_buffers import host_pointer_table

T = TypeVar("T")

KERNELS = Path(__file__).parent
ALIGNMENT = 256  # bytes, of every array made here; what CuPy's pool gives as well
REMEMBERED = 1024  # sets of arrays; a timing loop may go around a few hundred copies of a small problem

C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}


class Device:
    """Where one provider's arrays live and its kernels are compiled.

    raw_module: a class called as `cupy.RawModule(code=, options=, name_expressions=)`; arrays are then NumPy arrays.
    None chooses: CuPy on a GPU where there is one, else the host compiler.
    """

    def __init__(self, raw_module: Callable[..., Any] | None = None) -> None:
        self.on_gpu = raw_module is None and gpu_present()
        self.uses_host_compiler = raw_module is None and not self.on_gpu
        self._raw_module = raw_module
        self._swap_stream: Any = None
        self._kernels: dict[tuple[str, str], Any] = {}
        self._remembered: OrderedDict[tuple[int, ...], tuple[list[weakref.ref[Any]], Any]] = OrderedDict()

    def kernel(self, source: str, name: str) -> Any:
        """The kernel `name`, `function` or `template<arguments>`, of kernels/`source`; compiled when first wanted."""
        key = (source, name)
        if key not in self._kernels:
            module = self._module_class()(
                code=(KERNELS / source).read_text(), options=self._options(), name_expressions=[name]
            )
            self._kernels[key] = module.get_function(name)
        return self._kernels[key]

    def kernel_with(self, source: str, name: str, shared: int) -> Any:
        """The same, able to take `shared` bytes of dynamic shared memory: more than 48 KiB need a kernel's consent."""
        kernel = self.kernel(source, name)
        if shared > kernel.max_dynamic_shared_size_bytes:
            kernel.max_dynamic_shared_size_bytes = shared
        return kernel

    def _module_class(self) -> Callable[..., Any]:
        if self._raw_module is None:
            if self.on_gpu:
                import cupy

                self._raw_module = cupy.RawModule
            else:
                from pagebench.kernels.cuda_host import RawModule

                self._raw_module = RawModule
        return self._raw_module

    def _options(self) -> tuple[str, ...]:
        options = ("-std=c++17", f"-I{KERNELS}")
        # CuPy's cache of compiled modules knows the source and the options, but not what the source includes.
        return (*options, *_nvidia_includes(), f"-DPAGEBENCH_HEADERS={_headers_digest()}") if self.on_gpu else options

    def to_device(self, array: np.ndarray) -> Any:
        """A contiguous copy of a host array."""
        copy = self.empty(array.shape, array.dtype)
        if self.on_gpu:
            if array.size:
                as_bits(copy).set(np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(array.shape))
        else:
            copy[...] = array
        return copy

    def to_host(self, array: Any) -> np.ndarray:
        """The values of a device array, of any strides, as a host array of its own."""
        if isinstance(array, np.ndarray):
            return array.copy()
        return np.asarray(as_bits(array).get()).view(array.dtype)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """An uninitialised contiguous array, aligned to ALIGNMENT."""
        dtype = np.dtype(dtype)
        if self.on_gpu:
            import cupy

            return cupy.ndarray(tuple(shape), dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        room = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        return room[start : start + nbytes].view(dtype).reshape(shape)

    def to_pinned(self, array: np.ndarray) -> np.ndarray:
        """A contiguous copy in host memory that the GPU's copy engines can reach; any host memory off a GPU."""
        if not self.on_gpu or not array.size:
            copy: np.ndarray = array.copy() if self.on_gpu else self.to_device(array)
            return copy
        import cupy

        memory = cupy.cuda.alloc_pinned_memory(array.nbytes)
        pinned = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape)
        pinned[...] = array
        return pinned

    def swap_stream(self) -> Any:
        """The stream that transfers between host and device run on."""
        import cupy

        if self._swap_stream is None:
            self._swap_stream = cupy.cuda.Stream(non_blocking=True)
        return self._swap_stream

    def as_strided(self, base: Any, dtype: Any, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        """A view of `base`, a device array of uint8; strides and offset in elements of `dtype`."""
        dtype = np.dtype(dtype)
        in_bytes = tuple(s * dtype.itemsize for s in strides)
        if isinstance(base, np.ndarray):
            return np.ndarray(tuple(shape), dtype, base, offset * dtype.itemsize, in_bytes)
        import cupy

        return cupy.ndarray(tuple(shape), dtype, base.data + offset * dtype.itemsize, in_bytes)

    def synchronize(self) -> None:
        if self.on_gpu:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    def pointer_table(self, arrays: Sequence[Any]) -> Any:
        """int64 [len(arrays)]: the address of each array."""
        if not self.on_gpu:
            return host_pointer_table(arrays)
        return self.table(np.array([address(a) for a in arrays], np.int64))

    def table(self, values: np.ndarray) -> Any:
        """A small host array on the device, put there in the order of the current stream."""
        if not self.on_gpu:
            return values
        import cupy

        table = cupy.ndarray(values.shape, values.dtype)
        table.set(values, stream=cupy.cuda.get_current_stream())
        return table

    def remember(self, arrays: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make()` returned for these very arrays before, while they live.

        A serving loop copies blocks in the same caches at every step. Off a GPU, where what was made may hold the
        arrays and so keep them alive, nothing is remembered.
        """
        if not self.on_gpu:
            return make()
        key = tuple(map(id, arrays))
        found = self._remembered.get(key)
        if found is None or any(owner() is not array for owner, array in zip(found[0], arrays, strict=True)):
            found = self._remembered[key] = ([weakref.ref(array) for array in arrays], make())
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        made: T = found[1]
        return made


def as_bits(array: Any) -> Any:
    """The same device memory as unsigned integers: CuPy holds bfloat16 and float8 arrays, but computes with none."""
    import cupy

    return cupy.ndarray(array.shape, np.dtype(f"u{array.itemsize}"), array.data, array.strides)


def address(array: Any) -> int:
    """Device address of an array's first element."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def strides_of(array: Any) -> list[np.int64]:
    """Strides in elements, as kernel arguments."""
    return [np.int64(s // array.itemsize) for s in array.strides]


def aligned16(array: Any) -> bool:
    """Whether every row (last dimension) is contiguous, a multiple of 16 bytes long and on a 16-byte boundary."""
    *outer, last = array.strides
    inner = array.shape[-1] * array.itemsize % 16 == 0 and (last == array.itemsize or array.shape[-1] == 1)
    return inner and address(array) % 16 == 0 and all(s % 16 == 0 for s in outer)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@cache
def _nvidia_includes() -> tuple[str, ...]:
    """`-I` for NVRTC 13: CuPy finds cuda_fp16.h itself where it can, but some headers want cccl beside it."""
    from pagebench.kernels.cuda_toolkit import HeadersMissing, include_dirs

    try:
        return tuple(f"-I{path}" for path in include_dirs())
    except HeadersMissing:
        return ()


@cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    for header in sorted(KERNELS.glob("*.cuh")):
        digest.update(header.read_bytes())
    return f"0x{digest.hexdigest()[:15]}ull"
