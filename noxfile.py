# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5"]
# ///
"""Every way of running pagebench: `nox -l` lists the sessions, `nox -s NAME -- ARGUMENTS` runs one."""

import os
from pathlib import Path

import nox

ROOT = Path(__file__).parent
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True
nox.needs_version = ">=2025.5"

TESTING = ["pytest", "hypothesis", "pytest-benchmark", "pytest-timeout", "pytest-xdist", "gguf"]
CUDA_WITHOUT_GPU = [
    "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl",
]  # fmt: skip
ORACLES = [
    "libgguf", "gfloat", "bitsandbytes", "compressed-tensors", "torchao", "transformers", "optimum-quanto",
]  # fmt: skip
DRAWING = ["matplotlib", "tqdm"]
BENCH = ["asv", "asv_runner", "scipy", "packaging", "virtualenv"]


def install(session: nox.Session, *packages: str, triton: str = "triton") -> None:
    """Install the tested set and this checkout, once per environment and set of requirements.

    torch comes first and alone: on PyPI it pins a triton of its own, which the tested one then replaces. Where pip
    would take a CUDA build, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
    """
    if session.virtualenv.is_sandboxed is False:
        return  # --no-venv: use what is installed
    wanted = " ".join(
        [*packages, triton, (ROOT / "constraints.txt").read_text(), (ROOT / "pyproject.toml").read_text()]
    )
    stamp = Path(session.virtualenv.location) / "pagebench-installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    constraints = ["-c", str(ROOT / "constraints.txt")] if triton == "triton" else []
    session.install("torch==2.13.0")
    session.install(*constraints, triton, "numpy", "ml_dtypes", *packages)
    session.install("--no-deps", "-e", ".")
    stamp.write_text(wanted)


def python(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run the session's Python from the repository's root."""
    session.chdir(ROOT)
    session.run("python", *arguments, env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole test suite: properties of both providers and tests of the harness, in minutes and without a GPU."""
    install(session, *TESTING, *CUDA_WITHOUT_GPU, *BENCH, *DRAWING)
    workers = str(min(os.cpu_count() or 1, 4))
    options = ["-n", workers, "--dist", "worksteal", "--allowed-skips", "tests/allowed_skips.toml"]
    python(session, "-m", "pytest", *options, *session.posargs, OMP_NUM_THREADS="1")  # the workers fill the machine


@nox.session
def properties(session: nox.Session) -> None:
    """Check any provider: -- --provider triton | MODULE:NAME | PATH.py:NAME [--pagebench-profile deep]."""
    install(session, *TESTING, *CUDA_WITHOUT_GPU)
    python(session, "-m", "pytest", "properties", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Check, then measure what this machine can: -- [--provider PATH.py:NAME] [--machine NAME] [--quick]."""
    install(session, *TESTING, *CUDA_WITHOUT_GPU, *BENCH)
    python(session, "-m", "bench.run", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Check every kernel on the GPU, then time the workloads: -- [--out DIR]. Works with --no-venv."""
    install(session, *TESTING, "cupy-cuda13x")
    python(session, "-m", "bench.gpu", *session.posargs)


@nox.session
def codegen(session: nox.Session) -> None:
    """Compile every kernel for sm_80, sm_90 and sm_100 and print registers, spills, load widths, tensor-core use."""
    install(session, *TESTING, *CUDA_WITHOUT_GPU)
    python(session, "-m", "bench.codegen_table", *session.posargs)
    if not session.posargs:
        python(session, "-m", "bench.dequant_codegen")


@nox.session
def history(session: nox.Session) -> None:
    """Publish results/asv as web pages that need no network: -- --serve [--port N] serves them on 127.0.0.1."""
    install(session, *BENCH)
    python(session, "-m", "bench._history", *session.posargs)


@nox.session
def compat(session: nox.Session) -> None:
    """Compile every kernel with Triton 3.6, the oldest supported; nothing runs."""
    install(session, *TESTING, "numpy<2.4", triton="triton==3.6.0")
    python(session, "-m", "bench.codegen_table", "--provider", "triton", *session.posargs)


@nox.session
def memory(session: nox.Session) -> None:
    """KV memory of a model on a GPU: -- --model llama-2-13b --gpu-memory 80GiB [--trace FILE] [--help]."""
    install(session, *TESTING, *DRAWING)
    python(session, "-m", "bench.memory", *session.posargs)


@nox.session
def figures(session: nox.Session) -> None:
    """Draw docs/figures from the computations."""
    install(session, *TESTING, *DRAWING)
    python(session, "-m", "bench.figures", *session.posargs)


@nox.session
def bounds(session: nox.Session) -> None:
    """How near results come to the error bounds: -- [--provider NAME] [--problems N]; goes on where it stopped."""
    install(session, *TESTING, *CUDA_WITHOUT_GPU)
    python(session, "-m", "bench.bounds", *session.posargs)


@nox.session
def oracles(session: nox.Session) -> None:
    """Check the reference decoders against other people's (a gigabyte of packages)."""
    install(session, *TESTING, *ORACLES)
    python(session, "-m", "pytest", "tests/test_dequant_oracles.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: lint and formatting."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy --strict on reference, kernels (outside @jit bodies) and properties."""
    install(session, *TESTING, "mypy")
    packages = ROOT / ".typing" / "pagebench"  # mypy does not follow an editable install's import hook
    packages.mkdir(parents=True, exist_ok=True)
    for room in ("reference", "kernels", "properties"):
        link = packages / room
        if not link.is_symlink():
            link.symlink_to(ROOT / room, target_is_directory=True)
    session.run("mypy", "-p", "pagebench.reference", "-p", "pagebench.kernels", "-p", "pagebench.properties")


if __name__ == "__main__":
    nox.main()
