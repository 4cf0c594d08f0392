# ruff: noqa: N803  # a kernel's constexpr parameters are capitals, as everywhere in Triton
"""The memory trace of Triton kernels, and its parts; `test_memory_trace_cuda` has the same of CUDA C++."""

from typing import Any

import numpy as np
import pytest
from traced_problems import decode, run

from pagebench.kernels.devices import gpu_present
from pagebench.kernels.providers import load_provider

PROVIDERS = {"triton": load_provider("triton")}

import torch  # noqa: E402  # triton must not be imported before it is activated, and torch may import it
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pagebench.kernels import triton_memory  # noqa: E402
from pagebench.kernels.launch_buffers import Buffer, MemoryFault, StridedView, buffers_of  # noqa: E402
from pagebench.kernels.memory_trace import RaceError, UninitialisedReadError, ratio, trace  # noqa: E402
from pagebench.kernels.memory_trace_races import Access, ByteOwners  # noqa: E402
from pagebench.properties import profile, traced  # noqa: E402

pytestmark = pytest.mark.skipif(gpu_present(), reason="kernels are compiled here: a GPU is present")

# --- bytes and sectors


def test_traffic_of_a_decode_is_exact() -> None:
    problem = decode([64])
    launches = run(PROVIDERS["triton"], problem)
    assert [launch.how for launch in launches] == ["interpreter", "interpreter"]
    attend, combine = (launch.buffers for launch in launches)
    for name in ("key_cache", "value_cache"):
        cache = attend[name]
        assert cache.nbytes == 64 * 32 * 2
        assert (cache.loaded_bytes, cache.stored_bytes, cache.atomic_bytes) == (cache.nbytes, 0, 0)
        assert cache.sectors_requested == cache.sectors == 128
        assert cache.sector_efficiency == 1.0
    assert attend["query"].loaded_bytes == 2 * 32 * 2  # once per split
    assert attend["query"].sectors == 2
    assert attend["block_table"].loaded_bytes == 4 * 4  # a block's id once, however many keys ask
    assert attend["part_sum"].stored_bytes == combine["part_sum"].loaded_bytes == 2 * 32 * 4
    assert combine["out"].stored_bytes == 32 * 2
    total = sum(launch.requested_bytes for launch in launches)
    assert ratio(launches, problem) == total / problem.bytes_moved()
    assert ratio(launches, problem, without=("part_sum",)) == (total - 2 * 256) / problem.bytes_moved()


@triton.jit
def columns_kernel(x, y, STRIDE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i * STRIDE))


