"""One workload on one provider: check it, then measure what this machine can. For the table, asv and the GPU job."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench._device_time import DeviceTime, copies_needed, device_time, l2_bytes
from bench.workloads import Workload
from pagebench.kernels.providers import Provider, how_it_runs, ops_of
from pagebench.properties import contracts
from pagebench.reference import error_bounds, paged_attention
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.problem import Problem

SAMPLED_SEQUENCES = 2  # of a full-size attention problem; the small one is compared whole


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check said. `status` is passed, failed, rejected or unavailable; `runs` is gpu, interpreter or host."""

    status: str
    runs: str
    seconds: float = 0.0
    detail: str = ""


def verdict(provider: Provider, workload: Workload) -> Verdict:
    """Check the workload's small problem against the reference, wherever the provider runs on this machine."""
    problem, runs, begin = workload.check_problem(), "-", time.perf_counter()
    try:
        reason = provider.unavailable()
        if reason is not None:
            return Verdict("unavailable", "-", detail=reason)
        if workload.op not in ops_of(provider):
            return Verdict("rejected", "-", detail=f"{provider.name} has no {workload.op}")
        reason = provider.rejects(problem)
        if reason is not None:
            return Verdict("rejected", "-", detail=reason)
        runs = how_it_runs(provider)
        contracts.check(provider, problem)
    except Exception as error:  # whatever a kernel raises is its verdict
        return Verdict("failed", runs, time.perf_counter() - begin, f"{type(error).__name__}: {error}")
    return Verdict("passed", runs, time.perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class Throughput:
    """A workload's device time, and the bytes and operations it counts as (from the problem alone)."""

    time: DeviceTime
    bytes_moved: int
    flops: int

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_moved / self.time.median


def throughput(provider: Provider, problem: Problem, variant: dict[str, Any] | None = None) -> Throughput:
    """Device time of a full-size problem on a GPU. Raises what the check raises if its results are wrong."""
    if isinstance(problem, PagedAttention):
        _check_sequences(provider, problem, variant)
    else:
        contracts.check(provider, problem, variant=variant)
    run = getattr(provider, problem.op)
    copies = copies_needed(problem.bytes_moved(), l2_bytes())
    inputs = [problem.on(provider) for _ in range(copies)]
    timed = device_time(lambda placed: run(placed, **(variant or {})), inputs)
    return Throughput(timed, problem.bytes_moved(), problem.flops())


def _check_sequences(provider: Provider, problem: PagedAttention, variant: dict[str, Any] | None) -> None:
    """Run the whole problem, and compare a few of its sequences with the reference, whose cost is in the keys."""
    result = provider.paged_attention(problem.on(provider), **(variant or {}))  # type: ignore[attr-defined]  # optional
    out, lse = (None if array is None else provider.to_host(array) for array in result)
    for seq in np.unique(np.linspace(0, problem.num_seqs - 1, SAMPLED_SEQUENCES).astype(int)):
        rows = problem.query_rows(seq)
        alone = dataclasses.replace(
            problem,
            query=problem.query[rows],
            block_table=problem.block_table[seq : seq + 1],
            seq_lens=problem.seq_lens[seq : seq + 1],
            query_start=np.array([0, rows.stop - rows.start], np.int32),
        )
        expected, bounds = paged_attention.paged_attention(alone), error_bounds.paged_attention(alone)
        error_bounds.assert_close(f"out of sequence {seq}", out[rows], expected[0], bounds[0])
        if lse is not None:
            error_bounds.assert_close(f"lse of sequence {seq}", lse[rows], expected[1], bounds[1])


@contextmanager
def freed_after() -> Iterator[None]:
    """Give the GPU's cached memory back afterwards, so that one workload's buffers do not crowd the next."""
    import torch

    try:
        yield
    finally:
        torch.cuda.empty_cache()
