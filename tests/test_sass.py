"""Compiled kernels are read right: against NVIDIA's own occupancy rules, and on kernels whose properties are known."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import _sass
from bench._launch import CompiledLaunch, full_grid
from bench._record_cuda import CudaCompileError, RecordingRawModule, include_options, nvrtc_compile, recording_module

ROOT = Path(__file__).resolve().parent.parent

TRITON_SAMPLES = """
import torch, triton, triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

@triton.jit
def divide(x, out, EXACT: tl.constexpr):
    at = tl.arange(0, 128)
    a = tl.load(x + at)
    b = tl.load(x + 128 + at)
    tl.store(out + at, tl.div_rn(a, b) if EXACT else a / b)

@triton.jit
def matmul(a, b, c, K, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr):
    rows, cols, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, TILE)
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, K, TILE):
        left = tl.load(a + rows[:, None] * K + (k + ks)[None, :])
        acc = tl.dot(left, tl.load(b + (k + ks)[:, None] * N + cols[None, :]), acc)
    tl.store(c + rows[:, None] * N + cols[None, :], acc)

def launch():
    x = torch.zeros(4096, dtype=torch.float16)
    by_meta = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)
    add[by_meta](x, x, x, 4096, BLOCK=1024)
    add[(1, 2)](x[1:], x, x, 4095, BLOCK=1024, num_warps=8)
    f = torch.zeros(256)
    divide[(1,)](f, f, EXACT=False)
    divide[(1,)](f, f, EXACT=True)
    h = torch.zeros(128, 256, dtype=torch.float16)
    matmul[(1,)](h, h, torch.zeros(128, 64), 256, M=128, N=64, TILE=64, num_stages=3)
"""
RECORD = """
import json, sys, tempfile
from bench._codegen import _isolate, triton_launches
archs = [int(arch) for arch in sys.argv[1:]]
with tempfile.TemporaryDirectory() as cache:
    _isolate(archs[0], cache)
    import samples
    print(json.dumps({arch: [launch.to_json() for launch in triton_launches(samples.launch, arch)] for arch in archs}))
