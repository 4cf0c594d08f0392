"""Arrays so large that an offset in 32 bits wraps: few rows, far apart, in memory that is never touched in between.

A kernel may count in bytes, in elements or in the 16 bytes of its widest access, so that there are three distances: one
that keeps wide accesses, an odd one that forbids them, and one as large in units of 16 bytes. In host memory what is
not touched costs nothing; on a GPU 3 rows take up to 48 GiB.
"""

import dataclasses
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagebench.properties.contracts import Missing, expectation, require_supported
from pagebench.properties.host_arrays import HostArrays, member
from pagebench.properties.runs import NotExercised, Run, results_of
from pagebench.reference.dtypes import Array, as_bits
from pagebench.reference.placement import Placement, arrays_of, place
from pagebench.reference.problem import Problem

APART = 2**30 + 2**12  # of each unit from row to row: row 2 begins beyond 2^31
DISTANCES = ("elements", "elements, odd", "units of 16 bytes")
BETWEEN = 2**16  # bytes from one array's first row to the next one's; no row may be longer
MOST_ELEMENTS = 4  # of an array of one dimension that is put far apart
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def check_far_blocks(provider: Any, problem: Problem, *, variant: dict[str, Any] | None = None) -> Missing:
    """The result is right however far apart the blocks of every array lie: its rows along the first axis.

    Of SwapBlocks only the device's pool, since the host's is pinned. Rows of at most BETWEEN bytes; only arrays of 3
    rows or more show anything. Device arrays must take `view[...] = array`, as those of NumPy, PyTorch and CuPy do.
    """
    require_supported(provider, problem)
    if not hasattr(provider, "as_strided"):
        raise NotExercised("offsets beyond 2^31: the provider has no as_strided")
    if not _far_arrays(problem):
        raise NotExercised("offsets beyond 2^31: the problem has no rows to put far apart")
    expect = expectation(problem)
    missing: list[str] = []
    for distance in DISTANCES:
        reason = provider.rejects(_far_problem(problem, distance))
        if reason is not None:
            missing.append(f"offsets beyond 2^31 {distance}: {reason}")
            continue
        try:
            placed = _placed(provider, problem, distance)
            returned = getattr(provider, problem.op)(placed.problem, **(variant or {}))
            provider.synchronize()
            missing += expect(Run(results_of(provider, problem, placed, returned), ()))
        except NotExercised as why:
            missing.append(str(why))
        except Exception as error:
            error.add_note(f"rows 2^30 {distance} apart")
            raise
    return tuple(missing)


def _far_problem(problem: Problem, distance: str) -> Any:
    """The same problem on the host, for `rejects` to look at."""
    arrays = _far_arrays(problem)
    views = _views(HostArrays(), _untouched(_nbytes(arrays, distance)), arrays, distance)
    far = _replaced(problem, views)
    far.validate()
    return far


def _placed(provider: Any, problem: Problem, distance: str) -> Placement[Any]:
    placed = place(problem, provider)
    arrays = _far_arrays(problem)
    views = _views(provider, _room(provider, _nbytes(arrays, distance)), arrays, distance)
    near = {name: member(placed.problem, name) for name, _ in arrays_of(problem)}
    return Placement(_replaced(placed.problem, near | views), (), provider)


def _far_arrays(problem: Problem) -> dict[str, Array]:
    """The arrays with rows, but for what stays on the host, and a packed weight's short ones: a scale for each row."""
    stay = problem.pinned_fields
    return {
        name: array
        for name, array in arrays_of(problem)
        if array.size and name.partition("[")[0] not in stay and (array.ndim >= 2 or _short(name, array))
    }


def _short(name: str, array: Array) -> bool:
    return name.startswith("packed[") and array.ndim == 1 and array.size <= MOST_ELEMENTS


def _apart(array: Array, distance: str) -> int:
    """Elements from row to row."""
    return APART * 16 // array.itemsize if distance == DISTANCES[2] else APART + (distance == DISTANCES[1])


def _nbytes(arrays: Mapping[str, Array], distance: str) -> int:
    longest = max(int(a.shape[0]) * _apart(a, distance) * a.itemsize for a in arrays.values())
    return longest + len(arrays) * BETWEEN


def _views(provider: Any, room: Any, arrays: Mapping[str, Array], distance: str) -> dict[str, Any]:
    """Copies of `arrays` in `room`, uint8 [_nbytes] of the provider, each BETWEEN bytes behind the one before."""
    views = {}
    for i, (name, array) in enumerate(arrays.items()):
        assert array[0].nbytes <= BETWEEN, f"{name} has rows of {array[0].nbytes} bytes"
        strides = (_apart(array, distance), *contiguous_strides(array)[1:])
        views[name] = strided_copy(provider, room, array, strides, i * BETWEEN // array.itemsize)
    return views


def contiguous_strides(array: Array) -> tuple[int, ...]:
    """Strides in elements that an array of this shape has without gaps."""
    return tuple(int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim))


def strided_copy(provider: Any, room: Any, array: Array, strides: tuple[int, ...], offset: int) -> Any:
    """A copy of the host's `array` in `room`, uint8 of the provider; strides and offset in elements."""
    bits, layout = as_bits(array), (array.shape, strides, offset)
    provider.as_strided(room, bits.dtype, *layout)[...] = provider.to_device(bits)
    return provider.as_strided(room, array.dtype, *layout)


def _room(provider: Any, nbytes: int) -> Any:
    """uint8 [nbytes] of the provider, nothing of it touched. NotExercised where there is not as much."""
    one = provider.to_device(np.zeros(1, np.uint8))
    if isinstance(one, np.ndarray):
        return _untouched(nbytes)
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(one, torch.Tensor) and one.device.type == "cpu":
        return torch.from_numpy(_untouched(nbytes))
    if not callable(getattr(provider, "empty", None)):
        raise NotExercised("offsets beyond 2^31: the provider has no empty")
    try:
        return provider.empty((nbytes,), np.dtype(np.uint8))
    except Exception as error:  # whatever the provider's array library raises when memory is short
        raise NotExercised(f"offsets beyond 2^31 on {nbytes >> 30} GiB: {error}") from error


def _untouched(nbytes: int) -> Array:
    """uint8 [nbytes] of address space without memory behind it, which an ordinary allocation may not get."""
    try:
        space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError) as error:
        raise NotExercised(f"offsets beyond 2^31: no {nbytes >> 30} GiB of address space ({error})") from error
    return np.frombuffer(space, np.uint8)


def _replaced(problem: Problem, arrays: Mapping[str, Any]) -> Any:
    """The same dataclass with the named arrays (as `arrays_of` names them) instead of its own; not validated."""
    replaced = object.__new__(type(problem))
    for field in dataclasses.fields(problem):  # type: ignore[arg-type]  # every Problem is a dataclass
        value = getattr(problem, field.name)
        if isinstance(value, dict):
            value = {key: arrays.get(f"{field.name}[{key}]", item) for key, item in value.items()}
        elif isinstance(value, tuple):
            value = tuple(arrays.get(f"{field.name}[{i}]", item) for i, item in enumerate(value))
        object.__setattr__(replaced, field.name, arrays.get(field.name, value))
    return replaced
