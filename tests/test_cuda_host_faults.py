"""Every kind of fault of a kernel on the host is an exception that says where, and the process goes on."""

import re
from pathlib import Path

import numpy as np
import pytest

from pagebench.kernels import cuda_host, launch_buffers
from pagebench.kernels.cuda_host import (
    BarrierDivergence,
    CompileError,
    KernelAborted,
    KernelTimeout,
    MemoryFault,
    MisalignedAccess,
    RawModule,
    UndefinedBehaviour,
)
from pagebench.kernels.launch_buffers import host_pointer_table

SAMPLES = Path(__file__).parent / "cuda_samples"
KERNELS = Path(launch_buffers.__file__).parent
OPTIONS = ("-std=c++17", f"-I{KERNELS}", f"-I{SAMPLES}")


def enumerators(name: str) -> list[str]:
    body = re.search(rf"enum {name} \{{(.*?)\}}", (SAMPLES / "faults.cu").read_text(), re.DOTALL)
    assert body is not None
    return re.findall(r"k\w+", body[1])


FAULTS = enumerators("Fault")
DIVERGENCES = enumerators("Divergence")


@pytest.fixture(scope="module")
def faults() -> RawModule:
    names = ("faulty", "divergent", "foreign_stack")
    module = RawModule(code=(SAMPLES / "faults.cu").read_text(), options=OPTIONS, name_expressions=names)
    module.compile()
    return module


def aligned(array: np.ndarray, boundary: int = 256) -> np.ndarray:
    """A copy that starts on a boundary of `boundary` bytes."""
    room = np.empty(array.nbytes + boundary, np.uint8)
    start = -room.ctypes.data % boundary
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run_faulty(faults: RawModule, kind: str, i: int, count: int = 4) -> None:
    data = aligned(np.zeros(64, np.float32))
    table = host_pointer_table([data, np.zeros(16, np.float32)])
    args = (data, table, np.int64(i), np.int32(count), np.int32(FAULTS.index(kind)))
    faults.get_function("faulty")((2,), (64,), args, shared_mem=128)


@pytest.mark.parametrize(
    ("kind", "i", "access", "buffer", "index"),
    [
        (kind, i, access, buffer, i)
        for kind, access, buffer, indices in (
            ("kLoad", "load", "data", (-1, 64)),
            ("kStore", "store", "data", (-1, 64)),
            ("kAtomic", "atomic", "data", (-1, 64)),
            ("kSharedLoad", "load", "__shared__ tile", (-1, 64)),
            ("kSharedStore", "store", "__shared__ tile", (-1, 64)),
            ("kDynamicLoad", "load", "dynamic shared memory", (-1, 32)),
            ("kDynamicStore", "store", "dynamic shared memory", (-1, 32)),
            ("kLocalArray", "index", "array float [4]", (-1, 4)),
            ("kMemcpyFrom", "load", "data", (64, -1)),
            ("kMemcpyTo", "store", "data", (64, -1)),
            ("kTable", "load", "table[1]", (-1, 16)),
            ("kDeviceStore", "store", "__device__ device_values", (4,)),
            ("kCopyAsync", "load", "data", (-4, 64)),
        )
        for i in indices
    ],
)
def test_out_of_bounds(faults: RawModule, kind: str, i: int, access: str, buffer: str, index: int) -> None:
    with pytest.raises(MemoryFault, match=r", at faults\.cu:\d+$") as caught:
        run_faulty(faults, kind, i)
    fault = caught.value
    assert fault.buffer is not None
    assert (fault.kind, fault.buffer.name, fault.index) == (access, buffer, index)
    assert (fault.kernel, fault.program, fault.thread) == ("faulty", (0, 0, 0), (5, 0, 0))


@pytest.mark.parametrize(
    ("kind", "indices"),
    [
        ("kLoad", (0, 63)),
        ("kStore", (0, 63)),
        ("kAtomic", (0, 63)),
        ("kSharedStore", (0, 63)),
        ("kDynamicLoad", (0, 31)),
        ("kMisalignedLoad", (0, 60)),
        ("kMisalignedStore", (0, 60)),
        ("kVectorLoad", (0, 15)),
        ("kLocalArray", (0, 3)),
        ("kMemcpyFrom", (0, 63)),
        ("kTable", (0, 15)),
        ("kDeviceStore", (0, 3)),
        ("kCopyAsync", (0, 60)),
        ("kMatrixRow", (0, 60)),
        ("kDivision", (1,)),
        ("kOverflow", (2**31 - 5,)),
        ("kShift", (0, 31)),
        ("kToInteger", (-(2**21), 2**21 - 1)),
        ("kLaunderedLoad", (0, 3)),
        ("kLaunderedStore", (0, 3)),
        ("kAssert", (0,)),
    ],
)
def test_the_last_element_is_in_bounds(faults: RawModule, kind: str, indices: tuple[int, ...]) -> None:
    for i in indices:
        run_faulty(faults, kind, i)