"""


def record_samples(folder: Path, archs: Sequence[int], hash_seed: str) -> dict[str, list[dict[str, Any]]]:
    (folder / "samples.py").write_text(TRITON_SAMPLES)
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONHASHSEED": hash_seed}
    # A hostile setting of the user's must not reach the recording.
    env |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-P", "-c", RECORD, *map(str, archs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return record_samples(tmp_path_factory.mktemp("samples"), _sass.ARCHS, "1")


@pytest.fixture(params=_sass.ARCHS)
def launches(request: pytest.FixtureRequest, recorded: dict[str, list[dict[str, Any]]]) -> list[CompiledLaunch]:
    return [CompiledLaunch.from_json(item) for item in recorded[str(request.param)]]


def test_launcher_decides_grid_and_warps(launches: list[CompiledLaunch]) -> None:
    assert [launch.kernel for launch in launches] == ["add", "add", "divide", "divide", "matmul"]
    assert [launch.grid for launch in launches[:2]] == [(4, 1, 1), (1, 2, 1)]
    assert [launch.threads for launch in launches[:2]] == [128, 256]


def test_alignment_decides_width(launches: list[CompiledLaunch]) -> None:
    aligned, shifted = launches[0].stats, launches[1].stats
    assert aligned.global_loads == {128: 2}
    assert aligned.global_stores == {128: 1}
    assert aligned.narrow_accesses == 0
    assert set(shifted.global_loads) == {16}
    assert shifted.narrow_accesses > 8


def test_ptx_shows_the_rounding_of_division(launches: list[CompiledLaunch]) -> None:
    approximate, exact = launches[2].ptx, launches[3].ptx
    assert "div.full.f32" in approximate
    assert "div.full.f32" not in exact
    assert "div.rn.f32" in exact


def test_matrix_class_is_the_architectures(launches: list[CompiledLaunch]) -> None:
    matmul = launches[4]
    expected = {80: ("HMMA", 2), 90: ("HGMMA", 1), 100: ("UTCHMMA", 0)}[matmul.arch]
    assert (*matmul.stats.matrix, matmul.stats.matrix_class) == expected
    assert launches[0].stats.matrix_class == len(_sass.MATRIX_CLASSES)


def test_pipelined_loads_and_shared_memory(launches: list[CompiledLaunch]) -> None:
    matmul = launches[4]
    assert set(matmul.stats.async_copies) == {128}
    # At least two stages of one half tile of each operand: (128 + 64) x 64 x 2 bytes.
    assert matmul.shared_bytes >= 2 * (128 + 64) * 64 * 2
    assert matmul.stats.barriers > 0
    assert matmul.tensor_memory_columns == (64 if matmul.arch == 100 else 0)


def test_occupancy_of_a_launch(launches: list[CompiledLaunch]) -> None:
    add = launches[0]
    assert (add.programs_per_sm, add.warps_per_sm) == (16, 64)
    assert add.waves == 4 / (16 * _sass.SM_LIMITS[add.arch].sm_count)


def test_same_numbers_in_every_process(recorded: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    """Another process, hash seed, folder and order of targets."""
    assert record_samples(tmp_path, [90], "2")["90"] == recorded["90"]


def test_recording_refuses_a_process_that_already_imported_triton() -> None:
    code = "import triton\nfrom bench._codegen import _isolate\n_isolate(90, '/nowhere')"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "a process of its own" in done.stderr


SCALE = """
#include <cuda_fp16.h>
template <typename T, int ROWS> __global__ void scale(T* x) {
  __shared__ float kept[64];
  extern __shared__ float given[];
  kept[threadIdx.x % 64] = given[threadIdx.x % ROWS];
  __syncthreads();
  x[threadIdx.x] = T(float(x[threadIdx.x]) * kept[(threadIdx.x + 1) % 64]);
}
"""
SPILLING = """
extern "C" __global__ void spills(float* x, int n) {
  float kept[64];
  for (int i = 0; i < 64; i++) kept[i] = x[i * n];
  __syncthreads();
  for (int i = 0; i < 64; i++) x[i * n + kept[(i + 7) % 64] > 0] = kept[i] * kept[(i * 5) % 64];
}
"""
WIDE = """
extern "C" __global__ void wide(const uint4* a, uint4* b, const unsigned char* c, unsigned char* d) {
  b[threadIdx.x] = a[threadIdx.x];
  d[threadIdx.x] = c[threadIdx.x];
}
"""


@pytest.mark.parametrize("arch", _sass.ARCHS)
def test_shared_memory_of_cuda(arch: int) -> None:
    module = nvrtc_compile(SCALE, (), ["scale<float, 4>", "scale<__half, 8>"], arch)
    assert len(module.kernels) == 2
    single, half = (module.kernels[module.symbol(name)] for name in module.lowered)
    assert single.static_shared_bytes == half.static_shared_bytes == 64 * 4
    assert single.barriers == 1
    assert single.global_loads == {32: 1}
    assert half.global_loads == {16: 1}


@pytest.mark.parametrize("arch", _sass.ARCHS)
def test_spills_are_seen(arch: int) -> None:
    roomy = nvrtc_compile(SPILLING, (), None, arch).kernels["spills"]
    tight = nvrtc_compile(SPILLING, ("-maxrregcount=32",), None, arch).kernels["spills"]
    assert (roomy.spills, roomy.stack_bytes) == (0, 0)
    assert tight.local_loads > 0
    assert tight.local_stores > 0
    assert tight.stack_bytes > 0
    assert tight.registers <= 32 < roomy.registers


@pytest.mark.parametrize("arch", _sass.ARCHS)
def test_access_widths_of_cuda(arch: int) -> None:
    stats = nvrtc_compile(WIDE, (), None, arch).kernels["wide"]
    assert stats.global_loads == stats.global_stores == {8: 1, 128: 1}
    assert stats.narrow_accesses == 2


def test_contraction_option_reaches_the_ptx() -> None:
    code = 'extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }'
    assert "fma.rn.f32" in nvrtc_compile(code).ptx_of("f")
    assert "fma.rn.f32" not in nvrtc_compile(code, ("-fmad=false",)).ptx_of("f")


def test_recording_module_has_cupys_interface() -> None:
    launches: list[CompiledLaunch] = []
    module = recording_module(90, launches)(code=SCALE, options=("-std=c++17",), name_expressions=["scale<float, 4>"])
    kernel = module.get_function("scale<float, 4>")
    with pytest.raises(ValueError, match=r"shared_mem must lie in 0\.\.49152"):
        kernel((3, 2), (64,), (None,), shared_mem=60_000)
    kernel.max_dynamic_shared_size_bytes = 60_000
    kernel((3, 2), (64,), (None,), shared_mem=60_000)
    (launch,) = launches
    assert (launch.grid, launch.threads, launch.shared_bytes) == ((3, 2, 1), 64, 60_256)
    assert launch.programs_per_sm == 3
    assert launch.ptx.count(".entry") == 1
    assert CompiledLaunch.from_json(json.loads(json.dumps(launch.to_json()))) == launch


@pytest.mark.parametrize("block", [(0,), (1025,), (32, 32, 2)])
def test_impossible_block_is_refused(block: tuple[int, ...]) -> None:
    kernel = RecordingRawModule(code=WIDE).get_function("wide")
    with pytest.raises(ValueError, match=r"block must have 1\.\.1024 threads"):
        kernel((1,), block, ())


def test_more_shared_memory_than_the_gpu_has_is_refused() -> None:
    name = "scale<float, 4>"
    kernel = RecordingRawModule(code=SCALE, name_expressions=[name], arch=80).get_function(name)
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes must lie in"):
        kernel.max_dynamic_shared_size_bytes = 163 * 1024


def test_compile_error_carries_the_log() -> None:
    with pytest.raises(CudaCompileError, match='identifier "nonsense" is undefined'):
        nvrtc_compile('extern "C" __global__ void f(float* x) { x[0] = nonsense; }')


def test_unknown_kernel_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="wide"):
        RecordingRawModule(code=WIDE).get_function("narrow")


@pytest.mark.parametrize("arch", [70, 91, "90"])
def test_unknown_architecture(arch: object) -> None:
    with pytest.raises(ValueError, match="arch must be one of"):
        _sass.limits_of(arch)  # type: ignore[arg-type]  # the point of the test


def test_unreadable_output_is_an_error() -> None:
    with pytest.raises(_sass.DisassemblyError, match="no kernel"):
        _sass.parse("nothing here", "", 90)
    with pytest.raises(_sass.DisassemblyError, match="no instruction of kernel 'f'"):
        _sass.parse(" Function f:\n  REG:8 STACK:0 SHARED:0 LOCAL:0", "", 90)
    with pytest.raises(_sass.DisassemblyError, match="exited with"):
        _sass.disassemble(b"not a cubin", 90)


@pytest.mark.parametrize("grid", [(), (1, 2, 3, 4), (-1,)])
def test_grid_of_wrong_shape(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grid must be one to three counts"):
        full_grid(grid)


OCCUPANCY = r"""
#include <cuda_occupancy.h>
#include <cstddef>
extern "C" int blocks(int major, size_t shared_per_sm, size_t shared_per_block, int sms, int threads, int registers,
                      size_t shared) {
  cudaOccDeviceProp gpu{};
  gpu.computeMajor = major; gpu.computeMinor = 0; gpu.maxThreadsPerBlock = 1024;
  gpu.maxThreadsPerMultiprocessor = 2048; gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536; gpu.warpSize = 32;
  gpu.sharedMemPerBlock = 49152; gpu.sharedMemPerMultiprocessor = shared_per_sm; gpu.numSms = sms;
  gpu.sharedMemPerBlockOptin = shared_per_block; gpu.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes kernel{};
  kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers;
  kernel.partitionedGCConfig = PARTITIONED_GC_OFF; kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.maxDynamicSharedSizeBytes = shared_per_block;
  cudaOccDeviceState state{};
  cudaOccResult result{};
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, threads, shared)) return -1;
  return result.activeBlocksPerMultiprocessor;
}
"""


def test_occupancy_follows_nvidias_header(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed, as it is for the host runs"
    source, library = tmp_path / "occupancy.cpp", tmp_path / "occupancy.so"
    source.write_text(OCCUPANCY)
    subprocess.run([compiler, "-shared", "-fPIC", *include_options(), str(source), "-o", str(library)], check=True)
    blocks = ctypes.CDLL(str(library)).blocks
    blocks.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
    compared = 0
    for arch, limits in _sass.SM_LIMITS.items():
        for threads in (1, 32, 33, 64, 96, 128, 160, 256, 384, 512, 768, 1024):
            for registers in (0, 1, 16, 24, 32, 33, 40, 64, 72, 80, 96, 128, 168, 200, 255):
                for shared in (0, 1, 1000, 4096, 20_000, 33_000, 56_000, 75_000, 100_000, 163 * 1024, 227 * 1024):
                    theirs = blocks(
                        arch // 10,
                        limits.shared_bytes,
                        limits.shared_bytes_per_program,
                        limits.sm_count,
                        threads,
                        registers,
                        shared,
                    )
                    ours = _sass.programs_per_sm(arch, threads=threads, registers=registers, shared_bytes=shared)
                    assert ours == max(theirs, 0), (arch, threads, registers, shared, theirs)
                    compared += 1
    assert compared == 3 * 12 * 15 * 11


def test_tensor_memory_limits_occupancy() -> None:
    def resident(columns: int) -> int:
        return _sass.programs_per_sm(100, threads=128, registers=32, shared_bytes=0, tensor_memory_columns=columns)

    assert [resident(columns) for columns in (0, 64, 256, 512)] == [16, 8, 2, 1]
