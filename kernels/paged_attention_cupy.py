"""Launcher of paged_attention.cu: decode attention over a paged KV cache.

Sixteen-bit types run on tensor cores, float32 on IEEE multiply-adds; either way all query heads of a KV head, up to 64
and 16, are in one program, and each key and value is loaded once for them.

Code generation, NVRTC 13.2, on sm_80 / sm_90 / sm_100, default tiles, no spills anywhere:

| warp class          | registers       | shared bytes | programs per SM | in flight per SM |
|---------------------|-----------------|--------------|-----------------|------------------|
| MmaWarp<half, 64>   | 124 / 128 / 122 | 43,040       | 3 / 4 / 4       | 48 / 64 / 64 KB  |
| MmaWarp<half, 128>  | 160 / 160 / 164 | 71,712       | 2 / 3 / 3       | 64 / 96 / 96 KB  |
| MmaWarp<bf16, 256>  | 247 / 236 / 242 | 74,784       | 2 / 2 / 2       | 64 KB            |
| FmaWarp<128>        | 162 / 162 / 159 | 68,640       | 2 / 3 / 3       | 64 / 96 / 96 KB  |

K and V come by LDGSTS.128 only, 15 of them; MmaWarp<half, 128> has 32 HMMA. Llama-3-8B, 1 x 32k and 8 x 4k keys: 512
programs of 512 keys. The 22 narrow accesses are lengths, table entries, states, and the way for unaligned arrays.
"""

import math
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

# Programs wanted for one long sequence: two for each of 132 SMs, and then some for balance. A split has eight tiles of
# keys, so that filling the pipeline and merging are paid for; fewer where there are few KV heads to make programs of.
# More than MAX_SPLITS pieces of SPLIT keys are joined to longer splits, which bounds the scratch memory.
PROGRAMS = 512
SPLIT = 512
LEAST_SPLIT = 128
# Scratch, written and read, over the bytes of K and V: at most this, as far as splits of SPLIT keys allow it, which is
# up to 12 query heads per KV head in a 16-bit cache.
SCRATCH_SHARE = 0.05
MAX_SPLITS = 64
# The table's width allows for more items of work than there are. A program that finds none costs about a microsecond of
# one of an SM's few places; this many programs are several for every place on any GPU.
MAX_PROGRAMS = 2048
TILE_BYTES = 32 * 1024  # of K and V per step: three programs per SM of an H200, each with as much in flight
MAX_TILE = 64  # keys: sixteen for each of four warps


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is cut up. `warp` is a class of paged_attention_warps.cuh for a head size of `padded`; it takes
    `rows` query heads, a program `row_warps` times as many, and `row_tiles` programs those of a KV head."""

    warp: str
    rows: int
    padded: int
    row_warps: int
    row_tiles: int
    tile: int
    split: int
    max_splits: int

    @property
    def merge_bytes(self) -> int:
        return WARPS * self.rows * (4 * (self.padded + MERGE_PAD) + 8)

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a program: query, K and V tiles and slots; the warps' partial results at the end."""
        loop = (self.rows * self.row_warps + STAGES * 2 * self.tile) * self.padded * itemsize + 2 * self.tile * 16
        return max(loop, self.merge_bytes)


