"""What ties merging to attention: the two halves of every sequence's keys, merged, are the whole."""

import dataclasses
from typing import Any

import numpy as np

from pagebench.properties.contracts import Missing, transformed
from pagebench.properties.relations import variant_of
from pagebench.properties.runs import NotExercised, Run, run
from pagebench.reference import error_bounds, merge_states
from pagebench.reference import paged_attention as attention
from pagebench.reference.dtypes import INT32, Array, to_float64
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention

Variant = dict[str, Any] | None


def check_halves(provider: Any, problem: PagedAttention, *, variant: Variant = None) -> Missing:
    """Within the bounds: attention over the first blocks of each sequence, merged with attention over the rest.

    The cut is at or before the first query, so that all queries see all of the first half, which gets the sinks. The
    error of a half reaches the whole in proportion to its weight, and that of its lse by changing the weights.
    """
    if not callable(getattr(provider, "merge_states", None)):
        raise NotExercised("merge of two halves: the provider has no merge_states")
    if problem.window is not None or problem.alibi_slopes is not None:
        raise NotExercised("merge of two halves: a window or ALiBi, which depend on where a query sits")
    parts = halves(problem)
    for part in parts:
        transformed(provider, part)
    runs = [run(provider, part, variant_of(provider, part, variant)) for part in parts]
    states = [(_result(done, "out"), _result(done, "lse")) for done in runs]
    merge = MergeStates(*states[0], *states[1])
    merged = run(provider, merge)
    out, lse = attention.paged_attention(problem)
    out_bound, lse_bound = _bounds(merge, parts)
    error_bounds.assert_close("out of two halves", _result(merged, "out"), out, out_bound)
    error_bounds.assert_close("lse of two halves", _result(merged, "lse"), lse, lse_bound)
    return merged.not_exercised


def halves(problem: PagedAttention) -> tuple[PagedAttention, PagedAttention]:
    """The same queries over the first blocks of each sequence, with the sinks, and over its other blocks."""
    size = problem.block_size
    lengths = problem.seq_lens.astype(np.int64)
    before = lengths - np.diff(problem.query_start) if problem.causal else lengths
    cuts = np.maximum(before, 0) // size // 2  # in blocks
    table = np.zeros_like(problem.block_table)
    for seq, cut in enumerate(cuts):
        table[seq, : table.shape[1] - cut] = problem.block_table[seq, cut:]
    first = dataclasses.replace(problem, seq_lens=(cuts * size).astype(INT32), causal=False)
    rest = dataclasses.replace(problem, block_table=table, seq_lens=(lengths - cuts * size).astype(INT32), sinks=None)
    return first, rest


def _bounds(merge: MergeStates, parts: tuple[PagedAttention, PagedAttention]) -> tuple[Array, Array]:
    """(bound of out, bound of lse) of the merged result as the result of the whole."""
    _, lse = merge_states.merge_states(merge)
    out_bound, lse_bound = merge_states.bound(merge)
    bounds = [error_bounds.paged_attention(part) for part in parts]
    off = np.expm1(bounds[0][1] + bounds[1][1])[..., None]  # relative, of the weights
    for own, side, (side_out, side_lse) in zip(
        (merge.lse_a, merge.lse_b), (merge.out_a, merge.out_b), bounds, strict=True
    ):
        there = np.isfinite(own)
        weight = np.where(there, np.exp(np.where(there, own - np.where(there, lse, 0.0), 0.0)), 0.0)
        out_bound = out_bound + weight[..., None] * (1 + off) * (side_out + off * abs(to_float64(side)))
        lse_bound = lse_bound + weight * (1 + off[..., 0]) * side_lse
    return error_bounds.SECOND_ORDER * out_bound, error_bounds.SECOND_ORDER * lse_bound


def _result(done: Run, name: str) -> Array:
    result = done.results[name]
    if result is None:
        raise NotExercised(f"merge of two halves: the provider returns no {name}")
    return result