def test_a_partial_overrun_is_out_of_bounds(faults: RawModule) -> None:
    with pytest.raises(MemoryFault, match=r"load of 8 bytes, buffer 'data' at element 63 of 64"):
        run_faulty(faults, "kMemcpyFrom", 63, count=8)
    with pytest.raises(MemoryFault, match=r"buffer 'data' at element 64 of 64"):
        run_faulty(faults, "kVectorLoad", 16)


@pytest.mark.parametrize("kind", ["kMisalignedLoad", "kMisalignedStore", "kCopyAsync", "kMatrixRow"])
@pytest.mark.parametrize("i", [1, 61])
def test_misaligned_vectors(faults: RawModule, kind: str, i: int) -> None:
    where = f"'__shared__ tile' at element {i // 4}" if kind == "kMatrixRow" else f"'data' at element {i}"
    with pytest.raises(MisalignedAccess, match=rf"{where}, not a multiple of 16.*, at faults\.cu:\d+$"):
        run_faulty(faults, kind, i)


@pytest.mark.parametrize(
    ("kind", "i", "count", "error", "message"),
    [
        ("kDivision", 0, 4, UndefinedBehaviour, "integer division by zero of type 'int'"),
        ("kOverflow", 2**31 - 4, 4, UndefinedBehaviour, "signed overflow in \\+ of type 'int'"),
        ("kShift", 32, 4, UndefinedBehaviour, r"negative or not less than the width, of type 'int', .*faults\.cu:\d+$"),
        ("kShift", -1, 4, UndefinedBehaviour, "negative or not less than the width, of type 'int'"),
        ("kToInteger", 2**21, 4, UndefinedBehaviour, r"converted from 'float' to .* 'int', .*faults\.cu:\d+$"),
        ("kLaunderedLoad", 4, 4, MemoryFault, r"load.*outside the variable.*, at faults\.cu:\d+$"),
        ("kLaunderedStore", 5, 4, MemoryFault, "store.*outside the variable"),
        ("kAssert", 1, 4, KernelAborted, "assertion failed: i == 0"),
        ("kTrap", 0, 4, KernelAborted, "__trap"),
        ("kRecursion", 0, 10**6, KernelAborted, "stack overflow"),
        ("kConstantStore", 0, 4, MemoryFault, "'__device__ constant_values' .*read-only"),
        ("kNullStore", 0, 4, MemoryFault, "address 0x0, near no buffer"),
        ("kLoad", 10**12, 4, MemoryFault, "near no buffer"),
        (
            "kLoad",
            10**6,
            4,
            MemoryFault,
            r"0x\w+, in no buffer of the launch: \d+ bytes (past the end|before the start) of '.*' is the nearest",
        ),
        (
            "kUnsignedIndex",
            -1,
            4,
            MemoryFault,
            r"array float \[4\]' at element -1 of 4.*wrapped below 0, to 4294967295",
        ),
        ("kUnsignedIndex", 4, 4, MemoryFault, r"array float \[4\]' at element 4 of 4, by"),
        ("kCachedLoad", 1, 4, MisalignedAccess, r"not a multiple of 16.*, at faults\.cu:\d+$"),
        ("kWrapperShared", 0, 4, MemoryFault, "needs a pointer to global memory"),
    ],
)
def test_other_faults(faults: RawModule, kind: str, i: int, count: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_faulty(faults, kind, i, count)
    run_faulty(faults, "kLoad", 0)  # the module is usable afterwards


def test_a_kernel_that_never_ends(faults: RawModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_host, "time_limit_s", 0.05)
    with pytest.raises(KernelTimeout):
        run_faulty(faults, "kEndless", 0)


def test_another_threads_stack_is_out_of_bounds(faults: RawModule) -> None:
    with pytest.raises(MemoryFault, match=r"load of 4 bytes.*thread \(1, 0, 0\)"):
        faults.get_function("foreign_stack")((1,), (32,), (np.zeros(32, np.float32),))


def test_dynamic_shared_memory_that_the_launch_does_not_provide() -> None:
    code = """__global__ void other(float* out) {
      __shared__ float tile[64];
      tile[threadIdx.x] = out[0];
      out[1] = tile[0];
    }
    extern "C" __global__ void k(float* out) {
      extern __shared__ float room[];
      room[threadIdx.x] = out[0];
      out[1] = room[0];
    }"""
    kernel = RawModule(code=code).get_function("k")
    kernel((1,), (4,), (np.zeros(4, np.float32),), shared_mem=16)
    for given in (0, 12):
        with pytest.raises(
            MemoryFault, match=rf"'dynamic shared memory' at element {given // 4} of .*provides {given} bytes"
        ):
            kernel((1,), (4,), (np.zeros(4, np.float32),), shared_mem=given)


def test_a_read_only_array_and_the_standard_assert() -> None:
    code = """#include <cassert>
    extern "C" __global__ void fill(int* out) { assert(gridDim.x == 1); out[threadIdx.x] = 1; }"""
    kernel = RawModule(code=code).get_function("fill")
    out = np.zeros(4, np.int32)
    kernel((1,), (4,), (out,))
    with pytest.raises(KernelAborted, match=r"assertion failed: gridDim\.x == 1"):
        kernel((2,), (4,), (out,))
    out.flags.writeable = False
    with pytest.raises(MemoryFault, match=r"store of 4 bytes, buffer 'out' at element 0 of 4.*read-only"):
        kernel((1,), (4,), (out,))


def test_a_stack_frame_larger_than_a_threads_stack_does_not_compile() -> None:
    code = 'extern "C" __global__ void k(int* out) { volatile int big[99999]; big[out[0]] = 1; out[1] = big[2]; }'
    with pytest.raises(CompileError, match="frame size"):
        RawModule(code=code).get_function("k")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "kExitAndBranches",
            "threads 0-31 wait at __syncthreads, .*; threads 32-39 wait .*; threads 40-40 exited; threads 41-63 wait",
        ),
        ("kBranches", "threads 0-31 wait at __syncthreads, line .*; threads 32-63 wait at __syncthreads"),
        ("kOtherBarrier", "wait at __syncthreads_or.*wait at __syncthreads,"),
        ("kMissingLane", "threads 0-2 wait in __shfl_sync with mask 0xffffffff, .*; threads 3-3 wait at __syncthreads"),
        ("kOneLine", r"threads 0-31 wait at __syncthreads, line \d+; threads 32-63 wait at __syncthreads, line"),
        ("kExitedSource", r"__shfl_sync with mask 0xffffffff: lane 0 reads lane 3, which has exited.*, at line \d+$"),
        ("kUnnamedSource", "mask 0x0000ffff: lane 8 reads lane 16, which the mask does not name"),
        ("kOutsideMask", "mask 0x0000ffff, which does not name the calling lane 16"),
    ],
)
def test_barrier_divergence(faults: RawModule, kind: str, message: str) -> None:
    kernel, out = faults.get_function("divergent"), np.zeros(64, np.int32)
    with pytest.raises(BarrierDivergence, match=message):
        kernel((1,), (64,), (out, np.int32(DIVERGENCES.index(kind))))
    kernel((1,), (64,), (out, np.int32(DIVERGENCES.index("kNoFault"))))
    np.testing.assert_array_equal(out, np.arange(64))


