"""Paged attention as it is compiled for every head size: `python -m bench.paged_attention_codegen`; nothing runs.

All head sizes of models, every type of cache, decode of groups up to 128 and a prefill, by both providers, for sm_80,
sm_90 and sm_100. Exits with 1 where a kernel spills, uses local memory or fits no SM. Minutes for each provider and
architecture, since hardly two of these problems share a kernel of Triton's: chosen by hand when a kernel changes.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench._codegen import _record_workload, _recording
from bench._codegen_sweep import local_memory_faults, parser_of, run_each, size_faults
from bench._launch import CompiledLaunch

HEAD_SIZES = (16, 24, 32, 64, 80, 96, 112, 120, 128, 192, 256, 320)
# Types of the query and of the cache, and how the cache's scales are given.
TYPES: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "e4m3-scalar": {"cache_dtype": "float8_e4m3fn", "kv_scale": "scalar"},
    "e4m3-head": {"cache_dtype": "float8_e4m3fn", "kv_scale": "head"},
    "e4m3-slot": {"cache_dtype": "float8_e4m3fn", "kv_scale": "slot"},
}
GROUPS = (1, 4, 8, 17, 64, 128)
# Group and sequences: a decode for each group, and prompts that are short and long.
WORK: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    **{f"decode-g{group}": (group, ((1, 1024),)) for group in GROUPS},
    "prefill-g4": (4, ((70, 1024), (1, 1024))),
}


def launches(
    provider: str, arch: int, head_sizes: Sequence[int], types: Sequence[str], work: Sequence[str]
) -> Iterator[tuple[str, CompiledLaunch]]:
    """(what for, launch), in a process that `_codegen._isolate` prepared."""
    from pagebench.kernels.providers import load_provider
    from pagebench.properties.paged_attention_recipes import AttentionRecipe

    loaded = load_provider(provider)
    with _recording(arch) as recorded:
        for head_size in head_sizes:
            for type_name in types:
                for name in work:
                    group, sequences = WORK[name]
                    recipe = AttentionRecipe(
                        head_size=head_size, group=group, num_kv_heads=8, sequences=sequences, **TYPES[type_name]
                    )
                    recording = _record_workload(loaded, recipe.build(), recorded)
                    if not recording.launches:
                        raise RuntimeError(f"{provider} {name}: {recording.unavailable or recording.rejected}")
                    for launch in recording.launches:
                        yield f"{type_name} D={head_size} {name}", launch


def sweep(provider: str, arch: int, head_sizes: Sequence[int], types: Sequence[str], work: Sequence[str]) -> int:
    """Print a line for each launch, and what is wrong with it; how many have faults."""
    wrong = count = 0
    for what, launch in launches(provider, arch, head_sizes, types, work):
        found, stats = local_memory_faults(launch) + size_faults(launch), launch.stats
        wrong, count = wrong + bool(found), count + 1
        figures = (
            f"{launch.threads} threads, {stats.registers} registers, {stats.instructions} instructions, "
            f"{launch.shared_bytes} shared bytes, {launch.programs_per_sm} programs/SM"
        )
        print(f"{provider} sm_{arch} {what} {launch.kernel}: {figures}" + "".join(f"; WRONG: {f}" for f in found))
        sys.stdout.flush()
    print(f"{provider} sm_{arch}: {wrong} of {count} launches have faults")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of("bench.paged_attention_codegen", __doc__)
    parser.add_argument("--head-size", type=int, action="append", default=[], help=f"{HEAD_SIZES} by default")
    parser.add_argument("--type", action="append", default=[], choices=list(TYPES), help="all by default")
    parser.add_argument("--work", action="append", default=[], choices=list(WORK), help="all by default")
    chosen = parser.parse_args(arguments)
    picks = (chosen.head_size or HEAD_SIZES, chosen.type or list(TYPES), chosen.work or list(WORK))
    words = [str(w) for n, p in zip(("--head-size", "--type", "--work"), picks, strict=True) for v in p for w in (n, v)]
    return run_each("bench.paged_attention_codegen", chosen, words, lambda *where: sweep(*where, *picks))


if __name__ == "__main__":
    sys.exit(main())
