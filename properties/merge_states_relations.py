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
    """Within the bounds: attention over the first keys of each sequence, merged with attention over the rest.

    With a window or ALiBi, which depend on where a query sits, the cut is behind each query (`halves_behind`); else it
    is a block of the sequence (`halves`). The error of a half reaches the whole in proportion to its weight, and that
    of its lse by changing the weights.
    """
    if not callable(getattr(provider, "merge_states", None)):
        raise NotExercised("merge of two halves: the provider has no merge_states")
    if problem.window == 1:
        raise NotExercised("merge of two halves: a window of one key, which has no halves")
    positioned = problem.window is not None or problem.alibi_slopes is not None
    behind = keys_behind(problem) if positioned else 0
    parts = halves_behind(problem, behind) if positioned else halves(problem)
    for part in parts:
        transformed(provider, part)
    runs = [run(provider, part, variant_of(provider, part, variant)) for part in parts]
    states = [(_result(done, "out"), _result(done, "lse")) for done in runs]
    moved = np.zeros(problem.num_query_heads) if problem.alibi_slopes is None else problem.alibi_slopes * float(behind)
    first_lse = (to_float64(states[0][1]) - moved).astype(np.float32)
    merge = MergeStates(states[0][0], first_lse, *states[1])
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


def keys_behind(problem: PagedAttention) -> int:
    """How many keys, its own position the last of them, the second half of each query has: half of what is there."""
    there = int(problem.seq_lens.max(initial=0)) if problem.window is None else problem.window
    return max(there // 2, 1)


def halves_behind(problem: PagedAttention, behind: int) -> tuple[PagedAttention, PagedAttention]:
    """The same queries over what they see but for their last `behind` keys, and over those, with the sinks; causal.

    The last keys are a window. Before them a query sits `behind` keys earlier, at the end of a shorter sequence, and
    sees the rest of its window there. Distances are then too short by `behind` keys, all of them: scores are larger by
    ALiBi's slope * behind, and so is the lse, from which that is to be taken.
    """
    lengths = np.maximum(problem.seq_lens.astype(np.int64) - behind, 0).astype(INT32)
    window = None if problem.window is None else problem.window - behind
    first = dataclasses.replace(problem, seq_lens=lengths, window=window, sinks=None)
    return first, dataclasses.replace(problem, window=behind)


def _bounds(merge: MergeStates, parts: tuple[PagedAttention, PagedAttention]) -> tuple[Array, Array]:
    """(bound of out, bound of lse) of the merged result as the result of the whole."""
    _, lse = merge_states.merge_states(merge)
    out_bound, lse_bound = merge_states.bound(merge)
    bounds = [error_bounds.paged_attention(part) for part in parts]
    if parts[0].alibi_slopes is not None:  # the first lse was rounded once more when it was moved
        finite = np.where(np.isfinite(merge.lse_a), merge.lse_a, 0.0)
        bounds[0] = (bounds[0][0], bounds[0][1] + error_bounds.U * abs(to_float64(finite)))
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
