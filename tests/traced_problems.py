"""Little problems with several splits and chained pairs, and a traced run of one."""

from typing import Any

import numpy as np

from pagebench.kernels.memory_trace import LaunchTrace, trace
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dtypes import FLOAT16, INT32
from pagebench.reference.paged_attention import PagedAttention


def chain() -> CopyBlocks:
    """Block 0 to 1 and 1 to 2, as if at once."""
    cache = np.arange(4 * 64, dtype=np.int16).reshape(4, 64)
    return CopyBlocks((cache,), np.array([[0, 1], [1, 2]], np.int64))


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


def run(provider: Any, problem: Any, **options: Any) -> list[LaunchTrace]:
    placed = problem.on(provider)
    with trace(provider, **options) as launches:
        getattr(provider, problem.op)(placed, **SMALL.get((provider.name, problem.op), {}))
    return launches


# Splits and tiles that little problems have several of.
SMALL = {
    ("triton", "paged_attention"): {"split": 32, "tile": 16},
    ("cupy", "paged_attention"): {"split": 32, "tile": 16},
}
