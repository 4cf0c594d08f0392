"""One run of an op by a provider: on a placed copy, with poisoned outputs, all memory around it looked at after."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.properties import poison
from pagebench.properties.host_arrays import copy_of, member
from pagebench.properties.traced import traced
from pagebench.reference import block_copy
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dtypes import Array
from pagebench.reference.placement import Placement, arrays_of, place, raw_bytes
from pagebench.reference.problem import Problem


class NotExercised(Exception):  # noqa: N818  # no error: the claim was not tried
    """A claim that cannot be tried on this provider or problem, and why."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came back: `results` on the host by name (None where the provider returns none), and what was not looked at.

    paged_attention: out, lse. dequantize: weight. copy_blocks: caches[0], caches[1], ...
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
    results = _results(provider, problem, placed, returned)
    _check_memory(problem, placed)
    missing = (
        [] if hasattr(provider, "as_strided") else ["strides and fences of inputs: the provider has no as_strided"]
    )
    if empty is None:
        missing.append(f"poisoned outputs and scratch: {why}")
    else:
        empty.check_fences()
        if not empty.taken and problem.op != "copy_blocks" and any(r is not None and r.size for r in results.values()):
            missing.append("poisoned outputs and scratch: the provider did not call self.empty")
    return Run(results, tuple(missing))


def _results(provider: Any, problem: Problem, placed: Placement[Any], returned: Any) -> dict[str, Array | None]:
    if problem.op == "paged_attention":
        pair = isinstance(returned, tuple | list) and len(returned) == 2
        assert pair, f"paged_attention must return (out, lse or None), got {type(returned).__name__}"
        return {name: _host(provider, value) for name, value in zip(("out", "lse"), returned, strict=True)}
    if problem.op == "copy_blocks":
        assert returned is None, f"copy_blocks must work in place and return None, got {type(returned).__name__}"
        return {f"caches[{i}]": _host(provider, cache) for i, cache in enumerate(placed.problem.caches)}
    assert returned is not None, f"{problem.op} must return an array, got None"
    return {"weight": _host(provider, returned)}


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
    if isinstance(problem, CopyBlocks):
        block_copy.copy_blocks_(placed.problem)
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
