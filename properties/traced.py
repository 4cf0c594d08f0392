"""Which runs are looked at access by access: no races, no reads of what nobody wrote, and the bytes counted.

Bounds are checked on every run on a CPU. The rest costs up to twice the time, so a share of the problems is traced, and
a share of these looked at for 32-bit arithmetic that wraps as well: by their form, so that a problem that failed fails
again, and every one once a fault was found, so that it can be shrunk.
The deep profile traces all.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagebench.kernels.memory_trace import LaunchTrace, RaceError, UninitialisedReadError, recorder, trace
from pagebench.kernels.providers import how_it_runs
from pagebench.properties import profile
from pagebench.reference.problem import Problem

SHARE = 4  # one problem in so many, outside the deep profile

_found = False


@contextmanager
def traced(provider: Any, problem: Problem) -> Iterator[list[LaunchTrace] | None]:
    """Trace what runs inside if `problem` is one of those chosen; yields its launches, or None when it is not traced.

    A trace that the caller has running already goes on instead. Raises RaceError and UninitialisedReadError for what a
    kernel does.
    """
    global _found
    if recorder() is not None or not chosen(problem) or how_it_runs(provider) == "gpu":
        yield None
        return
    try:
        with trace(provider, overflow=_looks_for_overflow(problem)) as launches:
            yield launches
    except (RaceError, UninitialisedReadError):
        _found = True
        raise
    except Exception as error:  # of the interpreter, by its words: Triton has no type for it
        _found = _found or "overflow detected" in str(error)
        raise


def chosen(problem: Problem) -> bool:
    """Whether `problem` is traced under the active profile: decided by its form, not by its numbers."""
    if _found or profile.active.name == "deep":
        return True
    return zlib.crc32(problem.describe().encode()) % SHARE == 0


def _looks_for_overflow(problem: Problem) -> bool:
    """Whether a traced run reports 32-bit arithmetic of Triton kernels that wraps, too: twice the time again."""
    if _found or profile.active.name == "deep":
        return True
    return zlib.crc32(problem.describe().encode()) // SHARE % SHARE == 0
