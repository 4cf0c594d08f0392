"""Bytes and sectors that every kernel requests, on any machine: exact figures, lower is better, no tolerance.

Over `Problem.bytes_moved()`, the fewest that any kernel must move. A byte that two programs, or two requests of one
program, ask for counts twice, though caches may serve the second. Each workload is scaled as its name here says. Of a
fused product the packed buffers are counted; all of it, and its x, which every tile of output features asks for again,
are series of their own.
"""

from typing import Any

from bench._traffic import SCALES, Traffic, record
from bench.workloads import WORKLOADS

PROVIDERS = ("triton", "cupy")
NAMES = {f"{name} at {SCALES[workload.op]}": name for name, workload in WORKLOADS.items() if workload.op in SCALES}

Figures = tuple[float, float, float, float] | tuple[type[Exception], str]


class _Traced:
    """Traced runs of each workload, which are held to the reference meanwhile."""

    param_names = ("provider", "workload")
    timeout = 3600.0

    def setup_cache(self) -> dict[tuple[str, str], Figures]:
        """The ratios, or what `setup` shall raise, by provider and workload; traced once for a commit."""
        return {
            (provider, label): _figures(traffic)
            for provider in PROVIDERS
            for label, traffic in zip(NAMES, record(provider, NAMES.values()).values(), strict=True)
        }

    setup_cache.timeout = 3600.0  # type: ignore[attr-defined]  # where asv looks for it

    def setup(self, results: Any, provider: str, workload: str) -> None:
        found = results[provider, workload]
        if isinstance(found[0], type):
            raise found[0](found[1])


class Ratio(_Traced):
    """What is asked for, over the least."""

    params = (PROVIDERS, tuple(NAMES))

    def track_bytes(self, results: Any, provider: str, workload: str) -> float:
        return float(results[provider, workload][0])

    def track_sectors(self, results: Any, provider: str, workload: str) -> float:
        return float(results[provider, workload][1])

    track_bytes.unit = "bytes requested / fewest bytes possible"  # type: ignore[attr-defined]  # asv reads attributes
    track_sectors.unit = "bytes of the sectors requested / fewest bytes possible"  # type: ignore[attr-defined]
    # By hand, since asv would derive it from the source above, and hide the history at every edit.
    track_bytes.version = track_sectors.version = "1"  # type: ignore[attr-defined]


class Fused(_Traced):
    """What a fused product asks for besides the packed buffers."""

    params = (PROVIDERS, tuple(label for label, name in NAMES.items() if WORKLOADS[name].op == "dequant_gemv"))

    def track_bytes_of_all(self, results: Any, provider: str, workload: str) -> float:
        return float(results[provider, workload][2])

    def track_reads_of_x(self, results: Any, provider: str, workload: str) -> float:
        return float(results[provider, workload][3])

    track_bytes_of_all.unit = "bytes requested / fewest bytes possible"  # type: ignore[attr-defined]
    track_reads_of_x.unit = "bytes requested of x / bytes of x"  # type: ignore[attr-defined]
    track_bytes_of_all.version = track_reads_of_x.version = "1"  # type: ignore[attr-defined]


def _figures(traffic: Traffic) -> Figures:
    if traffic.launches:
        return traffic.ratio, traffic.sector_ratio, traffic.whole_ratio, traffic.x_ratio
    if traffic.error:
        return RuntimeError, traffic.error
    return NotImplementedError, traffic.unavailable or traffic.rejected or ""  # n/a, so that the series survives
