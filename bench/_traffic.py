"""Bytes that a provider's launches request for a workload, traced on a CPU: exact, and the same on every machine.

`record("triton", ["llama-3-8b-decode-b8-s4096-block16-fp16"])` starts a process without a GPU, holds the provider to
the reference on the workload scaled down, and returns what its launches did to each buffer meanwhile. Lengths (keys,
input features, blocks) are the workload's own; batch, heads, caches and output features are fewer: SCALES.

On the command line, `python -m bench._traffic --provider triton` prints every buffer of every launch.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench._table import table
from bench.workloads import WORKLOADS, copy_pairs, random_floats
from pagebench.kernels.memory_trace import SECTOR, BufferTraffic, LaunchTrace, requested_bytes, trace
from pagebench.kernels.providers import load_provider, ops_of
from pagebench.properties import contracts
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dequant import Dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.dtypes import INT32
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800
KV_HEADS = 8  # at most; launchers cut a sequence up further where there are few heads to make programs of
PAIRS, CACHES = 16, 4
TOKENS = 64
MERGED_TOKENS = 16
OUTPUT_FEATURES = 1024
INDEXED_FEATURES = 4096  # where g_idx is read for each tile of features, which are narrower for few features
SCALES = {
    "paged_attention": f"batch 1, at most {KV_HEADS} KV heads",
    "merge_states": f"{MERGED_TOKENS} tokens",
    "copy_blocks": f"{PAIRS} pairs, {CACHES} caches",
    "swap_blocks": "8 pairs, 4 caches",
    "write_kv": f"{TOKENS} tokens",
    "gather_kv": f"batch 1, at most {KV_HEADS} KV heads",
    "dequantize": f"{OUTPUT_FEATURES} output features",
    "dequant_gemv": f"{OUTPUT_FEATURES} output features ({INDEXED_FEATURES} with a g_idx), packed buffers alone",
}
# A fused product's, by our kernels' names: its x is small, and asked of the caches again for every tile of output
# features; few features are cut into more splits than all of them, whose sums go through scratch.
X, NOT_PACKED = "x", ("x", "y", "out", "scratch", "parts")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What became of one workload: its launches, or one reason why there are none (see `_codegen.Recording`)."""

    scale: str = ""
    bytes_moved: int = 0
    packed_bytes: int = 0  # of those, of a fused product's weight
    x_bytes: int = 0
    launches: tuple[LaunchTrace, ...] = field(default=())
    unavailable: str | None = None
    rejected: str | None = None
    error: str | None = None

    @property
    def ratio(self) -> float:
        """Bytes requested over the fewest possible, scratch counted; a fused product's of the packed buffers alone."""
        return requested_bytes(self.launches, without=self._apart) / self._judged_bytes

    @property
    def sector_ratio(self) -> float:
        """Bytes of the sectors requested, atomics once, over the fewest bytes possible; of the same buffers."""
        buffers = [buffer for launch in self.launches for buffer in launch.buffers.values()]
        sectors = sum(buffer.sectors_requested for buffer in buffers if buffer.name not in self._apart)
        return SECTOR * sectors / self._judged_bytes

    @property
    def whole_ratio(self) -> float:
        """Bytes requested of all buffers over the fewest possible."""
        return requested_bytes(self.launches) / self.bytes_moved

    @property
    def x_ratio(self) -> float:
        """Bytes requested of a fused product's x over its bytes: how often it is read. 0 for other ops."""
        return requested_bytes(self.launches, only=(X,)) / self.x_bytes if self.x_bytes else 0.0

    @property
    def _judged_bytes(self) -> int:
        return self.packed_bytes or self.bytes_moved

    @property
    def _apart(self) -> tuple[str, ...]:
        return NOT_PACKED if self.packed_bytes else ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Traffic":
        """What `to_json` wrote."""
        launches = []
        for item in data["launches"]:
            buffers = {name: BufferTraffic(**buffer) for name, buffer in item["buffers"].items()}
            launches.append(LaunchTrace(item["kernel"], tuple(item["grid"]), item["how"], buffers))
        return cls(**{**data, "launches": tuple(launches)})