def plan(
    problem: Any,
    split: int | None = None,
    tile: int | None = None,
    max_splits: int | None = None,
    row_warps: int | None = None,
) -> Plan:
    """The problem's plan; the arguments are those of `paged_attention`."""
    dtype = np.dtype(problem.query.dtype)
    padded = next(size for size in PADDED_HEADS if size >= problem.head_size)
    rows = 4 if dtype == np.float32 else 16
    warp = f"FmaWarp<{padded}>" if dtype == np.float32 else f"MmaWarp<{C_TYPES[dtype.name]}, {padded}>"
    row_warps = row_warps or next((n for n in (1, 2) if problem.group <= n * rows), WARPS)
    row_tiles = ceil_div(problem.group, row_warps * rows)
    programs = problem.num_kv_heads * row_tiles
    tile = tile or min(MAX_TILE, TILE_BYTES // (2 * padded * dtype.itemsize))
    split = split or min(SPLIT, max(LEAST_SPLIT, SPLIT // 8 * programs, _least_split(problem, padded)))
    # Lengths are on the device: the block table's width is the bound on them that the host has.
    most = max(1, ceil_div(problem.block_table.shape[1] * problem.block_size, split))
    max_splits = min(most, max_splits or max(MAX_SPLITS, PROGRAMS // programs))
    return Plan(warp, rows, padded, row_warps, row_tiles, tile, split, max_splits)


def _least_split(problem: Any, padded: int) -> int:
    """Keys per split, a multiple of MAX_TILE, of whose bytes the scratch is SCRATCH_SHARE."""
    scratch = problem.group * 2 * 4 * (padded + 2)
    key = 2 * problem.head_size * np.dtype(problem.key_cache.dtype).itemsize
    return ceil_div(math.ceil(scratch / (SCRATCH_SHARE * key)), MAX_TILE) * MAX_TILE


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

    split: fewest keys of a split. tile: keys per step, a multiple of 16 up to 128. max_splits: of a sequence.
    row_warps: 1, 2 or 4 of a program's four warps share out the query heads, and the rest the keys. None chooses.
    """
    out = provider.empty(problem.query.shape, problem.query.dtype)
    lse = provider.empty(problem.query.shape[:2], np.float32)
    if problem.num_tokens == 0:
        return out, lse
    cut = plan(problem, split, tile, max_splits, row_warps)
    partials = states = lse  # not touched when there is one split
    if cut.max_splits > 1:
        scratch = (problem.num_seqs, problem.num_query_heads, cut.max_splits)
        partials = provider.empty((*scratch, cut.padded), np.float32)
        states = provider.empty((*scratch, 2), np.float32)
    outputs = (out, lse, partials, states)
    lengths = (problem.seq_lens, *strides_of(problem.seq_lens), problem.query_start, *strides_of(problem.query_start))
    _attend(provider.device, problem, cut, outputs, lengths)
    if cut.max_splits > 1:
        _reduce(provider.device, problem, cut, outputs, lengths)
    return out, lse


def _attend(device: Device, problem: Any, cut: Plan, outputs: tuple[Any, ...], lengths: tuple[Any, ...]) -> None:
    kernel = device.kernel(SOURCE, f"paged_attention<{cut.warp}>")
    shared = cut.shared_bytes(problem.query.itemsize)
    if shared > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared
    vector = aligned16(problem.key_cache) and aligned16(problem.value_cache)
    heads = (problem.num_kv_heads, problem.group, cut.row_tiles, cut.row_warps)
    sizes = (problem.head_size, problem.block_size, problem.num_seqs, *heads, cut.tile, cut.split, cut.max_splits)
    arrays = (problem.query, problem.key_cache, problem.value_cache, problem.block_table)
    args = (
        *outputs,
        *(argument for array in arrays for argument in (array, *strides_of(array))),
        *lengths,
        np.float32(problem.scale * np.log2(np.e)),
        *(np.int32(number) for number in (*sizes, vector, aligned16(problem.query))),
    )
    items = problem.num_seqs * cut.max_splits * problem.num_kv_heads * cut.row_tiles
    kernel((min(items, MAX_PROGRAMS),), (THREADS,), args, shared_mem=shared)


def _reduce(device: Device, problem: Any, cut: Plan, outputs: tuple[Any, ...], lengths: tuple[Any, ...]) -> None:
    kernel = device.kernel(SOURCE, f"reduce_splits<{C_TYPES[np.dtype(problem.query.dtype).name]}>")
    heads = problem.num_query_heads
    sizes = (problem.head_size, cut.padded, problem.num_seqs, heads, cut.split, cut.max_splits)
    args = (*outputs, *lengths, *(np.int32(size) for size in sizes))
    kernel((problem.num_seqs * heads,), (THREADS,), args)


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
