"""`nox -s codegen`: every launch of every provider for sm_80, sm_90 and sm_100, as tables; nothing runs.

Exits with 1 when a kernel does not compile or nothing was compiled.
"""

import argparse
import sys
from collections.abc import Sequence

from bench._codegen import ARCHS, record, table
from bench.workloads import WORKLOADS

PROVIDERS = ("triton", "cupy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.codegen_table", description=__doc__.partition("\n")[0])
    parser.add_argument("--provider", action="append", help="name, MODULE:NAME or PATH.py:NAME; ours by default")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="compute capability; all by default")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="all by default")
    chosen = parser.parse_args(arguments)
    launches, broken = 0, False
    for provider in chosen.provider or PROVIDERS:
        for arch in chosen.arch or ARCHS:
            recordings = record(provider, chosen.workload or list(WORKLOADS), arch)
            print(f"\n{provider}, sm_{arch}\n{table(recordings)}", flush=True)
            launches += sum(len(recording.launches) for recording in recordings.values())
            broken |= any(recording.error for recording in recordings.values())
    if not launches:
        print("nothing was compiled", file=sys.stderr)
    return int(broken or not launches)


if __name__ == "__main__":
    sys.exit(main())
