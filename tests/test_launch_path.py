"""What a call costs before any kernel runs: building (so validating) a problem, and the launchers' own Python.

The launch path is timed with kernels that do nothing: no figure here is a kernel's speed, and none needs a GPU.
"""

from typing import Any

import pytest

from bench.workloads import LLAMA_3_8B, WORKLOADS, decode
from pagebench.kernels.cupy_provider import CupyProvider
from pagebench.reference.dtypes import FLOAT16

WARM_UP = ("llama-3-8b-decode-b8-s4096-block16-fp16", "qwen2.5-7b-copy-64x16-fp16", "qwen2.5-7b-gptq-gate-fp16")


class IdleKernel:
    """A kernel that takes a launch and does nothing; it counts the launches."""

    launches = 0
    max_dynamic_shared_size_bytes = 0

    def __call__(self, grid: Any, block: Any, args: Any, **keywords: Any) -> None:
        IdleKernel.launches += 1


class IdleModule:
    """Takes `cupy.RawModule`'s place."""

    def __init__(self, **arguments: Any) -> None:
        pass

    def get_function(self, name: str) -> IdleKernel:
        return IdleKernel()


@pytest.mark.benchmark(group="validate", max_time=0.5)
def test_validating_a_decode_batch(benchmark: Any) -> None:
    problem = decode(LLAMA_3_8B, 64, 128, 16, FLOAT16)
    benchmark(problem.validate)


@pytest.mark.parametrize("name", WARM_UP)
@pytest.mark.benchmark(group="validate", max_time=0.5)
def test_validating_a_workload(benchmark: Any, name: str) -> None:
    benchmark(WORKLOADS[name].codegen_problem().validate)


@pytest.mark.parametrize("name", WARM_UP)
@pytest.mark.benchmark(group="launch path", max_time=0.5)
def test_launching(benchmark: Any, name: str) -> None:
    provider = CupyProvider(IdleModule)
    placed = WORKLOADS[name].codegen_problem().on(provider)
    run = getattr(provider, placed.op)
    run(placed)
    before = IdleKernel.launches
    benchmark(run, placed)
    assert IdleKernel.launches > before
