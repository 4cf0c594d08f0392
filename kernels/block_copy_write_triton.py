"""Writing rows of new keys and values into their slots of a paged cache, in Triton: one launch.

What it computes: row i of key and value [tokens, heads, head_size] goes to slot slots[i] = block * block_size + offset
of key_cache and value_cache [num_blocks, block_size, heads, head_size]; a negative slot is skipped. A cache of the
rows' type gets their bits, a quantised one the codes of x / scale, the scale given or worked out from the row.

Layout: a program takes ROWS rows, a row being one token's head, of both keys and values. Any strides; those that are
multiples of UNIT elements come as such, so that the compiler knows how wide accesses may be. Where heads of an odd size
lie side by side and share a scale, a token's elements are taken as heads of another size, which aligns them.

Traffic: each written row in and out once, 8 bytes of slot mapping per row. Rows longer than COLUMNS are read again,
from the L2, where their scale is computed. Fast because accesses are 16 bytes wide where alignment allows, and a
program has TILE elements of keys and as many of values in flight.

Code generation (Triton 3.9, sm_90, Llama-3-8B), nothing run: 48 registers for fp16, 89 for e4m3, 8 loads
and 8 or 4 stores of 16 bytes; no spill, on sm_80 and sm_100 neither.
"""

from typing import Any

import triton
import triton.language as tl

from pagebench.kernels.block_copy_formats_triton import (
    NONE,
    as_bits,
    as_codes,
    encode,
    format_of,
    highest,
    regrouped,
    scale_arguments,
    unit_of,
    units,
)
from pagebench.reference.block_copy_write import WriteKV

TILE = 4096  # elements of keys, and of values, in a program of 4 warps: 32 each per thread
MAX_COLUMNS = 1024


@triton.jit
def _write_rows(
    rows,
    row_strides,
    cache,
    cache_strides,
    scales,
    scale_strides,
    scale,
    token,
    head,
    block,
    offset,
    live,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One tile of keys or of values; token, head, block, offset and live are [ROWS]."""
    source = rows + (token * row_strides[0] + head * row_strides[1]) * UNIT
    target = cache + (block * cache_strides[0] + offset * cache_strides[1] + head * cache_strides[2]) * UNIT
    at = scales + block * scale_strides[0] + offset * scale_strides[1] + head * scale_strides[2]
    factor = scale
    if SCALE == 1:
        factor = tl.load(at, mask=live, other=1.0)[:, None]
    if SCALE == 2:
        largest = tl.zeros(token.shape, tl.float32)
        for first in tl.static_range(0, HEAD_SIZE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = live[:, None] & (column < HEAD_SIZE)[None, :]
            x = tl.load(source[:, None] + column.to(tl.int64)[None, :] * row_strides[2], mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(x.to(tl.float32)), axis=1))
        computed = tl.where(largest == 0.0, 1.0, tl.div_rn(largest, tl.full(token.shape, highest(FORMAT), tl.float32)))
        tl.store(at, computed, mask=live)
        factor = computed[:, None]
    for first in tl.static_range(0, HEAD_SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = live[:, None] & (column < HEAD_SIZE)[None, :]
        if SCALE != 2 or HEAD_SIZE > COLUMNS:
            x = tl.load(source[:, None] + column.to(tl.int64)[None, :] * row_strides[2], mask=inside, other=0)
        if FORMAT == 0:
            stored = x
        else:
            wide = x.to(tl.float32)
            stored = encode(tl.div_rn(wide, tl.zeros_like(wide) + factor), FORMAT)
        tl.store(target[:, None] + column.to(tl.int64)[None, :] * cache_strides[3], stored, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def write_kernel(
    key,
    key_strides,
    value,
    value_strides,
    key_cache,
    key_cache_strides,
    value_cache,
    value_cache_strides,
    slots,
    slot_stride,
    key_scales,
    key_scale_strides,
    key_scale,
    value_scales,
    value_scale_strides,
    value_scale,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
):
    """Rows [program_id(0) * ROWS, + ROWS) of num_rows = tokens * HEADS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots + token * slot_stride, mask=row < num_rows, other=-1)
    live = slot >= 0
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    _write_rows(
        key, key_strides, key_cache, key_cache_strides, key_scales, key_scale_strides, key_scale,
        token, head, block, offset, live, HEAD_SIZE, COLUMNS, UNIT, FORMAT, KEY_SCALE,
    )  # fmt: skip  # as many arguments as a call can take in two lines
    _write_rows(
        value, value_strides, value_cache, value_cache_strides, value_scales, value_scale_strides, value_scale,
        token, head, block, offset, live, HEAD_SIZE, COLUMNS, UNIT, FORMAT, VALUE_SCALE,
    )  # fmt: skip


def write_kv(problem: WriteKV, *, tile: int = TILE, max_columns: int = MAX_COLUMNS, num_warps: int = 4) -> None:
    """Write in place in the device arrays of the problem.

    tile: elements of keys that a program takes; max_columns: of a head's row at once; both powers of two.
    """
    num_tokens = problem.slot_mapping.shape[0]
    if num_tokens == 0:
        return
    quantised, computed = problem.quantised, problem.compute_scales
    key_scale = scale_arguments(problem.key_scale, problem.slot_mapping, computed=computed)
    value_scale = scale_arguments(problem.value_scale, problem.slot_mapping, computed=computed)
    arrays = [problem.key, problem.value, problem.key_cache, problem.value_cache]
    arrays = [*arrays[:2], *map(as_codes, arrays[2:])] if quantised else [*map(as_bits, arrays)]
    if not computed and key_scale[1][2] == value_scale[1][2] == 0:  # no head has a scale of its own
        arrays = regrouped(arrays, max_columns)
    heads, head_size = arrays[0].shape[-2:]
    num_rows = num_tokens * heads
    unit = unit_of(*arrays)
    columns = min(max_columns, triton.next_power_of_2(head_size))
    rows = max(1, min(tile // columns, triton.next_power_of_2(num_rows)))
    write_kernel[(triton.cdiv(num_rows, rows),)](
        *(argument for array in arrays for argument in (array, units(array, unit))),
        problem.slot_mapping,
        problem.slot_mapping.stride(0),
        *key_scale[:3],
        *value_scale[:3],
        num_rows,
        HEADS=heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=problem.block_size,
        ROWS=rows,
        COLUMNS=columns,
        UNIT=unit,
        FORMAT=format_of(problem.key_cache) if quantised else NONE,
        KEY_SCALE=key_scale[3],
        VALUE_SCALE=value_scale[3],
        num_warps=num_warps,
    )


def rejects(problem: WriteKV) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: WriteKV) -> list[dict[str, Any]]:
    """Tiles that make a little problem several programs and its rows two steps, whatever its size."""
    elements = problem.slot_mapping.shape[0] * problem.num_kv_heads * problem.head_size
    columns = max(triton.next_power_of_2(problem.head_size) // 2, 1)
    return [{"tile": max(triton.next_power_of_2(elements) // 8, 32), "max_columns": columns, "num_warps": 1}]
