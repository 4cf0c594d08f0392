"""The pytest plugin as somebody else uses it: another folder, their provider, a subprocess."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROVIDER = Path(__file__).with_name("numpy_provider.py")

DROPS_LAST_KEY = PROVIDER.read_text().replace(
    "length in enumerate(problem.seq_lens):",
    "length in enumerate(np.maximum(problem.seq_lens - 1, np.minimum(problem.seq_lens, 1))):",
)

STUB = """
    class Provider:
        name = "stub"
        unavailable = lambda self: {unavailable}
        rejects = lambda self, problem: {rejects}
        to_device = to_host = lambda self, array: array
        synchronize = lambda self: None
        {op} = lambda self, problem: None
"""


def stub(*, unavailable: str = "None", rejects: str = "None", op: str = "copy_blocks") -> str:
    return textwrap.dedent(STUB.format(unavailable=unavailable, rejects=rejects, op=op))


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "--pyargs", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def run_claims(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The property tests, quickly, on a provider whose source is `source`, named by a relative path."""
    (folder / "mine.py").write_text(source)
    options = ("--provider", "mine.py:Provider", "--pagebench-profile", "quick", *arguments)
    return pytest_in(folder, "pagebench.properties", *options)


def test_right_provider_passes(tmp_path: Path) -> None:
    done = run_claims(tmp_path, PROVIDER.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numpy [host]: paged_attention" in done.stdout
    assert "times: only q8_0" in done.stdout
    assert "poisoned outputs and scratch: the provider has no empty" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", ".hypothesis", "__pycache__"}


def test_dropped_key_fails_with_a_repro_that_can_be_copied(tmp_path: Path) -> None:
    done = run_claims(tmp_path, DROPS_LAST_KEY, "--pagebench-profile", "default", "-k", "test_values")
    assert done.returncode == 1, done.stdout + done.stderr
    snippet = tmp_path / "snippet.py"
    snippet.write_text(repro_in(done.stdout))
    assert str(tmp_path / "mine.py") in snippet.read_text()
    assert "elements are wrong" in run_script(snippet).stderr
    (tmp_path / "mine.py").write_text(PROVIDER.read_text())
    mended = run_script(snippet)
    assert mended.returncode == 0, mended.stderr


def repro_in(output: str) -> str:
    """The lines below the headline, as they were printed."""
    headline = r"^-+ to reproduce test_\w+\[mine.py:Provider\] -+\n"
    found = re.search(rf"{headline}(.*?)^[-=_]{{3}}", output, re.DOTALL | re.MULTILINE)
    assert found, output
    return found[1]


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)


def test_provider_that_rejects_everything_is_not_green(tmp_path: Path) -> None:
    done = run_claims(tmp_path, stub(rejects="'not today' if len(problem.caches) == 1 else 'nor two'"))
    assert done.returncode == 1, done.stdout
    assert "NOTHING EXERCISED" in done.stdout
    reasons = r"rejects every copy_blocks problem, (\d+) tried; (\d+) times: (.*); (\d+) times: (.*)"
    said = re.search(reasons, done.stdout)
    assert said, done.stdout
    assert int(said[1]) == int(said[2]) + int(said[4])
    assert {said[3], said[5]} == {"not today", "nor two"}


def test_provider_without_an_op_is_not_green(tmp_path: Path) -> None:
    done = run_claims(tmp_path, stub(op="some_other_op"))
    assert done.returncode == 1, done.stdout
    assert "NOTHING EXERCISED" in done.stdout


def test_unavailable_provider_named_explicitly_is_an_error(tmp_path: Path) -> None:
    done = run_claims(tmp_path, stub(unavailable="'no such card'"))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "cannot run here: no such card" in done.stderr


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:Provider", "must name an existing file"),
        ("mine.py:number", "without"),
        ("broken.py:Provider", "ZeroDivisionError"),
    ],
)
def test_bad_provider_is_a_usage_error(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("number = 1")
    (tmp_path / "broken.py").write_text("1 / 0")
    done = pytest_in(tmp_path, "pagebench.properties", "--provider", spec)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr


def test_two_providers_are_tested_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(PROVIDER.read_text().replace('name = "numpy"', 'name = "other"'))
    done = run_claims(tmp_path, PROVIDER.read_text(), "--provider", "other.py:Provider", "-k", "test_many_layers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numpy [host]: copy_blocks" in done.stdout
    assert "other [host]: copy_blocks" in done.stdout


def test_plugin_leaves_other_projects_alone(tmp_path: Path) -> None:
    """Their own fixture called `subject`, no summary, no heavy import, no folders."""
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent("""
            import sys
            import pytest

            @pytest.fixture
            def subject():
                return 7

            def test_theirs(subject):
                assert subject == 7
                assert not {"torch", "triton", "hypothesis", "cupy"} & set(sys.modules)
        """)
    )
    done = pytest_in(tmp_path, "test_theirs.py", "-p", "no:hypothesispytest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pagebench" not in done.stdout.split("collected")[1]
    assert {path.name for path in tmp_path.iterdir()} <= {"test_theirs.py", "__pycache__"}


@pytest.mark.parametrize(("listed", "code"), [("no GPU", 0), ("no disk", 1)])
def test_skips_must_be_listed(tmp_path: Path, listed: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_skipping.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('no GPU here')\n")
    (tmp_path / "allowed.toml").write_text(f"[[skip]]\ntest = 'test_skip*::*'\nreason = '{listed}'\nwhy = 'a test'\n")
    done = pytest_in(tmp_path, "test_skipping.py", "--allowed-skips", "allowed.toml")
    assert done.returncode == code, done.stdout + done.stderr
    assert ("does not list" in done.stdout) == bool(code)
