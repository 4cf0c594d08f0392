"""The state machine over real caches: each way of getting copies, swaps or writes wrong must be seen in its budget."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy_kernels
import pytest
from hypothesis import Phase, settings

from pagebench.properties.claims import budget
from pagebench.properties.kv_blocks_kernels import EXAMPLES, OPS, STEPS, run_kernel_machine
from pagebench.properties.subject import Subject, repros_of
from pagebench.reference.dtypes import BFLOAT16, Array
from pagebench.reference.kv_blocks_paged import PagedAllocator

# The machine's own budget, without the search for a shorter failure.
HOW = settings(
    budget(EXAMPLES),
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
)


def run(provider: Any, make_allocator: Callable[..., PagedAllocator] = PagedAllocator) -> Subject:
    subject = Subject("a NumPy provider of the tests", provider)
    run_kernel_machine(subject, HOW, make_allocator)
    return subject


class _CopiesNothing(numpy_kernels.Everything):
    def copy_blocks(self, p: Any) -> None:
        pass


class _CopiesBackwards(numpy_kernels.Everything):
    def pairs(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:, 1], p.pairs[:, 0]


class _CopyDropsLastPair(numpy_kernels.Everything):
    def pairs(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:-1, 0], p.pairs[:-1, 1]


class _CopyForgetsLastCache(numpy_kernels.Everything):
    """The values of the last layer, or the scales of them."""

    def caches(self, p: Any) -> tuple[Array, ...]:
        return tuple(p.caches[:-1])


class _CopiesFirstSlot(numpy_kernels.Everything):
    def write(self, cache: Array, dst: Array, staged: Array) -> None:
        cache[dst, :1] = staged[:, :1]


class _SwapsInToNextBlock(numpy_kernels.Everything):
    def sides(self, p: Any) -> tuple[Array, Array]:
        shift = int(p.direction == "in")
        return p.pairs[:, 0], (p.pairs[:, 1] + shift) % p.dst_caches[0].shape[0]


class _SwapDropsLastPair(numpy_kernels.Everything):
    def sides(self, p: Any) -> tuple[Array, Array]:
        return p.pairs[:-1, 0], p.pairs[:-1, 1]


class _SwapsKeysOnly(numpy_kernels.Everything):
    def swap_blocks(self, p: Any) -> None:
        src, dst = self.sides(p)
        for source, target in list(zip(p.src_caches, p.dst_caches, strict=True))[::2]:
            self.move(source, target, src, dst)


class _WritesNextSlot(numpy_kernels.Everything):
    def place(self, p: Any, slots: Array) -> tuple[Array, Array]:
        return super().place(p, (slots + 1) % (p.num_blocks * p.block_size))


class _WritesPadding(numpy_kernels.Everything):
    """Takes the last rows of the batch for the mapped ones."""

    def mapped(self, p: Any) -> tuple[Array, Array]:
        rows, slots = super().mapped(p)
        return rows + len(p.key) - len(p.slot_mapping), slots


class _WritesBesideTheScale(numpy_kernels.Everything):
    def row_scale(self, p: Any, values: Array) -> Array:
        return np.nextafter(super().row_scale(p, values), np.float32(np.inf), dtype=np.float32)


class _GathersFirstBlockAgain(numpy_kernels.Everything):
    def locate(self, p: Any, seq: int, position: Array) -> tuple[Array, Array]:
        return p.block_table[seq, np.zeros_like(position)], position % p.block_size


class _GatherDropsLastRow(numpy_kernels.Everything):
    def length_of(self, p: Any, seq: int) -> int:
        return max(0, super().length_of(p, seq) - 1) if seq == p.num_seqs - 1 else super().length_of(p, seq)


KERNELS = [kind for kind in list(vars().values()) if isinstance(kind, type) and kind.__name__.startswith("_")]


@pytest.mark.parametrize("bug", KERNELS, ids=lambda bug: bug.__name__.strip("_"))
def test_the_machine_finds_a_kernel_that(bug: Any) -> None:
    with pytest.raises(AssertionError):
        run(bug())


class _NoCopyOnWrite(PagedAllocator):
    """Hands out the pairs' new block without asking for the copy."""

    def append(self, seq_id: int, token: int | None = None) -> Any:
        super().append(seq_id, token)
        return ()


class _WrongDirection(PagedAllocator):
    def append(self, seq_id: int, token: int | None = None) -> Any:
        return tuple((target, source) for source, target in super().append(seq_id, token))


class _SwapsInElsewhere(PagedAllocator):
    """Pairs that lead to another block than the table's."""

    def swap_in(self, seq_ids: Any) -> Any:
        pairs = super().swap_in(seq_ids)
        return tuple((source, (target + 1) % self.pool.num_blocks) for source, target in pairs)


class _FreesSharedBlocks(PagedAllocator):
    """A block whose content another sequence still reads is handed out again."""

    def free(self, seq_id: int) -> None:
        sequence = self._get(seq_id)
        blocks = [block for block in sequence.live if sequence.pool.references(block) > 1]
        super().free(seq_id)
        sequence.pool._free += blocks[:1]


ALLOCATORS = [_NoCopyOnWrite, _WrongDirection, _SwapsInElsewhere, _FreesSharedBlocks]


@pytest.mark.parametrize("bug", ALLOCATORS, ids=lambda bug: bug.__name__.strip("_"))
def test_the_machine_finds_an_allocator_that(bug: Any) -> None:
    with pytest.raises((AssertionError, ValueError)):  # the op itself refuses a slot that two sequences were given
        run(numpy_kernels.Everything(), bug)


def test_right_kernels_pass_and_all_are_exercised() -> None:
    examples = run(numpy_kernels.Everything()).tally.examples
    assert all(examples["numpy [host]", op] >= EXAMPLES // 2 for op in OPS), dict(examples)


class _OnlyCopies:
    """One op, and none of the optional methods."""

    name = "copies"
    to_device = to_host = staticmethod(np.array)

    def rejects(self, problem: Any) -> str | None:
        return None

    def synchronize(self) -> None:
        pass

    def copy_blocks(self, p: Any) -> None:
        for cache in p.caches:
            cache[p.pairs[:, 1]] = cache[p.pairs[:, 0]]


class _Particular(numpy_kernels.Everything):
    """Blocks of 16 of bfloat16 only, and no swaps of two layers."""

    def rejects(self, problem: Any) -> str | None:
        if problem.op in ("write_kv", "gather_kv"):
            plain = problem.block_size == 16 and problem.key_cache.dtype == BFLOAT16
            return None if plain else "another block size or dtype"
        return "two layers" if problem.op == "swap_blocks" and len(problem.src_caches) > 2 else None


def test_what_a_provider_lacks_the_reference_does() -> None:
    subject = run(_OnlyCopies())
    assert {op for _, op in subject.tally.examples} == {"copy_blocks"}


def test_forms_are_those_that_a_provider_supports() -> None:
    tally = run(_Particular()).tally
    assert all(tally.examples["numpy [host]", op] >= EXAMPLES // 2 for op in ("write_kv", "gather_kv", "copy_blocks"))
    assert {reason for _, _, reason in tally.rejected} == {"two layers"}, "the rest is steered around"


def test_a_failure_says_how_to_run_its_steps() -> None:
    with pytest.raises(AssertionError) as error:
        run(_WritesNextSlot())
    (snippet,) = repros_of(error.value)
    assert "KernelMachine = kernel_machine(Subject('a NumPy provider of the tests'" in snippet
    compile(snippet, "snippet", "exec")
