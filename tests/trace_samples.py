"""The kernels of cuda_samples/traces.cu, and what tests of the memory trace need around them."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from pagebench.kernels import launch_buffers
from pagebench.kernels.cuda_host import RawModule
from pagebench.kernels.cupy_provider import CupyProvider
from pagebench.kernels.memory_trace import LaunchTrace, trace

SAMPLES = Path(__file__).parent / "cuda_samples"
KERNELS = Path(launch_buffers.__file__).parent
OPTIONS = ("-std=c++17", f"-I{KERNELS}", f"-I{SAMPLES}")
TEXT = (SAMPLES / "traces.cu").read_text()
NAMES = tuple(re.findall(r"__global__ void (\w+)\(", TEXT))


def enumerators(name: str) -> list[str]:
    """The names of an enumeration of traces.cu, in order."""
    body = re.search(rf"enum {name} \{{(.*?)\}}", TEXT, re.DOTALL)
    assert body is not None
    return re.findall(r"k\w+", body[1])


class Samples:
    """The sample kernels, compiled when first launched, and a provider for whose launches a trace can be asked."""

    def __init__(self) -> None:
        self.provider = CupyProvider(RawModule)
        self.module = RawModule(code=TEXT, options=OPTIONS, name_expressions=NAMES)
        self.faults = enumerators("Fault")

    def fault(self, name: str) -> np.int32:
        return np.int32(self.faults.index(name))

    def launch(self, kernel: str, grid: int, block: int, *args: Any) -> None:
        self.module.get_function(kernel)((grid,), (block,), args)

    def traced(self, kernel: str, grid: int, block: int, *args: Any) -> LaunchTrace:
        with trace(self.provider) as launches:
            self.launch(kernel, grid, block, *args)
        return launches[0]


def line_of(text: str) -> str:
    """How a report names the only line of traces.cu that holds `text`."""
    ((number, line),) = [(i, line) for i, line in enumerate(TEXT.splitlines(), start=1) if text in line]
    return f"traces.cu:{number}: {line.strip()}"


def aligned(array: Any, boundary: int = 256) -> np.ndarray:
    """A copy that starts on a boundary of `boundary` bytes."""
    array = np.asarray(array)
    room = np.empty(array.nbytes + boundary, np.uint8)
    start = -room.ctypes.data % boundary
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def floats(*shape: int) -> np.ndarray:
    """Zeros, float32, aligned."""
    return aligned(np.zeros(shape, np.float32))
