"""Which GPU is found, with a stand-in for NVIDIA's management library that reports two."""

import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = r"""
#include <string.h>
#include <stdlib.h>
static const char *uuids[] = {"GPU-8932f937-d72c", "GPU-11112222-3333"};
static const char *names[] = {"NVIDIA H200", "NVIDIA L4"};
int nvmlInit_v2(void) { return getenv("NO_DRIVER") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (i > 1) return 2; *h = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, void **h) {
  for (long i = 0; i < 2; i++) if (!strcmp(u, uuids[i])) { *h = (void *)(i + 1); return 0; }
  return 6;
}
int nvmlDeviceGetName(void *h, char *s, unsigned n) { strncpy(s, names[(long)h - 1], n); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { strncpy(s, uuids[(long)h - 1], n); return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.cpp").write_text('extern "C" {' + STAND_IN + "}")
    shared = folder / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(shared), str(folder / "nvml.cpp")], check=True)
    return folder


def found(library: Path, **environment: str) -> str:
    code = "from pagebench.kernels.devices import gpu_name, gpu_present; print(gpu_name(), gpu_present())"
    environment |= {"LD_LIBRARY_PATH": str(library), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "NVIDIA H200 True"),
        ("1,0", "NVIDIA L4 True"),
        ("GPU-11112222-3333", "NVIDIA L4 True"),
        ("GPU-1111", "NVIDIA L4 True"),
        ("", "None False"),
        ("-1", "None False"),
        ("2", "None False"),
        ("GPU-ffff", "None False"),
    ],
)
def test_visible_devices_are_respected(library: Path, visible: str | None, expected: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert found(library, **environment) == expected


def test_library_without_a_driver_is_no_gpu(library: Path, tmp_path: Path) -> None:
    assert found(library, NO_DRIVER="1") == "None False"
    assert found(tmp_path, CUDA_VISIBLE_DEVICES="") == "None False"


def test_with_a_gpu_activation_changes_nothing(library: Path) -> None:
    code = """
import sys, os
from pagebench.kernels.triton_interpreter import activate
assert activate() is False
assert "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules
"""
    environment = {"LD_LIBRARY_PATH": str(library), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
