"""KV blocks: what the paged allocator must do, in any order of calls.

The machine runs here over lists of values. It takes any `Store`: one over a provider's kernels is its second mode.
"""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from pagebench.properties.claims import budget
from pagebench.properties.kv_blocks_machine import KVBlocksMachine, MakeAllocator
from pagebench.properties.kv_blocks_store import ListStore, MakeStore
from pagebench.reference.kv_blocks_paged import PagedAllocator

EXAMPLES, STEPS = 120, 40


def run_machine(make_allocator: MakeAllocator, make_store: MakeStore, examples: int, steps: int) -> None:
    """Run the machine under the active profile; AssertionError with the shortest failing order of calls."""
    run_state_machine_as_test(
        lambda: KVBlocksMachine(make_allocator, make_store),  # type: ignore[arg-type]  # called, never subclassed
        settings=settings(budget(examples), stateful_step_count=steps),
    )


def test_any_order_of_calls() -> None:
    """Every sequence reads what was written to it, no block is lost or used twice, a failed call leaves no trace."""
    run_machine(PagedAllocator, ListStore, EXAMPLES, STEPS)
