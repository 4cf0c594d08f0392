"""Gathering sequences out of a paged cache into dense keys and values, in Triton: one launch.

What it computes: row p of sequence s lies in block block_table[s, p // block_size] of key_cache and value_cache
[num_blocks, block_size, heads, head_size] and goes to row seq_lens[:s].sum() + p of key and value [rows, heads,
head_size]; the bits where the types are the same, else RN(RN32(x * scale)).

Layout: a program takes ROWS rows of one sequence, a row being one token's head, of both keys and values. Programs
beyond a sequence's end return at once, the others add up the lengths before theirs (4 bytes a sequence, from the L2).

Traffic: each row in and out once, 4 bytes of block table per row. Fast for the reasons in block_copy_write_triton.

Code generation (Triton 3.9, sm_90, Llama-3-8B), nothing run: 40 registers for fp16, 48 for e4m3, 8 or 4
loads and 8 stores of 16 bytes; no spill, on sm_80 and sm_100 neither.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pagebench.kernels.block_copy_formats_triton import (
    NONE,
    as_bits,
    as_codes,
    decode,
    format_of,
    regrouped,
    scale_arguments,
    unit_of,
    units,
)
from pagebench.reference.block_copy_gather import GatherKV

TILE = 4096  # elements of keys, and of values, in a program of 4 warps: 32 each per thread
MAX_COLUMNS = 1024
LENGTHS = 128  # added up at once


@triton.jit
def _gather_rows(
    out,
    cache,
    cache_strides,
    scales,
    scale_strides,
    scale,
    out_row,
    head,
    block,
    offset,
    live,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """One tile of keys or of values; out_row, head, block, offset and live are [ROWS]."""
    source = cache + (block * cache_strides[0] + offset * cache_strides[1] + head * cache_strides[2]) * UNIT
    factor = scale
    if SCALE == 1:
        at = scales + block * scale_strides[0] + offset * scale_strides[1] + head * scale_strides[2]
        factor = tl.load(at, mask=live, other=1.0)[:, None]
    for first in tl.static_range(0, HEAD_SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = live[:, None] & (column < HEAD_SIZE)[None, :]
        x = tl.load(source[:, None] + column.to(tl.int64)[None, :] * cache_strides[3], mask=inside, other=0)
        if CONVERT:
            x = (decode(x, FORMAT) * factor).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * HEAD_SIZE + column[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def gather_kernel(
    key,
    value,
    key_cache,
    key_strides,
    value_cache,
    value_strides,
    block_table,
    table_strides,
    seq_lens,
    len_stride,
    key_scales,
    key_scale_strides,
    key_scale,
    value_scales,
    value_scale_strides,
    value_scale,
    tiles,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Sequence program_id(0) // tiles, its rows from program_id(0) % tiles * ROWS on."""
    seq, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    length = tl.load(seq_lens + seq.to(tl.int64) * len_stride)
    if tile.to(tl.int64) * ROWS < length.to(tl.int64) * HEADS:
        before = tl.zeros((LENGTHS,), tl.int64)
        for first in range(0, seq, LENGTHS):
            other = first + tl.arange(0, LENGTHS)
            before += tl.load(seq_lens + other.to(tl.int64) * len_stride, mask=other < seq, other=0).to(tl.int64)
        position, head = row // HEADS, row % HEADS
        live = position < length
        entry = block_table + seq.to(tl.int64) * table_strides[0] + position // BLOCK_SIZE * table_strides[1]
        block = tl.load(entry, mask=live, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        out_row = tl.sum(before, axis=0) * HEADS + row
        _gather_rows(
            key, key_cache, key_strides, key_scales, key_scale_strides, key_scale, out_row, head, block, offset, live,
            HEAD_SIZE, COLUMNS, UNIT, FORMAT, KEY_SCALE, CONVERT,
        )  # fmt: skip  # as many arguments as a call can take in two lines
        _gather_rows(
            value, value_cache, value_strides, value_scales, value_scale_strides, value_scale, out_row, head, block,
            offset, live, HEAD_SIZE, COLUMNS, UNIT, FORMAT, VALUE_SCALE, CONVERT,
        )  # fmt: skip


def gather_kv(
    problem: GatherKV,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    tile: int = TILE,
    max_columns: int = MAX_COLUMNS,
    lengths: int = LENGTHS,
    num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(key, value) [num_tokens, num_kv_heads, head_size] from a problem with device arrays.

    `empty(shape, dtype)` makes the outputs. tile: elements of keys that a program takes; max_columns: of a head's row
    at once; lengths: added up at once; all powers of two.
    """
    shape = (problem.num_tokens, problem.num_kv_heads, problem.head_size)
    out = [empty(shape, problem.dtype) for _ in range(2)]
    if problem.num_tokens == 0:
        return out[0], out[1]
    convert = problem.key_cache.dtype != out[0].dtype
    caches = [as_codes(cache) if convert else as_bits(cache) for cache in (problem.key_cache, problem.value_cache)]
    key_scale = scale_arguments(problem.key_scale, problem.seq_lens)
    value_scale = scale_arguments(problem.value_scale, problem.seq_lens)
    if key_scale[1][2] == value_scale[1][2] == 0:  # no head has a scale of its own
        caches = regrouped(caches, max_columns)
    heads, head_size = caches[0].shape[-2:]
    unit = unit_of(*caches)
    columns = min(max_columns, triton.next_power_of_2(head_size))
    most = problem.block_table.shape[1] * problem.block_size * heads
    rows = max(1, min(tile // columns, triton.next_power_of_2(most)))
    tiles = triton.cdiv(most, rows)
    gather_kernel[(problem.num_seqs * tiles,)](
        *(array if convert else as_bits(array) for array in out),
        *(argument for cache in caches for argument in (cache, units(cache, unit))),
        problem.block_table,
        problem.block_table.stride(),
        problem.seq_lens,
        problem.seq_lens.stride(0),
        *key_scale[:3],
        *value_scale[:3],
        tiles,
        HEADS=heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=problem.block_size,
        ROWS=rows,
        COLUMNS=columns,
        LENGTHS=lengths,
        UNIT=unit,
        FORMAT=format_of(problem.key_cache) if convert else NONE,
        KEY_SCALE=key_scale[3],
        VALUE_SCALE=value_scale[3],
        CONVERT=convert,
        num_warps=num_warps,
    )
    return out[0], out[1]


def rejects(problem: GatherKV) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: GatherKV) -> list[dict[str, Any]]:
    """Tiles that make a little problem several programs and its rows two steps, whatever its size."""
    elements = problem.block_table.shape[1] * problem.block_size * problem.num_kv_heads * problem.head_size
    columns = max(triton.next_power_of_2(problem.head_size) // 2, 1)
    return [
        {"tile": max(triton.next_power_of_2(elements) // 8, 32), "max_columns": columns, "lengths": 2, "num_warps": 1}
    ]
