"""Swapping blocks on CUDA's copy engines: asynchronous copies between the device and pinned host memory."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagebench.kernels.block_copy_swap import Transfer, transfers
from pagebench.kernels.cupy_launch import address
from pagebench.kernels.launch_buffers import Buffer

MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say which way


def swap_blocks(provider: Any, problem: Any) -> None:
    """Copy in place, in the order of the current stream. `provider` supplies `device`; the pairs are a host array."""
    pools = [
        (_buffer(src), _buffer(dst), (_memory(src), _memory(dst)))
        for src, dst in zip(problem.src_caches, problem.dst_caches, strict=True)
    ]
    found = transfers(pools, problem.pairs)
    if provider.device.on_gpu:
        _start(provider.device.swap_stream(), found)
    else:
        for t in found:
            for row in range(t.rows):
                ctypes.memmove(t.dst + row * t.dst_pitch, t.src + row * t.src_pitch, t.nbytes)


def _start(stream: Any, found: Sequence[Transfer]) -> None:
    import cupy

    current = cupy.cuda.get_current_stream()
    stream.wait_event(current.record())
    runtime = cupy.cuda.runtime
    for t in found:
        if t.rows == 1:  # of any length, where a 2-D copy's rows are less than 2 GiB apart
            runtime.memcpyAsync(t.dst, t.src, t.nbytes, MEMCPY_DEFAULT, stream.ptr)
        else:
            rows = (t.nbytes, t.rows, MEMCPY_DEFAULT, stream.ptr)
            runtime.memcpy2DAsync(t.dst, t.dst_pitch, t.src, t.src_pitch, *rows)
    current.wait_event(stream.record())


def _buffer(cache: Any) -> Buffer:
    start = address(cache)
    return Buffer("cache", start, start, cache.itemsize, tuple(cache.shape), tuple(cache.strides))


def _memory(cache: Any) -> int:
    """The address of the allocation that a cache is a view of."""
    if not isinstance(cache, np.ndarray):
        return int(cache.data.mem.ptr)
    while isinstance(cache.base, np.ndarray):
        cache = cache.base
    return int(cache.ctypes.data)


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The one way."""
    return [{}]
