"""What `nox -s codegen` asks of every format, asked of the one that is hardest on registers."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import dequant_codegen
from pagebench.reference.dequant_formats import FORMATS

ROOT = Path(__file__).resolve().parent.parent


# An IEEE division, which is a call: of all formats what spilled most.
@pytest.mark.parametrize(("arch", "formats"), [(100, ("nvfp4_ct",))])
def test_triton_keeps_to_registers(arch: int, formats: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "bench.dequant_codegen", "--provider", "triton", "--arch", str(arch)]
    command += [word for name in formats for word in ("--format", name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("registers") == 3 * len(formats)


def test_exceptions_are_formats() -> None:
    assert set(dequant_codegen.EXCEPTIONS) < set(FORMATS)