def scaled(name: str) -> Problem:
    """The workload's problem at its own lengths, but with few sequences, heads, caches or output features."""
    problem = WORKLOADS[name].codegen_problem()
    rule: Callable[[Any], Problem] | None = _RULES.get(problem.op)
    if rule is None:
        raise ValueError(f"name must be a workload of {list(_RULES)}, got {name!r} of {problem.op}")
    return rule(problem)


def _one_sequence(problem: PagedAttention) -> Problem:
    """The first sequence and the query heads of the first KV heads (of one, if it has several queries).

    Its blocks are scattered over a cache of its own.
    """
    rng = np.random.default_rng(0)
    rows = problem.query_rows(0)
    heads = 1 if rows.stop - rows.start > 1 else min(KV_HEADS, problem.num_kv_heads)  # a prefill computes for minutes
    width = problem.block_table.shape[1]
    shape = (2, width, problem.block_size, heads, problem.head_size)
    cache = random_floats(rng, shape, problem.key_cache.dtype)
    return dataclasses.replace(
        problem,
        query=problem.query[rows, : heads * problem.group].copy(),
        key_cache=cache[0],
        value_cache=cache[1],
        block_table=rng.permutation(width).astype(INT32)[None],
        seq_lens=problem.seq_lens[:1],
        query_start=np.array([0, rows.stop - rows.start], INT32),
    )


def _few_caches(problem: CopyBlocks) -> Problem:
    """The same blocks, in the first caches."""
    rng = np.random.default_rng(0)
    caches = tuple(random_floats(rng, (2 * PAIRS, *c.shape[1:]), c.dtype) for c in problem.caches[:CACHES])
    return CopyBlocks(
        caches, copy_pairs(rng, PAIRS, "chain" if problem.chained else "fork" if problem.fans_out else "apart")
    )


def _few_outputs(problem: Dequantize | DequantGemv) -> Problem:
    """The first output features of the same weight."""
    indexed = isinstance(problem, DequantGemv) and "g_idx" in problem.packed
    kind, shape = FORMATS[problem.format], (INDEXED_FEATURES if indexed else OUTPUT_FEATURES, problem.shape[1])
    specs = kind.specs(kind.form(problem.packed), shape, problem.group_size)
    packed = {
        name: np.array(array[tuple(slice(size) for size in specs[name].shape)])
        for name, array in problem.packed.items()
    }
    return dataclasses.replace(problem, packed=packed, shape=shape)


def _few_tokens(problem: WriteKV) -> Problem:
    """The first tokens, to the same slots."""
    rows = {name: getattr(problem, name)[:TOKENS] for name in ("key", "value", "slot_mapping")}
    return dataclasses.replace(problem, **rows)


def _one_gathered(problem: GatherKV) -> Problem:
    """The first sequence, of the first KV heads."""
    caches = {name: getattr(problem, name)[:, :, :KV_HEADS].copy() for name in ("key_cache", "value_cache")}
    return dataclasses.replace(problem, block_table=problem.block_table[:1], seq_lens=problem.seq_lens[:1], **caches)


def _merged_tokens(problem: MergeStates) -> Problem:
    """The first tokens."""
    return MergeStates(*(getattr(problem, name)[:MERGED_TOKENS] for name in ("out_a", "lse_a", "out_b", "lse_b")))


_RULES: dict[str, Callable[[Any], Problem]] = {
    "paged_attention": _one_sequence,
    "merge_states": _merged_tokens,
    "copy_blocks": _few_caches,
    "swap_blocks": lambda problem: problem,  # launches no kernel
    "write_kv": _few_tokens,
    "gather_kv": _one_gathered,
    "dequantize": _few_outputs,
    "dequant_gemv": _few_outputs,
}


