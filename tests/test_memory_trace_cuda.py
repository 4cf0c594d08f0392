"""The memory trace of CUDA C++ on the host: exact counts, planted faults named exactly, correct kernels left alone."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagebench.kernels import cuda_host, launch_buffers
from pagebench.kernels.cuda_host import KernelTimeout, MemoryFault, RawModule, threads_in_reverse
from pagebench.kernels.cuda_host_source import expand
from pagebench.kernels.cupy_provider import CupyProvider
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.memory_trace import BufferTraffic, LaunchTrace, RaceError, UninitialisedReadError, trace
from pagebench.kernels.memory_trace_races import Access
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dtypes import INT32
from pagebench.reference.paged_attention import PagedAttention

SAMPLES = Path(__file__).parent / "cuda_samples"
KERNELS = Path(launch_buffers.__file__).parent
OPTIONS = ("-std=c++17", f"-I{KERNELS}", f"-I{SAMPLES}")
NAMES = ("tree_sum", "fill", "reverse", "staged", "exchange", "chain", "shift", "row_sums", "strided", "constants",
         "add_by_cas", "touch", "spin", "increment")  # fmt: skip

pytestmark = pytest.mark.skipif(gpu_present(), reason="kernels are compiled here: a GPU is present")


class Machine:
    """Sample kernels of one module, and a provider for whose launches a trace can be asked."""

    def __init__(self) -> None:
        text = (SAMPLES / "traces.cu").read_text()
        self.provider = CupyProvider(RawModule)
        self.module = RawModule(code=text, options=OPTIONS, name_expressions=NAMES)
        body = re.search(r"enum Fault \{(.*?)\}", text, re.DOTALL)
        assert body is not None
        self.faults = re.findall(r"k\w+", body[1])
        self.lines = text.splitlines()

    def fault(self, name: str) -> np.int32:
        return np.int32(self.faults.index(name))

    def launch(self, kernel: str, grid: int, block: int, *args: Any) -> None:
        self.module.get_function(kernel)((grid,), (block,), args)

    def traced(self, kernel: str, grid: int, block: int, *args: Any) -> LaunchTrace:
        with trace(self.provider) as launches:
            self.launch(kernel, grid, block, *args)
        return launches[0]

    def line(self, text: str) -> str:
        """The line of a report for the only source line that holds `text`."""
        ((number, line),) = [(i, line) for i, line in enumerate(self.lines, start=1) if text in line]
        return f"traces.cu:{number}: {line.strip()}"


@pytest.fixture(scope="module")
def machine() -> Machine:
    reason = cuda_host.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return Machine()


@pytest.fixture(params=[False, True], ids=["forwards", "in-reverse"])
def either_order(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        with threads_in_reverse():
            yield
    else:
        yield


def aligned(array: Any, boundary: int = 256) -> np.ndarray:
    """A copy that starts on a boundary of `boundary` bytes."""
    array = np.asarray(array)
    room = np.empty(array.nbytes + boundary, np.uint8)
    start = -room.ctypes.data % boundary
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def floats(*shape: int) -> np.ndarray:
    return aligned(np.zeros(shape, np.float32))


def tree_sum(machine: Machine, fault: str = "kNone") -> LaunchTrace:
    x = aligned(np.arange(256, dtype=np.float32))
    return machine.traced("tree_sum", 4, 64, x, floats(4), floats(1), machine.fault(fault))


def staged(machine: Machine, fault: str = "kNone") -> LaunchTrace:
    return machine.traced("staged", 1, 32, floats(512), floats(512), np.int32(4), machine.fault(fault))


# ---- Traffic


def test_bytes_sectors_and_requests_are_exact(machine: Machine, either_order: None) -> None:
    launch = machine.traced("row_sums", 1, 64, floats(8, 40), floats(8), np.int32(8), np.int32(40))
    # Each row is one request of 128 bytes, in 4 sectors, or 5 where its start is in the middle of one: 160 is 5 * 32.
    assert launch.buffers["x"] == BufferTraffic("x", 1280, 1024, 0, 0, 8, 32, 32)
    assert launch.buffers["sums"] == BufferTraffic("sums", 32, 0, 32, 0, 8, 8, 1)
    assert (launch.kernel, launch.grid, launch.how) == ("row_sums", (1, 1, 1), "host")


@pytest.mark.parametrize(("step", "sectors"), [(1, 4), (2, 8), (8, 32), (16, 32)])
def test_coalescing(machine: Machine, either_order: None, step: int, sectors: int) -> None:
    args = (floats(64 * 16), floats(1), floats(64), aligned(np.zeros(1, np.uint32)), np.int32(step))
    launch = machine.traced("strided", 1, 64, *args)
    assert launch.buffers["x"] == BufferTraffic("x", 4096, 256, 0, 0, 2, 2 * sectors, 2 * sectors)
    assert launch.buffers["x"].sectors_per_request == sectors
    assert launch.buffers["table"] == BufferTraffic("table", 4, 8, 0, 0, 2, 2, 1)  # 32 lanes, one request, 4 bytes
    assert launch.buffers["count"] == BufferTraffic("count", 4, 0, 0, 8, 2, 2, 1)
    assert launch.buffers["count"].requested_bytes == 16  # an atomic reads and writes


def test_stores_that_follow_a_load_of_the_same_address_count(machine: Machine) -> None:
    launch = machine.traced("shift", 3, 64, aligned(np.zeros(192, np.int32)), machine.fault("kNone"))
    assert launch.buffers["out"].stored_bytes == 2 * 768
    totals, sums = floats(1), floats(4)
    with pytest.raises(RaceError):  # total[0] += tile[0] is a load and, though g++ reports none, a store
        machine.traced("tree_sum", 4, 64, floats(256) + 1, sums, totals, machine.fault("kNoAtomic"))


def test_cp_async_counts_what_it_reads(machine: Machine) -> None:
    launch = staged(machine)
    assert launch.buffers["x"] == BufferTraffic("x", 2048, 2048, 0, 0, 4, 64, 64)
    assert launch.buffers["out"] == BufferTraffic("out", 2048, 0, 2048, 0, 16, 64, 64)


def test_the_halves_of_one_array_are_told_apart(machine: Machine) -> None:
    both = floats(4, 2, 8)
    launch = machine.traced("touch", 1, 1, both[:, 0], both[:, 1], np.int64(16), np.int32(0))
    assert launch.buffers["view"] == BufferTraffic("view", 128, 4, 0, 0, 1, 1, 1)
    assert launch.buffers["other"] == BufferTraffic("other", 128, 0, 4, 0, 1, 1, 1)


# ---- Planted faults


def test_a_missing_barrier(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(machine, "kNoBarrier")
    race = caught.value
    assert (race.kernel, race.buffer, race.index) == ("tree_sum", "__shared__ tile", 32)
    load, store = machine.line("if (t < half) tile[t] += tile[t + half];"), machine.line("tile[t] = x[64 * blockIdx.x")
    assert race.first == Access("load", (0, 0, 0), (0, 0, 0), load)
    assert race.second == Access("store", (0, 0, 0), (32, 0, 0), store)


def test_two_blocks_that_write_one_element(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(machine, "kTwoBlocks")
    race, line = caught.value, machine.line("sums[fault == kTwoBlocks")
    assert (race.buffer, race.index) == ("sums", 0)
    assert race.first == Access("store", (0, 0, 0), (0, 0, 0), line)
    assert race.second == Access("store", (1, 0, 0), (0, 0, 0), line)


def test_a_missing_atomic(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(machine, "kNoAtomic")
    race, line = caught.value, machine.line("if (fault == kNoAtomic)")
    assert (race.buffer, race.index) == ("total", 0)
    assert race.first == Access("store", (0, 0, 0), (0, 0, 0), line)
    assert race.second == Access("load", (1, 0, 0), (0, 0, 0), line)


def test_an_atomic_and_a_plain_store(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(machine, "kAtomicAndPlain")
    race = caught.value
    assert (race.buffer, race.index, race.first.kind, race.second.kind) == ("total", 0, "atomic", "store")
    assert (race.first.program, race.second.program) == ((0, 0, 0), (1, 0, 0))


def test_a_block_that_reads_what_another_wrote(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        machine.traced("chain", 3, 1, np.zeros(4, np.int32), machine.fault("kOtherBlocksResult"))
    race, line = caught.value, machine.line("values[b + 1] =")
    assert (race.buffer, race.index) == ("values", 1)
    assert race.first == Access("store", (0, 0, 0), (0, 0, 0), line)
    assert race.second == Access("load", (1, 0, 0), (0, 0, 0), line)


def fill_and_reverse(machine: Machine, skip: int) -> np.ndarray:
    n = np.int32(100)
    with trace(machine.provider):
        scratch = machine.provider.empty((100,), np.float32)
        out = machine.provider.empty((100,), np.float32)
        machine.launch("fill", 2, 64, scratch, n, np.int32(skip))
        machine.launch("reverse", 2, 64, scratch, out, n)
    return np.asarray(out)


def test_scratch_that_was_never_written(machine: Machine) -> None:
    np.testing.assert_array_equal(fill_and_reverse(machine, skip=-1), np.arange(100)[::-1])
    with pytest.raises(UninitialisedReadError) as caught:
        fill_and_reverse(machine, skip=70)
    error = caught.value
    assert (error.kernel, error.buffer, error.index, error.kind) == ("reverse", "scratch", 70, "load")
    assert (error.program, error.thread) == ((1, 0, 0), (6, 0, 0))
    assert error.line == machine.line("out[n - 1 - i] = scratch[i]")


def test_what_the_host_wrote_may_be_read(machine: Machine) -> None:
    with trace(machine.provider):
        scratch = machine.provider.empty((100,), np.float32)
        scratch[:] = 1
        machine.launch("reverse", 2, 64, scratch, floats(100), np.int32(100))


def test_shared_memory_that_was_never_written(machine: Machine) -> None:
    with pytest.raises(UninitialisedReadError) as caught:
        tree_sum(machine, "kSharedNotWritten")
    error = caught.value
    assert (error.buffer, error.index, error.program, error.thread) == ("__shared__ tile", 9, (0, 0, 0), (9, 0, 0))
    assert error.line == machine.line("if (t < half) tile[t] +=")


def test_reading_before_cp_async_wait(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        staged(machine, "kNoWait")
    race = caught.value
    assert (race.buffer, race.index) == ("__shared__ stage", 0)
    assert race.first == Access("cp.async in flight", (0, 0, 0), (0, 0, 0), machine.line("pb::cp_async16("))
    assert race.second == Access("load", (0, 0, 0), (0, 0, 0), machine.line("out[128 * row + t + 32 * i] ="))


def test_fetching_over_what_others_still_read(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        staged(machine, "kNoSecondBarrier")
    race = caught.value
    assert race.buffer == "__shared__ stage"
    assert {race.first.kind, race.second.kind} == {"cp.async in flight", "load"}


def test_lanes_without_syncwarp(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        machine.traced("exchange", 1, 32, np.zeros(32, np.int32), machine.fault("kNoSyncwarp"))
    race = caught.value
    assert (race.buffer, race.first.kind, race.second.kind) == ("__shared__ box", "store", "load")
    assert race.first.line == machine.line("box[t] = t;")
    assert race.second.line == machine.line("const int other = box[t ^ 1];")
    assert race.first.thread == (race.index, 0, 0)
    assert race.second.thread == (race.index ^ 1, 0, 0)


def test_threads_of_a_block_in_global_memory(machine: Machine) -> None:
    with pytest.raises(RaceError) as caught:
        machine.traced("shift", 1, 64, np.zeros(64, np.int32), machine.fault("kNoBarrier"))
    race = caught.value
    assert (race.buffer, race.index, race.first.thread, race.second.thread) == ("out", 1, (0, 0, 0), (1, 0, 0))


def test_shared_memory_at_constant_indices(machine: Machine) -> None:
    out = np.zeros(64, np.int32)
    with pytest.raises(
        RaceError, match=r"'__shared__ two' at element 0: load .* thread \(0, 0, 0\) .*store .*\(33, 0, 0\)"
    ):
        machine.traced("constants", 1, 64, out, machine.fault("kNoBarrier"))
    with pytest.raises(UninitialisedReadError, match=r"'__shared__ pair' at element 0"):
        machine.traced("constants", 1, 64, out, machine.fault("kSharedNotWritten"))


# ---- Correct kernels, and what a trace costs nothing of


def test_correct_kernels_are_left_alone(machine: Machine, either_order: None) -> None:
    assert tree_sum(machine).requested_bytes == 1024 + 16 + 2 * 16
    staged(machine)
    none, out = machine.fault("kNone"), np.zeros(64, np.int32)
    machine.traced("exchange", 1, 32, out, none)
    np.testing.assert_array_equal(out[:32], np.arange(32)[::-1] ^ 1)
    machine.traced("shift", 1, 64, out, none)
    machine.traced("chain", 3, 1, out, none)
    machine.traced("constants", 1, 64, out, none)
    sums, seen = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    with trace(machine.provider):
        fresh = machine.provider.empty((1,), np.uint32)
        machine.launch("add_by_cas", 1, 32, fresh, seen)
    machine.launch("add_by_cas", 1, 32, sums, seen)
    assert (fresh[0], sums[0], set(seen)) == (496, 496, {496})


def test_nothing_is_looked_for_that_was_not_asked(machine: Machine) -> None:
    x, sums, total = floats(256), floats(4), floats(1)
    for fault in ("kTwoBlocks", "kSharedNotWritten", "kNoBarrier"):
        with trace(machine.provider, races=False, uninitialised=False) as launches:
            machine.launch("tree_sum", 4, 64, x, sums, total, machine.fault(fault))
        assert launches[0].buffers["sums"].stored_bytes == 16
        machine.launch("tree_sum", 4, 64, x, sums, total, machine.fault(fault))
    with trace(machine.provider, traffic=False) as launches:
        machine.launch("tree_sum", 4, 64, x, sums, total, machine.fault("kNone"))
    assert launches[0].requested_bytes == 0


def test_a_thread_that_spins_ends_at_the_time_limit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_host, "time_limit_s", 0.3)
    with pytest.raises(KernelTimeout):
        machine.traced("spin", 1, 1, np.zeros(1, np.int32))
    tree_sum(machine)


def test_an_unreported_store_to_a_read_only_array(machine: Machine) -> None:
    x = np.zeros(32, np.int32)
    assert machine.traced("increment", 1, 32, x).buffers["x"].stored_bytes == 128
    x.flags.writeable = False
    with pytest.raises(MemoryFault, match=r"store of 4 bytes, buffer 'x' at element 0 of 32.*read-only"):
        machine.traced("increment", 1, 32, x)


# ---- Bounds: the view's own elements, on every launch


def touch(machine: Machine, view: np.ndarray, other: np.ndarray, i: int, store: int) -> None:
    machine.launch("touch", 1, 1, view, other, np.int64(i), np.int32(store))


@pytest.mark.parametrize("store", [0, 1])
def test_the_gaps_of_a_strided_view_are_outside(machine: Machine, store: int) -> None:
    base = floats(4, 3, 5, 8)
    view = base[1:3, 1:, 1:4, 2:6]
    numbers = np.arange(base.size).reshape(base.shape)[1:3, 1:, 1:4, 2:6]
    elements = set((numbers - numbers.min()).ravel().tolist())
    for i in range(-12, 230):
        if i in elements:
            touch(machine, view, floats(1), i, store)
            continue
        with pytest.raises(MemoryFault) as caught:
            touch(machine, view, floats(1), i, store)
        fault = caught.value
        assert fault.buffer is not None
        assert (fault.buffer.name, fault.index, fault.kind) == ("view", i, ("load", "store")[store])


def test_the_gaps_of_one_view_may_be_another_live_buffer(machine: Machine) -> None:
    both = floats(4, 2, 8)
    touch(machine, both[:, 0], both[:, 1], 8, 1)  # an element of `other`
    with pytest.raises(MemoryFault, match="between the elements of a view"):
        touch(machine, both[:, 0], floats(1), 8, 1)
    with pytest.raises(MemoryFault):
        touch(machine, both[:, 0, :6], both[:, 1], 6, 0)  # of neither


def test_a_read_only_view_among_the_gaps_of_another(machine: Machine) -> None:
    both = floats(4, 2, 8)
    frozen = both[:, 1]
    frozen.flags.writeable = False
    touch(machine, both[:, 0], floats(1), 16, 1)
    with pytest.raises(MemoryFault, match=r"buffer 'other' .*read-only"):
        touch(machine, both[:, 0], frozen, 8, 1)


# ---- Agreement with AddressSanitizer

HARNESS = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __global__
#define __device__
static struct { unsigned x; } blockIdx, threadIdx;
#include "bounds.cu"
int main(int, char** argv) {
  const int nbytes = atoi(argv[1]), lo = atoi(argv[2]), hi = atoi(argv[3]);
  char* array = static_cast<char*>(malloc(nbytes));
  memset(array, 0, nbytes);
  int out = 0;
  for (int width = 1; width <= 8; width *= 2)
    for (int store = 0; store < 2; ++store)
      for (int offset = lo; offset < hi; offset += width) {
        fprintf(stderr, "case %d %d %d\\n", width, store, offset);
        for (blockIdx.x = 0; blockIdx.x < 3; ++blockIdx.x)
          for (threadIdx.x = 0; threadIdx.x < 4; ++threadIdx.x) around(array, offset, width, store, &out);
      }
  return 0;
}
"""
NBYTES, LO, HI = 61, -16, 80  # 16 bytes on either side are what AddressSanitizer guards at the least

