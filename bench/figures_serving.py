"""Figures of serving: memory over time on a trace, and tokens/s against batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.figures import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, WASTE_HATCH, drawing
from bench.memory_layouts import NaiveLayout, PagedLayout
from bench.request_trace import read_trace, synthetic_trace
from bench.trace_replay import Result, Sample, Server, replay
from pagebench.reference.kv_blocks import KV_FORMATS, KVFormat, token_bytes
from pagebench.reference.kv_blocks_batching import (
    DEVICES,
    WEIGHT_FORMATS,
    Device,
    WeightFormat,
    kv_memory,
    naive_capacity,
    paged_capacity,
    tokens_per_second,
)
from pagebench.reference.models import LLAMA_2_13B, Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1 << 30
POINTS = 240  # along the time axis; more are a black band in print
MODEL, DEVICE = LLAMA_2_13B, DEVICES["a100-80gb"]


def memory_on_trace(trace_file: Path | None) -> "Figure":
    """Naive 4096 against paged 16 on a trace: the synthetic one, or a file's."""
    trace = synthetic_trace() if trace_file is None else read_trace(trace_file)
    slot_bytes = token_bytes(MODEL, KV_FORMATS["fp16"])
    server = Server(kv_memory(MODEL, DEVICE, WEIGHT_FORMATS["fp16"]) // slot_bytes)
    layouts = (NaiveLayout(server.num_slots, 4096), PagedLayout(server.num_slots, 16))
    results = [replay(trace, layout, server, sample_every=1.0) for layout in layouts]
    return memory_over_time(results, slot_bytes, f"{trace.name}, {MODEL.name} on {DEVICE.name}")


def memory_over_time(results: Sequence[Result], slot_bytes: int, title: str) -> "Figure":
    """For each replay: memory reserved and memory written over event time, and below it the requests that wait."""
    end = min(max(sample.time for sample in result.samples) for result in results)
    width = max(1, round(end / POINTS))
    limit = results[0].server.num_slots * slot_bytes / GIB
    with drawing(4.6) as (figure, _):
        figure.clear()
        axes = figure.subplots(2, len(results), sharex=True, sharey="row", squeeze=False, height_ratios=(2, 1))
        for result, top, below in zip(results, *axes, strict=True):
            samples = _means([sample for sample in result.samples if sample.time <= end], width)
            minutes = [sample.time / 60 for sample in samples]
            used = [sample.used * slot_bytes / GIB for sample in samples]
            reserved = [sample.reserved * slot_bytes / GIB for sample in samples]
            top.fill_between(minutes, 0, used, color=BLUE, linewidth=0, label="written")
            top.fill_between(
                minutes, used, reserved, facecolor=PALE, edgecolor=ORANGE, hatch=WASTE_HATCH, linewidth=0.4,
                label="reserved, not written",
            )  # fmt: skip
            top.axhline(limit, color=INK, linestyle="--", linewidth=0.9, label="memory for KV")
            share = sum(used) / max(1e-9, sum(reserved))
            refused = f"{result.refused} requests refused" if result.refused else "no request refused"
            top.set_title(f"{result.layout}: {share:.1%} written,\n{refused}")
            top.set_ylim(0, limit * 1.12)
            below.plot(minutes, [sample.running for sample in samples], color=GREEN, linewidth=1.2, label="in memory")
            waiting = [sample.waiting for sample in samples]
            below.plot(minutes, waiting, color=PURPLE, linewidth=1.2, linestyle="--", label="waiting")
            below.set_yscale("symlog", linthresh=10)
            below.set_xlabel("time (minutes)")
            below.set_xlim(0, end / 60)
            below.set_ylim(bottom=0)
        axes[0][0].set_ylabel("KV memory (GiB)")
        axes[1][0].set_ylabel("requests")
        figure.suptitle(f"KV memory over time, means of {width} s: {title}", fontsize=10, x=0.01, ha="left")
        handles = [*axes[0][0].get_legend_handles_labels()[0], *axes[1][0].get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
        return figure


def _means(samples: Sequence[Sample], width: int) -> list[Sample]:
    """One sample per `width` seconds, each field the mean of those within."""
    bins: dict[int, list[Sample]] = {}
    for sample in samples:
        bins.setdefault(int(sample.time // width), []).append(sample)
    return [
        Sample(
            time=sum(sample.time for sample in inside) / len(inside),
            used=round(sum(sample.used for sample in inside) / len(inside)),
            reserved=round(sum(sample.reserved for sample in inside) / len(inside)),
            running=round(sum(sample.running for sample in inside) / len(inside)),
            waiting=round(sum(sample.waiting for sample in inside) / len(inside)),
        )
        for inside in bins.values()
    ]


def tokens_per_second_figure() -> "Figure":
    """The same for the documented model and GPU, at the synthetic trace's mean length."""
    requests = synthetic_trace().requests
    seq_len = round(sum(request.total_tokens for request in requests) / len(requests))
    return throughput_against_batch(MODEL, DEVICE, seq_len, WEIGHT_FORMATS["fp16"], KV_FORMATS["fp16"], 0.9)


def throughput_against_batch(
    model: Model, device: Device, seq_len: int, weights: WeightFormat, cache: KVFormat, utilization: float
) -> "Figure":
    """Decode throughput at the roofline against batch, with the batches at which each layout's memory is full."""
    memory = kv_memory(model, device, weights, utilization)
    limits = {f"naive {max_len}": naive_capacity(model, memory, max_len, cache) for max_len in (8192, 4096, 2048)}
    limits["paged 16"] = paged_capacity(model, memory, seq_len, 16, cache)
    most = max(4, 2 * max(limits.values()))
    batches = sorted({round(most ** (i / 200)) for i in range(201)})

    def rate(batch: int) -> float:
        return tokens_per_second(model, device, batch, seq_len, weights, cache)

    with drawing(3.6) as (figure, (axis,)):
        full = limits["paged 16"]
        axis.plot([b for b in batches if b <= full], [rate(b) for b in batches if b <= full], color=BLUE, linewidth=2)
        axis.plot([b for b in batches if b >= full], [rate(b) for b in batches if b >= full], color=GREY, linestyle=":")
        for (name, batch), marker in zip(limits.items(), ("s", "D", "o", "^"), strict=True):
            if batch:
                color = BLUE if name.startswith("paged") else ORANGE
                axis.plot(batch, rate(batch), marker, color=color, markersize=8, markeredgecolor="white")
                axis.annotate(
                    f"{name} is full\nB = {batch}: {rate(batch):,.0f} tokens/s", (batch, rate(batch)), (9, -6),
                    textcoords="offset points", va="top", fontsize=8,
                )  # fmt: skip
        axis.plot([], [], color=GREY, linestyle=":", label="does not fit")
        axis.set_xscale("log", base=2)
        ticks = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlim(1, most * 1.6)
        axis.set_ylim(0, rate(most) * 1.12)
        axis.set_xlabel("batch (sequences decoded together)")
        axis.set_ylabel("decode throughput (tokens/s)")
        axis.set_title(
            f"{model.name} on {device.name}: the roofline of decoding\n"
            f"{seq_len} tokens each, {weights.name} weights, {cache.name} cache"
        )
        axis.legend(loc="upper left")
        return figure
