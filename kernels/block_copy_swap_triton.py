"""Swapping blocks in torch: asynchronous copies between the device and pinned host memory, on a stream of their own.

Nothing is computed, so there is no Triton kernel: the copy engines move long runs at the speed of the bus while the SMs
work. torch has no 2-D copy between host and device, so rows are copied one by one, down to rows so short that torch's
own gather through a contiguous buffer beats a transfer for each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from pagebench.kernels.block_copy_swap import Transfer, transfers
from pagebench.kernels.launch_buffers import Buffer
from pagebench.reference.block_copy import SwapBlocks

SHORT_ROW = 4096  # bytes: a transfer of its own takes the host about 2 us, in which the bus moves 100 KB


def swap_blocks(problem: SwapBlocks) -> None:
    """Copy in place, in the order of the current stream. The pairs are a host array."""
    pools = [
        (_buffer(src), _buffer(dst), (src.untyped_storage().data_ptr(), dst.untyped_storage().data_ptr()))
        for src, dst in zip(problem.src_caches, problem.dst_caches, strict=True)
    ]
    storages = {
        memory: (_bytes_of(src), _bytes_of(dst))
        for src, dst, (_, _, memory) in zip(problem.src_caches, problem.dst_caches, pools, strict=True)
    }
    with _in_order(_gpu_of(problem)):
        for memory, (src, dst) in storages.items():
            _copy(transfers([pool for pool in pools if pool[2] == memory], problem.pairs.numpy()), src, dst)


def _gpu_of(problem: SwapBlocks) -> torch.device | None:
    """The GPU that the device's pool lies on; None on a CPU."""
    devices = (cache.device for cache in (*problem.src_caches, *problem.dst_caches))
    return next((device for device in devices if device.type == "cuda"), None)


@contextmanager
def _in_order(device: torch.device | None) -> Iterator[None]:
    """Run on the stream for transfers, after what the current stream was given before and before what it gets next."""
    if device is None:
        yield
        return
    current, own = torch.cuda.current_stream(device), _stream(device)
    own.wait_stream(current)
    with torch.cuda.stream(own):
        yield
    current.wait_stream(own)


def _copy(found: list[Transfer], src: torch.Tensor, dst: torch.Tensor) -> None:
    for t in found:
        from_, to = t.src - src.data_ptr(), t.dst - dst.data_ptr()
        if t.rows > 1 and t.nbytes < SHORT_ROW:
            shape = (t.rows, t.nbytes)
            rows = src.as_strided(shape, (t.src_pitch, 1), from_)
            dst.as_strided(shape, (t.dst_pitch, 1), to).copy_(rows)  # through a buffer of its own, so it blocks
            continue
        for row in range(t.rows):
            there, here = to + row * t.dst_pitch, from_ + row * t.src_pitch
            dst[there : there + t.nbytes].copy_(src[here : here + t.nbytes], non_blocking=True)


def _buffer(cache: torch.Tensor) -> Buffer:
    itemsize, start = cache.element_size(), cache.data_ptr()
    return Buffer("cache", start, start, itemsize, tuple(cache.shape), tuple(s * itemsize for s in cache.stride()))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def rejects(problem: SwapBlocks) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: SwapBlocks) -> list[dict[str, Any]]:
    """None but the default."""
    return []
