"""Launcher of merge_states.cu: one thread for each 16 bytes of a side, or each element where rows are not aligned."""

from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import C_TYPES, aligned16, ceil_div, strides_of
from pagebench.reference.dtypes import FLOAT32
from pagebench.reference.validation import require

SOURCE = "merge_states.cu"
THREADS = 128


def merge_states(provider: Any, problem: Any, *, threads: int = THREADS) -> tuple[Any, Any]:
    """(out like out_a, lse float32 [num_tokens, num_heads]). `provider` supplies `device` and `empty`.

    threads: of a block, a multiple of 32 up to 1024. Raises ValueError for others.
    """
    whole = isinstance(threads, int) and 32 <= threads <= 1024 and threads % 32 == 0
    require(whole, "threads", "be a multiple of 32 up to 1024", threads)
    num_tokens, num_heads, head_size = problem.out_a.shape
    out = provider.empty(problem.out_a.shape, problem.out_a.dtype)
    lse = provider.empty((num_tokens, num_heads), FLOAT32)
    rows = num_tokens * num_heads
    if rows == 0:
        return out, lse
    vector = aligned16(problem.out_a) and aligned16(problem.out_b)
    pieces = head_size * problem.out_a.itemsize // 16 if vector else head_size
    name = f"merge_states<{C_TYPES[problem.out_a.dtype.name]}, {str(vector).lower()}>"
    args = (
        *(problem.out_a, *strides_of(problem.out_a), problem.out_b, *strides_of(problem.out_b)),
        *(problem.lse_a, *strides_of(problem.lse_a), problem.lse_b, *strides_of(problem.lse_b)),
        *(out, lse, np.int64(rows), np.int32(num_heads), np.int32(pieces)),
    )
    provider.device.kernel(SOURCE, name)((ceil_div(rows * pieces, threads),), (threads,), args)
    return out, lse


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and blocks small enough that a little problem takes several."""
    return [{}, {"threads": 32}]
