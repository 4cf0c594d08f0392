"""The workflows: every action pinned, nothing that writes on the self-hosted runner, earlier results kept."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(path: Path) -> dict[str, str]:
    """The text of each job of a workflow."""
    _, _, jobs = path.read_text().partition("\njobs:\n")
    parts = re.split(r"^  (\w+):\n", jobs, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"actions/[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), (action, comment)


def test_the_self_hosted_runner_cannot_write_to_the_repository() -> None:
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text()
    assert "\npermissions:\n  contents: read\n" in text
    assert "pull_request" not in text.partition("\non:\n")[2]
    for name, job in jobs_of(ROOT / ".github" / "workflows" / "gpu.yml").items():
        if "self-hosted" in job:
            assert "permissions:" not in job, name
            assert job.count("actions/checkout@") == job.count("persist-credentials: false"), name


def test_earlier_results_are_published_again() -> None:
    jobs = jobs_of(ROOT / ".github" / "workflows" / "gpu.yml")
    order = ["ref: gpu-results", "cp -Rn gpu-results-kept/asv/. results/asv/", "nox -s bench", "nox -s history"]
    at = [jobs["gpu"].index(step) for step in order]
    assert at == sorted(at)
    assert ".ci/keep-results fresh" in jobs["keep"]


def test_examples_of_last_night_are_tried_first() -> None:
    explore = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")["explore"]
    order = ["actions/cache/restore@", "--pagebench-profile deep", "if: always()", "actions/cache/save@"]
    at = [explore.index(step) for step in order]
    assert at == sorted(at)
    assert explore.count("path: .hypothesis\n") == 3


def test_results_are_added_to_those_that_are_kept(tmp_path: Path) -> None:
    kept, fresh = tmp_path / "kept.git", tmp_path / "fresh"
    subprocess.run(["git", "init", "--quiet", "--bare", str(kept)], check=True)
    for commit in ("aaaa", "bbbb", "bbbb"):  # the second time there is nothing new
        folder = fresh / commit / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{commit}-env.json").write_text(commit)
        command = [str(ROOT / ".ci" / "keep-results"), str(fresh / commit), "gpu", str(kept), "gpu-results"]
        subprocess.run(command, check=True, timeout=60)
    listed = subprocess.run(
        ["git", "-C", str(kept), "ls-tree", "-r", "--name-only", "gpu-results"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() == ["asv/gpu/aaaa-env.json", "asv/gpu/bbbb-env.json"]
    log = subprocess.run(
        ["git", "-C", str(kept), "log", "--oneline", "gpu-results"], capture_output=True, text=True, check=True
    )
    assert len(log.stdout.splitlines()) == 2
