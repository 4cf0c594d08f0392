"""Claims that tie two runs together and need no reference: metamorphic relations of each op.

Each says whether it holds *bitwise* or *within the bound*. Within the bound: both runs may be off by their own derived
bound, so they may differ by the sum. A provider whose attribute `batch_invariant` is true is held bitwise to the
relations between batches. Same signature as in `contracts`.
"""

import dataclasses
from typing import Any, TypeVar

import numpy as np

from pagebench.properties.contracts import Missing, assert_equal_runs, require_supported, transformed
from pagebench.properties.host_arrays import copy_of
from pagebench.properties.poison import live_elements
from pagebench.properties.runs import NotExercised, Run, run
from pagebench.reference import error_bounds
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.dtypes import INT32, Array
from pagebench.reference.paged_attention import PagedAttention

Variant = dict[str, Any] | None
Paged = TypeVar("Paged", PagedAttention, GatherKV)


def check_relabelling(provider: Any, problem: Paged, *, variant: Variant = None) -> Missing:
    """Bitwise: moving blocks to other physical places, with the table following, changes nothing."""
    require_supported(provider, problem)
    moved = transformed(provider, relabelled(problem))
    before, after = run(provider, problem, variant), run(provider, moved, variant)
    assert_equal_runs("after relabelling the blocks", after, before)
    return before.not_exercised


def relabelled(problem: Paged) -> Paged:
    """The same keys and values with the physical blocks permuted."""
    order = np.random.default_rng(problem.num_blocks).permutation(problem.num_blocks)  # block order[i] of old becomes i
    moved = copy_of(problem).problem
    for name in ("key_cache", "value_cache", "key_scale", "value_scale"):
        if np.ndim(getattr(problem, name)) >= 3:
            getattr(moved, name)[...] = getattr(problem, name)[order]
    live = live_elements(problem, "block_table")
    moved.block_table[live] = np.argsort(order)[problem.block_table[live]]
    moved.validate()
    return moved


def check_batch_permutation(provider: Any, problem: PagedAttention, *, variant: Variant = None) -> Missing:
    """Within the bound (bitwise if batch_invariant): another order of the sequences only reorders the result."""
    if problem.num_seqs < 2:
        raise NotExercised("batch permutation: fewer than two sequences")
    order = np.roll(np.arange(problem.num_seqs)[::-1], problem.num_blocks % problem.num_seqs)
    other = transformed(provider, subset(problem, order))
    before, after = run(provider, problem, variant), run(provider, other, variant)
    rows = rows_of(problem, order)
    _compare(provider, "after permuting the batch", problem, rows, before, other, np.arange(rows.size), after)
    return before.not_exercised


def check_batch_split(provider: Any, problem: PagedAttention, *, variant: Variant = None) -> Missing:
    """Within the bound (bitwise if batch_invariant): a sequence alone gives what it gives in the batch."""
    if problem.num_seqs < 2:
        raise NotExercised("batch split: fewer than two sequences")
    before = run(provider, problem, variant)
    cut = problem.num_seqs // 2
    for part in (np.arange(cut), np.arange(cut, problem.num_seqs)):
        other = transformed(provider, subset(problem, part))
        rows = rows_of(problem, part)
        after = run(provider, other, variant)
        _compare(provider, "after splitting the batch", problem, rows, before, other, np.arange(rows.size), after)
    return before.not_exercised


def rows_of(problem: PagedAttention, order: Array) -> Array:
    """int64: rows of `query` that belong to the sequences `order`, in that order."""
    rows = [np.arange(problem.num_tokens)[problem.query_rows(int(seq))] for seq in order]
    return np.concatenate([np.zeros(0, np.int64), *rows])


def subset(problem: PagedAttention, order: Array) -> PagedAttention:
    """The problem over the sequences `order` alone, on the same caches."""
    lengths = np.diff(problem.query_start)[order]
    return dataclasses.replace(
        problem,
        query=problem.query[rows_of(problem, order)],
        block_table=problem.block_table[order],
        seq_lens=problem.seq_lens[order],
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(INT32),
    )


