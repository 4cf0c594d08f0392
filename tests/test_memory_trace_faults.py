"""Every kind of fault, planted in copies of our kernels: both backends must name it exactly."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_kernels import planted
from traced_problems import chain, decode, run

from pagebench.kernels.launch_buffers import MemoryFault
from pagebench.kernels.memory_trace import RaceError, UninitialisedReadError, ratio, trace
from pagebench.kernels.providers import load_provider
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dtypes import FLOAT16

PROVIDERS = {name: load_provider(name) for name in ("triton", "cupy")}
BACKENDS = list(PROVIDERS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", [decode([0, 1, 37, 100]), chain()], ids=lambda p: p.op)
def test_our_kernels_neither_race_nor_read_what_nobody_wrote(backend: str, problem: Any) -> None:
    assert run(PROVIDERS[backend], problem)


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
