"""What the README shows is what the project does."""

import re
from pathlib import Path

import numpy as np
import pytest

from bench.workloads import LLAMA_3_8B, decode
from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.reference.dtypes import FLOAT16

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "docs" / "examples" / "mine.py"


def test_the_example_is_shown_as_it_is() -> None:
    assert EXAMPLE.read_text().rstrip() in README
    assert len(EXAMPLE.read_text().splitlines()) < 20


def test_the_example_is_right() -> None:
    provider = load_provider(f"{EXAMPLE}:Mine")
    problem = decode(LLAMA_3_8B, 3, 40, 16, FLOAT16)
    problem.seq_lens[:] = np.array([40, 0, 17])
    contracts.check(provider, problem)


def test_the_example_rejects_what_its_kernel_cannot_do() -> None:
    provider = load_provider(f"{EXAMPLE}:Mine")
    problem = decode(LLAMA_3_8B, 2, 40, 16, FLOAT16)
    problem.query_start[:] = np.array([0, 0, 2])
    with pytest.raises(ValueError, match="plain decode only"):
        contracts.check(provider, problem)


@pytest.mark.parametrize("session", re.findall(r"nox -s ([a-z]+)", README))
def test_every_session_named_exists(session: str) -> None:
    assert f"\ndef {session}(" in (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize(("session", "shown"), [("bench", "provider"), ("tests", "passed")])
def test_each_command_is_shown_with_what_it_prints(session: str, shown: str) -> None:
    after = README.split(f"python -m pip install nox && python -m nox -s {session}\n```", 1)[1]
    printed = after.split("```", 2)[1]
    assert shown in printed
    assert after.index("```") < after.index("\n**" if session == "bench" else "\n## ")
