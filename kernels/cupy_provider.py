"""The project's CUDA C++ kernels as a provider: through CuPy on a GPU, through the host compiler on a CPU."""

import importlib.util
from typing import Any

from pagebench.kernels import (
    block_copy_cupy,
    block_copy_gather_cupy,
    block_copy_swap_cupy,
    block_copy_write_cupy,
    dequant_cupy,
    dequant_gemv_cupy,
    merge_states_cupy,
    paged_attention_cupy,
)
from pagebench.kernels.cupy_arrays import CupyArrays

_OPS: dict[str, Any] = {
    "paged_attention": paged_attention_cupy,
    "merge_states": merge_states_cupy,
    "copy_blocks": block_copy_cupy,
    "swap_blocks": block_copy_swap_cupy,
    "write_kv": block_copy_write_cupy,
    "gather_kv": block_copy_gather_cupy,
    "dequantize": dequant_cupy,
    "dequant_gemv": dequant_gemv_cupy,
}


class CupyProvider(CupyArrays):
    """Paged attention, block copy and dequantisation in CUDA C++.

    raw_module: what compiles a source and returns its kernels, with the call interface of `cupy.RawModule`; arrays are
    then NumPy arrays. None chooses CuPy where there is a GPU, else `pagebench.kernels.cuda_host`.
    """

    name = "cupy"
    batch_invariant = True  # bitwise: see paged_attention_splits.cuh

    def unavailable(self) -> str | None:
        if self.device.on_gpu and importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed (pip install cupy-cuda13x)"
        if not self.device.on_gpu and self.device.uses_host_compiler:
            from pagebench.kernels import cuda_host

            return cuda_host.unavailable()
        return None

    def rejects(self, problem: Any) -> str | None:
        launcher = _OPS.get(problem.op)
        return f"{problem.op} is not implemented" if launcher is None else launcher.rejects(problem)

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        """The default first, then small tiles and splits whose edges a small problem crosses."""
        found: list[dict[str, Any]] = _OPS[problem.op].variants(problem)
        return found

    def contract(self, format: str) -> str:
        return dequant_cupy.contract(format)

    def paged_attention(self, problem: Any, **variant: Any) -> tuple[Any, Any]:
        return paged_attention_cupy.paged_attention(self, problem, **variant)

    def merge_states(self, problem: Any, **variant: Any) -> tuple[Any, Any]:
        return merge_states_cupy.merge_states(self, problem, **variant)

    def copy_blocks(self, problem: Any, **variant: Any) -> None:
        block_copy_cupy.copy_blocks(self, problem, **variant)

    def swap_blocks(self, problem: Any) -> None:
        block_copy_swap_cupy.swap_blocks(self, problem)

    def write_kv(self, problem: Any, **variant: Any) -> None:
        block_copy_write_cupy.write_kv(self, problem, **variant)

    def gather_kv(self, problem: Any, **variant: Any) -> tuple[Any, Any]:
        return block_copy_gather_cupy.gather_kv(self, problem, **variant)

    def dequantize(self, problem: Any, **variant: Any) -> Any:
        return dequant_cupy.dequantize(self, problem, **variant)

    def dequant_gemv(self, problem: Any, **variant: Any) -> Any:
        return dequant_gemv_cupy.dequant_gemv(self, problem, **variant)


provider = CupyProvider()
