"""Swapping blocks: few and long transfers, and on a GPU in the order of the kernels around them."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagebench.kernels.block_copy_swap import MAX_PITCH, Transfer, transfers
from pagebench.kernels.block_copy_swap_cupy import _buffer, _memory
from pagebench.kernels.launch_buffers import Buffer
from pagebench.kernels.providers import load_provider
from pagebench.reference.block_copy import SwapBlocks, swap_blocks
from pagebench.reference.dtypes import Array


def filled(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).integers(0, 256, shape, np.uint8)


def found(sources: Any, targets: Any, pairs: Any) -> list[Transfer]:
    pools = [(_buffer(a), _buffer(b), (_memory(a), _memory(b))) for a, b in zip(sources, targets, strict=True)]
    return transfers(pools, np.array(pairs, np.int64).reshape(-1, 2))


def sizes(some: list[Transfer]) -> list[tuple[int, int]]:
    return sorted((t.rows, t.nbytes) for t in some)


ADJACENT = [(1, 3), (2, 4), (3, 5)]


def test_adjacent_pairs_are_one_transfer_in_any_order() -> None:
    source, target = filled(6, 100), filled(8, 100)
    for pairs in (ADJACENT, ADJACENT[::-1], [ADJACENT[1], ADJACENT[0], ADJACENT[2]]):
        assert sizes(found([source], [target], pairs)) == [(1, 300)]


def test_keys_and_values_as_halves_of_one_tensor_are_one_transfer() -> None:
    source, target = filled(6, 2, 50), filled(8, 2, 50)
    both = found((source[:, 0], source[:, 1]), (target[:, 0], target[:, 1]), ADJACENT)
    assert sizes(both) == [(1, 300)]


def test_blocks_at_equal_distances_are_rows_of_one_transfer() -> None:
    source, target = filled(9, 100), filled(9, 100)
    (rows,) = found([source], [target], [(0, 1), (2, 4), (4, 7)])
    assert (rows.rows, rows.nbytes, rows.src_pitch, rows.dst_pitch) == (3, 100, 200, 300)
    padded = found([filled(6, 128)[:, :100]], [target], ADJACENT)
    assert sizes(padded) == [(3, 100)]


def test_adjacent_pairs_are_one_transfer_also_where_a_source_is_repeated() -> None:
    source, target = filled(9, 100), filled(9, 100)
    for pairs in ([(0, 1), (0, 4), (1, 2), (2, 3)], [(0, 4), (0, 1), (1, 2), (2, 3)], [(2, 3), (1, 2), (0, 4), (0, 1)]):
        assert sizes(found([source], [target], pairs)) == [(1, 100), (1, 300)]
    assert sizes(found([source], [target], [(i % 4, i) for i in range(8)])) == [(1, 400), (1, 400)]
    apart = [(src, src + to) for src in (0, 2, 4) for to in (0, 1)]
    assert sizes(found([source], [target], apart)) == [(3, 100), (3, 100)]
    assert sizes(found([source], [target], [(0, 5), (2, 6), (4, 7)])) == [(3, 100)]  # closer together than the sources


@pytest.mark.parametrize("seed", range(40))
def test_transfers_move_the_blocks_of_any_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (num_src, num_dst), strided = rng.integers(1, 12, 2), bool(seed % 2)
    source, target = (rng.integers(0, 256, (n, 3, 7), np.uint8) for n in (num_src, num_dst))
    src_cache, dst_cache = (source[..., :5], target[..., 2:]) if strided else (source, target)
    count = int(rng.integers(0, num_dst + 1))
    pairs = np.stack([rng.integers(0, num_src, count), rng.permutation(num_dst)[:count]], axis=1)
    expected = target.copy()
    (expected[..., 2:] if strided else expected)[pairs[:, 1]] = src_cache[pairs[:, 0]]
    for t in found([src_cache], [dst_cache], pairs):
        assert t.rows == 1 or min(t.src_pitch, t.dst_pitch) >= t.nbytes
        for row in range(t.rows):
            ctypes.memmove(t.dst + row * t.dst_pitch, t.src + row * t.src_pitch, t.nbytes)
    assert np.array_equal(target, expected)


def test_no_transfer_spans_allocations_or_goes_back() -> None:
    room = filled(12, 100)
    sources, targets = (room[:6], room[6:]), (filled(6, 100), filled(6, 100))
    assert sizes(found(sources, targets, [(i, i) for i in range(6)])) == [(1, 600), (1, 600)]
    assert sizes(found([room], [filled(12, 100)], [(0, 2), (1, 1), (2, 0)])) == [(1, 100)] * 3
    assert sizes(found([room], [filled(12, 100)], [(0, 0), (0, 1), (0, 2)])) == [(1, 100)] * 3


def test_no_row_is_further_away_than_a_2d_copy_goes() -> None:
    stride = MAX_PITCH // 2 + 1
    pool = Buffer("cache", 0, 8 * stride, 1, (8, 100), (stride, 1))
    near = transfers([(pool, pool, 0)], np.array([[0, 1], [1, 2], [2, 3]], np.int64))
    assert sizes(near) == [(3, 100)]
    assert sizes(transfers([(pool, pool, 0)], np.array([[0, 1], [2, 3], [4, 5]], np.int64))) == [(1, 100)] * 3
    dense = Buffer("cache", 0, 8 * stride, 1, (8, stride), (stride, 1))
    assert sizes(transfers([(dense, dense, 0)], np.array([[i, i] for i in range(8)], np.int64))) == [(1, 8 * stride)]


def problem() -> SwapBlocks:
    """Transfers of one row and of several, in two allocations."""
    pairs = np.array([(0, 1), (1, 2), (3, 5), (5, 8), (7, 0)], np.int64)
    return SwapBlocks((filled(9, 100), filled(9, 64)), (filled(9, 100)[::-1].copy(), filled(9, 64) ^ 1), pairs, "out")


def check(provider: Any, log: list[str]) -> None:
    """The copy is right, and its transfers lie between the wait for earlier work and the wait of later work for it."""
    given = problem()
    placed = given.on(provider)
    provider.swap_blocks(placed)
    for got, expected in zip(placed.dst_caches, swap_blocks(given), strict=True):
        assert np.array_equal(np.asarray(got), expected)
    assert log[: log.index("copy")] == ["swaps wait for current"]
    assert log[-1] == "current waits for swaps"
    assert set(log[1:-1]) == {"copy"}


def test_cupy_transfers_in_the_order_of_the_kernels_around(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: str, ptr: int) -> None:
            self.name, self.ptr = name, ptr

        def record(self) -> str:
            return f"{self.name} {len(log)}"  # an event: whose, and after how much of the work

        def wait_event(self, event: str) -> None:
            whose, _, after = event.partition(" ")
            assert int(after) == len(log)  # of all that was queued before
            log.append(f"{self.name} wait{'s' * (self.name == 'current')} for {whose}")

    current, swaps = Stream("current", 1), Stream("swaps", 7)

    def memcpy(dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (4, swaps.ptr)
        ctypes.memmove(dst, src, nbytes)
        log.append("copy")

    def memcpy2d(dst: int, dpitch: int, src: int, spitch: int, width: int, rows: int, kind: int, stream: int) -> None:
        assert width <= min(dpitch, spitch)
        assert rows > 1
        for row in range(rows):
            memcpy(dst + row * dpitch, src + row * spitch, width, kind, stream)

    runtime = SimpleNamespace(memcpyAsync=memcpy, memcpy2DAsync=memcpy2d)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: current)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    provider: Any = load_provider("cupy")
    starts_on_gpu = SimpleNamespace(on_gpu=True, swap_stream=lambda: swaps)

    from pagebench.kernels import block_copy_swap_cupy

    placing = SimpleNamespace(**{name: getattr(provider, name) for name in ("to_device", "as_strided", "to_pinned")})
    placing.swap_blocks = lambda placed: block_copy_swap_cupy.swap_blocks(SimpleNamespace(device=starts_on_gpu), placed)
    check(placing, log)


def test_torch_transfers_in_the_order_of_the_kernels_around(monkeypatch: pytest.MonkeyPatch) -> None:
    provider: Any = load_provider("triton")
    import torch

    from pagebench.kernels import block_copy_swap_triton

    log: list[str] = []
    here = ["current"]

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} wait{'s' * (self.name == 'current')} for {other.name}")

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        here.append(stream.name)
        yield
        here.pop()

    copy = block_copy_swap_triton._copy

    def logged(*args: Any) -> None:
        assert here[-1] == "swaps"
        log.append("copy")
        copy(*args)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(block_copy_swap_triton, "_stream", lambda device: Stream("swaps"))
    monkeypatch.setattr(block_copy_swap_triton, "_gpu_of", lambda problem: torch.device("cuda", 0))
    monkeypatch.setattr(block_copy_swap_triton, "_copy", logged)
    check(provider, log)


@pytest.mark.parametrize("name", ["triton", "cupy"])
def test_the_host_s_pool_and_the_pairs_are_pinned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU anything else would land on the device, where the host cannot read pairs or start a transfer."""
    provider: Any = load_provider(name)
    pinned: list[tuple[int, ...]] = []
    to_pinned = provider.to_pinned
    monkeypatch.setattr(type(provider), "to_pinned", lambda self, array: pinned.append(array.shape) or to_pinned(array))
    problem().on(provider)
    assert len(pinned) == 3
