"""intrinsics.cuh: tensor cores and asynchronous copies on the host, and the same text through NVRTC."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pagebench.kernels import cuda_toolkit, launch_buffers
from pagebench.kernels.cuda_host import MemoryFault, RawModule

SAMPLES = Path(__file__).parent / "cuda_samples"
KERNELS = Path(launch_buffers.__file__).parent
OPTIONS = ("-std=c++17", f"-I{KERNELS}", f"-I{SAMPLES}")

TENSOR_CORE = (
    *(f"mma_from_{where}<{t}>" for where in ("registers", "shared") for t in ("__half", "__nv_bfloat16")),
    *(f"ldmatrix_tile<{trans}>" for trans in ("false", "true")),
    *(f"pipeline<{stages}, {forget}>" for stages, forget in ((2, "false"), (4, "false"), (3, "true"))),
    "scalar_wrappers",
)
DECODE = ("paged_decode<__half, 64>", "paged_decode<__nv_bfloat16, 128>")
DTYPES = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}


def sample(name: str, expressions: tuple[str, ...]) -> RawModule:
    """A module of tests/cuda_samples, every kernel of it compiled."""
    module = RawModule(code=(SAMPLES / name).read_text(), options=OPTIONS, name_expressions=expressions)
    module.compile()
    return module


@pytest.fixture(scope="module")
def tensor_core() -> RawModule:
    return sample("tensor_core.cu", TENSOR_CORE)


def aligned(array: np.ndarray, boundary: int = 256) -> np.ndarray:
    """A copy that starts on a boundary of `boundary` bytes."""
    room = np.empty(array.nbytes + boundary, np.uint8)
    start = -room.ctypes.data % boundary
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("name", ["__half", "__nv_bfloat16"])
def test_mma_fragments(tensor_core: RawModule, name: str) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(16, 16)).astype(DTYPES[name]), rng.normal(size=(16, 8)).astype(DTYPES[name])
    c, out = rng.normal(size=(16, 8)).astype(np.float32), np.zeros((16, 8), np.float32)
    exact = a.astype(float) @ b.astype(float)
    tensor_core.get_function(f"mma_from_registers<{name}>")((1,), (32,), (a, b, c, out))
    np.testing.assert_allclose(out, exact + c, rtol=0, atol=1e-6)
    tensor_core.get_function(f"mma_from_shared<{name}>")((1,), (32,), (a, b, out))
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6)


def test_ldmatrix_layout(tensor_core: RawModule) -> None:
    tile, out = np.arange(256, dtype=np.uint16), np.zeros((32, 4), np.uint32)
    matrices = tile.reshape(4, 8, 8)
    for trans in (False, True):
        tensor_core.get_function(f"ldmatrix_tile<{str(trans).lower()}>")((1,), (32,), (tile, out))
        rows = matrices.transpose(0, 2, 1) if trans else matrices
        expected = rows.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4, 2)  # [lane = row, pair][matrix][half]
        np.testing.assert_array_equal(out.view(np.uint16).reshape(32, 4, 2), expected)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("n", [1, 127, 128, 1001])
def test_cp_async_pipeline(tensor_core: RawModule, stages: int, n: int) -> None:
    x, out = np.arange(n, dtype=np.float32), np.zeros(1, np.float32)
    tensor_core.get_function(f"pipeline<{stages}, false>")((1,), (32,), (aligned(x), out, np.int32(n)))
    assert out[0] == x.sum()


def test_cp_async_without_its_wait_reads_poison(tensor_core: RawModule) -> None:
    out = np.zeros(1, np.float32)
    tensor_core.get_function("pipeline<3, true>")((1,), (32,), (aligned(np.ones(512, np.float32)), out, np.int32(512)))
    assert np.isnan(out[0])


def test_vector_copies_and_scalar_wrappers(tensor_core: RawModule) -> None:
    words = aligned(np.arange(128, dtype=np.uint32))
    copy, x = aligned(np.zeros(256, np.uint32)), np.array([1.5, 8, 1 / 3], np.float32)
    out, bits = np.zeros(5, np.float32), np.array([0, 0xF0F0, 0xCCFF, 0x1], np.uint32)
    tensor_core.get_function("scalar_wrappers")((1,), (32,), (words, copy, x, out, bits))
    np.testing.assert_array_equal(copy, np.concatenate([words, words]))
    third = np.float32(1 / 3)
    expected = [2**1.5, 3, 0, third.astype(np.float16), third.astype(ml_dtypes.bfloat16)]
    np.testing.assert_allclose(out, np.array(expected, np.float32), rtol=1e-6)
    assert bits[0] == (0xF0F0 & 0xCCFF) | 1


@pytest.mark.parametrize("expression", DECODE)
def test_paged_decode(expression: str) -> None:
    name, head_size = re.findall(r"<(\w+), (\d+)>", expression)[0]
    kv_heads, group, block_size, size = 2, 3, 16, int(head_size)
    lens = np.array([1, 17, 64, 150], np.int32)
    rng = np.random.default_rng(3)
    query = aligned(rng.normal(size=(4, kv_heads * group, size)).astype(DTYPES[name]))
    cache = aligned(rng.normal(size=(2, 24, block_size, kv_heads, size)).astype(DTYPES[name]))
    table = np.full((4, 12), 2**30, np.int32)
    unused = list(rng.permutation(24))
    for row, n in zip(table, lens, strict=True):
        used = -(-n // block_size)
        row[:used] = [unused.pop() for _ in range(used)]
    out, lse = np.zeros_like(query), np.zeros(query.shape[:2], np.float32)
    shape = np.dtype(
        [(n, "i4") for n in ("num_kv_heads", "group", "block_size", "max_blocks")] + [("scale_log2", "f4")]
    )
    numbers = np.array((kv_heads, group, block_size, 12, np.log2(np.e) / np.sqrt(size)), shape)
    kernel = sample("paged_decode.cu", (expression,)).get_function(expression)
    kernel_args = (query, cache[0], cache[1], table, lens, out, lse, numbers)
    shared = 9 * 16 * (size + 8) * 2
    kernel((4, kv_heads), (128,), kernel_args, shared_mem=shared)
    for i, n in enumerate(lens):
        keys, values = (c[table[i, : -(-n // 16)]].reshape(-1, kv_heads, size)[:n].astype(float) for c in cache)
        for head in range(kv_heads * group):
            logits = keys[:, head // group] @ query[i, head].astype(float) / np.sqrt(size)
            weights = np.exp(logits - logits.max())
            expected = weights / weights.sum() @ values[:, head // group]
            np.testing.assert_allclose(out[i, head].astype(float), expected, atol=0.02, rtol=0.02)
            np.testing.assert_allclose(lse[i, head], logits.max() + np.log(weights.sum()), atol=1e-5)
    table[3, 9] = 24  # one past the last block
    with pytest.raises(MemoryFault, match=r"'(key|value)_cache' at element .* at paged_decode.cu:\d+"):
        kernel((4, kv_heads), (128,), kernel_args, shared_mem=shared)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_compiles_the_intrinsics(arch: str) -> None:
    compile_for_gpu("tensor_core.cu", TENSOR_CORE, arch)


@pytest.mark.parametrize(
    ("file", "expressions"),
    [("basics.cu", ("row_sums<__half, 128>", "scale_many<float>")), ("paged_decode.cu", DECODE[:1])],
)
def test_nvrtc_compiles_the_samples(file: str, expressions: tuple[str, ...]) -> None:
    compile_for_gpu(file, expressions, "sm_90")


def compile_for_gpu(file: str, expressions: tuple[str, ...], arch: str) -> None:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram((SAMPLES / file).read_text(), file, (), ())
    for expression in expressions:
        nvrtc.addNameExpression(program, expression)
    includes = [f"-I{path}" for path in cuda_toolkit.include_dirs()]
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={arch}", *includes))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len(nvrtc.getCUBIN(program)) > 1000