Verdict = tuple[str, int] | None  # ("load" or "store", bytes) of a fault


def by_address_sanitizer(folder: Path) -> dict[tuple[int, int, int], Verdict]:
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        pytest.skip("no g++ to compile a kernel with AddressSanitizer")
    (folder / "main.cpp").write_text(HARNESS)
    flags = ["-std=c++20", "-O1", "-fsanitize=address", "-fsanitize-recover=address", f"-I{SAMPLES}"]
    built = subprocess.run([compiler, *flags, "-o", str(folder / "main"), str(folder / "main.cpp")],
                           capture_output=True, text=True, check=False)  # fmt: skip
    if built.returncode != 0:
        pytest.skip(f"g++ has no AddressSanitizer here: {built.stderr.strip().splitlines()[-1:]}")
    options = "halt_on_error=0:suppress_equal_pcs=0:symbolize=0:detect_leaks=0:color=never"
    environment = os.environ | {"ASAN_OPTIONS": options}
    done = subprocess.run([str(folder / "main"), *map(str, (NBYTES, LO, HI))], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    verdicts: dict[tuple[int, int, int], Verdict] = {}
    for part in done.stderr.split("case ")[1:]:
        width, store, offset = map(int, part.splitlines()[0].split())
        found = re.search(r"(READ|WRITE) of size (\d+)", part)
        verdicts[width, store, offset] = found and ({"READ": "load", "WRITE": "store"}[found[1]], int(found[2]))
    return verdicts


def on_the_host(kernel: Any, width: int, store: int, offset: int) -> Verdict:
    array = np.zeros(256, np.uint8)[64 : 64 + NBYTES]
    try:
        kernel((3,), (4,), (array, np.int64(offset), np.int32(width), np.int32(store), np.zeros(1, np.int32)))
    except MemoryFault as fault:
        where = (fault.program, fault.thread, fault.index)
        return (fault.kind, fault.size) if where == ((1, 0, 0), (2, 0, 0), offset) else ("elsewhere", 0)
    return None


def test_bounds_agree_with_address_sanitizer(machine: Machine, tmp_path: Path) -> None:
    expected = by_address_sanitizer(tmp_path)
    code = (SAMPLES / "bounds.cu").read_text()
    kernel = RawModule(code=code, options=OPTIONS, name_expressions=["around"]).get_function("around")
    assert {case: on_the_host(kernel, *case) for case in expected} == expected
    outside = [case for case, verdict in expected.items() if verdict]
    assert 100 < len(outside) < len(expected) == 2 * sum(-(-(HI - LO) // width) for width in (1, 2, 4, 8))


# ---- Our own kernels


def planted(source: str, name: str, old: str, new: str) -> CupyProvider:
    """A provider whose kernel `name` has `old` replaced by `new`."""
    text = (KERNELS / source).read_text()
    assert text.count(old) == 1, f"{source} must hold {old!r} once to plant a fault there"
    provider = CupyProvider(RawModule)
    module = RawModule(code=text.replace(old, new), options=OPTIONS, name_expressions=[name])
    provider.device._kernels[source, name] = module.get_function(name)
    return provider


def decode() -> PagedAttention:
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((20, 2, 16, 1, 64)).astype(np.float32)
    return PagedAttention(
        query=rng.standard_normal((2, 2, 64)).astype(np.float32),
        key_cache=cache[:, 0],
        value_cache=cache[:, 1],
        block_table=rng.permutation(20).astype(INT32).reshape(2, 10),
        seq_lens=np.array([150, 131], INT32),
        query_start=np.arange(3, dtype=INT32),
        scale=0.125,
    )


def chained_copies() -> CopyBlocks:
    rng = np.random.default_rng(0)
    caches = tuple(rng.standard_normal((8, 16, 1, 64)).astype(np.float32) for _ in range(2))
    return CopyBlocks(caches, np.array([[0, 1], [1, 2], [3, 4], [4, 3], [5, 5]], np.int64))


def run_all(provider: CupyProvider, problem: Any) -> None:
    for variant in provider.variants(problem):
        with trace(provider):
            getattr(provider, problem.op)(problem.on(provider), **variant)


def test_our_kernels_run_clean(machine: Machine) -> None:
    provider = CupyProvider(RawModule)
    run_all(provider, decode())
    run_all(provider, chained_copies())


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("if (index >= 0) cp_async_wait<0>();", "", ("cp.async in flight", "load")),
        ("__syncthreads();  // tile `index`", "// tile `index`", None),
    ],
    ids=["no wait", "no barrier"],
)
def test_faults_in_our_attention(machine: Machine, old: str, new: str, kinds: tuple[str, str] | None) -> None:
    provider = planted("paged_attention.cu", "paged_attention<FmaWarp<64>>", old, new)
    with pytest.raises(RaceError) as caught:
        run_all(provider, decode())
    race = caught.value
    assert race.buffer == "dynamic shared memory"
    assert kinds is None or (race.first.kind, race.second.kind) == kinds


# ---- Hidden shared variables


@pytest.mark.parametrize(
    ("declaration", "names"),
    [
        ("__shared__ float tile[64];", ["tile"]),
        ("__shared__ __align__(16) float tile[M], other[N < 3 ? 4 : 2];", ["tile", "other"]),
        ("__align__(16) __shared__ Pair<int, 4> pair;", ["pair"]),
        ("__shared__ union { float f[3]; int i[3]; } u;", ["u"]),
        ("__shared__ typename Storage<T>::Type storage;  // a comment; with a semicolon", ["storage"]),
        ("__shared__ float* leaked;", ["leaked"]),
        ("__shared__ float (*pointer)[4];", []),
        ("extern __shared__ float4 dynamic[];", []),
        ("#define SHARED __shared__", []),
    ],
)
def test_references_to_shared_variables(declaration: str, names: list[str]) -> None:
    text = expand(declaration + "\nint x;", "a.cu", []).text
    found = re.findall(r"auto& (\w+) = cuda_host::hidden\((\w+)\);", text)
    assert found == [(name, f"{name}__hidden") for name in names]
    assert [line for line in text.splitlines() if line.endswith("int x;")], "nothing spills into the next line"
    for _, hidden in found:
        assert text.count(hidden) == 2
