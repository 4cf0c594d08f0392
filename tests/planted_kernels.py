"""Copies of our kernels with one fault each, as providers, for the checks that look at memory."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pagebench.kernels

KERNELS = Path(next(iter(pagebench.kernels.__path__)))
_numbers = itertools.count()


def planted(backend: str, op: str, old: str, new: str, folder: Path) -> Any:
    """The provider `backend` ("triton" or "cupy") with `old` replaced by `new`, once, in the kernel source of `op`."""
    return (_planted_triton if backend == "triton" else _planted_cupy)(op, old, new, folder)


def replaced(text: str, old: str, new: str) -> str:
    """`text` with the one place where it says `old` changed."""
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the kernel"
    return text.replace(old, new)


FILES = {"paged_attention": "paged_attention", "copy_blocks": "block_copy", "dequantize": "dequant"}


def _planted_triton(op: str, old: str, new: str, folder: Path) -> Any:
    from pagebench.kernels.triton_provider import TritonProvider

    name = f"planted_{FILES[op]}_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(replaced((KERNELS / f"{FILES[op]}_triton.py").read_text(), old, new))
    module = _load(name, path)

    class Planted(TritonProvider):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute != op:
                return super().__getattribute__(attribute)
            arguments = () if op == "copy_blocks" else (self.empty,)
            return lambda problem, **variant: getattr(module, op)(problem, *arguments, **variant)

    return Planted()


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _planted_cupy(op: str, old: str, new: str, folder: Path) -> Any:
    from pagebench.kernels import cuda_host
    from pagebench.kernels.cupy_provider import CupyProvider

    def raw_module(code: str, **arguments: Any) -> Any:
        return cuda_host.RawModule(code=replaced(code, old, new), **arguments)

    return CupyProvider(raw_module)
