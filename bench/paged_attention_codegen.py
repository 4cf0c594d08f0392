"""Paged attention as it is compiled for every head size: `python -m bench.paged_attention_codegen`; nothing runs.

All head sizes of models, every type of cache, decode of groups up to 64 and a prefill, by both providers, for sm_80,
sm_90 and sm_100. Exits with 1 where a kernel spills, uses local memory or fits no SM. Minutes for each provider and
architecture, since hardly two of these problems share a kernel of Triton's: chosen by hand when a kernel changes.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from bench._codegen import ARCHS, ROOT, _isolate, _record_workload, _recording
from bench._launch import CompiledLaunch

HEAD_SIZES = (16, 24, 32, 64, 80, 96, 112, 120, 128, 192, 256)
# Types of the query and of the cache, and how the cache's scales are given.
TYPES: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "e4m3-scalar": {"cache_dtype": "float8_e4m3fn", "kv_scale": "scalar"},
    "e4m3-head": {"cache_dtype": "float8_e4m3fn", "kv_scale": "head"},
    "e4m3-slot": {"cache_dtype": "float8_e4m3fn", "kv_scale": "slot"},
}
GROUPS = (1, 4, 8, 17, 64)
# Group and sequences: a decode for each group, and prompts that are short and long.
WORK: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    **{f"decode-g{group}": (group, ((1, 1024),)) for group in GROUPS},
    "prefill-g4": (4, ((70, 1024), (1, 1024))),
}


def faults(launch: CompiledLaunch) -> list[str]:
    """What is wrong with a launch, in words; empty when nothing is."""
    found = []
    if launch.stats.spills or launch.stats.stack_bytes:
        found.append(f"{launch.stats.spills} accesses to {launch.stats.stack_bytes} bytes of local memory")
    if not launch.programs_per_sm:
        found.append("no program fits an SM")
    return found


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


def sweep(
    provider: str, arch: int, head_sizes: Sequence[int], types: Sequence[str], work: Sequence[str]
) -> tuple[int, int]:
    """Print a line for each launch, and what is wrong with it; how many have faults, of how many."""
    wrong = count = 0
    for what, launch in launches(provider, arch, head_sizes, types, work):
        found, stats = faults(launch), launch.stats
        wrong, count = wrong + bool(found), count + 1
        figures = (
            f"{launch.threads} threads, {stats.registers} registers, {stats.instructions} instructions, "
            f"{launch.shared_bytes} shared bytes, {launch.programs_per_sm} programs/SM"
        )
        print(f"{provider} sm_{arch} {what} {launch.kernel}: {figures}" + "".join(f"; WRONG: {f}" for f in found))
        sys.stdout.flush()
    return wrong, count


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paged_attention_codegen", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--provider", action="append", choices=("triton", "cupy"), help="both by default")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="compute capability; all by default")
    parser.add_argument("--head-size", type=int, action="append", default=[], help=f"{HEAD_SIZES} by default")
    parser.add_argument("--type", action="append", default=[], choices=list(TYPES), help="all by default")
    parser.add_argument("--work", action="append", default=[], choices=list(WORK), help="all by default")
    chosen = parser.parse_args(arguments)
    providers, archs = chosen.provider or ["triton", "cupy"], chosen.arch or list(ARCHS)
    picks = (chosen.head_size or HEAD_SIZES, chosen.type or list(TYPES), chosen.work or list(WORK))
    if len(providers) == len(archs) == 1:
        with tempfile.TemporaryDirectory(prefix="pagebench-triton-") as cache:
            _isolate(archs[0], cache)
            wrong, count = sweep(providers[0], archs[0], *picks)
        print(f"{providers[0]} sm_{archs[0]}: {wrong} of {count} launches have faults")
        return int(wrong > 0)
    words = [str(w) for n, p in zip(("--head-size", "--type", "--work"), picks, strict=True) for v in p for w in (n, v)]
    failed = False
    for provider in providers:
        for arch in archs:
            command = [sys.executable, "-m", "bench.paged_attention_codegen", "--provider", provider]
            failed |= subprocess.run([*command, "--arch", str(arch), *words], cwd=ROOT, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
