"""`nox -s memory`: KV memory of one model on one GPU, computed, replayed on a request trace, and drawn.

    nox -s memory -- --model llama-2-13b --gpu-memory 80GiB --trace FILE

prints five tables and writes two figures. --model takes a name or a Hugging Face config.json; --trace a CSV, JSONL or
ShareGPT file (see `request_trace`), and a synthetic trace without it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.memory_layouts import Layout, NaiveLayout, PagedLayout
from bench.memory_tables import (
    REPLAY_LEGEND,
    bytes_table,
    capacity_table,
    edge_table,
    parse_size,
    replay_table,
    size,
    throughput_table,
)
from bench.request_trace import Trace, read_trace, synthetic_trace
from bench.trace_replay import Result, Server, replay
from pagebench.reference.kv_blocks import KV_FORMATS, token_bytes
from pagebench.reference.kv_blocks_batching import DEVICES, WEIGHT_FORMATS, Device, kv_memory, weight_bytes
from pagebench.reference.model_config import read_config
from pagebench.reference.models import MODELS, Model
from pagebench.reference.validation import require

ROOT = Path(__file__).resolve().parent.parent
LOCAL_FIGURES = ROOT / "results" / "local" / "memory"  # git-ignored
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_LENS = (2048, 4096, 8192, 16384)
MakeLayout = Callable[[], Layout]


def layouts(
    num_slots: int, max_lens: Sequence[int], block_sizes: Sequence[int], *, fragmentation: bool, share: bool
) -> dict[str, MakeLayout]:
    """What to replay, by name: naive ones first, then paged ones by block size, then those that share prefixes."""
    made: dict[str, MakeLayout] = {
        f"naive {max_len}": lambda max_len=max_len: NaiveLayout(num_slots, max_len)  # type: ignore[misc]  # bound now
        for max_len in max_lens
        if max_len <= num_slots
    }
    if fragmentation:
        made["naive exact"] = lambda: NaiveLayout(num_slots, num_slots, reserve="exact")
        made["naive exact, best"] = lambda: NaiveLayout(num_slots, num_slots, reserve="exact", fit="best")
        made["naive pow2"] = lambda: NaiveLayout(num_slots, num_slots, reserve="pow2")
    for sharing in (False, True) if share else (False,):
        fitting = [block_size for block_size in block_sizes if block_size <= num_slots]
        for block_size in fitting if not sharing else [wide for wide in fitting if wide >= 16][:1]:
            made[f"paged {block_size}" + " shared" * sharing] = (
                lambda block_size=block_size, sharing=sharing: PagedLayout(num_slots, block_size, share=sharing)  # type: ignore[misc]  # bound now
            )
    return made


def replay_all(trace: Trace, made: dict[str, MakeLayout], server: Server) -> list[Result]:
    """Replay the trace on every layout, with a progress bar on a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # has no types; only this command needs it, and asv imports every module of this folder

    results = []
    with tqdm(total=len(trace.requests) * len(made), unit="req", disable=None, leave=False) as bar:
        for name, make in made.items():
            bar.set_description(name)
            results.append(replay(trace, make(), server, bar.update))
    return results


def chosen_model(name: str) -> Model:
    """A named model, or the one that a config.json describes."""
    if name in MODELS:
        return MODELS[name]
    require(Path(name).exists(), "model", f"be a config.json or one of {', '.join(MODELS)}", name)
    return read_config(name)


def chosen_device(options: argparse.Namespace) -> Device:
    """The named GPU, with what the command line gives instead."""
    device = DEVICES[options.gpu]
    memory = None if options.gpu_memory is None else parse_size(options.gpu_memory)
    changes = {"memory": memory, "bandwidth": options.bandwidth, "flop_rate": options.flops}
    given = {name: value for name, value in changes.items() if value not in (None, getattr(device, name))}
    return replace(device, name=device.name + (" (changed)" if given else ""), **given)


def chosen_trace(options: argparse.Namespace) -> Trace:
    """The trace in a file, or the synthetic one."""
    given = {"request_rate": options.request_rate} if options.request_rate is not None else {}
    if options.trace is not None:
        return read_trace(options.trace, seed=options.seed, limit=options.limit, **given)
    size = {"num_requests": options.limit} if options.limit is not None else {}
    return synthetic_trace(seed=options.seed, **size, **given)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="nox -s memory --", description=__doc__.partition("\n")[0])
    add = made.add_argument
    add("--model", default="llama-2-13b", help=f"config.json, its folder, or one of {', '.join(MODELS)}")
    add("--gpu", default="a100-80gb", choices=list(DEVICES), help="memory, bandwidth and FLOP rate of its data sheet")
    add("--gpu-memory", metavar="SIZE", help="instead of the data sheet's: 80GiB, 24GB")
    add("--bandwidth", type=float, metavar="B/S", help="bytes per second, as measured: 1.8e12")
    add("--flops", type=float, metavar="FLOP/S", help="dense 16-bit FLOP per second, as measured: 2.5e14")
    add("--utilization", type=float, default=0.9, help="share of the memory for weights and KV (default 0.9)")
    add("--weights", default="fp16", choices=list(WEIGHT_FORMATS))
    add("--cache", default="fp16", choices=list(KV_FORMATS))
    add("--trace", metavar="FILE", help=".csv, .jsonl or .json; a synthetic trace by default")
    add("--limit", type=int, metavar="N", help="only the first N requests")
    add("--request-rate", type=float, metavar="R", help="requests per second where the trace has no times")
    add("--seed", type=int, default=0, help="of the synthetic trace and of drawn arrivals")
    add("--prefill-rate", type=float, default=20000.0, help="prompt tokens computed per second (default 20000)")
    add("--step-time", type=float, default=0.025, help="seconds per decode step (default 0.025)")
    add("--max-running", type=int, metavar="N", help="most requests in memory at once (default: what fits)")
    add("--max-len", type=int, action="append", metavar="N", help=f"naive reservation, repeatable (default {MAX_LENS})")
    add("--block-size", type=int, action="append", metavar="N", help=f"repeatable (default {BLOCK_SIZES})")
    add("--fragmentation", action="store_true", help="also reservations of the exact length and of powers of two")
    add("--figures", type=Path, metavar="DIR", default=LOCAL_FIGURES, help="where the figures go")
    add("--no-figures", action="store_true")
    add("--json", type=Path, metavar="FILE", help="write everything the replay found")
    return made


