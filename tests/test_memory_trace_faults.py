"""Every kind of fault, planted in copies of a kernel with a split reduction: both backends must name it exactly."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from split_sum import BLOCK, WIDTH, split_sum
from traced_problems import chain, decode, run

from pagebench.kernels import cuda_host
from pagebench.kernels.devices import gpu_present
from pagebench.kernels.launch_buffers import MemoryFault
from pagebench.kernels.memory_trace import LaunchTrace, RaceError, UninitialisedReadError, trace
from pagebench.kernels.providers import load_provider

PROVIDERS = {name: load_provider(name) for name in ("triton", "cupy")}
BACKENDS = list(PROVIDERS)

pytestmark = [
    pytest.mark.skipif(gpu_present(), reason="kernels are compiled here: a GPU is present"),
    pytest.mark.parametrize("backend", BACKENDS),
]

Replaced = tuple[str, str]

# Two programs write their parts to one place.
ONE_PLACE: dict[str, Replaced] = {
    "triton": ("part = seq * num_splits + split", "part = seq * num_splits"),
    "cupy": ("part = seq * num_splits + split;", "part = seq * num_splits;"),
}
# A program adds the part of the one before it, which may not have come that far.
PART_BEFORE: dict[str, Replaced] = {
    "triton": (
        "tl.sum(rows, axis=0))",
        "tl.sum(rows, axis=0) + tl.load(parts + (part - 1) * WIDTH + column, mask=column < split * WIDTH))",
    ),
    "cupy": ("= total;\n}\n\n", "= total + (split > 0 ? parts[(part - 1) * WIDTH + column] : 0.0f);\n}\n\n"),
}
# Parts of blocks that a sequence does not have are added too.
EVERY_PART: dict[str, Replaced] = {
    "triton": ("range(tl.cdiv(tl.load(lens + seq), BLOCK))", "range(num_splits)"),
    "cupy": ("count = (lens[seq] + BLOCK - 1) / BLOCK;", "count = num_splits;"),
}
# The stride of blocks as if the values were not every second block of a tensor.
HALF_STRIDE: dict[str, Replaced] = {
    "triton": ("block * block_stride", "block * (block_stride // 2)"),
    "cupy": ("block * block_stride", "block * (block_stride / 2)"),
}
TWICE: dict[str, Replaced] = {
    "triton": ("        part =", "        rows += 0 * tl.load(at, mask=live[:, None], other=0)\n        part ="),
    "cupy": (
        "  const int part",
        "  int again = 0;\n"
        "  for (int row = 0; row < BLOCK && split * BLOCK + row < length; ++row)\n"
        "    again += values[block * block_stride + row * row_stride + column];\n"
        "  if (again == 1 << 30) total = 0;\n"
        "  const int part",
    ),
}
NARROW: dict[str, Replaced] = {
    "triton": ("num_splits + split).to(tl.int64)", "num_splits + split)"),
    "cupy": ("const long long block", "const int block"),
}

LENS = (20, 4 * BLOCK)  # two blocks of four, and all four


def sum_traced(backend: str, folder: Path, fault: Replaced = ("", ""), **options: Any) -> tuple[Any, list[LaunchTrace]]:
    """(out, launches) of the values 0, 1, 2... in blocks that are every second one of a tensor, in reverse order."""
    provider = PROVIDERS[backend]
    both = np.arange(8 * 2 * BLOCK * WIDTH).astype(np.int8).reshape(8, 2, BLOCK, WIDTH)
    table = np.arange(8, dtype=np.int32)[::-1].reshape(2, 4)
    device = [provider.to_device(np.ascontiguousarray(a)) for a in (both, table, np.array(LENS, np.int32))]
    with trace(provider, **options) as launches:
        out = split_sum(backend, folder, *fault)(provider, device[0][:, 0], *device[1:])
    rows = [both[table[i], 0].reshape(-1, WIDTH)[: LENS[i]].astype(np.float32).sum(0) for i in range(2)]
    np.testing.assert_array_equal(provider.to_host(out), rows)
    return out, launches


def test_the_kernel_without_a_fault(backend: str, tmp_path: Path) -> None:
    _, (first, second) = sum_traced(backend, tmp_path)
    assert (first.kernel, first.grid, second.kernel, second.grid) == (
        "sum_kernel",
        (2, 4, 1),
        "combine_kernel",
        (2, 1, 1),
    )
    assert first.buffers["values"].loaded_bytes == sum(LENS) * WIDTH
    assert first.buffers["values"].nbytes == 8 * BLOCK * WIDTH
    assert first.buffers["parts"].stored_bytes == second.buffers["parts"].loaded_bytes == 6 * WIDTH * 4
    assert second.buffers["out"].stored_bytes == 2 * WIDTH * 4


def test_two_programs_that_write_one_byte(backend: str, tmp_path: Path) -> None:
    with pytest.raises(RaceError) as caught:
        sum_traced(backend, tmp_path, ONE_PLACE[backend])
    race = caught.value
    assert (race.kernel, race.buffer, race.index) == ("sum_kernel", "parts", 0)
    assert (race.first.kind, race.first.program) == ("store", (0, 0, 0))
    assert (race.second.kind, race.second.program) == ("store", (0, 1, 0))
    for access in (race.first, race.second):
        assert re.match(r"\S*split_sum_\d+\.\w+:\d+: .*parts", access.line), access.line
        assert str(access) in str(race)


def test_a_program_that_reads_what_another_writes(backend: str, tmp_path: Path) -> None:
    with pytest.raises(RaceError) as caught:
        sum_traced(backend, tmp_path, PART_BEFORE[backend])
    race = caught.value
    assert (race.kernel, race.buffer, race.index) == ("sum_kernel", "parts", 0)
    assert (race.first.kind, race.first.program) == ("store", (0, 0, 0))
    assert (race.second.kind, race.second.program) == ("load", (0, 1, 0))


def test_scratch_that_nobody_wrote(backend: str, tmp_path: Path) -> None:
    with pytest.raises(UninitialisedReadError) as caught:
        sum_traced(backend, tmp_path, EVERY_PART[backend])
    read = caught.value
    assert (read.kernel, read.buffer, read.kind) == ("combine_kernel", "parts", "load")
    assert (read.index, read.program) == (2 * WIDTH, (0, 0, 0))
    assert re.match(r"\S*split_sum_\d+\.\w+:\d+: .*parts", read.line), read.line


def test_a_read_between_the_elements_of_a_view(backend: str, tmp_path: Path) -> None:
    with pytest.raises(MemoryFault, match=r"between the elements of a view of shape \(8, 16, 32\)") as caught:
        sum_traced(backend, tmp_path, HALF_STRIDE[backend], races=False, uninitialised=False, traffic=False)
    fault = caught.value
    assert (fault.kernel, fault.kind, fault.program) == ("sum_kernel", "load", (0, 0, 0))
    assert fault.index == 7 * BLOCK * WIDTH  # block 7 is the first of the table
    assert fault.buffer is not None
    assert fault.buffer.name == "values"


def test_a_second_read_is_counted(backend: str, tmp_path: Path) -> None:
    once = sum_traced(backend, tmp_path)[1][0].buffers["values"]
    twice = sum_traced(backend, tmp_path, TWICE[backend])[1][0].buffers["values"]
    assert twice.loaded_bytes == 2 * once.loaded_bytes
    assert twice.sectors == once.sectors
    assert twice.sectors_requested == 2 * once.sectors_requested


def test_a_block_offset_in_32_bits(backend: str, tmp_path: Path) -> None:
    """In Triton it wraps, and then is out of bounds, unless overflow is looked for; in C++ it always is."""
    provider = PROVIDERS[backend]
    last = 2**31 // (BLOCK * WIDTH) + 4
    values = provider.empty((last + 4, BLOCK, WIDTH), np.dtype(np.int8))  # 2 GiB, of which a few pages are touched
    values[last:] = provider.to_device(np.ones((4, BLOCK, WIDTH), np.int8))
    table = provider.to_device(np.arange(last, last + 4, dtype=np.int32)[None])
    lens = provider.to_device(np.array([50], np.int32))
    for overflow in (False, True):
        with trace(provider, overflow=overflow) as launches:
            out = split_sum(backend, tmp_path)(provider, values, table, lens)
        assert (provider.to_host(out) == 50).all()
        assert launches[0].buffers["values"].sectors == 50
    wraps = split_sum(backend, tmp_path, *NARROW[backend])
    if backend == "cupy":
        with pytest.raises(cuda_host.UndefinedBehaviour, match=r"signed overflow in \* of type 'int'"):
            wraps(provider, values, table, lens)
        return
    with pytest.raises(MemoryFault, match="'values' at element -2147481600 of"):
        wraps(provider, values, table, lens)
    with pytest.raises(Exception, match="overflow"), trace(provider, overflow=True):
        wraps(provider, values, table, lens)


@pytest.mark.parametrize("problem", [decode([0, 1, 37, 100]), chain()], ids=lambda p: p.op)
def test_our_kernels_neither_race_nor_read_what_nobody_wrote(backend: str, problem: Any) -> None:
    assert run(PROVIDERS[backend], problem)
