"""The Triton provider: torch tensors, on the GPU or, through Triton's interpreter, on the CPU.

Load it with `pagebench.kernels.providers.load_provider("triton")`, which turns the interpreter on first where there is
no GPU: that choice is fixed once the kernels are imported.
"""

from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction

from pagebench.kernels import block_copy_triton, dequant_triton, paged_attention_triton
from pagebench.kernels.triton_arrays import array_of, tensor_of, torch_dtype
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.paged_attention import PagedAttention

_KERNELS: dict[type, Any] = {
    PagedAttention: paged_attention_triton,
    CopyBlocks: block_copy_triton,
    Dequantize: dequant_triton,
}


class TritonProvider:
    """Every op of `pagebench.kernels.*_triton` (see `providers.Provider` for the contract)."""

    name = "triton"

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

    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return tensor_of(array, self.device)

    def to_host(self, array: torch.Tensor) -> np.ndarray[Any, Any]:
        return array_of(array)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def as_strided(
        self, base: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A view of `base` (uint8 [nbytes] from `to_device`); strides and offset in elements of `dtype`."""
        whole = base[: base.numel() // dtype.itemsize * dtype.itemsize].view(torch_dtype(dtype))
        return whole.as_strided(shape, strides, offset)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        return [{}, *_KERNELS[type(problem)].variants(problem)]

    def contract(self, format: str) -> str:
        return default_contract(format)

    def paged_attention(self, problem: PagedAttention, **variant: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention_triton.paged_attention(problem, self.empty, **variant)

    def copy_blocks(self, problem: CopyBlocks, **variant: Any) -> None:
        block_copy_triton.copy_blocks(problem, **variant)

    def dequantize(self, problem: Dequantize, **variant: Any) -> torch.Tensor:
        return dequant_triton.dequantize(problem, self.empty, **variant)


provider = TritonProvider()
