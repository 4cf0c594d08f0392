"""One run of an op by a provider: on a placed copy, with poisoned outputs, all memory around it looked at after."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.properties import poison
from pagebench.properties.host_arrays import copy_of, member
from pagebench.properties.traced import traced
from pagebench.reference.block_copy import copy_blocks_, swap_blocks_
from pagebench.reference.block_copy_write import write_kv_
from pagebench.reference.dtypes import Array
from pagebench.reference.placement import Placement, arrays_of, place, raw_bytes
from pagebench.reference.problem import Problem

# What the ops that work in place leave in their problem's arrays.
IN_PLACE: dict[str, Any] = {"copy_blocks": copy_blocks_, "swap_blocks": swap_blocks_, "write_kv": write_kv_}
OUTPUTS = {"copy_blocks": ("caches",), "swap_blocks": ("dst_caches",)}
SINGLE = {"dequantize": "weight", "dequant_gemv": "y"}
PAIRS = {"paged_attention": ("out", "lse"), "merge_states": ("out", "lse"), "gather_kv": ("key", "value")}


class NotExercised(Exception):  # noqa: N818  # no error: the claim was not tried
    """A claim that cannot be tried on this provider or problem, and why."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came back: `results` on the host by name (None where the provider returns none), and what was not looked at.

    paged_attention, merge_states: out, lse. gather_kv: key, value. dequantize: weight. dequant_gemv: y. copy_blocks:
    caches[0], caches[1], ... swap_blocks: dst_caches[0], ... write_kv: key_cache, value_cache, and where computed
    key_scale, value_scale.
    """

    results: dict[str, Array | None]
    not_exercised: tuple[str, ...]


def run(provider: Any, problem: Problem, variant: dict[str, Any] | None = None, *, byte: int = poison.NAN) -> Run:
    """Run the op on fresh copies; outputs and scratch start as `byte`, where the provider lets them.

    Raises AssertionError when an input changed, a byte beside an array changed, or the return value has the wrong form;
    on a CPU also MemoryFault, and RaceError and UninitialisedReadError for the share of problems that are `traced`.
    """
    placed = place(problem, provider)
    swapped, empty, why = poison.with_poisoned_empty(provider, byte)
    with traced(swapped, problem):
        returned = getattr(swapped, problem.op)(placed.problem, **(variant or {}))
        provider.synchronize()
    results = results_of(provider, problem, placed, returned)
    _check_memory(problem, placed)
    missing = (
        [] if hasattr(provider, "as_strided") else ["strides and fences of inputs: the provider has no as_strided"]
    )
    if empty is None:
        missing.append(f"poisoned outputs and scratch: {why}")
    else:
        empty.check_fences()
        if not empty.taken and problem.op not in IN_PLACE and any(r is not None and r.size for r in results.values()):
            missing.append("poisoned outputs and scratch: the provider did not call self.empty")
    return Run(results, tuple(missing))


def results_of(provider: Any, problem: Problem, placed: Placement[Any], returned: Any) -> dict[str, Array | None]:
    """The results of an op on the host by name, from what it returned or, in place, from the placed problem.

    AssertionError where the return value has the wrong form.
    """
    if problem.op in PAIRS:
        pair = isinstance(returned, tuple | list) and len(returned) == 2
        names = PAIRS[problem.op]
        assert pair, f"{problem.op} must return ({', '.join(names)}), got {type(returned).__name__}"
        return {name: _host(provider, value) for name, value in zip(names, returned, strict=True)}
    if problem.op in IN_PLACE:
        assert returned is None, f"{problem.op} must work in place and return None, got {type(returned).__name__}"
        return {name: _host(provider, member(placed.problem, name)) for name in outputs_of(problem)}
    assert returned is not None, f"{problem.op} must return an array, got None"
    return {SINGLE[problem.op]: _host(provider, returned)}


def outputs_of(problem: Problem) -> list[str]:
    """Names of the arrays that an op in place writes, as `placement.arrays_of` calls them."""
    if problem.op == "write_kv":
        scales = ["key_scale", "value_scale"] if problem.compute_scales else []  # type: ignore[attr-defined]  # of that op
        return ["key_cache", "value_cache", *scales]
    return [name for name, _ in arrays_of(problem) if name.partition("[")[0] in OUTPUTS[problem.op]]


def _host(provider: Any, array: Any) -> Array | None:
    return None if array is None else np.array(provider.to_host(array))


def _check_memory(problem: Problem, placed: Placement[Any]) -> None:
    """Every byte of every base is what the op leaves there: in place what the reference does, else the input."""
    if not hasattr(placed.provider, "as_strided"):
        expected = _after(problem).problem
        for name, array in arrays_of(expected):
            _assert_bytes(name, raw(placed.provider.to_host(member(placed.problem, name))), raw(array))
        return
    after = _after(problem)
    for base, expected_base in zip(placed.bases, after.bases, strict=True):
        _assert_bytes(base.name, placed.host_bytes(base), after.host_bytes(expected_base))


def _after(problem: Problem) -> Placement[Any]:
    placed: Placement[Any] = copy_of(problem)
    if problem.op in IN_PLACE:
        IN_PLACE[problem.op](placed.problem)
    return placed


def raw(array: Any) -> Array:
    """uint8 [nbytes]: the elements of `array` in index order."""
    return raw_bytes(np.ascontiguousarray(array))


def _assert_bytes(name: str, got: Array, expected: Array) -> None:
    if got.size != expected.size or (got != expected).any():
        count = int((got != expected).sum()) if got.size == expected.size else got.size
        first = int(np.flatnonzero(got != expected)[0]) if got.size == expected.size else 0
        raise AssertionError(
            f"memory of {name}: {count} of {expected.size} bytes are not what the op must leave there, "
            f"the first at byte {first}: "
            f"got {int(got[first]):#04x}, expected {int(expected[first]):#04x}"
        )
