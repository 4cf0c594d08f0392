"""Claims about any provider and problem: one function per claim, each raising AssertionError where the claim is broken.

`check` is the claim that everyone starts from: the benchmarks before timing, and every printed repro. Each function
takes (provider, host problem, variant) and returns what it could not try, in words: empty means fully exercised.
Further claims are in `relations`; inputs made to show particular faults are in `probes`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from pagebench.properties import poison
from pagebench.properties.runs import NotExercised, Run, run
from pagebench.reference import dequant, error_bounds, merge_states
from pagebench.reference import paged_attention as attention
from pagebench.reference.block_copy import CopyBlocks, SwapBlocks, copy_blocks, swap_blocks
from pagebench.reference.block_copy_gather import GatherKV, gather_kv
from pagebench.reference.block_copy_write import WriteKV, write_kv
from pagebench.reference.dequant import Dequantize
from pagebench.reference.dequant_gemv import DequantGemv, assert_product, dequant_gemv
from pagebench.reference.dtypes import FLOAT32, Array
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.problem import Problem

Missing = tuple[str, ...]
P = TypeVar("P", bound=Problem)


def check(provider: Any, problem: Problem, *, variant: dict[str, Any] | None = None) -> Missing:
    """The result has the right shape, dtype and values, and no byte that is not the op's own changed.

    Values: attention within `error_bounds`, copies and dequantisation bit for bit. Raises AssertionError otherwise, and
    ValueError for a problem that the provider rejects.
    """
    require_supported(provider, problem)
    expect = expectation(problem)
    done = run(provider, problem, variant)
    return (*done.not_exercised, *expect(done))


def check_poison(provider: Any, problem: Problem, *, variant: dict[str, Any] | None = None) -> Missing:
    """Nothing that must not matter does: all of it NaN in one run and large numbers in another gives the same bits.

    That is: slots past a sequence's end, unused blocks, keys that no query sees, table entries past the last block,
    unused groups, gaps between the elements of a view; and outputs and scratch as they were before the call.
    """
    require_supported(provider, problem)
    done = {}
    for byte in (poison.NAN, poison.LARGE):
        poisoned = poison.poisoned(problem, byte)
        done[byte] = run(provider, poisoned, variant, byte=byte)
        expectation(poisoned)(done[byte])
    assert_equal_runs("after poisoning with large numbers instead of NaN", done[poison.LARGE], done[poison.NAN])
    return done[poison.NAN].not_exercised


def check_variants(provider: Any, problem: Problem, *, variant: dict[str, Any] | None = None) -> Missing:
    """`check` holds for every variant of the provider; `variant` is ignored."""
    require_supported(provider, problem)
    if not hasattr(provider, "variants"):
        raise NotExercised("variants: the provider has none")
    expect = expectation(problem)
    for each in provider.variants(problem):
        try:
            done = run(provider, problem, each)
            missing = (*done.not_exercised, *expect(done))
        except Exception as error:
            error.add_note(f"variant: {each!r}")
            raise
    return missing


def require_supported(provider: Any, problem: Problem) -> None:
    """Raise ValueError when the provider does not implement the op or rejects the problem."""
    if not callable(getattr(provider, problem.op, None)):
        raise ValueError(f"provider must implement {problem.op}, got {provider.name!r} without it")
    reason = provider.rejects(problem)
    if reason is not None:
        raise ValueError(f"problem must be one that {provider.name!r} supports, got rejected: {reason}")


def transformed(provider: Any, problem: P) -> P:
    """`problem`, which was made from a supported one. Raises NotExercised when the provider does not support it."""
    if not callable(getattr(provider, problem.op, None)):
        raise NotExercised(f"the provider has no {problem.op}")
    reason = provider.rejects(problem)
    if reason is not None:
        raise NotExercised(f"the transformed problem is rejected: {reason}")
    return problem


# --- what the reference says, worked out once per problem


def expectation(problem: Problem) -> Callable[[Run], Missing]:
    """A function that raises AssertionError unless a run's results are right for `problem`."""
    if isinstance(problem, PagedAttention):
        return _attention_expectation(problem)
    if isinstance(problem, MergeStates):
        return _merge_expectation(problem)
    if isinstance(problem, CopyBlocks):
        caches = copy_blocks(problem)
        return lambda done: _compare_bits(done, {f"caches[{i}]": cache for i, cache in enumerate(caches)})
    if isinstance(problem, SwapBlocks):
        caches = swap_blocks(problem)
        return lambda done: _compare_bits(done, {f"dst_caches[{i}]": cache for i, cache in enumerate(caches)})
    if isinstance(problem, WriteKV):
        written = write_kv(problem)
        return lambda done: _compare_bits(done, written)
    if isinstance(problem, GatherKV):
        dense = dict(zip(("key", "value"), gather_kv(problem), strict=True))
        return lambda done: _compare_bits(done, dense)
    if isinstance(problem, Dequantize):
        weight = dequant.dequantize(problem)
        return lambda done: _compare_bits(done, {"weight": weight})
    if isinstance(problem, DequantGemv):
        return _product_expectation(problem)
    raise ValueError(f"problem must be of an op with a reference, got {type(problem).__name__}")


