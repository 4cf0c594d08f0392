"""The Triton provider: torch tensors, on the GPU or, through Triton's interpreter, on the CPU.

Load it with `pagebench.kernels.providers.load_provider("triton")`, which turns the interpreter on first where there is
no GPU: that choice is fixed once the kernels are imported.
"""

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from pagebench.kernels import (
    block_copy_gather_triton,
    block_copy_swap_triton,
    block_copy_triton,
    block_copy_write_triton,
    dequant_gemv_triton,
    dequant_triton,
    merge_states_triton,
    paged_attention_triton,
)
from pagebench.kernels.torch_arrays import TorchArrays
from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention

_KERNELS: dict[type, Any] = {
    PagedAttention: paged_attention_triton,
    MergeStates: merge_states_triton,
    CopyBlocks: block_copy_triton,
    SwapBlocks: block_copy_swap_triton,
    WriteKV: block_copy_write_triton,
    GatherKV: block_copy_gather_triton,
    Dequantize: dequant_triton,
    DequantGemv: dequant_gemv_triton,
}


class TritonProvider(TorchArrays):
    """Every op of `pagebench.kernels.*_triton` (see `providers.Provider` for the contract)."""

    name = "triton"
    batch_invariant = True  # bitwise: see paged_attention_ranges_triton

    @property
    def interpreted(self) -> bool:
        """Whether the kernels run in Triton's interpreter, on CPU tensors."""
        return isinstance(paged_attention_triton.attend_kernel, InterpretedFunction)

    @property
    def device(self) -> torch.device:
        """Where arrays live: without a GPU on the CPU, also for compiled kernels, so that launches can be recorded."""
        return torch.device("cuda" if torch.cuda.is_available() and not self.interpreted else "cpu")

    def unavailable(self) -> str | None:
        if self.interpreted or torch.cuda.is_available():
            return None
        return "no GPU that torch can use, and the kernels were imported without TRITON_INTERPRET=1"

    def rejects(self, problem: Any) -> str | None:
        kernels = _KERNELS.get(type(problem))
        return f"no kernel for {type(problem).__name__}" if kernels is None else kernels.rejects(problem)

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        return [{}, *_KERNELS[type(problem)].variants(problem)]

    def contract(self, format: str) -> str:
        return default_contract(format)

    def paged_attention(self, problem: PagedAttention, **variant: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention_triton.paged_attention(problem, self.empty, **variant)

    def merge_states(self, problem: MergeStates, **variant: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_states_triton.merge_states(problem, self.empty, **variant)

    def copy_blocks(self, problem: CopyBlocks, **variant: Any) -> None:
        block_copy_triton.copy_blocks(problem, self.empty, **variant)

    def swap_blocks(self, problem: SwapBlocks) -> None:
        block_copy_swap_triton.swap_blocks(problem)

    def write_kv(self, problem: WriteKV, **variant: Any) -> None:
        block_copy_write_triton.write_kv(problem, **variant)

    def gather_kv(self, problem: GatherKV, **variant: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return block_copy_gather_triton.gather_kv(problem, self.empty, **variant)

    def dequantize(self, problem: Dequantize, **variant: Any) -> torch.Tensor:
        return dequant_triton.dequantize(problem, self.empty, **variant)

    def dequant_gemv(self, problem: DequantGemv, **variant: Any) -> torch.Tensor:
        return dequant_gemv_triton.dequant_gemv(problem, self.empty, **variant)


provider = TritonProvider()
