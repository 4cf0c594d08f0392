"""KV blocks: what the allocators must do, in any order of calls.

The machine runs over lists of values, and in its second mode over real caches that a provider's kernels write.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebench.properties import kv_blocks_kernels
from pagebench.properties.claims import budget, fixed
from pagebench.properties.kv_blocks_machine import EXAMPLES, STEPS, run_machine
from pagebench.properties.kv_blocks_store import ListStore
from pagebench.properties.subject import Subject
from pagebench.reference.kv_blocks import naive_waste
from pagebench.reference.kv_blocks_contiguous import ContiguousAllocator, OutOfSlotsError
from pagebench.reference.kv_blocks_paged import PagedAllocator
from pagebench.reference.kv_blocks_pairs import merge_copies
from pagebench.reference.kv_blocks_prefix import chained_keys


def test_any_order_of_calls() -> None:
    """Every sequence reads what was written to it, no block is lost or used twice, a failed call leaves no trace."""
    run_machine(PagedAllocator, ListStore, settings(budget(EXAMPLES), stateful_step_count=STEPS))


@fixed(*kv_blocks_kernels.OPS)
def test_any_order_of_calls_through_kernels(subject: Subject) -> None:
    """The same with write_kv, copy_blocks and swap_blocks doing the work: every sequence reads what was written."""
    how = settings(budget(kv_blocks_kernels.EXAMPLES), stateful_step_count=kv_blocks_kernels.STEPS)
    kv_blocks_kernels.run_kernel_machine(subject, how)


@budget(100)
@given(copies=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_merged_copies_do_what_single_ones_do(copies: list[tuple[int, int]]) -> None:
    """One simultaneous copy has the effect of all, one after the other."""
    alone = list(range(6))
    for source, target in copies:
        alone[target] = alone[source]
    merged = merge_copies(copies)
    together = list(range(6))
    for source, target in merged.tolist():
        together[target] = source  # what the source held before any copy
    assert together == alone
    assert len(set(merged[:, 1].tolist())) == len(merged), "a destination twice, which CopyBlocks refuses"


PROMPTS = st.tuples(
    st.lists(st.integers(0, 1), max_size=6),
    st.lists(st.sampled_from(["a", b"a", 1, "1", "1:a"]), max_size=2).map(tuple),
    st.dictionaries(st.integers(0, 5), st.sampled_from(["a", 1]), max_size=1),
)


@budget(250)
@given(first=PROMPTS, second=PROMPTS, block_size=st.integers(1, 3))
def test_keys_are_equal_only_for_equal_prefix_and_extras(first: Any, second: Any, block_size: int) -> None:
    """Block i has the same key in two prompts exactly if all tokens and extra keys up to its end are the same."""
    described = []
    for tokens, extras, placed in (first, second):
        placed = {at: extra for at, extra in placed.items() if at < len(tokens)}
        keys = chained_keys(tokens, block_size, extras, placed)
        ends = range(block_size, len(tokens) + 1, block_size)
        assert len(keys) == len(ends)
        pasts = [
            (
                tokens[:end],
                [(type(extra), extra) for extra in extras],
                sorted((at, str(type(extra)), extra) for at, extra in placed.items() if at < end),
            )
            for end in ends
        ]
        described.append(list(zip(keys, pasts, strict=True)))
    for key, past in described[0]:
        for other_key, other_past in described[1]:
            assert (key == other_key) == (past == other_past)


@budget(150)
@given(
    fit=st.sampled_from(["first", "best"]),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 12)), max_size=40),
)
def test_contiguous_reservations(fit: Any, steps: list[tuple[int, int, int]]) -> None:
    """Any order of reserve, append and free over a slab of 32, against a list of who owns each slot."""
    allocator, slab = ContiguousAllocator(32, fit=fit), [None] * 32
    lengths: dict[int, tuple[int, int, int]] = {}  # seq_id: start, size, length
    refused = fragmented = 0
    for seq_id, (action, size, pick) in enumerate(steps):
        live = list(lengths)
        if action <= 1:
            before, free = allocator.snapshot(), slab.count(None)
            fitting = [hole for hole in _holes(slab) if hole[1] >= size]
            if not fitting:
                with pytest.raises(OutOfSlotsError) as error:
                    allocator.reserve(seq_id, size, min(pick, size))
                refused, fragmented = refused + 1, fragmented + (free >= size)
                assert error.value.fragmented == (free >= size)
                assert allocator.snapshot() == before, "a failed reservation left a trace"
                continue
            start = allocator.reserve(seq_id, size, min(pick, size))
            best = fitting[0] if fit == "first" else min(fitting, key=lambda hole: hole[1])
            assert start == best[0], "another hole than asked for"
            slab[start : start + size] = [seq_id] * size  # type: ignore[list-item]  # a slot's owner
            lengths[seq_id] = (start, size, min(pick, size))
        elif live and action == 2:
            chosen = live[pick % len(live)]
            start, size, length = lengths[chosen]
            if length < size:
                assert allocator.append(chosen) == start + length
                lengths[chosen] = (start, size, length + 1)
            else:
                with pytest.raises(ValueError, match="seq_id must have room"):
                    allocator.append(chosen)
        elif live:
            chosen = live[pick % len(live)]
            allocator.free(chosen)
            start, size, _ = lengths.pop(chosen)
            slab[start : start + size] = [None] * size
            with pytest.raises(ValueError, match="live sequence"):
                allocator.free(chosen)
        allocator.check()
        assert allocator.free_slots == slab.count(None)
        assert allocator.largest_extent == max((hole[1] for hole in _holes(slab)), default=0)
        assert allocator.used == sum(length for _, _, length in lengths.values())
        for chosen, (_, size, length) in lengths.items():
            assert allocator.waste(chosen) == naive_waste(length, size)
        assert (allocator.refused, allocator.refused_fragmented) == (refused, fragmented)


def _holes(slab: list[Any]) -> list[tuple[int, int]]:
    """Free extents (start, size) of a slab of owners."""
    holes, start = [], None
    for at, owner in enumerate([*slab, -1]):
        if owner is None and start is None:
            start = at
        elif owner is not None and start is not None:
            holes.append((start, at - start))
            start = None
    return holes
