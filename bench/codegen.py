"""What the compiler makes of every kernel, on any machine: exact figures, lower is better, no tolerance.

A workload may launch several kernels (splits, then their merge). A resource that limits occupancy is the largest of
them; what costs time wherever it stands is their sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

from bench._codegen import record
from bench._launch import CompiledLaunch
from bench._sass import SM_LIMITS
from bench.workloads import WORKLOADS

PROVIDERS = ("triton", "cupy")
ARCH = 90


def _largest(figure: Callable[[CompiledLaunch], int]) -> Callable[[Sequence[CompiledLaunch]], int]:
    return lambda launches: max(figure(launch) for launch in launches)


def _total(figure: Callable[[CompiledLaunch], int]) -> Callable[[Sequence[CompiledLaunch]], int]:
    return lambda launches: sum(figure(launch) for launch in launches)


FIGURES: dict[str, Callable[[Sequence[CompiledLaunch]], int]] = {
    "registers": _largest(lambda launch: launch.stats.registers),
    "spills": _total(lambda launch: launch.stats.spills),
    "stack_bytes": _total(lambda launch: launch.stats.stack_bytes),
    "shared_bytes": _largest(lambda launch: launch.shared_bytes),
    "instructions": _total(lambda launch: launch.stats.instructions),
    "narrow_accesses": _total(lambda launch: launch.stats.narrow_accesses),
    "barriers": _total(lambda launch: launch.stats.barriers),
    # The row of `_sass.MATRIX_CLASSES` of the best matrix instruction used: a kernel that loses its class goes up.
    "matrix_class": lambda launches: min(launch.stats.matrix_class for launch in launches),
    "empty_warps": _largest(lambda launch: SM_LIMITS[launch.arch].warps - launch.warps_per_sm),
}


class Codegen:
    """Compiled launches of each workload for sm_90, recorded without a GPU."""

    params = (PROVIDERS, tuple(WORKLOADS))
    param_names = ("provider", "workload")
    timeout = 900.0

    def setup_cache(self) -> dict[tuple[str, str], dict[str, int] | tuple[type[Exception], str]]:
        """Every figure, or what `setup` shall raise, by provider and workload; computed once for a commit."""
        results: dict[tuple[str, str], dict[str, int] | tuple[type[Exception], str]] = {}
        for provider in PROVIDERS:
            for name, recording in record(provider, WORKLOADS, ARCH).items():
                if recording.launches:
                    results[provider, name] = {figure: of(recording.launches) for figure, of in FIGURES.items()}
                elif recording.error:
                    results[provider, name] = (RuntimeError, recording.error)
                else:  # shown as n/a, so that the series goes on when the backend is back
                    reason = recording.unavailable or recording.rejected or ""
                    results[provider, name] = (NotImplementedError, reason)
        return results

    setup_cache.timeout = 900.0  # type: ignore[attr-defined]  # where asv looks for it

    def setup(self, results: Any, provider: str, workload: str) -> None:
        outcome = results[provider, workload]
        if isinstance(outcome, tuple):
            raise outcome[0](outcome[1])


def _track(figure: str, unit: str, explanation: str) -> None:
    """Add `track_<figure>` to Codegen."""

    def track(self: Codegen, results: Any, provider: str, workload: str) -> int:
        return int(results[provider, workload][figure])

    track.__name__, track.__doc__ = f"track_{figure}", explanation
    track.unit = unit  # type: ignore[attr-defined]  # where asv looks for it
    # By hand, since asv would derive it from the source above, and hide the history at every edit.
    track.version = "1"  # type: ignore[attr-defined]
    setattr(Codegen, track.__name__, track)


_track("registers", "registers", "Registers per thread, of the kernel that needs most.")
_track("spills", "instructions", "Loads and stores of local memory (STL, LDL).")
_track("stack_bytes", "bytes", "Local memory per thread.")
_track("shared_bytes", "bytes", "Static and dynamic shared memory per program, of the kernel that needs most.")
_track("instructions", "instructions", "Static instructions without NOP.")
_track("narrow_accesses", "instructions", "Global loads, stores and asynchronous copies of less than 16 bytes.")
_track("barriers", "instructions", "Barriers of a program (BAR).")
_track("matrix_class", "class", "0 tensor memory (UTCHMMA), 1 warp group (HGMMA), 2 warp (HMMA), 3 no tensor cores.")
_track("empty_warps", "warps", "Warps of an SM that cannot be resident beside the others, of the worst kernel.")
