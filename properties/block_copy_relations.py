"""Claims that tie runs of the block operations together and need no reference. All hold bitwise.

Same signature as in `contracts`; each takes a problem of the op named in its first line.
"""

import dataclasses
from typing import Any

import numpy as np

from pagebench.properties.contracts import Missing, assert_equal_runs, require_supported, transformed
from pagebench.properties.host_arrays import copy_of
from pagebench.properties.runs import NotExercised, Run, run
from pagebench.reference import error_bounds
from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dtypes import CODE_LIMITS, FLOAT16, INT32, INT64, Array, to_float64, unit_roundoff

Variant = dict[str, Any] | None
MOST_COPIED = 8  # blocks: what a copy costs on a CPU grows with the square


def check_copy_twice(provider: Any, problem: CopyBlocks, *, variant: Variant = None) -> Missing:
    """copy_blocks: without a source that is also a destination, a second copy changes nothing."""
    require_supported(provider, problem)
    src, dst = problem.pairs.T
    if np.isin(src, dst[src != dst]).any():
        raise NotExercised("copying twice: a source is a destination too")
    once = run(provider, problem, variant)
    caches = tuple(_some(once, f"caches[{i}]") for i in range(len(problem.caches)))
    assert_equal_runs("after a second copy", run(provider, CopyBlocks(caches, problem.pairs), variant), once)
    return once.not_exercised


def check_swap_twice(provider: Any, problem: SwapBlocks, *, variant: Variant = None) -> Missing:
    """swap_blocks: the same blocks brought over again change nothing."""
    require_supported(provider, problem)
    once = run(provider, problem, variant)
    caches = tuple(_some(once, f"dst_caches[{i}]") for i in range(len(problem.dst_caches)))
    again = dataclasses.replace(problem, dst_caches=caches)
    assert_equal_runs("after a second swap", run(provider, again, variant), once)
    return once.not_exercised


def check_swap_there_and_back(provider: Any, problem: SwapBlocks, *, variant: Variant = None) -> Missing:
    """swap_blocks: blocks that went to the other pool come back as they were, whatever was in their place meanwhile."""
    require_supported(provider, problem)
    there = run(provider, problem, variant)
    _, first = np.unique(problem.pairs[:, 0], return_index=True)  # a block comes back from one place
    pairs = np.ascontiguousarray(problem.pairs[first][:, ::-1])
    away = tuple(_some(there, f"dst_caches[{i}]") for i in range(len(problem.dst_caches)))
    emptied = tuple(_with_blocks(cache, pairs[:, 1], 0xFF) for cache in problem.src_caches)
    back = SwapBlocks(away, emptied, pairs, "in" if problem.direction == "out" else "out")
    done = _supported_run(provider, back, variant)
    for i, cache in enumerate(problem.src_caches):
        _assert_bytes(f"dst_caches[{i}] after swapping there and back", _some(done, f"dst_caches[{i}]"), cache)
    return there.not_exercised


def check_row_order(provider: Any, problem: WriteKV, *, variant: Variant = None) -> Missing:
    """write_kv: the order of the rows means nothing when their slots go with them."""
    require_supported(provider, problem)
    mapped = problem.slot_mapping.size
    if mapped < 2:
        raise NotExercised("row order: fewer than two rows")
    before = run(provider, problem, variant)
    order = np.random.default_rng(mapped).permutation(mapped)
    moved = {"slot_mapping": problem.slot_mapping[order], "key": problem.key[order], "value": problem.value[order]}
    after = _supported_run(provider, dataclasses.replace(problem, **moved), variant)
    assert_equal_runs("after permuting the rows", after, before)
    return before.not_exercised


def check_slot_relabelling(provider: Any, problem: WriteKV, *, variant: Variant = None) -> Missing:
    """write_kv: with the slots of the caches permuted, and the mapping following, the same is in every slot."""
    require_supported(provider, problem)
    slots = problem.num_blocks * problem.block_size
    order = np.random.default_rng(slots).permutation(slots)  # slot order[i] of old becomes i
    moved = copy_of(problem).problem
    names = ["key_cache", "value_cache"] + (["key_scale", "value_scale"] if problem.compute_scales else [])
    for name in names:
        getattr(moved, name)[...] = _with_slots(getattr(problem, name), order)
    live = problem.slot_mapping >= 0
    moved.slot_mapping[live] = np.argsort(order)[problem.slot_mapping[live]]
    moved.validate()
    before, after = run(provider, problem, variant), _supported_run(provider, moved, variant)
    for name in names:
        expected = _with_slots(_some(before, name), order)
        _assert_bytes(f"{name} after relabelling the slots", _some(after, name), expected)
    return before.not_exercised


