"""Compiles a CUDA C++ module for the host and keeps the result in a per-user cache.

The cache is addressed by content: the expanded source, the host headers, the compiler and its flags. Files appear in
it by rename, so any number of processes may build at once, and end in a digest of what comes before it, so that one cut
short by a full disk or a lost machine is built anew. PAGEBENCH_CACHE_DIR, XDG_CACHE_HOME, then ~/.cache say
where; what nothing has used for 30 days is dropped.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagebench.kernels.cuda_host_source import HostSource
from pagebench.kernels.cuda_toolkit import include_dirs

_HERE = Path(__file__).resolve().parent
_LANGUAGE_HEADERS = (
    "cuda_host.hpp",
    "cuda_host_intrinsics.hpp",
    "cuda_host_keywords.hpp",
    "cuda_host_math.hpp",
    "cuda_host_runtime.hpp",
)
_RUNTIME_SOURCES = (
    "cuda_host_runtime.cpp",
    "cuda_host_runtime.hpp",
    "cuda_host_fibers.hpp",
    "cuda_host_launch.hpp",
    "cuda_host_memory.hpp",
    "cuda_host_sanitizer.hpp",
    "cuda_host_owners.hpp",
    "cuda_host_scheduler.hpp",
    "cuda_host_trace.hpp",
    "cuda_host_traffic.hpp",
    "cuda_host_views.hpp",
    "cuda_host_warp.hpp",
)
_COMMON = ("-std=c++20", "-g1", "-gdwarf-4", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden")
_RUNTIME_FLAGS = (*_COMMON, "-O2", "-ftree-vectorize")
_KERNEL_FLAGS = (
    *_COMMON,
    "-O1",
    "-fsigned-char",  # on every machine, as on a GPU
    # A CUDA kernel reads one array through several types, and its float results are not contracted on the host.
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    # Each access of the source stays one access of its own width, so that the check sees what a GPU would do.
    "-fno-tree-sra",
    "-fno-store-merging",
    "-fno-tree-vectorize",
    "-fno-tree-loop-distribute-patterns",
    "-fno-threadsafe-statics",
    "-fsanitize=kernel-address",
    "--param=asan-instrumentation-with-call-threshold=0",
    "--param=asan-stack=0",
    "--param=asan-globals=1",
    "-fsanitize=alignment,bounds,object-size,integer-divide-by-zero,signed-integer-overflow,shift,float-cast-overflow",
    "-Werror=frame-larger-than=131072",  # a thread's stack is 256 KiB
)

_SIZES = "sizes"  # in a folder of the cache: the size of each file


class CompilerMissing(RuntimeError):  # noqa: N818  # says what is missing, as HeadersMissing does
    """There is no g++ to compile the kernel with."""


class CompileError(RuntimeError):
    """g++ refused the kernel; the message holds its errors."""


def cache_dir() -> Path:
    """The folder of compiled modules, created on first use."""
    explicit = os.environ.get("PAGEBENCH_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagebench"
    path = (Path(explicit) if explicit else base) / "cuda_host"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def compiler() -> tuple[str, str]:
    """Path and version line of g++ (or of $CXX). Raises CompilerMissing."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise CompilerMissing(
            f"no C++ compiler {name!r}: running CUDA C++ without a GPU needs g++ 11 or newer "
            "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    if "clang" in version:
        raise CompilerMissing(f"{path} is clang: running CUDA C++ without a GPU needs g++ (apt-get install g++)")
    return path, version.splitlines()[0]


def build(source: HostSource, entry: str, defines: Sequence[str], search: Sequence[Path]) -> Path:
    """The shared object of one module: `source` and the generated `entry` code, with the -D/-U options `defines`."""
    unit = _translation_unit(source, entry)
    with ThreadPoolExecutor(2) as pool:  # both are there but for the first module of all
        parts = [pool.submit(make) for make in (_runtime_object, _precompiled_headers)]
        runtime, headers = (part.result() for part in parts)
    key = _digest(unit, *defines, *map(str, search), runtime.name, headers.name)

    def compile_to(target: Path) -> None:
        folder = target.parent
        (folder / "module.cpp").write_text(unit)
        includes = [f"-I{path}" for path in (headers, *_language_dirs(), *search)]
        _run([*_KERNEL_FLAGS, *defines, *includes, "-shared", "-Wl,-Bsymbolic,-z,defs,-z,now", "-o", str(target),
              str(folder / "module.cpp"), str(runtime), "-lrt"])  # fmt: skip

    return _cached(f"module-{key}.so", compile_to)


