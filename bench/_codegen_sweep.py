"""What the sweeps of compiled kernels share: faults of any kernel, and a process for each provider and architecture."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from bench._codegen import ARCHS, ROOT, _isolate
from bench._launch import CompiledLaunch

PROVIDERS = ("triton", "cupy")


def local_memory_faults(launch: CompiledLaunch) -> list[str]:
    """The launch's spills and other local memory, in words; empty without."""
    spills, nbytes = launch.stats.spills, launch.stats.stack_bytes
    return [f"{spills} accesses to {nbytes} bytes of local memory"] if spills or nbytes else []


def size_faults(launch: CompiledLaunch) -> list[str]:
    """That the launch fits no SM, in words; empty where it does."""
    return [] if launch.programs_per_sm else ["no program fits an SM"]


def parser_of(module: str, doc: str) -> argparse.ArgumentParser:
    """A parser of `python -m module`, with the provider and the architecture to choose."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc.partition("\n")[0])
    parser.add_argument("--provider", action="append", choices=PROVIDERS, help="both by default")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="compute capability; all by default")
    return parser


def run_each(module: str, chosen: argparse.Namespace, words: Sequence[str], sweep: Callable[[str, int], int]) -> int:
    """The exit code: 1 if `sweep(provider, arch)` counts faults. One pair is swept in this process, isolated first.

    Each of several is swept by `python -m module` with `words` in a process of its own.
    """
    pairs = [(p, arch) for p in chosen.provider or PROVIDERS for arch in chosen.arch or ARCHS]
    if len(pairs) == 1:
        ((provider, arch),) = pairs
        with tempfile.TemporaryDirectory(prefix="pagebench-triton-") as cache:
            _isolate(arch, cache)
            return int(sweep(provider, arch) > 0)
    failed = False
    for provider, arch in pairs:
        command = [sys.executable, "-m", module, "--provider", provider, "--arch", str(arch), *words]
        failed |= subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    return int(failed)