def check_block_size(provider: Any, problem: PagedAttention, *, variant: Variant = None) -> Missing:
    """Within the bound: the same keys and values in blocks of another size give the same result."""
    other = transformed(provider, reblocked(problem, 5 if problem.block_size > 5 else problem.block_size + 3))
    before, after = run(provider, problem, variant), run(provider, other, variant)
    rows = np.arange(problem.num_tokens)
    _compare(None, "with another block size", problem, rows, before, other, rows, after)
    return before.not_exercised


def reblocked(problem: PagedAttention, block_size: int) -> PagedAttention:
    """The same sequences in fresh, contiguous caches of blocks of `block_size`, unused slots and table entries 0."""
    longest = int(problem.seq_lens.max(initial=0))
    width = max(-(-longest // block_size), 1)
    table = np.arange(problem.num_seqs * width, dtype=INT32).reshape(problem.num_seqs, width)

    def moved(cache: Any) -> Any:
        if np.ndim(cache) < 3:
            return cache
        fresh = np.zeros((max(table.size, 1), block_size, *cache.shape[2:]), cache.dtype)
        for seq in range(problem.num_seqs):
            keys = np.arange(problem.first_visible(seq), int(problem.seq_lens[seq]))
            fresh[table[seq, keys // block_size], keys % block_size] = cache[problem.slots(seq)]
        return fresh

    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    return dataclasses.replace(problem, block_table=table, **{name: moved(getattr(problem, name)) for name in names})


def check_gqa_is_mha(provider: Any, problem: PagedAttention, *, variant: Variant = None) -> Missing:
    """Within the bound: grouped heads give what as many KV heads, each repeated for its group, give."""
    if problem.group == 1:
        raise NotExercised("GQA = MHA: the group is 1")
    other = transformed(provider, with_repeated_heads(problem))
    before, after = run(provider, problem, variant), run(provider, other, variant_of(provider, other, variant))
    rows = np.arange(problem.num_tokens)
    _compare(None, "with the KV heads repeated", problem, rows, before, other, rows, after)
    return before.not_exercised


def with_repeated_heads(problem: PagedAttention) -> PagedAttention:
    """The same problem with num_kv_heads = num_query_heads."""

    def repeated(array: Any) -> Any:
        if np.ndim(array) == 0:
            return array
        return np.repeat(array, problem.group, axis=0 if np.ndim(array) == 1 else 2)

    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    return dataclasses.replace(problem, **{name: repeated(getattr(problem, name)) for name in names})


def check_pair_order(provider: Any, problem: CopyBlocks, *, variant: Variant = None) -> Missing:
    """Bitwise: the order of the pairs means nothing, since all are copied at once."""
    require_supported(provider, problem)
    if problem.pairs.shape[0] < 2:
        raise NotExercised("pair order: fewer than two pairs")
    before = run(provider, problem, variant)
    order = np.random.default_rng(problem.pairs.shape[0]).permutation(problem.pairs.shape[0])
    for pairs in (problem.pairs[::-1], problem.pairs[order]):
        other = dataclasses.replace(problem, pairs=np.ascontiguousarray(pairs))
        assert_equal_runs("after reordering the pairs", run(provider, other, variant), before)
    return before.not_exercised


def variant_of(provider: Any, problem: PagedAttention, variant: Variant) -> Variant:
    """`variant` where it is one of the transformed problem's too, else the default."""
    return variant if variant and variant in provider.variants(problem) else None


def _compare(
    provider: Any,
    when: str,
    first: PagedAttention,
    rows: Array,
    before: Run,
    second: PagedAttention,
    other: Array,
    after: Run,
) -> None:
    """Rows `rows` of `before` against rows `other` of `after`."""
    bitwise = getattr(provider, "batch_invariant", False)
    bounds = error_bounds.paged_attention(first), error_bounds.paged_attention(second)
    for i, name in enumerate(("out", "lse")):
        old, new = before.results[name], after.results[name]
        if old is None or new is None:
            continue
        if bitwise:
            error_bounds.assert_same_bits(f"{name} {when}", new[other], old[rows])
        else:
            bound = bounds[0][i][rows] + bounds[1][i][other]
            error_bounds.assert_close(f"{name} {when}", new[other], old[rows].astype(np.float64), bound)
