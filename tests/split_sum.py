"""A small kernel with a split reduction, in Triton and in CUDA C++, for faults to be planted in copies of it.

Its text does not change when our kernels do, so that what a fault must be called can be said exactly.
"""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pagebench.reference.dtypes import FLOAT32

BLOCK, WIDTH = 16, 32
HERE = Path(__file__).parent
_numbers = itertools.count()

# (provider, values int8 [num_blocks, BLOCK, WIDTH], table int32 [num_seqs, num_splits], lens int32 [num_seqs]), all on
# the device -> out float32 [num_seqs, WIDTH]
SplitSum = Callable[[Any, Any, Any, Any], Any]


def split_sum(backend: str, folder: Path, old: str = "", new: str = "") -> SplitSum:
    """The sum by kernels of `backend`, "triton" or "cupy", in whose text `old` stands once and becomes `new`."""
    sample = {"triton": "triton_samples/split_sum.py", "cupy": "cuda_samples/split_sum.cu"}[backend]
    text = (HERE / sample).read_text()
    if old:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {sample}"
        text = text.replace(old, new)
    path = folder / f"split_sum_{next(_numbers)}{Path(sample).suffix}"
    path.write_text(text)
    return (_triton if backend == "triton" else _cupy)(path)


def _triton(path: Path) -> SplitSum:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    kernels = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)

    def run(provider: Any, values: Any, table: Any, lens: Any) -> Any:
        num_seqs, splits = table.shape
        parts, out = provider.empty((num_seqs, splits, WIDTH), FLOAT32), provider.empty((num_seqs, WIDTH), FLOAT32)
        shape = {"BLOCK": BLOCK, "WIDTH": WIDTH}
        kernels.sum_kernel[(num_seqs, splits)](values, table, lens, parts, *values.stride()[:2], splits, **shape)
        kernels.combine_kernel[(num_seqs,)](lens, parts, out, splits, **shape)
        return out

    return run


def _cupy(path: Path) -> SplitSum:
    from pagebench.kernels.cuda_host import RawModule

    module = RawModule(code=path.read_text(), options=(f"-I{path.parent}",))

    def run(provider: Any, values: Any, table: Any, lens: Any) -> Any:
        num_seqs, splits = table.shape
        parts, out = provider.empty((num_seqs, splits, WIDTH), FLOAT32), provider.empty((num_seqs, WIDTH), FLOAT32)
        sizes = (*(np.int32(stride) for stride in values.strides[:2]), np.int32(splits))
        module.get_function("sum_kernel")((num_seqs, splits), (WIDTH,), (values, table, lens, parts, *sizes))
        module.get_function("combine_kernel")((num_seqs,), (WIDTH,), (lens, parts, out, np.int32(splits)))
        return out

    return run
