"""Launcher of paged_attention.cu: attention over a paged KV cache, every feature of the op.

Sixteen-bit types run on tensor cores, float32 on IEEE multiply-adds; either way all query heads of a KV head, up to 128
(64 of float32 with more than 128 columns, whose queries leave no room), are in one program, and each key and value is
loaded once for them.

What depends on lengths is decided on the device, by each sequence alone: how many warps share out its rows, and how
its keys are split. So one launch (and one for the merge) serves decode, prefill and mixed batches alike, and a
sequence's result does not depend, to the bit, on what it is batched with.

Code generation, NVRTC 13.2, on sm_80 / sm_90 / sm_100, decode with default tiles, no spills in any instance:

| warp class          | registers       | shared bytes | programs per SM | in flight per SM |
|---------------------|-----------------|--------------|-----------------|------------------|
| MmaWarp<half, 128>  | 168 / 168 / 164 | 72,736       | 2 / 3 / 3       | 64 / 96 / 96 KB  |

MmaWarp<half, 64> has 128 / 128 / 110 registers, MmaWarp<half, 256> 255 / 255 / 251, FmaWarp<256> 160 / 168 / 160;
of eight warps MmaWarp<half, 128> has 194 / 195 / 204, and there is one program per SM.
K and V come by LDGSTS.128 only, 17 of them; MmaWarp<half, 128> has 48 HMMA: 16 for scores, 16 for values, 16 for values
whose slots have scales, which run twice. Llama-3-8B, 1 x 32k and 8 x 4k keys: 512 programs of 512 keys. Narrow accesses
are lengths, table entries, states, scales, and the way for unaligned arrays.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import C_TYPES, Device, aligned16, ceil_div, strides_of
from pagebench.reference.paged_attention import MAX_KEYS
from pagebench.reference.validation import require, require_option

SOURCE = "paged_attention.cu"
REDUCE_SOURCE = "paged_attention_reduce.cu"
WARP_SIZE = 32
WARPS = 4
MANY_WARPS = 8  # where four cannot hold a group's rows
STAGES = 2
FACTOR_TILES = 3
MERGE_PAD = 8
NO_WINDOW = 1 << 31
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
FORMATS = {"float8_e4m3fn": 1, "float8_e5m2": 2, "int8": 3}  # enum Format of paged_attention_keys.cuh
PADDED_HEADS = (64, 128, 256)
WIDEST = PADDED_HEADS[-1]  # columns at a time of a longer head

# Programs wanted for one long sequence: two for each of 132 SMs, and then some for balance. A split has eight tiles of
# keys, so that filling the pipeline and merging are paid for; fewer where there are few KV heads to make programs of.
# More than MAX_SPLITS pieces of SPLIT keys are joined to longer splits, which bounds the scratch memory.
PROGRAMS = 512
SPLIT = 512
LEAST_SPLIT = 128
# Scratch, written and read, over the bytes of K and V of a decoding sequence: at most this, as far as splits of SPLIT
# keys allow it, which is up to 12 query heads per KV head in a 16-bit cache.
SCRATCH_SHARE = 0.05
MAX_SPLITS = 64
# The table's width allows for more items of work than there are. A program that finds none costs about a microsecond of
# one of an SM's few places; this many programs are several for every place on any GPU.
MAX_PROGRAMS = 2048
TILE_BYTES = 32 * 1024  # of K and V per step: three programs per SM of an H200, each with as much in flight
MAX_TILE = 64  # keys: sixteen for each of four warps
CHUNKS = {2: 16, 4: 8}  # keys that a warp takes at a time, by the query's bytes per element
# Dynamic shared memory for as many programs per SM of an H200 as the registers leave room for: 4, 3, 2. A tile of more
# rows has as many fewer keys.
SHARED_BYTES = {64: 54 * 1024, 128: 73 * 1024, 256: 110 * 1024}
ANY_SHARED, MOST_SHARED = 99 * 1024, 227 * 1024  # of a program, on any GPU and on sm_90 and sm_100
STATIC_BYTES, STATIC_ROW_BYTES = 64, 16  # of shared memory: of any program, and of each of its rows


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is cut up.

    warp: a class of paged_attention_warps.cuh, of `rows` rows, for heads of `padded` columns, or `parts` times as many;
    warps: of a program. row_warps: how many share out a tile's rows; 0 as each sequence wants. tiles: keys per step for
    1, 2 and more of them.
    max_splits: what `Sequences` takes; splits: of a sequence at most. scratch: the rows of partial results that each
    token, each sequence (one of the two is 0) and each KV head has, and all.
    """

    warp: str
    warps: int
    rows: int
    padded: int
    parts: int
    row_warps: int
    tiles: tuple[int, ...]
    split: int
    max_splits: int
    splits: int
    scratch: tuple[int, int, int, int]

    def shared_bytes(self, itemsize: int, factors: bool) -> int:
        """Dynamic shared memory of a program: query, K and V tiles, slots; the warps' partial results at the end."""
        merge = WARPS * self.rows * (4 * (self.padded + MERGE_PAD) + 8)
        warps = (self.row_warps,) if self.row_warps else (1, 2, 4)
        loops = (_loop_bytes(self.rows * n, self.tiles[min(n // 2, 2)], self.padded * itemsize, factors) for n in warps)
        return max(merge, *loops)


def _loop_bytes(rows: int, tile: int, row_bytes: int, factors: bool) -> int:
    return (rows + STAGES * 2 * tile) * row_bytes + 2 * tile * 16 + (FACTOR_TILES * tile * 8 if factors else 0)


def plan(
    problem: Any,
    split: int | None = None,
    tile: int | None = None,
    max_splits: int | None = None,
    row_warps: int | None = None,
) -> Plan:
    """The problem's plan; the arguments are those of `paged_attention`."""
    dtype = np.dtype(problem.query.dtype)
    padded = next((size for size in PADDED_HEADS if size >= problem.head_size), WIDEST)
    parts = ceil_div(problem.head_size, padded)
    rows = _float32_rows(problem.group, padded) if dtype == np.float32 else 16
    kind = f"FmaWarp<{padded}, {rows}" if dtype == np.float32 else f"MmaWarp<{C_TYPES[dtype.name]}, {padded}"
    factors = _slot_scaled(problem)
    least = _loop_bytes(MANY_WARPS * rows, tile or CHUNKS[dtype.itemsize], padded * dtype.itemsize, factors)
    fits = least <= _room(padded, MANY_WARPS * rows)
    many = row_warps is None and problem.group > WARPS * rows and parts == 1 and fits
    if many:
        row_warps = MANY_WARPS
    # One decoding sequence's programs and row warps: what splits are chosen for.
    warps = row_warps or next((n for n in (1, 2) if problem.group <= n * rows), WARPS)
    row_tiles = ceil_div(problem.group, warps * rows)
    programs = problem.num_kv_heads * row_tiles
    row_warps_of_tile = (MANY_WARPS,) * 3 if many else (1, 2, 4)
    tiles = tuple(tile or _tile(padded, rows * n, dtype.itemsize, factors) for n in row_warps_of_tile)
    split = split or min(SPLIT, max(LEAST_SPLIT, SPLIT // 8 * programs, _least_split(problem, padded * parts)))
    most = (max_splits or max(MAX_SPLITS, PROGRAMS // programs)) * warps * row_tiles
    # Lengths are on the device: the block table's width is the bound on them that the host has.
    pieces = max(1, ceil_div(problem.block_table.shape[1] * problem.block_size, split))
    splits = min(pieces, most)
    by_token, by_seq = problem.num_tokens * problem.group * splits, problem.num_seqs * rows * most
    slots = (problem.group * splits, 0) if by_token <= by_seq else (0, rows * most)
    each_head = min(by_token, by_seq)
    scratch = (*slots, each_head, each_head * problem.num_kv_heads)
    warp = f"{kind}{', true' if parts > 1 else f', false, {MANY_WARPS}' if many else ''}>"
    return Plan(
        warp, MANY_WARPS if many else WARPS, rows, padded, parts, row_warps or 0, tiles, split, most, splits, scratch
    )


def _float32_rows(group: int, padded: int) -> int:
    """Rows of an FmaWarp: as few as hold the group in one program; more than 8 of 256 columns would spill."""
    most = 8 if padded == WIDEST else 16
    return next((rows for rows in (4, 8) if group <= WARPS * rows), most)


def _room(padded: int, rows: int) -> int:
    """Bytes of dynamic shared memory for a program of so many rows; one of eight warps is alone on its SM."""
    most = ANY_SHARED - STATIC_BYTES - STATIC_ROW_BYTES * max(rows, 64)
    return most if rows > 64 else min(SHARED_BYTES[padded], most)


def _tile(padded: int, rows: int, itemsize: int, factors: bool) -> int:
    """Keys per step, a multiple of a warp's chunk: TILE_BYTES of K and V, or fewer where many rows leave no room."""
    row_bytes, room = padded * itemsize, _room(padded, rows)
    wanted = min(MAX_TILE, TILE_BYTES // (2 * row_bytes))
    fits = (tile for tile in range(wanted, 0, -16) if _loop_bytes(rows, tile, row_bytes, factors) <= room)
    return next(fits, CHUNKS[itemsize])


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

    split: fewest keys of a split. tile: keys per step, a multiple of 16 up to 128. max_splits: of a decoding sequence.
    row_warps: 1, 2 or 4 of a program's four warps share out the rows, and the rest the keys. None chooses. Raises
    ValueError for others.
    """
    for name, value in (("split", split), ("max_splits", max_splits)):
        if value is not None:
            require_option(name, value, 1, MAX_KEYS)
    whole = isinstance(tile, int) and 16 <= tile <= 128 and tile % 16 == 0
    require(tile is None or whole, "tile", "be a multiple of 16 up to 128, or None", tile)
    if row_warps is not None:
        require_option("row_warps", row_warps, 1, WARPS, power_of_two=True)
    out = provider.empty(problem.query.shape, problem.query.dtype)
    lse = provider.empty(problem.query.shape[:2], np.float32)
    if problem.num_tokens == 0:
        return out, lse
    cut = plan(problem, split, tile, max_splits, row_warps)
    shared = cut.shared_bytes(problem.query.itemsize, _slot_scaled(problem))
    most = MOST_SHARED - STATIC_BYTES - STATIC_ROW_BYTES * cut.rows * cut.warps
    require(shared <= most, "tile", f"need at most {most} bytes of shared memory, not {shared}", tile)
    partials = states = lse  # not touched when there is one split
    if cut.splits > 1:
        partials = provider.empty((cut.scratch[3], cut.padded * cut.parts), np.float32)
        states = provider.empty((cut.scratch[3], 2), np.float32)
    shared_arguments = (out, lse, partials, states, *_strided(problem.seq_lens), *_strided(problem.query_start))
    shared_arguments += _optional(problem.sinks, lse)
    _attend(provider.device, problem, cut, shared, shared_arguments)
    if cut.splits > 1:
        _reduce(provider.device, problem, cut, shared_arguments)
    return out, lse


def _strided(array: Any) -> tuple[Any, ...]:
    return (array, *strides_of(array))


def _optional(array: Any, unused: Any, ndim: int = 1) -> tuple[Any, ...]:
    """Pointer and `ndim` strides in elements; an absent array is never read, and a missing dimension has stride 0."""
    if array is None or isinstance(array, np.float32):
        return (unused, *[np.int64(0)] * ndim)
    return (array, *[np.int64(0)] * (ndim - array.ndim), *strides_of(array))


def _slot_scaled(problem: Any) -> bool:
    return any(np.ndim(scale) == 3 for scale in (problem.key_scale, problem.value_scale) if scale is not None)


def _flags(problem: Any) -> int:
    """The bits that paged_attention.cu lists."""
    scales = (problem.key_scale, problem.value_scale)
    facts = (
        problem.causal,
        problem.alibi_slopes is not None,
        problem.sinks is not None,
        *(scale is not None and not isinstance(scale, np.float32) for scale in scales),
        _slot_scaled(problem),
        aligned16(problem.key_cache) and aligned16(problem.value_cache),
        aligned16(problem.query),
    )
    return sum(bool(fact) << bit for bit, fact in enumerate(facts))


def _window(problem: Any) -> np.uint32:
    """The window, or NO_WINDOW where none can be shorter than a sequence."""
    longest = problem.block_table.shape[1] * problem.block_size
    return np.uint32(NO_WINDOW if problem.window is None or int(problem.window) >= longest else int(problem.window))


def _attend(device: Device, problem: Any, cut: Plan, shared: int, outputs: tuple[Any, ...]) -> None:
    """Launch with `shared` bytes of dynamic shared memory."""
    flags = _flags(problem)
    kernel = device.kernel_with(SOURCE, f"paged_attention<{cut.warp}>", shared)
    unused, cap = outputs[1], None if problem.soft_cap is None else float(problem.soft_cap)
    # A scale that is no array is a number the host knows.
    key_factor, value_factor = (
        float(scale) if isinstance(scale, np.float32) else 1.0 for scale in (problem.key_scale, problem.value_scale)
    )
    arrays = (problem.query, problem.key_cache, problem.value_cache, problem.block_table)
    scale = key_factor * float(problem.scale) * (np.log2(np.e) if cap is None else 1)
    sizes = (problem.head_size, problem.block_size, problem.num_seqs, problem.num_kv_heads, problem.group)
    cutting = (cut.row_warps, cut.split, cut.max_splits, cut.parts, *cut.tiles)
    args = (
        *outputs,
        *(argument for array in arrays for argument in _strided(array)),
        *_optional(problem.alibi_slopes, unused),
        *_optional(problem.key_scale, unused, 3),
        *_optional(problem.value_scale, unused, 3),
        *map(np.int64, cut.scratch[:3]),
        np.float32(min(max(scale, -LARGEST), LARGEST)),
        np.float32(value_factor),
        np.float32(0 if cap is None else max(cap * np.log2(np.e), SMALLEST)),
        np.float32(0 if cap is None else 1 / cap),
        _window(problem),
        *(np.int32(n) for n in (flags, FORMATS.get(np.dtype(problem.key_cache.dtype).name, 0), *sizes, *cutting)),
    )
    kernel((min(_most_items(problem, cut), MAX_PROGRAMS),), (cut.warps * WARP_SIZE,), args, shared_mem=shared)


def _most_items(problem: Any, cut: Plan) -> int:
    """Items of work at most, whatever the lengths of the sequences are."""
    rows = problem.num_tokens * problem.group
    full_tiles = rows // (cut.rows * (cut.row_warps or 1)) + problem.num_seqs  # and a last one each
    tiles = min(full_tiles, problem.num_tokens * ceil_div(problem.group, cut.rows))
    items = min(tiles * cut.splits, tiles + problem.num_seqs * cut.max_splits)
    return int(items * problem.num_kv_heads * cut.parts)


def _reduce(device: Device, problem: Any, cut: Plan, outputs: tuple[Any, ...]) -> None:
    kernel = device.kernel(REDUCE_SOURCE, f"reduce_splits<{C_TYPES[np.dtype(problem.query.dtype).name]}>")
    sizes = (problem.head_size, cut.padded * cut.parts, problem.num_seqs, problem.num_kv_heads, problem.group, cut.rows)
    cutting = (cut.row_warps, cut.split, cut.max_splits)
    args = (
        *outputs,
        *map(np.int64, cut.scratch[:3]),
        _window(problem),
        *(np.int32(n) for n in (_flags(problem), *sizes, *cutting)),
    )
    kernel((min(problem.num_tokens * problem.num_query_heads, MAX_PROGRAMS),), (WARPS * WARP_SIZE,), args)


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, then splits and tiles so small that short sequences have several, and warps shared out otherwise."""
    return [
        {},
        {"split": 16, "tile": 16},
        {"split": 32, "tile": 16, "max_splits": 2, "row_warps": 2},
    ]
