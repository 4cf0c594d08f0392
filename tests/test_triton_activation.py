"""When kernels are interpreted, and what happens to those decorated before that was decided."""

import os
import subprocess
import sys
from typing import Any


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True)


def test_explicit_environment_wins_and_nothing_heavy_is_imported() -> None:
    code = """
from pagebench.kernels.triton_interpreter import activate
import sys
assert activate() is False
assert not {"torch", "triton"} & set(sys.modules)
"""
    assert run_python(code, TRITON_INTERPRET="0").returncode == 0


def test_kernel_decorated_too_early_is_named(tmp_path: Any) -> None:
    (tmp_path / "early.py").write_text("import triton\n@triton.jit\ndef hasty(x):\n    pass\n")
    code = "import early; from pagebench.kernels.triton_interpreter import activate; activate()"
    result = run_python(code, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert "early.hasty" in result.stderr


def test_triton_imported_early_still_reduces(tmp_path: Any) -> None:
    (tmp_path / "late.py").write_text("""
import triton
from pagebench.kernels.triton_interpreter import activate
assert activate() and activate()
import torch, triton.language as tl
@triton.jit
def total(x, y):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, 4)), 0))
y = torch.zeros(1)
total[(1,)](torch.ones(4), y)
assert y.item() == 4
""")
    result = run_python("import late", PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr


def test_overflow_option_reports_a_wrapped_index(tmp_path: Any) -> None:
    (tmp_path / "wraps.py").write_text("""
from pagebench.kernels.triton_interpreter import activate
activate(overflow=True)
import torch, triton, triton.language as tl
@triton.jit
def wrap(x, block, stride):
    tl.store(x + block * stride * 0, 1)
wrap[(1,)](torch.zeros(1), 1 << 16, 1 << 16)
""")
    result = run_python("import wraps", PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert "int32 overflow detected for operation mul" in result.stderr
