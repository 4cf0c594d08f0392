"""CUDA C++ on the host computes what a GPU would, behind CuPy's call interface."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagebench.kernels import cuda_host, cuda_host_build, cuda_toolkit, launch_buffers
from pagebench.kernels.cuda_host import CompileError, CompilerMissing, RawModule
from pagebench.kernels.cuda_host_source import expand, parameter_names
from pagebench.kernels.launch_buffers import host_pointer_table

SAMPLES = Path(__file__).parent / "cuda_samples"
KERNELS = Path(launch_buffers.__file__).parent
OPTIONS = ("-std=c++17", f"-I{KERNELS}", f"-I{SAMPLES}")

BASICS = (
    "row_sums<float, 128>",
    "row_sums<__nv_bfloat16, 64>",
    "reverse_blocks<double>",
    "reverse_blocks<unsigned char>",
    "shift_racing",
    "coordinates",
    "histogram",
    "locked_count",
    "scale_many<float>",
    "affine",
    "partial_warp",
    "shuffle_types",
    "block_votes",
    "module_state",
    "intrinsics",
    "saturating",
    "keywords",
)


def sample(name: str, expressions: tuple[str, ...]) -> RawModule:
    """A module of tests/cuda_samples, every kernel of it compiled."""
    module = RawModule(code=(SAMPLES / name).read_text(), options=OPTIONS, name_expressions=expressions)
    module.compile()
    return module


@pytest.fixture(scope="module")
def basics() -> RawModule:
    return sample("basics.cu", BASICS)


# ---- What kernels compute


def test_vector_add_over_a_partial_last_block(basics: RawModule) -> None:
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    out = np.full(1000, np.nan, np.float32)
    basics.get_function("vector_add")((8,), (128,), (x, y, out, np.int32(1000)))
    np.testing.assert_array_equal(out, x + 1)


@pytest.mark.parametrize(
    ("expression", "threads", "dtype"), [(BASICS[0], 128, np.float32), (BASICS[1], 64, ml_dtypes.bfloat16)]
)
def test_row_sums_of_a_strided_view(basics: RawModule, expression: str, threads: int, dtype: Any) -> None:
    rows = np.arange(7 * 50).reshape(7, 50).astype(dtype)[:, 3:40]
    out = np.zeros(7, np.float32)
    stride = np.int64(rows.strides[0] // rows.itemsize)
    basics.get_function(expression)((7,), (threads,), (rows, out, stride, np.int32(37)))
    np.testing.assert_array_equal(out, rows.astype(np.float32).sum(axis=1))


@pytest.mark.parametrize(("expression", "dtype"), [(BASICS[2], np.float64), (BASICS[3], np.uint8)])
def test_dynamic_shared_memory(basics: RawModule, expression: str, dtype: Any) -> None:
    x = np.arange(240).astype(dtype)
    out = np.zeros_like(x)
    basics.get_function(expression)((5,), (48,), (x, out), shared_mem=48 * x.itemsize)
    np.testing.assert_array_equal(out, x.reshape(5, 48)[:, ::-1].ravel())


def test_coordinates_in_three_dimensions(basics: RawModule) -> None:
    grid, block = (3, 2, 4), (4, 3, 2)
    out, visits = np.zeros(4, np.int32), np.zeros((4, 6, 2, 12), np.int32)
    basics.get_function("coordinates")(grid, block, (out, visits))
    z_block, z_thread = np.arange(4).reshape(4, 1, 1, 1), np.arange(2).reshape(1, 1, 2, 1)
    np.testing.assert_array_equal(visits, np.broadcast_to(1 + 100 * z_block + 10 * z_thread, visits.shape))
    assert out.tolist() == [*grid, 32]


def test_atomics_and_the_last_block(basics: RawModule) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    bins, sums, extremes = np.zeros(8, np.uint32), np.zeros(8, np.float32), np.array([0, 255], np.int32)
    ticket, total = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    args = (data, np.int32(1000), bins, sums, extremes, ticket, total)
    basics.get_function("histogram")((3,), (64,), args)
    np.testing.assert_array_equal(bins, np.bincount(data % 8, minlength=8))
    np.testing.assert_array_equal(sums, np.bincount(data % 8, weights=data, minlength=8))
    assert (extremes.tolist(), total[0], ticket[0]) == ([data.max(), data.min()], 1000, 0)


def test_spinning_on_a_lock_lets_the_holder_run(basics: RawModule) -> None:
    lock, count = np.zeros(1, np.int32), np.zeros(1, np.int32)
    basics.get_function("locked_count")((2,), (96,), (lock, count))
    assert count[0] == 192


def test_pointer_table(basics: RawModule) -> None:
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 70, 1)]
    lengths = np.array([3, 70, 1], np.int32)
    basics.get_function("scale_many<float>")(
        (3,), (32,), (host_pointer_table(arrays), lengths, np.int32(3), np.float32(2))
    )
    assert [a[-1] for a in arrays] == [4, 138, 0]


def test_struct_by_value(basics: RawModule) -> None:
    affine = np.dtype([("scale", "f8"), ("offset", "i4", 3), ("negate", "?")], align=True)
    x, out = np.arange(20, dtype=np.int32), np.zeros(20, np.int32)
    value = np.array((1.5, [100, 200, 300], True), affine)
    for scalar in (value, value[()]):  # CuPy takes a 0-d array, NumPy code also passes its scalar
        out[:] = 0
        basics.get_function("affine")((1,), (32,), (x, out, scalar, np.int32(20)))
        np.testing.assert_array_equal(out, -(x * 1.5).astype(int) + np.array([100, 200, 300])[x % 3])


def test_warp_operations_after_some_lanes_left(basics: RawModule) -> None:
    out = np.zeros((32, 8), np.uint32)
    basics.get_function("partial_warp")((1,), (32,), (out,))
    lanes = np.arange(20)
    live, odd = 0xFFFFF, sum(lane for lane in range(20) if lane % 2)
    assert set(out[:20, 0]) == {sum(1 << lane for lane in range(0, 20, 3))}
    assert set(out[:20, 1]) == {3}
    np.testing.assert_array_equal(out[:20, 2], lanes ^ 1)
    np.testing.assert_array_equal(out[:20, 3], lanes // 4 * 4 + (lanes + 5) % 4)
    np.testing.assert_array_equal(out[:20, 4], np.where(lanes % 8 < 2, lanes, lanes - 2))
    assert set(out[:20, 5]) == {live}
    np.testing.assert_array_equal(out[:20, 6], np.where(lanes % 2, odd, live & 0x55555555))
    same = [sum(1 << other for other in range(20) if other // 7 == lane // 7) for lane in range(20)]
    assert out[:20, 7].tolist() == same


def test_shuffles_of_every_width(basics: RawModule) -> None:
    rng = np.random.default_rng(1)
    d, longs = rng.normal(size=32), rng.integers(-(2**40), 2**40, 32)
    h, b = rng.normal(size=32).astype(np.float16), rng.normal(size=(32, 2)).astype(ml_dtypes.bfloat16)
    out = np.zeros(32)
    basics.get_function("shuffle_types")((1,), (32,), (d, longs, h, b, out))
    other = np.arange(32) ^ 3
    expected = d[other] + longs[other] + h[other].astype(float) + b[other, 1].astype(float)
    np.testing.assert_array_equal(out, expected)


def test_barriers_that_vote(basics: RawModule) -> None:
    out = np.zeros((70, 3), np.int32)
    basics.get_function("block_votes")((1,), (70,), (out,))
    assert np.unique(out, axis=0).tolist() == [[14, 1, 1]]


def test_shared_memory_starts_poisoned_and_device_variables_stay(basics: RawModule) -> None:
    kernel = basics.get_function("module_state")
    bits, constants, count = np.zeros(64, np.uint32), np.zeros(4, np.float32), np.zeros(1, np.int32)
    for launch in (1, 2):
        kernel((2,), (32,), (bits, constants, count), shared_mem=128)
        assert set(bits) == {0xFFFFFFFF}
        assert count[0] == launch
    assert constants.tolist() == [0.5, -1, 2, np.inf]


def test_integer_and_conversion_intrinsics(basics: RawModule) -> None:
    x, y, f = 0x80F01234, 0x9ABCDEF0, 2.5
    out = np.zeros(13, np.int64)
    basics.get_function("intrinsics")((1,), (1,), (np.uint32(x), np.uint32(y), np.float32(f), out))
    signed_bytes = [np.array([v], np.uint32).view(np.int8).astype(int) for v in (x, y)]
    assert out.tolist() == [
        bin(x).count("1"),
        0,  # leading zeros
        3,  # lowest set bit, from 1
        int(f"{x:032b}"[::-1], 2),
        0x9ABC1234,  # bytes 7, 6 of y:x above bytes 1, 0
        0xF080F012,  # y:x shifted right by 8
        x * y >> 32,
        2,  # half to even
        2**31 - 1,  # saturated
        0x40200000,
        3,
        int(signed_bytes[0] @ signed_bytes[1]) + 7,
        int(np.float16(f * 3 + float(np.float16(1e-3))).view(np.uint16)),
    ]


def test_intrinsics_saturate_as_ptx_says(basics: RawModule) -> None:
    out = np.zeros(17, np.int64)
    basics.get_function("saturating")((1,), (1,), (np.float32(np.nan), np.float32(1e20), out))
    lowest, highest = -(2**63), 2**63 - 1
    assert out.tolist() == [
        *(0, 2**31 - 1, -(2**31), 0),
        *(lowest, highest, -(2**31), -3),  # NaN to or from 64 bits: the highest bit only
        *(-2, -3, 0),
        *(-1, 0, 2),  # all 64 bits
        *(1, 2, 2 << 31 & 0xFFFFFFFF | 1 << 31 >> 32),
    ]


def test_words_of_the_language(basics: RawModule) -> None:
    out = np.zeros(4, np.int32)
    basics.get_function("keywords")((1,), (4,), (np.int32(5), out))
    assert out.tolist() == [20] * 4


def test_a_missing_barrier_shows_in_reverse_order(basics: RawModule) -> None:
    x, out = np.arange(1, 65, dtype=np.int32), np.zeros(64, np.int32)
    kernel = basics.get_function("shift_racing")
    kernel((1,), (64,), (x, out))
    assert out.tolist() == [0, *range(1, 64)]
    with cuda_host.threads_in_reverse():
        kernel((1,), (64,), (x, out))
    assert out.tolist() == [0] + [-1] * 63


# ---- The call interface


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (3, 7, "'n' must be a signed integer of 4 bytes .* not int64 7"),  # CuPy passes a Python int as int64
        (3, np.float32(7), "'n' must be a signed integer of 4 bytes .* not float32"),
        (3, np.zeros(1, np.int32), "'n' must be a signed integer of 4 bytes, not an array"),
        (0, np.zeros(8, np.float64), "'x' must hold float .* not float64"),
        (0, np.zeros(8, np.float32)[::-1], "'x' must have no negative strides"),
        (0, np.int32(0), "'x' must be an array, None or a 64-bit address"),
    ],
)
def test_arguments_that_do_not_fit(basics: RawModule, position: int, value: Any, message: str) -> None:
    x = np.zeros(8, np.float32)
    args: list[Any] = [x, x, x, np.int32(8)]
    args[position] = value
    with pytest.raises(ValueError, match=message):
        basics.get_function("vector_add")((1,), (8,), args)


def test_argument_count_and_launch_limits(basics: RawModule) -> None:
    kernel, x = basics.get_function("vector_add"), np.zeros(8, np.float32)
    args = (x, x, x, np.int32(8))
    with pytest.raises(ValueError, match=r"args must be 4 values \(x, y, out, n\) for vector_add, not 3"):
        kernel((1,), (8,), args[:3])
    with pytest.raises(ValueError, match="block must have at most 1024 threads, not 2048"):
        kernel((1,), (1024, 2), args)
    with pytest.raises(ValueError, match="grid must have at most 3 extents"):
        kernel((1, 70000), (8,), args)
    with pytest.raises(ValueError, match="shared_mem must be 0 to max_dynamic_shared_size_bytes = 49152, not 50000"):
        kernel((1,), (8,), args, shared_mem=50000)
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (8,), args, shared_mem=50000)
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes must be 0 to 232448"):
        kernel.max_dynamic_shared_size_bytes = 300_000


def test_names_options_and_compile_errors(basics: RawModule) -> None:
    with pytest.raises(ValueError, match="name must be an extern"):
        basics.get_function("row_sums<double, 32>")
    with pytest.raises(ValueError, match="options must be"):
        RawModule(code="", options=("--use_fast_math",))
    with pytest.raises(CompileError, match=r"kernel\.cu:2:.*nowhere"):
        RawModule(code='extern "C" __global__ void k(int* p) {\n  p[0] = nowhere; }').get_function("k")
    with pytest.raises(CompileError, match="60000 bytes of static shared memory"):
        RawModule(
            code='extern "C" __global__ void k(char* p) { __shared__ char s[60000]; s[threadIdx.x] = 0; p[0] = s[1]; }'
        ).get_function("k")


def test_missing_compiler_and_headers_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_host.unavailable() is None
    cuda_host_build.compiler.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    try:
        with pytest.raises(CompilerMissing, match=r"apt-get install g\+\+"):
            cuda_host_build.compiler()
        assert "g++" in (cuda_host.unavailable() or "")
    finally:
        cuda_host_build.compiler.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(cuda_toolkit, "_candidates", list)
    assert "pip install nvidia-cuda-runtime" in (cuda_host.unavailable() or "")


def test_two_builders_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEBENCH_CACHE_DIR", str(tmp_path))

    def make(target: Path) -> None:
        target.mkdir()
        (target / "part").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: cuda_host_build._cached("folder", make), range(16)))
    assert {(p / "part").read_text() for p in paths} == {"whole"}
    assert [p.name for p in (tmp_path / "cuda_host").iterdir()] == ["folder"]


def test_included_headers_are_part_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "once.cuh").write_text('#pragma once\n#include "nested.cuh"\nconstexpr int once = 1;\n')
    (tmp_path / "nested.cuh").write_text("#pragma once\n#include <cstdint>\nconstexpr int nested = 2;\n")
    code = '#include "once.cuh"\n#include "nested.cuh"\n#include "once.cuh"\nint x; // #include "none.cuh"\n'
    source = expand(code, "main.cu", [tmp_path])
    assert set(source.system) == {"cstdint"}
    assert '#line 2 "main.cu"' in source.text
    assert "#pragma" not in source.text


def test_headers_named_by_macros(tmp_path: Path) -> None:
    (tmp_path / "tile.cuh").write_text("constexpr int tile = 3;\n")
    code = """#define HEADER "tile.cuh"
    #define ALIAS HEADER  // another name
    #include ALIAS
    #if __has_include("tile.cuh") && __has_include(HEADER) && __has_include(<cstdint>) && !__has_include("none.cuh")
    #define FOUND 4
    #endif
    #if 0
    #include NOWHERE
    #endif
    extern "C" __global__ void k(int* out) { out[0] = tile + FOUND; }"""
    out = np.zeros(1, np.int32)
    RawModule(code=code, options=(f"-I{tmp_path}",)).get_function("k")((1,), (1,), (out,))
    assert out[0] == 7
    source = expand("#include NAME\n", "main.cu", [tmp_path], ['-DNAME="tile.cuh"'])
    assert "constexpr int tile" in source.text
    two = '#define NAME "tile.cuh"\n#define NAME <other.cuh>\n#include NAME\n'
    with pytest.raises(ValueError, match=r'main\.cu:3: NAME is "tile\.cuh" or <other\.cuh>'):
        expand(two, "main.cu", [tmp_path])


@pytest.mark.parametrize("left", [b"", b"whole", b"wh0le" + bytes(32), b"whole" + bytes(31)])
def test_a_broken_file_in_the_cache_is_built_anew(left: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEBENCH_CACHE_DIR", str(tmp_path))

    def make(target: Path) -> None:
        target.write_bytes(b"whole")

    path = cuda_host_build._cached("file", make)
    built = path.read_bytes()
    path.write_bytes(left)
    assert cuda_host_build._cached("file", make).read_bytes() == built


def test_a_broken_folder_in_the_cache_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEBENCH_CACHE_DIR", str(tmp_path))

    def make(target: Path) -> None:
        target.mkdir()
        (target / "part").write_text("whole")

    path = cuda_host_build._cached("folder", make)
    (path / "part").write_text("who")
    assert (cuda_host_build._cached("folder", make) / "part").read_text() == "whole"


def test_a_module_that_does_not_load_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f'extern "C" __global__ void k(int* out) {{ out[0] = 5; }}  // {os.getpid()}'
    with monkeypatch.context() as patched:
        patched.setattr(cuda_host, "RawKernel", lambda name, library, *rest: library)  # not loaded
        library: Any = RawModule(code=code).get_function("k")
    library.write_bytes(b"not a library")
    cuda_host_build._seal(library)
    out = np.zeros(1, np.int32)
    RawModule(code=code).get_function("k")((1,), (1,), (out,))
    assert out[0] == 5
    library.unlink()


def test_parameter_names_through_attributes_and_defaults() -> None:
    text = """
    template <class T>
    __global__ void __launch_bounds__(kWarps * 32, 2) first(const T* __restrict__ a, /* b */ int (n), float4 v[2]);
    __global__ void second(Pair<int, float> pair, T* const* table) {}
    """
    assert parameter_names(text, "first") == ["a", "n", "v"]
    assert parameter_names(text, "second") == ["pair", "table"]
    assert parameter_names(text, "third") == []


FITTING = (  # a parameter type, dtypes that its argument may have, and dtypes that would be garbage on a GPU
    ("const float*", (np.float32, np.uint32, np.uint8), (np.float16, np.float64)),
    ("const __half*", (np.float16, np.uint16), (ml_dtypes.bfloat16, np.float32)),
    ("const __nv_bfloat16*", (ml_dtypes.bfloat16, np.int16), (np.float16,)),
    ("const int*", (np.int32, np.uint32, np.int8), (np.int64,)),
    ("const unsigned*", (np.uint32, np.float16), ()),
    ("const uint4*", (np.float32, np.uint8), ()),
    ("const void*", (np.float64, np.int16), ()),
    ("const __nv_fp8_e4m3*", (ml_dtypes.float8_e4m3fn, np.uint8), ()),
    ("__half", (np.float16,), (ml_dtypes.bfloat16, np.int16, np.float32)),
    ("__nv_bfloat16", (ml_dtypes.bfloat16,), (np.float16,)),
    ("bool", (np.bool_,), (np.int32,)),
    ("unsigned", (np.int32, np.uint32), (np.float32, np.int64)),
    ("double", (np.float64,), (np.float32, np.int64)),
)


def test_which_types_fit() -> None:
    declared = ", ".join(f"{declaration} p{i}" for i, (declaration, _, _) in enumerate(FITTING))
    kernel = RawModule(code=f'extern "C" __global__ void take({declared}) {{}}').get_function("take")

    def value(i: int, dtype: Any) -> Any:
        return np.ones(4, dtype) if "*" in FITTING[i][0] else np.ones(1, dtype)[0]

    fitting = [value(i, dtypes[0]) for i, (_, dtypes, _) in enumerate(FITTING)]
    for i, (_, good, bad) in enumerate(FITTING):
        for dtype in good:
            kernel((1,), (1,), [*fitting[:i], value(i, dtype), *fitting[i + 1 :]])
        for dtype in bad:
            with pytest.raises(ValueError, match=f"argument 'p{i}' must"):
                kernel((1,), (1,), [*fitting[:i], value(i, dtype), *fitting[i + 1 :]])