def _attention_expectation(problem: PagedAttention) -> Callable[[Run], Missing]:
    out, lse = attention.paged_attention(problem)
    out_bound, lse_bound = error_bounds.paged_attention(problem)

    def compare(done: Run) -> Missing:
        require_form("out", done.results["out"], problem.query.shape, problem.query.dtype)
        error_bounds.assert_close("out", _some(done.results["out"]), out, out_bound)
        if done.results["lse"] is None:
            return ("lse: the provider returns none",)
        require_form("lse", done.results["lse"], problem.query.shape[:2], FLOAT32)
        error_bounds.assert_close("lse", _some(done.results["lse"]), lse, lse_bound)
        return ()

    return compare


def _product_expectation(problem: DequantGemv) -> Callable[[Run], Missing]:
    product = dequant_gemv(problem)

    def compare(done: Run) -> Missing:
        require_form("y", done.results["y"], product.y.shape, problem.dtype)
        assert_product("y", _some(done.results["y"]), product, problem.dtype)
        return ()

    return compare


def _merge_expectation(problem: MergeStates) -> Callable[[Run], Missing]:
    expected = merge_states.merge_states(problem)
    bounds = merge_states.bound(problem)
    alone, *sides = merge_states.one_sided(problem)

    def compare(done: Run) -> Missing:
        for name, right, bound, side in zip(("out", "lse"), expected, bounds, sides, strict=True):
            require_form(name, done.results[name], side.shape, side.dtype)
            got = _some(done.results[name])
            error_bounds.assert_same_bits(f"{name} of rows with one empty side", got[alone], side[alone])
            error_bounds.assert_close(name, got[~alone], right[~alone], bound[~alone])
        return ()

    return compare


def _compare_bits(done: Run, expected: dict[str, Array]) -> Missing:
    for name, array in expected.items():
        require_form(name, done.results[name], array.shape, array.dtype)
        error_bounds.assert_same_bits(name, _some(done.results[name]), array)
    return ()


def require_form(name: str, actual: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise AssertionError unless `actual` has this shape and then this dtype."""
    assert actual is not None, f"{name}: None, expected an array"
    assert actual.shape == tuple(shape), f"{name}: shape {list(actual.shape)}, expected {list(shape)}"
    assert actual.dtype == dtype, f"{name}: dtype {actual.dtype}, expected {dtype}"


def assert_equal_runs(when: str, got: Run, expected: Run) -> None:
    """Raise AssertionError unless two runs gave the same bits (any NaN equals any NaN)."""
    for name, array in expected.results.items():
        other = got.results[name]
        if array is not None and other is not None:
            error_bounds.assert_same_bits(f"{name} {when}", other, array)


def _some(array: Array | None) -> Array:
    assert array is not None
    return array
