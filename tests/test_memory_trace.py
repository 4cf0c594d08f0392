# ruff: noqa: N803  # a kernel's constexpr parameters are capitals, as everywhere in Triton
"""The memory trace: exact byte counts, and every kind of planted fault named exactly."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_kernels import planted

from pagebench.kernels.providers import load_provider

PROVIDERS = {name: load_provider(name) for name in ("triton", "cupy")}

import torch  # noqa: E402  # triton must not be imported before it is activated, and torch may import it
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pagebench.kernels import memory_trace, triton_memory  # noqa: E402
from pagebench.kernels.launch_buffers import Buffer, MemoryFault, StridedView, buffers_of  # noqa: E402
from pagebench.kernels.memory_trace import RaceError, UninitialisedReadError, ratio, trace  # noqa: E402
from pagebench.kernels.memory_trace_races import Access, ByteOwners  # noqa: E402
from pagebench.reference.block_copy import CopyBlocks  # noqa: E402
from pagebench.reference.dtypes import FLOAT16, INT32  # noqa: E402
from pagebench.reference.paged_attention import PagedAttention  # noqa: E402

BACKENDS = list(PROVIDERS)


def decode(lens: list[int], *, head_size: int = 32, block_size: int = 16) -> PagedAttention:
    """One query head per sequence, K and V halves of one tensor, blocks in no order."""
    rng = np.random.default_rng(0)
    width = max(-(-n // block_size) for n in lens)
    cache = rng.standard_normal((len(lens) * width, 2, block_size, 1, head_size)).astype(FLOAT16)
    return PagedAttention(
        query=rng.standard_normal((len(lens), 1, head_size)).astype(FLOAT16),
        key_cache=cache[:, 0],
        value_cache=cache[:, 1],
        block_table=rng.permutation(len(lens) * width).astype(INT32).reshape(len(lens), width),
        seq_lens=np.array(lens, INT32),
        query_start=np.arange(len(lens) + 1, dtype=INT32),
        scale=head_size**-0.5,
    )


def run(provider: Any, problem: Any, **options: Any) -> list[memory_trace.LaunchTrace]:
    placed = problem.on(provider)
    with trace(provider, **options) as launches:
        getattr(provider, problem.op)(placed, **SMALL.get((provider.name, problem.op), {}))
    return launches


# Splits and tiles that little problems have several of.
SMALL = {
    ("triton", "paged_attention"): {"split": 32, "tile": 16},
    ("cupy", "paged_attention"): {"split": 32, "tile": 16},
}


# --- bytes and sectors


def test_traffic_of_a_decode_is_exact() -> None:
    problem = decode([64])
    attend, combine = run(PROVIDERS["triton"], problem)
    assert (attend.kernel, attend.grid, attend.how) == ("attend_kernel", (2, 1, 1), "interpreter")
    for name in ("key_cache", "value_cache"):
        cache = attend.buffers[name]
        assert cache.nbytes == 64 * 32 * 2
        assert (cache.loaded_bytes, cache.stored_bytes, cache.atomic_bytes) == (cache.nbytes, 0, 0)
        assert (cache.requests, cache.sectors_requested, cache.sectors) == (4, 128, 128)
        assert (cache.sectors_per_request, cache.sector_efficiency) == (32, 1.0)
    assert attend.buffers["query"].loaded_bytes == 2 * 32 * 2  # once per split
    assert attend.buffers["query"].sectors == 2
    assert attend.buffers["block_table"].loaded_bytes == 4 * 4  # a block's id once per tile, however many keys ask
    assert attend.buffers["part_sum"].stored_bytes == combine.buffers["part_sum"].loaded_bytes == 2 * 32 * 4
    assert combine.buffers["out"].stored_bytes == 32 * 2
    total = attend.requested_bytes + combine.requested_bytes
    assert ratio([attend, combine], problem) == total / problem.bytes_moved()
    named = ratio([attend, combine], problem, without=("part_sum", "part_max", "part_denominator"))
    assert named < ratio([attend, combine], problem)


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


# --- planted faults: what is replaced in a copy of the kernel, and what must be said


@dataclasses.dataclass(frozen=True)
class Fault:
    op: str
    old: str
    new: str
    buffer: str
    kernel: str
    index: int = 0  # of the element that is named


# Two splits of one sequence write their partial results to one place.
RACES = {
    "triton": Fault(
        "paged_attention",
        "part = result * num_splits + split_index",
        "part = result * num_splits",
        "part_sum",
        "attend_kernel",
    ),
    "cupy": Fault(
        "paged_attention",
        "num_heads + head) * max_splits + split;",
        "num_heads + head) * max_splits;",
        "partials",
        "paged_attention",
    ),
}
# Every pair is copied by a program of its own, also where another pair writes what it reads.
READ_RACES = {
    "triton": Fault(
        "copy_blocks",
        "return (parent == num_pairs) | (ancestor == pair)",
        "return pair >= 0",
        "table[0]",
        "copy_kernel",
    ),
    "cupy": Fault("copy_blocks", "if (role == DEPENDENT) return;", "", "addresses[0]", "copy_blocks"),
}
# The shorter of two sequences has a split less, and its state is read all the same.
UNWRITTEN = {
    "triton": Fault(
        "paged_attention", "live = part < splits", "live = part < num_splits", "part_max", "combine_kernel", 2
    ),
    "cupy": Fault(
        "paged_attention",
        "const int count = sequences.splits(seq).count;",
        "const int count = max_splits;",
        "states",
        "reduce_splits",
        4,
    ),
}
# The stride of blocks as if K were not every second block of a tensor that holds V too.
GAPS = {
    "triton": Fault(
        "copy_blocks",
        "held = tl.load(tile_of_block_0 + src * block_stride, mask=inside)",
        "held = tl.load(tile_of_block_0 + src * (block_stride // 2), mask=inside)",
        "table[0]",
        "copy_kernel",
        64,
    ),
    "cupy": Fault(
        "copy_blocks",
        "const char* from = cache + block * block_stride;",
        "const char* from = cache + block * (block_stride / 2);",
        "addresses[0]",
        "copy_blocks",
        64,
    ),
}
_STAGE_KEY = "stage_piece(key_tile(index) + at, exist ? key_piece + slot.x : keys.data, keys.stride, exist, vector);"
# Keys are read twice.
TWICE = {
    "triton": Fault(
        "paged_attention",
        "k = tl.load(k_d[None, :]",
        "k = tl.load(k_d[None, :] + ((block * ks0 + slot * ks1) * KV_VECTOR)[:, None], mask=key_d, other=0.0)\n"
        "            k = tl.load(k_d[None, :]",
        "key_cache",
        "attend_kernel",
    ),
    "cupy": Fault("paged_attention", _STAGE_KEY, 2 * _STAGE_KEY, "keys", "paged_attention"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_programs_that_write_one_byte_are_named(backend: str, tmp_path: Path) -> None:
    fault = RACES[backend]
    provider = planted(backend, fault.op, fault.old, fault.new, tmp_path)
    with pytest.raises(RaceError) as caught:
        run(provider, decode([64]))
    race = caught.value
    assert (race.kernel.split("<")[0], race.buffer, race.index) == (fault.kernel, fault.buffer, fault.index)
    assert (race.first.kind, race.second.kind) == ("store", "store")
    assert {race.first.program, race.second.program} == {(0, 0, 0), (1, 0, 0)}
    for access in (race.first, race.second):
        assert re.match(r"\S+:\d+: .*store", access.line), access.line
        assert access.line in str(race)


def chain() -> CopyBlocks:
    """Block 0 to 1 and 1 to 2, as if at once."""
    cache = np.arange(4 * 64, dtype=np.int16).reshape(4, 64)
    return CopyBlocks((cache,), np.array([[0, 1], [1, 2]], np.int64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_that_reads_what_another_writes_is_named(backend: str, tmp_path: Path) -> None:
    fault = READ_RACES[backend]
    provider = planted(backend, fault.op, fault.old, fault.new, tmp_path)
    with pytest.raises(RaceError) as caught:
        run(provider, chain())
    race = caught.value
    assert (race.kernel.split("<")[0], race.buffer) == (fault.kernel, fault.buffer)
    assert 64 <= race.index < 128  # block 1
    assert {race.first.kind, race.second.kind} == {"load", "store"}
    assert race.first.program != race.second.program


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_of_scratch_that_nobody_wrote_is_named(backend: str, tmp_path: Path) -> None:
    fault = UNWRITTEN[backend]
    provider = planted(backend, fault.op, fault.old, fault.new, tmp_path)
    with pytest.raises(UninitialisedReadError) as caught:
        run(provider, decode([40, 64, 96]))
    read = caught.value
    assert (read.kernel.split("<")[0], read.buffer, read.kind) == (fault.kernel, fault.buffer, "load")
    assert read.index == fault.index  # sequence 0 has two splits, and this is of the third
    assert read.program == (0, 0, 0)
    assert re.match(r"\S+:\d+: \S", read.line), read.line


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_between_the_elements_of_a_view_is_named_without_a_trace(backend: str, tmp_path: Path) -> None:
    fault = GAPS[backend]
    provider = planted(backend, fault.op, fault.old, fault.new, tmp_path)
    cache = np.zeros((4, 2, 64), np.int16)
    problem = CopyBlocks((cache[:, 0],), np.array([[1, 2]], np.int64))
    with pytest.raises(MemoryFault, match="between the elements of a view of shape") as caught:
        provider.copy_blocks(problem.on(provider))
    assert (caught.value.kernel.split("<")[0], caught.value.kind, caught.value.index) == (
        fault.kernel,
        "load",
        fault.index,
    )
    assert caught.value.buffer is not None
    assert caught.value.buffer.name == fault.buffer


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_read_of_the_keys_is_counted(backend: str, tmp_path: Path) -> None:
    fault, problem = TWICE[backend], decode([64])
    once = run(PROVIDERS[backend], problem)[0].buffers[fault.buffer]
    provider = planted(backend, fault.op, fault.old, fault.new, tmp_path)
    launches = run(provider, problem, races=False)  # copies to one place at once are a race in CUDA
    twice = launches[0].buffers[fault.buffer]
    assert (once.loaded_bytes, twice.loaded_bytes) == (once.nbytes, 2 * once.nbytes)
    assert twice.sectors == once.sectors
    assert 1.3 < ratio(launches, problem) - ratio(run(PROVIDERS[backend], problem), problem) + 1 < 1.5


# --- own kernels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", [decode([0, 1, 37, 100]), chain()], ids=lambda p: p.op)
def test_our_kernels_neither_race_nor_read_what_nobody_wrote(backend: str, problem: Any) -> None:
    assert run(PROVIDERS[backend], problem)


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


@pytest.mark.parametrize(
    ("overflow", "error", "match"), [(False, MemoryFault, "_cache' at element -21"), (True, Exception, "overflow")]
)
def test_a_block_offset_in_32_bits_is_reported(overflow: bool, error: Any, match: str, tmp_path: Path) -> None:
    old = "block = tl.load(table + (position // block_size).to(tl.int64) * ts1, mask=live, other=0).to(tl.int64)"
    provider = planted("triton", "paged_attention", old, old.removesuffix(".to(tl.int64)"), tmp_path)
    problem = decode([64])
    placed = problem.on(provider)
    last = 2**31 // (16 * 32) + 64  # blocks; an offset of one in this range does not fit int32
    for name in ("key_cache", "value_cache"):
        # 4 GiB, never touched; not aligned, so that strides are in single elements
        base = provider.empty((1 + (last + 4) * 16 * 32,), FLOAT16)
        object.__setattr__(placed, name, base[1:].view(last + 4, 16, 1, 32))
    placed.block_table.add_(last)
    with pytest.raises(error, match=match), trace(provider, overflow=overflow):
        provider.paged_attention(placed, split=32, tile=16)
    right = PROVIDERS["triton"]
    with trace(right, overflow=overflow):
        right.paged_attention(placed, split=32, tile=16)


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