def check_write_twice(provider: Any, problem: WriteKV, *, variant: Variant = None) -> Missing:
    """write_kv: the same rows written again change nothing."""
    require_supported(provider, problem)
    once = run(provider, problem, variant)
    written: dict[str, Any] = {name: _some(once, name) for name in once.results}
    assert_equal_runs("after a second write", run(provider, dataclasses.replace(problem, **written), variant), once)
    return once.not_exercised


def check_write_then_gather(provider: Any, problem: WriteKV, *, variant: Variant = None) -> Missing:
    """write_kv: the provider's own gather_kv reads back what was written.

    The rows bit for bit from a 16- or 32-bit cache. From a quantised one, within the rounding of the result, the number
    of the format nearest to the row's, saturated.
    """
    require_supported(provider, problem)
    done = run(provider, problem, variant)
    blocks, offsets = problem.slots()
    if blocks.size == 0:
        raise NotExercised("write then gather: no row is written")
    scales = {
        n: done.results[n] if problem.compute_scales else getattr(problem, n) for n in ("key_scale", "value_scale")
    }
    read = _gather_slots(provider, problem, {n: _some(done, n) for n in ("key_cache", "value_cache")}, scales)
    for name in ("key", "value"):
        rows, back = getattr(problem, name)[problem.rows()], _some(read, name)
        if problem.quantised:
            scale = scales[f"{name}_scale"]
            _assert_nearest(name, rows, back, _per_row(scale, blocks, offsets), problem.key_cache.dtype)
        else:
            error_bounds.assert_same_bits(f"{name} after writing and gathering", back, rows)
    return (*done.not_exercised, *read.not_exercised)


def _gather_slots(provider: Any, problem: WriteKV, caches: dict[str, Array], scales: dict[str, Any]) -> Run:
    """Each written slot as a sequence of its own, over the caches seen as blocks of one slot."""
    blocks, offsets = problem.slots()
    slots = problem.num_blocks * problem.block_size

    def one_slot_blocks(array: Any) -> Any:
        return array.reshape(slots, 1, *array.shape[2:]) if np.ndim(array) >= 3 else array

    table = (blocks * problem.block_size + offsets).astype(INT32).reshape(-1, 1)
    gather = GatherKV(
        **{name: one_slot_blocks(cache) for name, cache in caches.items()},
        block_table=table,
        seq_lens=np.ones(table.shape[0], INT32),
        dtype=problem.key.dtype,
        **{name: None if scale is None else one_slot_blocks(scale) for name, scale in scales.items()},
    )
    return _supported_run(provider, gather, None)


def _per_row(scale: Any, blocks: Array, offsets: Array) -> Array:
    """float64, to broadcast against rows [n, heads, head_size]."""
    if scale is None:
        return np.ones((1, 1, 1))
    values = np.asarray(scale)
    rows = values[blocks, offsets][..., None] if values.ndim == 3 else values.reshape(1, -1, 1)
    return rows.astype(np.float64)


def _assert_nearest(name: str, rows: Array, back: Array, scale: Array, dtype: np.dtype[Any]) -> None:
    """`back` is within half a step of the cache's format, and a rounding of the row's type, of the row saturated."""
    with np.errstate(all="ignore"):
        x, y = to_float64(rows), to_float64(back)
        low, high = CODE_LIMITS[dtype]
        nan = np.isnan(x)
        expected = np.clip(np.where(nan, 0, x), low * scale, high * scale)
        if dtype.kind == "i":
            step = np.broadcast_to(scale, x.shape)
        else:
            mantissa, least = (3, -9) if high == 448 else (2, -16)
            exponent = np.floor(np.log2(np.maximum(abs(expected / scale), 2.0**-30)))
            step = np.exp2(np.maximum(exponent - mantissa, least)) * scale
        bound = 0.5 * step + abs(expected) * (2.0**-22 + 2 * unit_roundoff(rows.dtype)) + 2.0**-24
        largest = 65504.0 if rows.dtype == FLOAT16 else 3.3e38  # beyond it, what is read overflows
        ok = (abs(y - expected) <= bound) | (nan & (np.isnan(y) | (y == 0))) | (abs(expected) + bound >= largest)
    assert ok.all(), (
        f"{name} after writing and gathering: {int((~ok).sum())} elements are not the nearest number of {dtype}, "
        f"the first {x[~ok][0]!r} came back as {y[~ok][0]!r}, scale {np.broadcast_to(scale, x.shape)[~ok][0]!r}"
    )