def record(spec: str, names: Iterable[str]) -> dict[str, Traffic]:
    """The traffic of provider `spec` (a name, MODULE:NAME or PATH.py:NAME) for each workload, from one process.

    RuntimeError if that process dies.
    """
    with tempfile.TemporaryDirectory(prefix="pagebench-traffic-") as folder:
        out = Path(folder) / "traffic.json"
        command = [sys.executable, "-P", "-m", "bench._traffic", "--provider", spec, "--out", str(out)]
        command += [word for name in names for word in ("--workload", name)]
        search = [str(ROOT), os.environ.get("PYTHONPATH", ""), os.getcwd()]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in search if path),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if not out.is_file():
            said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            raise RuntimeError(f"tracing {spec} exited with {done.returncode}:\n{said}")
        return {name: Traffic.from_json(item) for name, item in json.loads(out.read_text()).items()}


def measure(spec: str, name: str) -> Traffic:
    """The same in this process, which must not use a GPU."""
    try:
        provider = load_provider(spec)
    except ModuleNotFoundError as error:
        return Traffic(unavailable=f"{error.name} is not installed")
    reason = provider.unavailable()
    if reason is not None:
        return Traffic(unavailable=reason)
    if WORKLOADS[name].op not in ops_of(provider):
        return Traffic(rejected=f"{provider.name} has no {WORKLOADS[name].op}")
    try:
        problem, scale = scaled(name), SCALES.get(WORKLOADS[name].op, "")
        reason = provider.rejects(problem)
        if reason is not None:
            return Traffic(scale, rejected=reason)
        with trace(provider, races=False, uninitialised=False) as launches:
            contracts.check(provider, problem)
    except Exception:  # reported for this workload; the others still count
        return Traffic(error=traceback.format_exc())
    if not launches:
        return Traffic(scale, rejected=f"{provider.name} launched no Triton or CUDA C++ kernel for {problem.op}")
    packed, x = (problem.packed_bytes(), problem.x.nbytes) if isinstance(problem, DequantGemv) else (0, 0)
    return Traffic(scale, problem.bytes_moved(), packed, x, tuple(launches))


HEAD = ("workload", "kernel", "buffer", "loaded", "stored", "atomic", "of fewest", "sectors/request", "sectors")


def rows(name: str, traffic: Traffic) -> list[tuple[str, ...]]:
    """A table line for each buffer that was touched, a last one for the sum."""
    reason = traffic.unavailable or traffic.rejected or (traffic.error or "").strip().rpartition("\n")[2]
    if reason:
        return [(name, reason, *[""] * (len(HEAD) - 2))]
    lines = []
    for launch in traffic.launches:
        for buffer in (b for b in launch.buffers.values() if b.requests):
            share = f"{buffer.requested_bytes / traffic.bytes_moved:.4f}"
            figures = (buffer.loaded_bytes, buffer.stored_bytes, buffer.atomic_bytes, share)
            coalescing = f"{buffer.sectors_per_request:.1f}"
            lines.append((name, launch.kernel, buffer.name, *map(str, figures), coalescing, str(buffer.sectors)))
    if traffic.packed_bytes:
        lines.append((name, "", "x, times read", "", "", "", f"{traffic.x_ratio:.4f}", "", ""))
        lines.append((name, "", "all", "", "", "", f"{traffic.whole_ratio:.4f}", "", ""))
    judged = "packed" if traffic.packed_bytes else "all"
    lines.append((name, traffic.scale, judged, "", "", "", f"{traffic.ratio:.4f}", f"x{traffic.sector_ratio:.4f}", ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 when a workload failed."""
    parser = argparse.ArgumentParser(prog="python -m bench._traffic", description=__doc__.partition("\n")[0])
    parser.add_argument("--provider", required=True, help="name, MODULE:NAME or PATH.py:NAME")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="all by default")
    parser.add_argument("--out", type=Path, help="write JSON here instead of printing a table")
    chosen = parser.parse_args(arguments)
    found = {name: measure(chosen.provider, name) for name in chosen.workload or WORKLOADS}
    if chosen.out:
        chosen.out.write_text(json.dumps({name: traffic.to_json() for name, traffic in found.items()}))
    else:
        print(table(HEAD, [line for name, traffic in found.items() for line in rows(name, traffic)]))
    return int(any(traffic.error for traffic in found.values()))


if __name__ == "__main__":
    sys.exit(main())