@pytest.mark.parametrize(("stride", "sectors"), [(1, 2), (2, 4), (16, 32), (64, 32)])
def test_coalescing_is_the_sectors_of_a_request(stride: int, sectors: int) -> None:
    x, y = torch.zeros(32 * stride, dtype=torch.int16), torch.zeros(32, dtype=torch.int16)
    offset = -(x.data_ptr() // 2) % 16  # to a sector's edge
    x = torch.zeros(32 * stride + 16, dtype=torch.int16)[offset:] if offset else x
    with trace(PROVIDERS["triton"]) as launches:
        columns_kernel[(1,)](x, y, STRIDE=stride, N=32)
    moved = launches[0].buffers["x"]
    assert (moved.requests, moved.loaded_bytes) == (1, 64)
    assert abs(moved.sectors_requested - sectors) <= (x.data_ptr() % 32 != 0)
    assert moved.sectors == moved.sectors_requested


def test_what_several_lanes_ask_for_counts_once_and_views_are_told_apart() -> None:
    both = torch.zeros(4, 2, 32, dtype=torch.int16)
    with trace(PROVIDERS["triton"]) as launches:
        columns_kernel[(1,)](both[:, 0], both[:, 1], STRIDE=0, N=32)
    x, y = launches[0].buffers["x"], launches[0].buffers["y"]
    assert (x.loaded_bytes, x.sectors_requested, x.nbytes) == (2, 1, 256)
    assert (y.loaded_bytes, y.stored_bytes) == (0, 64)


def test_nothing_is_recorded_outside_a_trace_nor_when_not_asked() -> None:
    provider, problem = PROVIDERS["triton"], decode([20])
    launches = run(provider, problem, traffic=False)
    assert sum(launch.requested_bytes for launch in launches) == 0
    provider.paged_attention(problem.on(provider))
    assert len(launches) == 1  # the table is too narrow for a second split
    assert not triton_memory.observers
    assert "empty" not in vars(provider)


def test_traces_do_not_nest_and_ratio_needs_a_launch() -> None:
    provider = PROVIDERS["triton"]
    with trace(provider) as launches, pytest.raises(RuntimeError, match="do not nest"), trace(provider):
        pass
    with pytest.raises(ValueError, match="launches must not be empty"):
        ratio(launches, decode([20]))


# --- own kernels


@triton.jit
def count_kernel(counter, y, ATOMIC: tl.constexpr, RESET: tl.constexpr):
    program = tl.program_id(0)
    if RESET & (program == 1):
        tl.store(counter, 0)
    if ATOMIC:
        tl.atomic_add(counter, 1)
    else:
        tl.store(counter, tl.load(counter) + 1)
    tl.store(y + program, program)


def test_atomics_do_not_race_with_each_other_but_with_anything_else() -> None:
    provider = PROVIDERS["triton"]
    counter, y = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with trace(provider) as launches:
        count_kernel[(3,)](counter, y, ATOMIC=True, RESET=False)
    assert counter.item() == 3
    assert launches[0].buffers["counter"].atomic_bytes == 12
    assert launches[0].buffers["counter"].requested_bytes == 24
    for options, kinds in (
        ({"ATOMIC": True, "RESET": True}, "atomic store"),
        ({"ATOMIC": False, "RESET": False}, "store load"),
    ):
        with pytest.raises(RaceError) as caught, trace(provider):
            count_kernel[(3,)](counter, y, **options)
        assert f"{caught.value.first.kind} {caught.value.second.kind}" == kinds
        assert (caught.value.first.program, caught.value.second.program) == ((0, 0, 0), (1, 0, 0))


@triton.jit
def negate_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, -tl.load(x + i))


def test_what_an_earlier_launch_or_the_host_wrote_may_be_read() -> None:
    provider = PROVIDERS["triton"]
    x = torch.zeros(8, dtype=torch.int32)
    with trace(provider):
        a, b, c = (provider.empty((8,), np.dtype(np.int32)) for _ in range(3))
        negate_kernel[(1,)](x, a, N=8)
        negate_kernel[(1,)](a, b, N=8)
        c.zero_()
        negate_kernel[(1,)](c, b, N=8)
    with trace(provider):
        a = provider.empty((8,), np.dtype(np.int32))
        negate_kernel[(1,)](x, a, N=4)
        a[5] = 0
        with pytest.raises(UninitialisedReadError, match="buffer 'x' at element 4, by program") as caught:
            negate_kernel[(1,)](a, b, N=8)
    assert caught.value.index == 4


@triton.jit
def offset_kernel(x, block, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + block * stride + i, 1)


def test_an_address_that_wraps_is_reported() -> None:
    provider = PROVIDERS["triton"]
    cache = provider.empty(((1 << 31) + (1 << 16),), np.dtype(np.int8))  # never touched, so it costs nothing
    with pytest.raises(MemoryFault, match="'x' at element -2147483648"):
        offset_kernel[(1,)](cache, 1 << 15, 1 << 16, N=8)
    with pytest.raises(Exception, match="overflow"), trace(provider, overflow=True):
        offset_kernel[(1,)](cache, 1 << 15, 1 << 16, N=8)
    with trace(provider) as launches:
        offset_kernel[(1,)](cache, (1 << 15) - 1, 1 << 16, N=8)
    assert launches[0].buffers["x"].sectors == 1


# --- which property runs are traced


