"""The memory trace of CUDA C++ on the host: exact counts, planted faults named exactly, correct kernels left alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_samples import KERNELS, Samples, aligned, floats, line_of

from pagebench.kernels import cuda_host
from pagebench.kernels.cuda_host import KernelTimeout, MemoryFault, RawModule, threads_in_reverse
from pagebench.kernels.cupy_provider import CupyProvider
from pagebench.kernels.memory_trace import BufferTraffic, LaunchTrace, RaceError, UninitialisedReadError, trace
from pagebench.kernels.memory_trace_races import Access
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dtypes import INT32
from pagebench.reference.paged_attention import PagedAttention


@pytest.fixture(scope="module")
def samples() -> Samples:
    reason = cuda_host.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return Samples()


@pytest.fixture(params=[False, True], ids=["forwards", "in-reverse"])
def either_order(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        with threads_in_reverse():
            yield
    else:
        yield


def tree_sum(samples: Samples, fault: str = "kNone") -> LaunchTrace:
    x = aligned(np.arange(256, dtype=np.float32))
    return samples.traced("tree_sum", 4, 64, x, floats(4), floats(1), samples.fault(fault))


def staged(samples: Samples, fault: str = "kNone") -> LaunchTrace:
    return samples.traced("staged", 1, 32, floats(512), floats(512), np.int32(4), samples.fault(fault))


# ---- Traffic


def test_bytes_sectors_and_requests_are_exact(samples: Samples, either_order: None) -> None:
    launch = samples.traced("row_sums", 1, 64, floats(8, 40), floats(8), np.int32(8), np.int32(40))
    # Each row is one request of 128 bytes, in 4 sectors, or 5 where its start is in the middle of one: 160 is 5 * 32.
    assert launch.buffers["x"] == BufferTraffic("x", 1280, 1024, 0, 0, 8, 32, 32)
    assert launch.buffers["sums"] == BufferTraffic("sums", 32, 0, 32, 0, 8, 8, 1)
    assert (launch.kernel, launch.grid, launch.how) == ("row_sums", (1, 1, 1), "host")


@pytest.mark.parametrize(("step", "sectors"), [(1, 4), (2, 8), (8, 32), (16, 32)])
def test_coalescing(samples: Samples, either_order: None, step: int, sectors: int) -> None:
    args = (floats(64 * 16), floats(1), floats(64), aligned(np.zeros(1, np.uint32)), np.int32(step))
    launch = samples.traced("strided", 1, 64, *args)
    assert launch.buffers["x"] == BufferTraffic("x", 4096, 256, 0, 0, 2, 2 * sectors, 2 * sectors)
    assert launch.buffers["x"].sectors_per_request == sectors
    assert launch.buffers["table"] == BufferTraffic("table", 4, 8, 0, 0, 2, 2, 1)  # 32 lanes, one request, 4 bytes
    assert launch.buffers["count"] == BufferTraffic("count", 4, 0, 0, 8, 2, 2, 1)
    assert launch.buffers["count"].requested_bytes == 16  # an atomic reads and writes


def test_stores_that_follow_a_load_of_the_same_address_count(samples: Samples) -> None:
    launch = samples.traced("shift", 3, 64, aligned(np.zeros(192, np.int32)), samples.fault("kNone"))
    assert launch.buffers["out"].stored_bytes == 2 * 768
    totals, sums = floats(1), floats(4)
    with pytest.raises(RaceError):  # total[0] += tile[0] is a load and, though g++ reports none, a store
        samples.traced("tree_sum", 4, 64, floats(256) + 1, sums, totals, samples.fault("kNoAtomic"))


def test_cp_async_counts_what_it_reads(samples: Samples) -> None:
    launch = staged(samples)
    assert launch.buffers["x"] == BufferTraffic("x", 2048, 2048, 0, 0, 4, 64, 64)
    assert launch.buffers["out"] == BufferTraffic("out", 2048, 0, 2048, 0, 16, 64, 64)


def test_the_halves_of_one_array_are_told_apart(samples: Samples) -> None:
    both = floats(4, 2, 8)
    launch = samples.traced("touch", 1, 1, both[:, 0], both[:, 1], np.int64(16), np.int32(0))
    assert launch.buffers["view"] == BufferTraffic("view", 128, 4, 0, 0, 1, 1, 1)
    assert launch.buffers["other"] == BufferTraffic("other", 128, 0, 4, 0, 1, 1, 1)


# ---- Planted faults


def test_a_missing_barrier(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(samples, "kNoBarrier")
    race = caught.value
    assert (race.kernel, race.buffer, race.index) == ("tree_sum", "__shared__ tile", 32)
    load, store = line_of("if (t < half) tile[t] += tile[t + half];"), line_of("tile[t] = x[64 * blockIdx.x")
    assert race.first == Access("load", (0, 0, 0), (0, 0, 0), load)
    assert race.second == Access("store", (0, 0, 0), (32, 0, 0), store)


def test_two_blocks_that_write_one_element(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(samples, "kTwoBlocks")
    race, line = caught.value, line_of("sums[fault == kTwoBlocks")
    assert (race.buffer, race.index) == ("sums", 0)
    assert race.first == Access("store", (0, 0, 0), (0, 0, 0), line)
    assert race.second == Access("store", (1, 0, 0), (0, 0, 0), line)


def test_a_missing_atomic(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(samples, "kNoAtomic")
    race, line = caught.value, line_of("if (fault == kNoAtomic)")
    assert (race.buffer, race.index) == ("total", 0)
    assert race.first == Access("store", (0, 0, 0), (0, 0, 0), line)
    assert race.second == Access("load", (1, 0, 0), (0, 0, 0), line)


def test_an_atomic_and_a_plain_store(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        tree_sum(samples, "kAtomicAndPlain")
    race = caught.value
    assert (race.buffer, race.index, race.first.kind, race.second.kind) == ("total", 0, "atomic", "store")
    assert (race.first.program, race.second.program) == ((0, 0, 0), (1, 0, 0))


def test_a_block_that_reads_what_another_wrote(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        samples.traced("chain", 3, 1, np.zeros(4, np.int32), samples.fault("kOtherBlocksResult"))
    race, line = caught.value, line_of("values[b + 1] =")
    assert (race.buffer, race.index) == ("values", 1)
    assert race.first == Access("store", (0, 0, 0), (0, 0, 0), line)
    assert race.second == Access("load", (1, 0, 0), (0, 0, 0), line)


def fill_and_reverse(samples: Samples, skip: int) -> np.ndarray:
    n = np.int32(100)
    with trace(samples.provider):
        scratch = samples.provider.empty((100,), np.float32)
        out = samples.provider.empty((100,), np.float32)
        samples.launch("fill", 2, 64, scratch, n, np.int32(skip))
        samples.launch("reverse", 2, 64, scratch, out, n)
    return np.asarray(out)


def test_scratch_that_was_never_written(samples: Samples) -> None:
    np.testing.assert_array_equal(fill_and_reverse(samples, skip=-1), np.arange(100)[::-1])
    with pytest.raises(UninitialisedReadError) as caught:
        fill_and_reverse(samples, skip=70)
    error = caught.value
    assert (error.kernel, error.buffer, error.index, error.kind) == ("reverse", "scratch", 70, "load")
    assert (error.program, error.thread) == ((1, 0, 0), (6, 0, 0))
    assert error.line == line_of("out[n - 1 - i] = scratch[i]")


def test_what_the_host_wrote_may_be_read(samples: Samples) -> None:
    with trace(samples.provider):
        scratch = samples.provider.empty((100,), np.float32)
        scratch[:] = 1
        samples.launch("reverse", 2, 64, scratch, floats(100), np.int32(100))


def test_shared_memory_that_was_never_written(samples: Samples) -> None:
    with pytest.raises(UninitialisedReadError) as caught:
        tree_sum(samples, "kSharedNotWritten")
    error = caught.value
    assert (error.buffer, error.index, error.program, error.thread) == ("__shared__ tile", 9, (0, 0, 0), (9, 0, 0))
    assert error.line == line_of("if (t < half) tile[t] +=")


def test_reading_before_cp_async_wait(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        staged(samples, "kNoWait")
    race = caught.value
    assert (race.buffer, race.index) == ("__shared__ stage", 0)
    assert race.first == Access("cp.async in flight", (0, 0, 0), (0, 0, 0), line_of("pb::cp_async16("))
    assert race.second == Access("load", (0, 0, 0), (0, 0, 0), line_of("out[128 * row + t + 32 * i] ="))


def test_fetching_over_what_others_still_read(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        staged(samples, "kNoSecondBarrier")
    race = caught.value
    assert race.buffer == "__shared__ stage"
    assert {race.first.kind, race.second.kind} == {"cp.async in flight", "load"}


def test_lanes_without_syncwarp(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        samples.traced("exchange", 1, 32, np.zeros(32, np.int32), samples.fault("kNoSyncwarp"))
    race = caught.value
    assert (race.buffer, race.first.kind, race.second.kind) == ("__shared__ box", "store", "load")
    assert race.first.line == line_of("box[t] = t;")
    assert race.second.line == line_of("const int other = box[t ^ 1];")
    assert race.first.thread == (race.index, 0, 0)
    assert race.second.thread == (race.index ^ 1, 0, 0)


def test_threads_of_a_block_in_global_memory(samples: Samples) -> None:
    with pytest.raises(RaceError) as caught:
        samples.traced("shift", 1, 64, np.zeros(64, np.int32), samples.fault("kNoBarrier"))
    race = caught.value
    assert (race.buffer, race.index, race.first.thread, race.second.thread) == ("out", 1, (0, 0, 0), (1, 0, 0))


def test_shared_memory_at_constant_indices(samples: Samples) -> None:
    out = np.zeros(64, np.int32)
    with pytest.raises(
        RaceError, match=r"'__shared__ two' at element 0: load .* thread \(0, 0, 0\) .*store .*\(33, 0, 0\)"
    ):
        samples.traced("constants", 1, 64, out, samples.fault("kNoBarrier"))
    with pytest.raises(UninitialisedReadError, match=r"'__shared__ pair' at element 0"):
        samples.traced("constants", 1, 64, out, samples.fault("kSharedNotWritten"))


# ---- Correct kernels, and what a trace costs nothing of


def test_correct_kernels_are_left_alone(samples: Samples, either_order: None) -> None:
    assert tree_sum(samples).requested_bytes == 1024 + 16 + 2 * 16
    staged(samples)
    none, out = samples.fault("kNone"), np.zeros(64, np.int32)
    samples.traced("exchange", 1, 32, out, none)
    np.testing.assert_array_equal(out[:32], np.arange(32)[::-1] ^ 1)
    samples.traced("shift", 1, 64, out, none)
    samples.traced("chain", 3, 1, out, none)
    samples.traced("constants", 1, 64, out, none)
    sums, seen = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    with trace(samples.provider):
        fresh = samples.provider.empty((1,), np.uint32)
        samples.launch("add_by_cas", 1, 32, fresh, seen)
    samples.launch("add_by_cas", 1, 32, sums, seen)
    assert (fresh[0], sums[0], set(seen)) == (496, 496, {496})


def test_nothing_is_looked_for_that_was_not_asked(samples: Samples) -> None:
    x, sums, total = floats(256), floats(4), floats(1)
    for fault in ("kTwoBlocks", "kSharedNotWritten", "kNoBarrier"):
        with trace(samples.provider, races=False, uninitialised=False) as launches:
            samples.launch("tree_sum", 4, 64, x, sums, total, samples.fault(fault))
        assert launches[0].buffers["sums"].stored_bytes == 16
        samples.launch("tree_sum", 4, 64, x, sums, total, samples.fault(fault))
    with trace(samples.provider, traffic=False) as launches:
        samples.launch("tree_sum", 4, 64, x, sums, total, samples.fault("kNone"))
    assert launches[0].requested_bytes == 0


def test_a_thread_that_spins_ends_at_the_time_limit(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_host, "time_limit_s", 0.3)
    with pytest.raises(KernelTimeout):
        samples.traced("spin", 1, 1, np.zeros(1, np.int32))
    tree_sum(samples)


def test_an_unreported_store_to_a_read_only_array(samples: Samples) -> None:
    x = np.zeros(32, np.int32)
    assert samples.traced("increment", 1, 32, x).buffers["x"].stored_bytes == 128
    x.flags.writeable = False
    with pytest.raises(MemoryFault, match=r"store of 4 bytes, buffer 'x' at element 0 of 32.*read-only"):
        samples.traced("increment", 1, 32, x)


# ---- Our own kernels


def planted(folder: Path, pattern: str) -> CupyProvider:
    """A provider whose attention kernels are copies with an empty statement for what `pattern` matches."""
    removed = 0
    for path in sorted(KERNELS.glob("*.cu*")):
        text = path.read_text()
        if path.name.startswith("paged_attention"):
            text, count = re.subn(pattern, ";", text)
            removed += count
        (folder / path.name).write_text(text)
    assert removed > 0, f"{pattern} is nowhere in the attention kernels"

    def module(code: str, options: tuple[str, ...], name_expressions: list[str]) -> RawModule:
        return RawModule(code=re.sub(pattern, ";", code), options=(f"-I{folder}",), name_expressions=name_expressions)

    return CupyProvider(module)


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


def test_our_kernels_run_clean(samples: Samples) -> None:
    provider = CupyProvider(RawModule)
    run_all(provider, decode())
    run_all(provider, chained_copies())


def test_attention_that_does_not_wait_for_its_copies(samples: Samples, tmp_path: Path) -> None:
    with pytest.raises(RaceError) as caught:
        run_all(planted(tmp_path, r"cp_async_wait<\d+>\(\);|cp_async_wait_all\(\);"), decode())
    race = caught.value
    assert race.buffer == "dynamic shared memory"
    assert race.first.kind == "cp.async in flight"
    assert "cp_async16(" in race.first.line


def test_attention_without_barriers(samples: Samples, tmp_path: Path) -> None:
    with pytest.raises(RaceError) as caught:
        run_all(planted(tmp_path, r"__syncthreads\(\);"), decode())
    race = caught.value
    assert "shared" in race.buffer
    assert race.first.program == race.second.program
    assert race.first.thread != race.second.thread


PROGRAMS: dict[str, dict[str, Any]] = {
    "codes": {"cache_dtype": "int8", "kv_scale": "slot"},
    "codes, float32": {"cache_dtype": "float8_e4m3fn", "kv_scale": "slot", "dtype": "float32", "group": 2},
    "wide": {"head_size": 576},
    "wide, codes": {"head_size": 576, "cache_dtype": "float8_e5m2", "kv_scale": "head"},
    "many rows": {"group": 71},
    "many rows, float32": {"group": 40, "dtype": "float32"},
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_kind_of_program_runs_clean(samples: Samples, kind: str) -> None:
    """No race and no read of what nobody wrote, in several splits and tiles of each."""
    provider = CupyProvider()
    problem: Any = AttentionRecipe(sequences=((1, 150), (2, 70)), block_size=16, **PROGRAMS[kind]).build()
    for variant in provider.variants(problem):
        with trace(provider):
            provider.paged_attention(problem.on(provider), **variant)
