"""Attention inputs that see what random data cannot: the structure of a problem stays, its numbers are replaced.

In random data a dropped key is lost in the noise from about 130 keys on. Here it is not.
"""

import dataclasses
import math

import numpy as np

from pagebench.properties.host_arrays import copy_of
from pagebench.properties.poison import live_slots
from pagebench.reference.dtypes import INT8, Array
from pagebench.reference.paged_attention import PagedAttention

LARGE_LOGIT = 1e5
NEEDLE_SCORE = 20.0  # a needle outweighs e^20 other keys


def counting(problem: PagedAttention) -> PagedAttention:
    """q = 0, V one-hot by slot: all visible keys weigh the same, so each column of out counts keys; lse is ln(count).

    Dead slots hold a value that no count of live ones can hide.
    """
    probe: PagedAttention = _copy(problem)
    probe.query[...] = 0
    slot = np.arange(problem.num_blocks * problem.block_size).reshape(problem.num_blocks, problem.block_size)
    one_hot = (slot[..., None] % problem.head_size) == np.arange(problem.head_size)
    live = live_slots(problem)
    probe.key_cache[~live] = 0
    probe.value_cache[...] = one_hot[:, :, None, :].astype(np.float32)
    probe.value_cache[~live] = 64
    return probe


def needle(problem: PagedAttention, edge: int) -> PagedAttention:
    """One key per sequence aligned with its queries, the others and their values 0; `edge` selects where it lies.

    Candidates are both ends, every block and tile boundary and its neighbours, and the slot past the end, where the
    needle must be invisible. ALiBi would move the balance, so it is left out; a window moves with the queries.
    """
    probe: PagedAttention = dataclasses.replace(_copy(problem), scale=1.0, soft_cap=None, alibi_slopes=None, sinks=None)
    size = problem.head_size
    direction = np.where(np.arange(size) % 3 == 1, -1.0, 1.0)
    strength = np.sqrt(NEEDLE_SCORE / size)
    probe.query[...] = direction * strength
    probe.key_cache[...] = 0
    probe.value_cache[...] = 0
    for seq in range(problem.num_seqs):
        position = _edge(problem, seq, edge)
        if position is not None:
            block, offset = int(problem.block_table[seq, position // problem.block_size]), position % problem.block_size
            probe.key_cache[block, offset] = direction * strength * _unit(problem)
            probe.value_cache[block, offset] = 1 + np.arange(size) % 7
    return probe


def _unit(problem: PagedAttention) -> float:
    """What turns 1.0 into a number that the cache's dtype can hold with some precision."""
    return 30.0 if problem.key_cache.dtype == INT8 else 1.0


def _edge(problem: PagedAttention, seq: int, edge: int) -> int | None:
    """A position of sequence `seq` whose block is in use: the `edge`-th candidate, counted around."""
    first, length = problem.first_visible(seq), int(problem.seq_lens[seq])
    if first >= length:
        return None
    units = (problem.block_size, 16, 32, 64, 128)
    marks = {0, first, length - 1, length, *(m for unit in units for m in range(unit, length + 1, unit))}
    if problem.window is not None:  # where each query's window begins, and one before
        marks |= {int(at) - problem.window for at in problem.positions(seq)}
    near = {mark + delta for mark in marks for delta in (-1, 0, 1)}
    capacity = -(-length // problem.block_size) * problem.block_size
    start = first // problem.block_size * problem.block_size
    candidates = sorted(p for p in near if start <= p < capacity)
    return candidates[(edge + 7 * seq) % len(candidates)]


def constant_value(problem: PagedAttention) -> PagedAttention:
    """Every live V of a head and column the same number, dead ones another: out is that number for any weights."""
    probe: PagedAttention = _copy(problem)
    live = live_slots(problem)
    columns = 1 + np.arange(problem.num_kv_heads * problem.head_size).reshape(problem.num_kv_heads, -1) % 11
    probe.value_cache[...] = columns.astype(np.float32)
    probe.value_cache[~live] = -100
    return probe


def large_logits(problem: PagedAttention) -> PagedAttention:
    """The scale raised until the largest |score| is about 1e5, where exp of anything but a difference overflows."""
    keys = problem.key_cache[live_slots(problem)].astype(np.float64)
    if keys.size == 0 or problem.num_tokens == 0:
        return problem
    queries = problem.query.astype(np.float64).reshape(problem.num_tokens, problem.num_kv_heads, problem.group, -1)
    largest = float(abs(np.einsum("thgd,khd->thgk", queries, keys)).max())
    return (
        problem
        if largest == 0
        else dataclasses.replace(problem, scale=min(LARGE_LOGIT / largest, largest_scale(problem)))
    )


def largest_scale(problem: PagedAttention) -> float:
    """About the largest scale with which `problem` is valid: beyond it a factor of the scores leaves float32."""
    key_scale = 1.0 if problem.key_scale is None else float(np.max(problem.key_scale, initial=1.0))
    by_cap = 1.0 if problem.soft_cap is None else min(float(problem.soft_cap) / 2, math.log2(math.e))
    return float(np.finfo(np.float32).max) * (1 - 2.0**-20) * by_cap / math.log2(math.e) / key_scale


def indifferent(problem: PagedAttention) -> PagedAttention:
    """Queries of 0 under the largest scale: every score is 0, unless a factor of it has become infinite."""
    probe: PagedAttention = dataclasses.replace(_copy(problem), scale=largest_scale(problem))
    probe.query[...] = 0
    return probe


def large_sinks(problem: PagedAttention) -> PagedAttention:
    """Sinks of +-1e5, head by head: one that leaves nothing of the keys, and one that leaves nothing of itself."""
    sinks = np.where(np.arange(problem.num_query_heads) % 2, -LARGE_LOGIT, LARGE_LOGIT)
    return dataclasses.replace(problem, sinks=sinks.astype(np.float32))


def _copy(problem: PagedAttention) -> PagedAttention:
    return copy_of(problem).problem


def visible_count(problem: PagedAttention) -> Array:
    """int64 [num_tokens]: keys that each query sees."""
    counts = np.zeros(problem.num_tokens, np.int64)
    for seq in range(problem.num_seqs):
        counts[problem.query_rows(seq)] = problem.visible(seq).sum(axis=1)
    return counts