def test_a_share_of_the_problems_is_traced_and_all_in_the_deep_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [decode([n, 1 + n // 3]) for n in range(1, 101)]
    share = [traced.chosen(problem) for problem in problems]
    assert 10 <= sum(share) <= 40
    assert share == [traced.chosen(problem) for problem in problems]
    monkeypatch.setattr(profile, "active", profile.PROFILES["deep"])
    assert all(traced.chosen(problem) for problem in problems)


def test_a_property_run_reports_what_its_trace_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_found", False)
    monkeypatch.setattr(traced, "SHARE", 1)
    counter, y = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RaceError), traced.traced(PROVIDERS["triton"], decode([1])):
        count_kernel[(3,)](counter, y, ATOMIC=False, RESET=False)
    monkeypatch.setattr(traced, "SHARE", 10**12)
    assert traced.chosen(decode([1]))  # so that what was found can be shrunk


# --- the parts, against the plainest thing that does the same


def test_owners_of_bytes_agree_with_a_set_per_byte() -> None:
    rng = np.random.default_rng(0)
    memory = np.zeros(3 * 4096, np.uint8)
    for _ in range(60):
        offsets = rng.integers(0, 64, 2) * 8
        views = [memory[offsets[0] : offsets[0] + 512].view(np.int32), memory[6000 + offsets[1] :][:512].view(np.int16)]
        buffers = [buffer for i, view in enumerate(views) for buffer in buffers_of(str(i), view)]
        owners, plain = ByteOwners(buffers), dict[int, list[Access]]()
        for _ in range(12):
            view = buffers[rng.integers(2)]
            size = int(rng.choice([1, 2, 4, 8], p=[0.1, 0.3, 0.3, 0.3]))
            lanes = rng.integers(view.start // size + 1, view.stop // size, rng.integers(1, 20))
            addresses = np.unique(lanes.astype(np.uint64) * np.uint64(size))
            access = Access(str(rng.choice(["load", "load", "store", "atomic"])), (int(rng.integers(3)), 0, 0))
            expected = _conflicts(plain, access, addresses, size)
            found = owners.touch(access, addresses, size)
            assert (found is None) == (not expected)
            if found is not None:
                assert found[1] in expected[found[0]]
                break


def _conflicts(plain: dict[int, list[Access]], access: Access, addresses: Any, size: int) -> dict[int, list[Access]]:
    """Earlier accesses that conflict, by byte; notes the access."""
    found: dict[int, list[Access]] = {}
    for byte in (int(address) + i for address in addresses for i in range(size)):
        for earlier in plain.setdefault(byte, []):
            kinds = {earlier.kind, access.kind}
            if earlier.program != access.program and kinds not in ({"load"}, {"atomic"}):
                found.setdefault(byte, []).append(earlier)
        plain[byte].append(access)
    return found


def test_a_strided_view_holds_its_own_bytes_only() -> None:
    rng = np.random.default_rng(0)
    base = np.zeros(4000, np.int16)
    strided = 0
    for _ in range(300):
        shape, steps = rng.integers(1, 5, 3), rng.choice([0, 1, 2, 4, 6, 12, 24, 60, 96], 3)
        view = np.lib.stride_tricks.as_strided(base[100:], shape, [2 * int(s) for s in steps])
        (buffer,) = buffers_of("x", view)
        own = {2 * int((steps * index).sum()) + byte for index in np.ndindex(*shape) for byte in range(2)}
        if not buffer.rows()[1]:
            continue
        strided += 1
        addresses = np.arange(buffer.start - 20, buffer.stop + 20, dtype=np.uint64)
        held = StridedView(buffer).holds(addresses, 1)
        assert held.tolist() == [int(a) - buffer.start in own for a in addresses]
    assert strided > 100


def test_rows_of_a_view() -> None:
    def rows(array: Any) -> Any:
        (buffer,) = buffers_of("x", array)
        assert isinstance(buffer, Buffer)
        return buffer.rows()

    cache = np.zeros((5, 2, 4, 3, 8), np.float16)
    assert rows(cache) == (cache.nbytes, ())
    assert rows(cache[:, 0]) == (4 * 3 * 8 * 2, ((2 * 4 * 3 * 8 * 2, 5),))
    assert rows(cache[:, 0, :, 1]) == (16, ((2 * 4 * 3 * 8 * 2, 5), (48, 4)))
    assert rows(cache[..., ::2]) == (2, ((4, 5 * 2 * 4 * 3 * 4),))
    assert rows(np.broadcast_to(cache[0, 0, 0, 0], (7, 8))) == (16, ())
    assert rows(cache[:0]) == (0, ())
