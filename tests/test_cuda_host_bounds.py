"""Bounds of CUDA C++ on the host: a view's own elements, as AddressSanitizer sees them, and every shared variable."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_samples import OPTIONS, SAMPLES, Samples, floats

from pagebench.kernels import cuda_host
from pagebench.kernels.cuda_host import MemoryFault, RawModule
from pagebench.kernels.cuda_host_source import expand


@pytest.fixture(scope="module")
def samples() -> Samples:
    reason = cuda_host.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return Samples()


# ---- Bounds: the view's own elements, on every launch


def touch(samples: Samples, view: np.ndarray, other: np.ndarray, i: int, store: int) -> None:
    samples.launch("touch", 1, 1, view, other, np.int64(i), np.int32(store))


@pytest.mark.parametrize("store", [0, 1])
def test_the_gaps_of_a_strided_view_are_outside(samples: Samples, store: int) -> None:
    base = floats(4, 3, 5, 8)
    view = base[1:3, 1:, 1:4, 2:6]
    numbers = np.arange(base.size).reshape(base.shape)[1:3, 1:, 1:4, 2:6]
    elements = set((numbers - numbers.min()).ravel().tolist())
    for i in range(-12, 230):
        if i in elements:
            touch(samples, view, floats(1), i, store)
            continue
        with pytest.raises(MemoryFault) as caught:
            touch(samples, view, floats(1), i, store)
        fault = caught.value
        assert fault.buffer is not None
        assert (fault.buffer.name, fault.index, fault.kind) == ("view", i, ("load", "store")[store])


def test_the_gaps_of_one_view_may_be_another_live_buffer(samples: Samples) -> None:
    both = floats(4, 2, 8)
    touch(samples, both[:, 0], both[:, 1], 8, 1)  # an element of `other`
    with pytest.raises(MemoryFault, match="between the elements of a view"):
        touch(samples, both[:, 0], floats(1), 8, 1)
    with pytest.raises(MemoryFault):
        touch(samples, both[:, 0, :6], both[:, 1], 6, 0)  # of neither


def test_a_read_only_view_among_the_gaps_of_another(samples: Samples) -> None:
    both = floats(4, 2, 8)
    frozen = both[:, 1]
    frozen.flags.writeable = False
    touch(samples, both[:, 0], floats(1), 16, 1)
    with pytest.raises(MemoryFault, match=r"buffer 'other' .*read-only"):
        touch(samples, both[:, 0], frozen, 8, 1)


# ---- Agreement with AddressSanitizer

HARNESS = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __global__
#define __device__
static struct { unsigned x; } blockIdx, threadIdx;
#include "bounds.cu"
int main(int, char** argv) {
  const int nbytes = atoi(argv[1]), lo = atoi(argv[2]), hi = atoi(argv[3]);
  char* array = static_cast<char*>(malloc(nbytes));
  memset(array, 0, nbytes);
  int out = 0;
  for (int width = 1; width <= 8; width *= 2)
    for (int store = 0; store < 2; ++store)
      for (int offset = lo; offset < hi; offset += width) {
        fprintf(stderr, "case %d %d %d\\n", width, store, offset);
        for (blockIdx.x = 0; blockIdx.x < 3; ++blockIdx.x)
          for (threadIdx.x = 0; threadIdx.x < 4; ++threadIdx.x) around(array, offset, width, store, &out);
      }
  return 0;
}
"""
NBYTES, LO, HI = 61, -16, 80  # 16 bytes on either side are what AddressSanitizer guards at the least

Verdict = tuple[str, int] | None  # ("load" or "store", bytes) of a fault


def by_address_sanitizer(folder: Path) -> dict[tuple[int, int, int], Verdict]:
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        pytest.skip("no g++ to compile a kernel with AddressSanitizer")
    (folder / "main.cpp").write_text(HARNESS)
    flags = ["-std=c++20", "-O1", "-fsanitize=address", "-fsanitize-recover=address", f"-I{SAMPLES}"]
    built = subprocess.run([compiler, *flags, "-o", str(folder / "main"), str(folder / "main.cpp")],
                           capture_output=True, text=True, check=False)  # fmt: skip
    if built.returncode != 0:
        pytest.skip(f"AddressSanitizer does not link here: {built.stderr.strip()[-200:]}")
    options = "halt_on_error=0:suppress_equal_pcs=0:symbolize=0:detect_leaks=0:color=never"
    environment = os.environ | {"ASAN_OPTIONS": options}
    done = subprocess.run([str(folder / "main"), *map(str, (NBYTES, LO, HI))], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    if "case " not in done.stderr:
        pytest.skip(f"AddressSanitizer does not run here: {done.stderr.strip()[-200:]}")
    verdicts: dict[tuple[int, int, int], Verdict] = {}
    for part in done.stderr.split("case ")[1:]:
        width, store, offset = map(int, part.splitlines()[0].split())
        found = re.search(r"(READ|WRITE) of size (\d+)", part)
        verdicts[width, store, offset] = found and ({"READ": "load", "WRITE": "store"}[found[1]], int(found[2]))
    return verdicts


def on_the_host(kernel: Any, width: int, store: int, offset: int) -> Verdict:
    array = np.zeros(256, np.uint8)[64 : 64 + NBYTES]
    try:
        kernel((3,), (4,), (array, np.int64(offset), np.int32(width), np.int32(store), np.zeros(1, np.int32)))
    except MemoryFault as fault:
        where = (fault.program, fault.thread, fault.index)
        return (fault.kind, fault.size) if where == ((1, 0, 0), (2, 0, 0), offset) else ("elsewhere", 0)
    return None


def test_bounds_agree_with_address_sanitizer(samples: Samples, tmp_path: Path) -> None:
    expected = by_address_sanitizer(tmp_path)
    code = (SAMPLES / "bounds.cu").read_text()
    kernel = RawModule(code=code, options=OPTIONS, name_expressions=["around"]).get_function("around")
    assert {case: on_the_host(kernel, *case) for case in expected} == expected
    outside = [case for case, verdict in expected.items() if verdict]
    assert 100 < len(outside) < len(expected) == 2 * sum(-(-(HI - LO) // width) for width in (1, 2, 4, 8))


# ---- Hidden shared variables


@pytest.mark.parametrize(
    ("declaration", "names"),
    [
        ("__shared__ float tile[64];", ["tile"]),
        ("__shared__ __align__(16) float tile[M], other[N < 3 ? 4 : 2];", ["tile", "other"]),
        ("__align__(16) __shared__ Pair<int, 4> pair;", ["pair"]),
        ("__shared__ union { float f[3]; int i[3]; } u;", ["u"]),
        ("__shared__ typename Storage<T>::Type storage;  // a comment; with a semicolon", ["storage"]),
        ("__shared__ float* leaked;", ["leaked"]),
        ("__shared__ float (*pointer)[4];", []),
        ("extern __shared__ float4 dynamic[];", []),
        ("#define SHARED __shared__", []),
    ],
)
def test_references_to_shared_variables(declaration: str, names: list[str]) -> None:
    text = expand(declaration + "\nint x;", "a.cu", []).text
    found = re.findall(r"auto& (\w+) = cuda_host::hidden\((\w+)\);", text)
    assert found == [(name, f"{name}__hidden") for name in names]
    assert [line for line in text.splitlines() if line.endswith("int x;")], "nothing spills into the next line"
    for _, hidden in found:
        assert text.count(hidden) == 2
