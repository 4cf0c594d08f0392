"""Figure of the fused product: why batching pays. Tokens per second of one projection against rows of x.

Drawn from stored results of `nox -s gpu` where there are any (`results/gpu/*.json`, copies of its gpu.json), beside the
roofline that is computed from the bytes and the operations of the problem, and said to be computed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, ROOT, drawing
from bench.workloads import BATCHES, LLAMA_3_8B, projections
from pagebench.reference.kv_blocks_batching import DEVICES, Device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STORED = ROOT / "results" / "gpu"
DEVICE = DEVICES["h200-141gb"]
PROJECTION = "gate"
WORKLOAD = re.compile(rf"{LLAMA_3_8B.name}-gemv-mxfp4-{PROJECTION}-m(\d+)-fp16")
# Bytes of a weight, its share of the scales included, as `DequantGemv.bytes_moved` counts them.
WEIGHTS = {"MXFP4": 0.5 + 1 / 32, "FP8": 1.0, "fp16": 2.0}


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second by provider and rows of x, on one GPU."""

    gpu: str
    rates: Mapping[str, Mapping[int, float]]


def tokens_per_second(rows: int, n: int, k: int, bytes_per_weight: float, device: Device) -> float:
    """At the roofline: the weight is read once for all rows of x in 16 bits, which are read and written once."""
    nbytes = n * k * bytes_per_weight + 2 * rows * (n + k)
    return rows / max(nbytes / device.bandwidth, 2 * rows * n * k / device.flop_rate)


def rows_until_arithmetic_binds(n: int, k: int, bytes_per_weight: float, device: Device) -> float:
    """Rows of x at which reading and multiplying take as long; infinite where reading x itself always takes longer."""
    each = 2 * n * k / device.flop_rate - 2 * (n + k) / device.bandwidth
    return n * k * bytes_per_weight / device.bandwidth / each if each > 0 else float("inf")


def measured(folder: Path = STORED) -> Measured | None:
    """The newest stored results that hold the workloads; None without any."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        found = from_document(json.loads(path.read_text()))
        if found is not None:
            return found
    return None


def from_document(document: Mapping[str, Any]) -> Measured | None:
    """Of a gpu.json: for each workload the median over processes of each one's median; only what passed its check."""
    times: dict[str, dict[int, list[float]]] = {}
    for process in document.get("processes", ()):
        for row in process["rows"]:
            name = WORKLOAD.fullmatch(row["workload"])
            if name and "gpu" in row and row["check"]["status"] == "passed":
                at = times.setdefault(row["provider"], {}).setdefault(int(name[1]), [])
                at.append(median(row["gpu"]["seconds"]))
    rates = {provider: {m: m / median(seconds) for m, seconds in sorted(of.items())} for provider, of in times.items()}
    return Measured(document["machine"]["gpu"], rates) if rates else None


def batching() -> "Figure":
    """Tokens per second of Llama-3-8B's gate projection against rows of x."""
    return tokens_against_rows(measured(), DEVICE)


def tokens_against_rows(stored: Measured | None, device: Device) -> "Figure":
    """The roofline of three formats, and what was measured of the fused product with MXFP4."""
    n, k = projections(LLAMA_3_8B)[PROJECTION]
    fine = [2 ** (i / 16) for i in range(16 * (BATCHES[-1].bit_length() - 1) + 1)]
    with drawing(3.8) as (figure, (axis,)):
        for (name, nbytes), color, style in zip(WEIGHTS.items(), (BLUE, GREEN, GREY), ("-", "--", ":"), strict=True):
            rates = [tokens_per_second(m, n, k, nbytes, device) for m in fine]  # type: ignore[arg-type]  # a real number
            axis.plot(fine, rates, color=color, linestyle=style, linewidth=1.8, label=f"{name}, computed")
            binds = rows_until_arithmetic_binds(n, k, nbytes, device)
            if binds <= BATCHES[-1]:
                rate = tokens_per_second(binds, n, k, nbytes, device)  # type: ignore[arg-type]  # a real number
                axis.plot(binds, rate, "o", color=color, markersize=6)
                axis.annotate(
                    f"{binds:.0f}", (binds, rate), (0, 5), textcoords="offset points", ha="center", fontsize=8
                )
        for (provider, of), marker, color in zip(
            (stored.rates if stored else {}).items(), ("s", "^", "D"), (ORANGE, PURPLE, BLUE), strict=False
        ):
            axis.plot(list(of), list(of.values()), marker, color=color, label=f"MXFP4, {provider}, measured")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(BATCHES, [str(m) for m in BATCHES])
        axis.minorticks_off()
        axis.set_xlim(0.9, BATCHES[-1] * 1.15)
        axis.set_ylim(top=2.2 * tokens_per_second(BATCHES[-1], n, k, min(WEIGHTS.values()), device))
        axis.set_xlabel("rows of x that share one reading of the weights (sequences)")
        axis.set_ylabel("tokens/s through the projection")
        how = f"lines computed, marks measured on {stored.gpu}" if stored else "computed, nothing here is measured"
        axis.set_title(
            f"y = x W$^T$, {LLAMA_3_8B.name} {PROJECTION} {n} x {k}: {how}\n"
            f"{device.name}: {device.bandwidth / 1e12:g} TB/s, {device.flop_rate / 1e12:g} TFLOP/s; "
            "dots: from here on arithmetic binds"
        )
        axis.legend(loc="lower right")
        return figure
