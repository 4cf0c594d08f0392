"""What the launches of a provider do to memory on a CPU: bytes, sectors, races, reads of what nobody wrote.

    with trace(provider) as launches:
        provider.paged_attention(problem.on(provider))
    ratio(launches, problem)  # bytes requested over the fewest possible
    launches[0].buffers["key_cache"].sectors

Both ways of running without a GPU report here: Triton's interpreter every access with its addresses
(`memory_trace_accesses`), CUDA C++ on the host its totals, added up in C++. A *request* is what the memory system gets
at once: one access of a tile (Triton), one instruction of a warp (CUDA); a byte that several lanes of a request ask for
counts once. Bounds are checked on every launch, traced or not.

Outside a trace the only cost is looking whether there is one, once per launch.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagebench.kernels.launch_buffers import Buffer
from pagebench.kernels.memory_trace_fresh import FreshMemory, UninitialisedReadError
from pagebench.kernels.memory_trace_races import RaceError

__all__ = [
    "SECTOR",
    "BufferTraffic",
    "FreshMemory",
    "LaunchTrace",
    "RaceError",
    "Recorder",
    "UninitialisedReadError",
    "ratio",
    "recorder",
    "requested_bytes",
    "trace",
]

SECTOR = 32  # bytes: what an NVIDIA GPU moves between the L2 and an SM at the least


@dataclass(slots=True)
class BufferTraffic:
    """What one launch did to one buffer. Bytes count once per request, however many lanes of it ask for them.

    nbytes: of the view's own elements. sectors: distinct 32-byte sectors that any request touched; sectors_requested:
    added up over requests.
    """

    name: str
    nbytes: int
    loaded_bytes: int = 0
    stored_bytes: int = 0
    atomic_bytes: int = 0
    requests: int = 0
    sectors_requested: int = 0
    sectors: int = 0

    @property
    def requested_bytes(self) -> int:
        """Bytes loaded and stored; an atomic does both."""
        return self.loaded_bytes + self.stored_bytes + 2 * self.atomic_bytes

    @property
    def sectors_per_request(self) -> float:
        """Coalescing: 0 without a request."""
        return self.sectors_requested / self.requests if self.requests else 0.0

    @property
    def sector_efficiency(self) -> float:
        """Bytes asked for over the bytes of the sectors they lie in: 1 when every sector is used whole."""
        asked = self.loaded_bytes + self.stored_bytes + self.atomic_bytes
        return asked / (SECTOR * self.sectors_requested) if self.sectors_requested else 1.0


@dataclass(slots=True)
class LaunchTrace:
    """One launch. grid: programs or blocks; how: "interpreter" or "host"; buffers by name, in argument order."""

    kernel: str
    grid: tuple[int, int, int]
    how: str
    buffers: dict[str, BufferTraffic] = field(default_factory=dict)

    @property
    def requested_bytes(self) -> int:
        return sum(buffer.requested_bytes for buffer in self.buffers.values())

    def add_buffers(self, buffers: Iterable[Buffer]) -> None:
        """An entry without traffic for each buffer; a name that comes twice gets one."""
        for buffer in buffers:
            nbytes = int(np.prod(buffer.shape, dtype=np.int64)) * buffer.itemsize
            self.buffers.setdefault(buffer.name, BufferTraffic(buffer.name, nbytes))


@dataclass(slots=True)
class Recorder:
    """The trace that is running: what it looks for, the launches so far, and the memory that starts unwritten.

    A backend calls `begin` for each launch, fills the entries of the LaunchTrace that it gets, and keeps
    `fresh[i].written` up to date; it raises RaceError or UninitialisedReadError where the kernel earns it.
    """

    races: bool
    uninitialised: bool
    traffic: bool
    launches: list[LaunchTrace] = field(default_factory=list)
    fresh: list[FreshMemory] = field(default_factory=list)

    def begin(self, kernel: str, grid: tuple[int, int, int], how: str, buffers: Sequence[Buffer]) -> LaunchTrace:
        """A new launch, at the end of `launches`, with an entry per buffer. The host may have written before it."""
        launch = LaunchTrace(kernel, grid, how)
        launch.add_buffers(buffers)
        self.launches.append(launch)
        for memory in self.fresh:
            memory.note_host_writes()
        return launch


_active: Recorder | None = None


def recorder() -> Recorder | None:
    """The trace that is running; None outside one. Backends ask once per launch."""
    return _active


@contextmanager
def trace(
    provider: Any, *, races: bool = True, uninitialised: bool = True, traffic: bool = True, overflow: bool = False
) -> Iterator[list[LaunchTrace]]:
    """Record every launch of `provider` inside the `with`: yields the list that they are added to as they start.

    races: RaceError where a program touches a byte that another program of the same launch writes, unless both do it
    atomically; in CUDA also between threads of a block, between barriers, for shared memory. uninitialised:
    UninitialisedReadError where a kernel reads a byte from `provider.empty` that neither a launch of this trace nor the
    host wrote. traffic: fill the BufferTraffic entries. overflow: 32-bit arithmetic that wraps in a Triton kernel is an
    error (in CUDA C++ it always is), in twice the time.

    Raises ValueError for a provider on a GPU, RuntimeError inside another trace.
    """
    global _active
    if _active is not None:
        raise RuntimeError("a trace is already running: traces do not nest")
    if _on_gpu(provider):
        raise ValueError(f"provider must run on a CPU to be traced, got {provider.name!r} on a GPU")
    _active = Recorder(races, uninitialised, traffic)
    try:
        with _fresh_memory(provider, _active), _overflow(overflow):
            yield _active.launches
    finally:
        _active = None


def ratio(launches: Iterable[LaunchTrace], problem: Any, *, without: Collection[str] = ()) -> float:
    """Bytes that `launches` requested over `problem.bytes_moved()`; buffers named in `without` are left out.

    A fused product (`x` times packed weights) is judged by its packed buffers, and its x apart.
    ValueError when there is no launch to judge, or nothing has to be moved.
    """
    launches, fewest = list(launches), int(problem.bytes_moved())
    if not launches:
        raise ValueError("launches must not be empty: nothing that was traced launched a kernel")
    if fewest <= 0:
        raise ValueError(f"problem must move at least one byte, got bytes_moved() = {fewest}")
    return requested_bytes(launches, without=without) / fewest


def requested_bytes(
    launches: Iterable[LaunchTrace], *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> int:
    """Bytes requested by all `launches`: of the buffers named in `only` (None: of all), less those in `without`."""
    return sum(
        buffer.requested_bytes
        for launch in launches
        for name, buffer in launch.buffers.items()
        if (only is None or name in only) and name not in without
    )


def _on_gpu(provider: Any) -> bool:
    from pagebench.kernels.providers import how_it_runs

    return how_it_runs(provider) == "gpu"


@contextmanager
def _fresh_memory(provider: Any, recording: Recorder) -> Iterator[None]:
    """Note every array that `provider.empty` hands out. A provider without it, or that cannot be changed, is let be."""
    original = getattr(provider, "empty", None)
    if not recording.uninitialised or not callable(original):
        yield
        return
    own = "empty" in getattr(provider, "__dict__", {})

    def empty(*args: Any, **kwargs: Any) -> Any:
        array = original(*args, **kwargs)
        memory = FreshMemory.of(array)
        if memory is not None:
            recording.fresh.append(memory)
        return array

    if not _set(provider, empty):
        yield
        return
    try:
        yield
    finally:
        if own:
            provider.empty = original
        else:
            del provider.empty


def _set(provider: Any, empty: Callable[..., Any]) -> bool:
    try:
        provider.empty = empty
    except (AttributeError, TypeError):
        return False
    return True


@contextmanager
def _overflow(on: bool) -> Iterator[None]:
    """Triton's own check of int32 arithmetic, where its interpreter is in use."""
    from pagebench.kernels import triton_interpreter

    with triton_interpreter.overflow_reported(on):
        yield
