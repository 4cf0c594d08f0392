"""Caches so large that an offset in 32 bits wraps: few blocks, far apart, in memory that is never touched in between.

On a CPU untouched memory costs nothing; on a GPU it takes the 2 or 4 GiB.
"""

from typing import Any

import numpy as np

from pagebench.properties.contracts import Missing, expectation, require_supported
from pagebench.properties.runs import NotExercised, Run, results_of
from pagebench.reference.placement import place
from pagebench.reference.problem import Problem

STRIDE = 2**30 + 2**12  # elements from block to block: block 2 begins beyond 2^31


def check_far_blocks(provider: Any, problem: Problem, *, variant: dict[str, Any] | None = None) -> Missing:
    """The result is right when block i of each cache lies STRIDE * i elements into its memory.

    problem: of any op over paged caches but SwapBlocks. Needs contiguous caches of at least 3 blocks, and device arrays
    that take `view[...] = array`, as those of NumPy, PyTorch and CuPy do.
    """
    require_supported(provider, problem)
    for name in ("as_strided", "empty"):
        if not callable(getattr(provider, name, None)):
            raise NotExercised(f"blocks beyond 2^31 elements: the provider has no {name}")
    placed = place(problem, provider)
    fields = ("caches",) if hasattr(problem, "caches") else ("key_cache", "value_cache")
    caches = problem.caches if hasattr(problem, "caches") else tuple(getattr(problem, name) for name in fields)
    far = _far(provider, caches)
    for name, value in zip(fields, (far,) if fields == ("caches",) else far, strict=True):
        object.__setattr__(placed.problem, name, value)  # a device problem is not validated
    returned = getattr(provider, problem.op)(placed.problem, **(variant or {}))
    provider.synchronize()
    return expectation(problem)(Run(results_of(provider, problem, placed, returned), ()))


def _far(provider: Any, caches: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same contents with blocks STRIDE elements apart, all in one allocation, each cache 2048 elements on."""
    itemsize = max(cache.itemsize for cache in caches)
    blocks = caches[0].shape[0]
    try:
        base = provider.empty(((blocks * STRIDE) * itemsize,), np.dtype(np.uint8))
    except Exception as error:  # whatever the provider's array library raises when memory is short
        raise NotExercised(f"blocks beyond 2^31 elements: {error}") from error
    views = []
    for i, cache in enumerate(caches):
        inner = tuple(stride // cache.itemsize for stride in cache.strides[1:])
        view = provider.as_strided(base, cache.dtype, cache.shape, (STRIDE, *inner), 2048 * i)
        view[...] = provider.to_device(cache.copy())
        views.append(view)
    return tuple(views)
