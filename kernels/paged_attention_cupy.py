"""Launcher of paged_attention.cu: decode attention over a paged KV cache.

Sixteen-bit types run on tensor cores, float32 on IEEE multiply-adds; either way all query heads of a KV head, up to 64 and
16, are in one program, and each key and value is loaded once for them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import C_TYPES, Device, aligned16, ceil_div, strides_of

SOURCE = "paged_attention.cu"
THREADS = 128
WARPS = 4
STAGES = 2
MERGE_PAD = 8
PADDED_HEADS = (64, 128, 256)
HEAD_SIZES = range(32, 257)

# Programs wanted for one long sequence: two for each of 132 SMs, and then some for balance.
PROGRAMS = 512
SPLIT = 512  # keys; eight tiles, so that filling the pipeline and merging are paid for
LEAST_SPLIT = 128
# The table's width allows for more items of work than there are; a program that finds none costs about a microsecond of one
# of an SM's few places, and this many are several for every place on any GPU.
MAX_PROGRAMS = 2048
TILE_BYTES = 32 * 1024  # of K and V per step: three programs per SM of an H200, each with as much in flight


@dataclass(frozen=True, slots=True)
class WarpClass:
    """A class of paged_attention_warps.cuh: its name, the query heads that a warp takes, the keys per step by default."""

    name: str
    rows: int
    tile: int


def _warp_class(dtype: np.dtype, padded_head: int) -> WarpClass:
    tile = min(64, TILE_BYTES // (2 * padded_head * dtype.itemsize))
    if dtype == np.float32:
        return WarpClass(f"FmaWarp<{padded_head}>", rows=4, tile=tile)
    return WarpClass(f"MmaWarp<{C_TYPES[dtype.name]}, {padded_head}>", rows=16, tile=tile)


def paged_attention(
    provider: Any,
    problem: Any,
    *,
    split: int | None = None,
    tile: int | None = None,
    max_splits: int | None = None,
    row_warps: int | None = None,
) -> tuple[Any, Any]:
    """(out like query, lse float32 [num_tokens, num_query_heads]). `provider` supplies `device` and `empty`.

    split: fewest keys of a split. tile: keys per step, a multiple of 16 up to 128. max_splits: of a sequence. row_warps:
    1, 2 or 4 of the four warps of a program share out the query heads, the others the keys. None chooses.
    """
    dtype, heads, head_size = problem.query.dtype, problem.num_query_heads, problem.head_size
    out = provider.empty(problem.query.shape, dtype)
    lse = provider.empty(problem.query.shape[:2], np.float32)
    if problem.num_tokens == 0:
        return out, lse
    padded = next(size for size in PADDED_HEADS if size >= head_size)
    warp = _warp_class(np.dtype(dtype), padded)
    tile = tile or warp.tile
    row_warps = row_warps or next((n for n in (1, 2) if problem.group <= n * warp.rows), WARPS)
    row_tiles = ceil_div(problem.group, row_warps * warp.rows)
    split = split or default_split(problem.num_kv_heads * row_tiles)
    max_splits = max_splits or max(64, PROGRAMS // (problem.num_kv_heads * row_tiles))
    # Lengths are on the device: the block table's width is the bound on them that the host has.
    grid_splits = min(max_splits, max(1, ceil_div(problem.block_table.shape[1] * problem.block_size, split)))

    partials = states = lse  # not touched when there is one split
    if grid_splits > 1:
        partials = provider.empty((problem.num_seqs, heads, grid_splits, padded), np.float32)
        states = provider.empty((problem.num_seqs, heads, grid_splits, 2), np.float32)
    lengths = (problem.seq_lens, *strides_of(problem.seq_lens), problem.query_start, *strides_of(problem.query_start))
    heads_of = (problem.num_seqs, problem.num_kv_heads, problem.group, row_tiles, row_warps)
    integers = (head_size, problem.block_size, *heads_of, tile, split)
    vector = aligned16(problem.key_cache) and aligned16(problem.value_cache)
    args = (
        *(out, lse, partials, states),
        *(problem.query, *strides_of(problem.query)),
        *(problem.key_cache, *strides_of(problem.key_cache)),
        *(problem.value_cache, *strides_of(problem.value_cache)),
        *(problem.block_table, *strides_of(problem.block_table)),
        *lengths,
        np.float32(problem.scale * np.log2(np.e)),
        *(np.int32(i) for i in (*integers, grid_splits, vector, aligned16(problem.query))),
    )
    device: Device = provider.device
    kernel = device.kernel(SOURCE, f"paged_attention<{warp.name}>")
    shared = shared_bytes(warp, padded, np.dtype(dtype).itemsize, tile, row_warps)
    if shared > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared
    items = problem.num_seqs * grid_splits * problem.num_kv_heads * row_tiles
    kernel((min(items, MAX_PROGRAMS),), (THREADS,), args, shared_mem=shared)

    if grid_splits > 1:
        integers = (head_size, padded, problem.num_seqs, heads, split, grid_splits)
        reduce_splits = device.kernel(SOURCE, f"reduce_splits<{C_TYPES[np.dtype(dtype).name]}>")
        args = (out, lse, partials, states, *lengths, *(np.int32(i) for i in integers))
        reduce_splits((problem.num_seqs * heads,), (THREADS,), args)
    return out, lse


def default_split(programs_per_split: int) -> int:
    """Keys of a split: fewer where one key feeds few programs, so that 32k keys still make about PROGRAMS of them."""
    return min(SPLIT, max(LEAST_SPLIT, 64 * programs_per_split))


def shared_bytes(warp: WarpClass, padded: int, itemsize: int, tile: int, row_warps: int) -> int:
    """Dynamic shared memory of a program: query, K and V tiles and slots, or the warps' partial results at the end."""
    loop = (warp.rows * row_warps + STAGES * 2 * tile) * padded * itemsize + 2 * tile * 16
    merge = WARPS * warp.rows * (4 * (padded + MERGE_PAD) + 8)
    return max(loop, merge)


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported; None when it is."""
    rows = np.diff(problem.query_start)
    if rows.size and rows.max() > 1:
        return f"sequences of more than one query ({int(rows.max())}) are not implemented"
    if problem.head_size not in HEAD_SIZES:
        return f"head_size {problem.head_size} is not implemented: {HEAD_SIZES.start} to {HEAD_SIZES.stop - 1} are"
    if problem.key_cache.dtype != problem.query.dtype:
        return f"a {problem.key_cache.dtype} cache under a {problem.query.dtype} query is not implemented"
    for name in ("window", "soft_cap", "alibi_slopes", "sinks"):
        if getattr(problem, name) is not None:
            return f"{name} is not implemented"
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, then splits and tiles so small that short sequences have several, and warps shared out otherwise."""
    return [
        {},
        {"split": 16, "tile": 16},
        {"split": 32, "tile": 16, "max_splits": 2, "row_warps": 2},
    ]