@pytest.mark.parametrize(("kind", "exited"), [("kEarlyExit", [40]), ("kOnlyHalf", [])])
def test_a_barrier_waits_for_no_thread_that_has_exited(faults: RawModule, kind: str, exited: list[int]) -> None:
    out = np.full(64, -1, np.int32)
    faults.get_function("divergent")((1,), (64,), (out, np.int32(DIVERGENCES.index(kind))))
    np.testing.assert_array_equal(out, [-1 if t in exited else t for t in range(64)])


def test_exited_threads_do_not_vote() -> None:
    code = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x >= 40) return;
      out[threadIdx.x] = __syncthreads_count(1) + 100 * __syncthreads_and(1) + 1000 * __syncthreads_or(0);
    }"""
    out = np.zeros(64, np.int32)
    RawModule(code=code).get_function("k")((1,), (64,), (out,))
    assert out.tolist() == [140] * 40 + [0] * 24


@pytest.mark.parametrize("expression", ["static_cast<int*>(malloc(n))", "new int[n]", "new int(n)"])
def test_a_kernel_has_no_heap(expression: str) -> None:
    code = f'extern "C" __global__ void k(int** out, int n) {{ out[0] = {expression}; }}'
    with pytest.raises(CompileError, match="device-side malloc and new are not supported on the host"):
        RawModule(code=code).get_function("k")
