"""The tables of `nox -s memory`: bytes, edge cases, capacity, throughput, and what a replay found."""

from collections.abc import Sequence

from bench._table import table
from bench.trace_replay import Result
from pagebench.reference.kv_blocks import (
    KV_FORMATS,
    KVFormat,
    blocks_for,
    model_kv_bytes,
    naive_waste,
    paged_waste,
    token_bytes,
)
from pagebench.reference.kv_blocks_batching import (
    WEIGHT_FORMATS,
    Device,
    WeightFormat,
    decode_bytes,
    decode_flops,
    kv_memory,
    naive_capacity,
    paged_capacity,
    tokens_per_second,
    weight_bytes,
)
from pagebench.reference.models import Model

GIB = 1 << 30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "80 GB", "512MiB" or a plain number. ValueError for anything else, or nothing."""
    stripped = text.strip()
    number = stripped.rstrip("bBiIkKmMgGtT ")
    unit = stripped[len(number) :].strip().upper() or "B"
    try:
        size = float(number) * UNITS[unit]
        if not 1 <= size < 1 << 60:
            raise ValueError(size)
    except (ValueError, KeyError):
        raise ValueError(f"size must be a positive number with B, KB, MB, GB, KiB, MiB or GiB, got {text!r}") from None
    return round(size)


def size(value: float) -> str:
    """Bytes for a reader."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:,.4g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:g} B"


def bytes_table(model: Model, seq_len: int, block_size: int) -> str:
    """KV bytes of the model in every format."""
    rows = []
    for form in KV_FORMATS.values():
        per_row = form.row_bytes(model.cache_row if model.latent else model.head_size)
        number = per_row / (model.cache_row if model.latent else model.head_size)
        token, whole = token_bytes(model, form), model_kv_bytes(model, seq_len, form)
        rows.append((form.name, f"{number:.4g}", size(token), size(token * block_size), f"{whole:,}", size(whole)))
    head = ("cache", "bytes/number", "per token", f"per block of {block_size}", f"bytes at {seq_len} tokens", "")
    return table(head, rows)


def edge_table(block_size: int, max_len: int, lengths: Sequence[int] = (1, 32, 100)) -> str:
    """Slots that hold nothing, for lengths about which the layouts differ most."""
    rows = [
        (
            str(length),
            str(naive_waste(length, max_len)),
            str(blocks_for(length, block_size)),
            str(paged_waste(length, block_size)),
        )
        for length in lengths
        if length <= max_len
    ]
    return table(("tokens", f"waste, naive {max_len}", "blocks", f"waste, paged {block_size}"), rows)


def capacity_table(
    model: Model, device: Device, seq_len: int, max_lens: Sequence[int], block_size: int, utilization: float
) -> str:
    """How many requests of `seq_len` tokens fit, and the decode throughput that this many give."""
    head = ["weights", "cache", "weights take", "for KV"]
    head += [f"naive {max_len}" for max_len in max_lens] + [f"paged {block_size}", "tokens/s"]
    rows = []
    for weights in WEIGHT_FORMATS.values():
        memory = kv_memory(model, device, weights, utilization)
        for name in ("fp16", "fp8", "int8", "int4"):
            cache = KV_FORMATS[name]
            counts = [naive_capacity(model, memory, max_len, cache) for max_len in max_lens]
            counts.append(paged_capacity(model, memory, seq_len, block_size, cache))
            rate = tokens_per_second(model, device, counts[-1], seq_len, weights, cache)
            sizes = (size(weight_bytes(model, weights)), size(memory))
            rows.append((weights.name, name, *sizes, *map(str, counts), f"{rate:,.0f}"))
    return table(head, rows)


def throughput_table(
    model: Model,
    device: Device,
    seq_len: int,
    weights: WeightFormat,
    cache: KVFormat,
    max_lens: Sequence[int],
    block_size: int,
    utilization: float,
) -> str:
    """Decode throughput against batch, and in which layouts the batch fits."""
    memory = kv_memory(model, device, weights, utilization)
    limits = {f"naive {max_len}": naive_capacity(model, memory, max_len, cache) for max_len in max_lens}
    limits[f"paged {block_size}"] = paged_capacity(model, memory, seq_len, block_size, cache)
    rows = []
    for batch in sorted({*BATCHES, *(limit for limit in limits.values() if limit)}):
        moved, flops = decode_bytes(model, batch, seq_len, weights, cache), decode_flops(model, batch, seq_len)
        bound = "memory" if moved / device.bandwidth >= flops / device.flop_rate else "FLOPs"
        rate = tokens_per_second(model, device, batch, seq_len, weights, cache)
        fits = [name for name, limit in limits.items() if batch <= limit]
        work = (f"{moved / 1e9:.1f}", f"{flops / 1e12:.3f}", f"{flops / moved:.1f}")
        rows.append((str(batch), *work, bound, f"{rate:,.0f}", ", ".join(fits) or "nowhere"))
    return table(("batch", "GB/step", "TFLOP/step", "FLOP/byte", "bound by", "tokens/s", "fits"), rows)


def replay_table(results: Sequence[Result], slot_bytes: int) -> str:
    """One row per layout. Memory is the mean over the time replayed."""
    head = (
        "layout", "useful", "waste/req", "finished", "refused", "preempted", "fragm.", "running", "peak",
        "in use", "reserved", "internal", "external", "shared", "prompt shared", "wait", "replayed",
    )  # fmt: skip
    return table(head, [_replay_row(result, slot_bytes) for result in results])


def _replay_row(result: Result, slot_bytes: int) -> tuple[str, ...]:
    used, reserved = result.mean(result.used_steps), result.mean(result.reserved_steps)
    memory = (used, reserved, reserved - used, result.mean(result.external_steps))
    return (
        result.layout,
        f"{result.useful_share:.3%}",
        f"{result.mean_waste:.4f}",
        str(result.finished),
        str(result.refused),
        str(result.preempted),
        str(result.delayed_by_fragmentation),
        f"{result.mean(result.running_steps):.1f}",
        str(result.peak_running),
        *(f"{slots * slot_bytes / GIB:.2f}" for slots in memory),
        str(result.peak_shared),
        f"{result.shared_tokens / max(1, result.prompt_tokens):.1%}",
        f"{result.waited / max(1, result.admitted):.1f}",
        f"{result.seconds:.0f}",
    )


REPLAY_LEGEND = """
useful, waste/req   slots written over slots held, and slots held but not written, at the end of every finished request
refused             longer than the layout's maximum or than the memory; preempted: times that a request gave up its
                    memory to an older one; fragm.: requests that waited although the free total would have held them
running, peak       requests in memory, their prompts in work included: mean over time, and most
in use ... external GiB, mean over time: written (shared blocks once), reserved, reserved but not written, and free but
                    useless to the first in line because it is in pieces
shared              most blocks held by several requests at once; prompt shared: prompt tokens found in shared blocks
wait, replayed      mean seconds from arrival to admission; length of the replay in seconds of event time"""