def check_copy_then_gather(provider: Any, problem: GatherKV, *, variant: Variant = None) -> Missing:
    """gather_kv: after copying blocks of sequences elsewhere, the table that names the copies reads the same."""
    require_supported(provider, problem)
    used = np.unique(problem.block_table[problem.used_entries()]).astype(INT64)[:MOST_COPIED]
    if used.size == 0:
        raise NotExercised("copy then gather: no block is used")
    if not callable(getattr(provider, "copy_blocks", None)):
        raise NotExercised("copy then gather: the provider has no copy_blocks")
    before = run(provider, problem, variant)
    arrays = {name: getattr(problem, name) for name in ("key_cache", "value_cache")}
    arrays |= {n: s for n in ("key_scale", "value_scale") if np.ndim(s := getattr(problem, n)) == 3}
    wider = tuple(np.concatenate([array, array[used]]) for array in arrays.values())
    pairs = np.stack([used, problem.num_blocks + np.arange(used.size)], axis=1)
    blank = tuple(_with_blocks(array, pairs[:, 1], 0xFF) for array in wider)
    copied = _supported_run(provider, CopyBlocks(blank, pairs), None)
    table = problem.block_table.copy()
    live = problem.used_entries() & np.isin(table, used)
    table[live] = problem.num_blocks + np.searchsorted(used, table[live])
    moved: dict[str, Any] = {name: _some(copied, f"caches[{i}]") for i, name in enumerate(arrays)}
    after = _supported_run(provider, dataclasses.replace(problem, block_table=table, **moved), variant)
    assert_equal_runs("after copying its blocks", after, before)
    return before.not_exercised


def check_sequence_order(provider: Any, problem: GatherKV, *, variant: Variant = None) -> Missing:
    """gather_kv: another order of the sequences only reorders their rows."""
    require_supported(provider, problem)
    if problem.num_seqs < 2:
        raise NotExercised("sequence order: fewer than two sequences")
    order = np.random.default_rng(problem.num_seqs).permutation(problem.num_seqs)
    before = run(provider, problem, variant)
    moved = {"block_table": problem.block_table[order], "seq_lens": problem.seq_lens[order]}
    after = _supported_run(provider, dataclasses.replace(problem, **moved), variant)
    ends = np.cumsum(problem.seq_lens)
    parts = [np.arange(ends[s] - problem.seq_lens[s], ends[s]) for s in order]
    rows = np.concatenate(parts)
    for name in ("key", "value"):
        error_bounds.assert_same_bits(
            f"{name} after permuting the sequences", _some(after, name), _some(before, name)[rows]
        )
    return before.not_exercised


def _supported_run(provider: Any, problem: Any, variant: Variant) -> Run:
    return run(provider, transformed(provider, problem), variant)


def _with_slots(cache: Array, order: Array) -> Array:
    """A contiguous copy whose slot i, counted over all blocks, is slot order[i] of `cache`."""
    flat = np.ascontiguousarray(cache).reshape(-1, *cache.shape[2:])
    moved: Array = flat[order].reshape(cache.shape)
    return moved


def _with_blocks(cache: Array, blocks: Array, byte: int) -> Array:
    """A contiguous copy in which every byte of `blocks` is `byte`."""
    copied = np.array(cache, order="C")
    if copied.size:
        copied.view(np.uint8).reshape(copied.shape[0], -1)[blocks] = byte
    return copied


def _assert_bytes(name: str, got: Array, expected: Array) -> None:
    same = np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()
    assert same, f"{name}: the bytes are not those of before"


def _some(done: Run, name: str) -> Array:
    array = done.results[name]
    assert array is not None
    return array