def _translation_unit(source: HostSource, entry: str) -> str:
    headers = [
        h for h in dict.fromkeys(source.system) if h not in ("assert.h", "cassert")
    ]  # they would undo our assert
    system = "".join(f"#if __has_include(<{h}>)\n#include <{h}>\n#endif\n" for h in headers)
    shared = "".join(f'{{"{name}", {first}, {last}}}, ' for name, first, last in dict.fromkeys(source.shared_lines))
    return f"""\
#include "cuda_host.hpp"
{system}#include "cuda_host_keywords.hpp"
namespace {{
{source.text}}}
#line 1 "cuda_host entry"
extern "C" {{
extern const cuda_host::SharedLines cuda_host_shared_lines[] = {{{shared}{{nullptr, 0, 0}}}};
extern const cuda_host::Coordinates cuda_host_coordinates = {{
    &threadIdx.x, &blockIdx.x, &blockDim.x, &gridDim.x}};
}}
{entry}"""


def _language_dirs() -> tuple[Path, ...]:
    return (_HERE, *include_dirs())


def _headers_identity() -> str:
    """NVIDIA's headers by path, size and time: hashing them all would cost more than it protects."""
    parts = []
    for name in ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_fp8.h", "vector_types.h"):
        path = include_dirs()[0] / name
        stat = path.stat()
        parts.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return "\n".join(parts)


def _runtime_object() -> Path:
    key = _digest(*(_text(name) for name in _RUNTIME_SOURCES), *_RUNTIME_FLAGS, *compiler())
    command = [*_RUNTIME_FLAGS, "-c", str(_HERE / "cuda_host_runtime.cpp"), "-o"]
    with _one_builder("runtime"):
        return _cached(f"runtime-{key}.o", lambda target: _run([*command, str(target)]))


def _precompiled_headers() -> Path:
    """A folder with cuda_host.hpp.gch: reading NVIDIA's headers anew costs half a second a module."""
    key = _digest(*(_text(name) for name in _LANGUAGE_HEADERS), _headers_identity(), *_KERNEL_FLAGS, *compiler())

    def compile_to(target: Path) -> None:
        target.mkdir()
        includes = [f"-I{path}" for path in _language_dirs()]
        _run([*_KERNEL_FLAGS, *includes, "-x", "c++-header", str(_HERE / "cuda_host.hpp"), "-o",
              str(target / "cuda_host.hpp.gch")])  # fmt: skip

    with _one_builder("headers"):
        return _cached(f"headers-{key}", compile_to)


@functools.cache
def _text(name: str) -> str:
    return (_HERE / name).read_text()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    path = cache_dir() / name
    if _whole(path):
        os.utime(path)  # the time of last use
        return path
    _drop_unused()
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache_dir()) as folder:
        target = Path(folder) / name
        make(target)
        _seal(target)
        if path.is_dir():
            with contextlib.suppress(OSError):  # a folder is not replaced by a rename
                path.rename(Path(folder) / "broken")
        try:
            target.replace(path)
        except OSError:  # another process put the same folder there first
            if not path.exists():
                raise
    return path


def _seal(path: Path) -> None:
    """Notes what belongs in `path`: a digest at the end of a file (nothing that reads it minds), sizes in a folder."""
    if path.is_dir():
        (path / _SIZES).write_text(_sizes(path))
        return
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def _whole(path: Path) -> bool:
    """Whether `path` is there as it was built."""
    try:
        if path.is_dir():
            return (path / _SIZES).read_text() == _sizes(path)  # a digest of 40 MB would be paid at every module
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(memoryview(content)[:-32]).digest() == content[-32:]


def _sizes(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name != _SIZES)
    return "".join(f"{path.name} {path.stat().st_size}\n" for path in files)


def discard(module: Path) -> None:
    """Takes a module that does not load out of the cache, so that it is built anew."""
    module.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_builder(part: str) -> Iterator[None]:
    """Lets one process at a time build what all need: the others wait for it instead of doing the same work."""
    with (cache_dir() / f"{part}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _drop_unused() -> None:
    """Removes what no process has used for 30 days; a module in use stays loaded."""
    limit = time.time() - 30 * 24 * 3600
    for path in cache_dir().iterdir():
        with contextlib.suppress(OSError):  # another process may be doing the same
            if path.stat().st_mtime < limit:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run(arguments: list[str]) -> None:
    done = subprocess.run([compiler()[0], *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        raise CompileError("g++ refused the kernel:\n" + "\n".join(lines[:60]))


@functools.lru_cache(maxsize=4096)
def source_line(module: str, offset: int) -> str:
    """FILE:LINE of the kernel source at `offset` bytes into a module; "" when binutils' addr2line is missing."""
    tool = shutil.which("addr2line")
    if tool is None:
        return ""
    done = subprocess.run([tool, "-i", "-s", "-e", module, hex(offset)], capture_output=True, text=True, check=False)
    places = [line.split(" ")[0] for line in done.stdout.splitlines()]  # the innermost inlined call first
    wrappers = ("cuda_", "intrinsics.cuh", "vector_", "?")
    return next((place for place in places if not place.startswith(wrappers)), "")