def report(options: argparse.Namespace) -> None:
    """Print the tables, replay the trace, write the figures. ValueError for options that make no sense."""
    model, device, trace = chosen_model(options.model), chosen_device(options), chosen_trace(options)
    weights, cache = WEIGHT_FORMATS[options.weights], KV_FORMATS[options.cache]
    max_lens, block_sizes = options.max_len or MAX_LENS, options.block_size or BLOCK_SIZES
    memory = kv_memory(model, device, weights, options.utilization)
    slot_bytes = token_bytes(model, cache)
    rule = f"hold {size(weight_bytes(model, weights))} of weights and a token in {options.utilization:.0%} of it"
    require(memory >= slot_bytes, "gpu_memory", rule, size(device.memory))
    server = Server(memory // slot_bytes, options.prefill_rate, options.step_time, options.max_running)
    made = layouts(
        server.num_slots, max_lens, block_sizes, fragmentation=options.fragmentation, share=trace.has_content
    )
    mean_len = max(1, round(sum(request.total_tokens for request in trace.requests) / len(trace.requests)))
    block = 16 if 16 in block_sizes else block_sizes[0]
    require(made, "gpu_memory", "hold a block or a reservation", f"{server.num_slots} slots")

    print(
        f"{model.name}: {model.parameters():,} parameters, {model.num_layers} layers, KV of a token {size(slot_bytes)}"
    )
    print(
        f"{device.name}: {size(device.memory)}, {device.bandwidth / 1e9:,.0f} GB/s,"
        f" {device.flop_rate / 1e12:,.0f} TFLOP/s"
    )
    print(f"\nKV bytes\n{bytes_table(model, 4096, block)}")
    print(f"\nSlots that hold nothing\n{edge_table(block, max_lens[0])}")
    print(
        f"\nRequests of {mean_len} tokens (the trace's mean) that fit {options.utilization:.0%} of the memory;"
        f" decode tokens/s of as many as fit paged {block}"
    )
    print(capacity_table(model, device, mean_len, max_lens, block, options.utilization))
    print(f"\nDecode at {mean_len} tokens, {weights.name} weights, {cache.name} cache: a roofline, an upper bound")
    print(throughput_table(model, device, mean_len, weights, cache, max_lens, block, options.utilization))

    results = replay_all(trace, made, server)
    print(f"\nReplay of {trace.name}: {len(trace.requests)} requests{f' ({trace.note})' if trace.note else ''}")
    print(
        f"{server.num_slots} slots in {size(memory)}; prefill {server.prefill_rate:g} tokens/s,"
        f" decode step {server.step_time:g} s{f', at most {server.max_running} running' if server.max_running else ''}"
    )
    print(replay_table(results, slot_bytes), REPLAY_LEGEND, sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results]))
        print(f"written: {options.json}")
    if not options.no_figures:
        write_figures(options, model, device, trace, results, slot_bytes)


def write_figures(
    options: argparse.Namespace, model: Model, device: Device, trace: Trace, results: list[Result], slot_bytes: int
) -> None:
    """Memory over time and tokens/s against batch, of this run."""
    from bench.figures import save
    from bench.figures_serving import memory_over_time, throughput_against_batch

    naive = [result for result in results if result.layout.startswith("naive")]
    paged = [result for result in results if result.layout.startswith("paged")]
    shown = [*naive[:1], *([r for r in paged if r.layout == "paged 16"] or paged)[:1]]
    mean_len = max(1, round(sum(request.total_tokens for request in trace.requests) / len(trace.requests)))
    drawn = {
        "memory_over_time": memory_over_time(shown, slot_bytes, f"{trace.name}, {model.name}"),
        "tokens_per_second": throughput_against_batch(
            model, device, mean_len, WEIGHT_FORMATS[options.weights], KV_FORMATS[options.cache], options.utilization
        ),
    }
    for name, figure in drawn.items():
        for path in save(figure, options.figures / name):
            print(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser()
    try:
        report(made.parse_args(arguments))
    except (ValueError, OSError) as error:
        made.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
