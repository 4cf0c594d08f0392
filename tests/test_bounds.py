"""How near results come to the error bounds: what is stored, and the tool that measures it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds_kernels import Sequential
from numpy_kernels import Attention

from bench import bounds, bounds_problems
from pagebench.kernels.providers import load_provider
from pagebench.properties import probes
from pagebench.reference import merge_states
from pagebench.reference.paged_attention import PagedAttention

ROOT = Path(__file__).parent.parent
STORED = json.loads(bounds.STORED.read_text())["runs"]
NUMPY = f"{ROOT / 'tests' / 'numpy_kernels.py'}:Attention"
CELLS = {
    "paged_attention": {
        f"{dtype}, {low}-{10 * low - 1} keys, {feature}"
        for dtype in ("float16", "bfloat16", "float32")
        for low in (1, 10, 100, 1000, 10000)
        for feature in (
            *("plain", "causal prefill", "window", "soft cap", "alibi", "sinks", "split", "groups"),
            *("fp8 e4m3", "fp8 e5m2", "int8"),
        )
    },
    "merge_states": {
        f"{dtype}, from {low} apart" for dtype in ("float16", "bfloat16", "float32") for low in ("0", "0.1", "1", "10")
    },
}


@pytest.mark.parametrize("provider", ["triton", "cupy"])
@pytest.mark.parametrize("op", CELLS)
def test_stored_results_are_within_the_bound_and_near_it(provider: str, op: str) -> None:
    """2,000 problems a provider and op; in every cell the largest error is between a fiftieth of the bound and all."""
    done = STORED[f"{provider}, {op}, seed 0"]
    assert done["problems"] >= 2000
    assert set(done["cells"]) == CELLS[op]
    assert bounds.outside(done) == []
    for cell in done["cells"].values():
        assert 0.02 <= max(cell["out"], cell["lse"]) <= 1
        assert cell["problems"] >= 10
        assert set(cell["worst"]) == {"index", "numbers", "variant"}
    assert {"python", "numpy", "ml_dtypes"} <= set(done["versions"])


@pytest.mark.parametrize("provider", ["triton", "cupy"])
def test_a_stored_worst_case_comes_again(provider: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--index runs it alone; float32, few keys, which every machine adds up in the same order."""
    name = "float32, 1-9 keys, plain"
    if load_provider(provider).unavailable() is not None:
        pytest.skip(str(load_provider(provider).unavailable()))
    cell = STORED[f"{provider}, paged_attention, seed 0"]["cells"][name]
    arguments = ["--provider", provider, "--op", "paged_attention", "--index", str(cell["worst"]["index"])]
    assert bounds.main(arguments) == 0
    said = capsys.readouterr().out
    assert name in said
    assert cell["worst"]["numbers"] in said


def test_the_command_runs_and_goes_on(tmp_path: Path) -> None:
    """Ten problems end to end, in two calls; the second one says what is out of range, as so few leave much at 0."""
    out = tmp_path / "folder" / "bounds.json"
    for problems in (4, 10):
        command = [sys.executable, "-m", "bench.bounds", "--provider", NUMPY, "--op", "paged_attention"]
        command += ["--problems", str(problems), "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stderr
        assert done.returncode == int("FAILED" in done.stderr)
        (run,) = json.loads(out.read_text())["runs"].values()
        assert run["problems"] == problems
    assert "float32, 10-99 keys, plain" in done.stdout
    assert list(out.parent.iterdir()) == [out]


class StopsOnce(Attention):
    """Interrupted in the middle of one problem, the first time."""

    at, calls = 8, 0

    def paged_attention(self, p: PagedAttention, split: int = 64) -> Any:
        StopsOnce.calls += 1
        if StopsOnce.calls == self.at:
            raise KeyboardInterrupt
        return super().paged_attention(p, split)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last problem stored, to the same result as without the interruption."""
    monkeypatch.setattr(bounds, "load_provider", lambda spec: StopsOnce())
    monkeypatch.setattr(StopsOnce, "calls", 0)
    arguments: dict[str, Any] = {"problems": 12, "seed": 3}
    path = tmp_path / "bounds.json"
    with pytest.raises(KeyboardInterrupt):
        bounds.run("numpy", "paged_attention", **arguments, path=path)
    assert json.loads(path.read_text())["runs"]["numpy, paged_attention, seed 3"]["problems"] == 5
    resumed = bounds.run("numpy", "paged_attention", **arguments, path=path)
    assert StopsOnce.calls == 8 + 7
    whole = bounds.run("numpy", "paged_attention", **arguments, path=tmp_path / "other.json")
    assert resumed == whole
    assert sum(cell["problems"] for cell in resumed["cells"].values()) >= 12


def test_results_of_other_sources_are_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bounds, "load_provider", lambda spec: Attention())
    path = tmp_path / "bounds.json"
    bounds.run("numpy", "paged_attention", problems=5, seed=0, path=path)
    monkeypatch.setattr(bounds, "sources", lambda: "others")
    again = bounds.run("numpy", "paged_attention", problems=3, seed=0, path=path)
    assert (again["problems"], again["sources"]) == (3, "others")
    assert "starting afresh" in capsys.readouterr().err


def test_sources_change_with_code_and_not_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reference").mkdir()
    path = tmp_path / "reference" / "error_bounds.py"
    monkeypatch.setattr(bounds, "ROOT", tmp_path)
    found = []
    for text in (
        '"""A."""\ndef f():\n    """B."""\n    return 1\n',
        "def f():\n    # C\n    return 1",
        "def f(): return 2",
    ):
        path.write_text(text)
        found.append(bounds.sources())
    assert found[0] == found[1] != found[2]


def test_runs_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "load_provider", lambda spec: Attention())
    path = tmp_path / "bounds.json"
    for spec, seed in (("one", 0), ("other", 0), ("one", 1)):
        bounds.run(spec, "paged_attention", problems=1, seed=seed, path=path)
    assert len(json.loads(path.read_text())["runs"]) == 3


def test_a_provider_that_cannot_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(Attention):
        def unavailable(self) -> str | None:
            return "no such device"

    monkeypatch.setattr(bounds, "load_provider", lambda spec: Absent())
    with pytest.raises(RuntimeError, match="no such device"):
        bounds.run("numpy", "paged_attention", problems=1, seed=0, path=tmp_path / "bounds.json")


class Wrong(Attention):
    def store(self, p: PagedAttention, out: Any, values: Any) -> None:
        super().store(p, out, values * np.float32(1.01))


def test_a_wrong_kernel_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1, and the problem to look at is named."""
    monkeypatch.setattr(bounds, "load_provider", lambda spec: Wrong())
    out = ["--out", str(tmp_path / "bounds.json"), "--op", "paged_attention", "--provider", "wrong"]
    assert bounds.main([*out, "--problems", "12"]) == 1
    said = capsys.readouterr().err
    assert "float32, 10-99 keys, plain" in said
    assert "--index 5" in said


def test_a_provider_that_stops_says_how_to_see_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stops(Attention):
        def paged_attention(self, p: PagedAttention, split: int = 64) -> Any:
            raise RuntimeError("stopped")

    monkeypatch.setattr(bounds, "load_provider", lambda spec: Stops())
    with pytest.raises(RuntimeError) as error:
        bounds.run("numpy", "paged_attention", problems=1, seed=0, path=tmp_path / "bounds.json")
    assert "--op paged_attention --seed 0 --index 0" in error.value.__notes__[0]


def test_what_is_rejected_is_left_out(tmp_path: Path) -> None:
    spec = f"{ROOT / 'tests' / 'numpy_provider.py'}:Provider"
    done = bounds.run(spec, "paged_attention", problems=165, seed=0, path=tmp_path / "bounds.json")
    assert {name.rpartition(", ")[2] for name in done["cells"]} == {"plain", "causal prefill", "split", "groups"}
    assert max(bounds.ratio_of(cell) for cell in done["cells"].values()) <= 1


def test_drawn_problems_are_what_their_cells_say() -> None:
    """Every cell occurs among 165 problems, each problem is valid, and the same when it is drawn again."""
    found = set()
    for index in range(165):
        drawn, again = (bounds_problems.attention(0, index, Sequential()) for _ in range(2))
        problem: Any = drawn.problem
        problem.validate()
        assert np.array_equal(problem.query, again.problem.query)  # type: ignore[attr-defined]  # of attention
        counts = probes.visible_count(problem)
        found.add(f"{problem.query.dtype.name}, {bounds_problems.decade_of(counts.max())} keys, {drawn.feature}")
        assert counts.max() < 33000
        fields = {"window": problem.window, "soft cap": problem.soft_cap, "alibi": problem.alibi_slopes}
        fields["sinks"] = problem.sinks
        assert [name for name, value in fields.items() if value is not None] == [drawn.feature] * (
            drawn.feature in fields
        )
        assert (problem.key_cache.dtype != problem.query.dtype) == (drawn.feature in ("fp8 e4m3", "fp8 e5m2", "int8"))
        assert (problem.num_tokens > problem.num_seqs) == (drawn.feature == "causal prefill")
        assert problem.group >= 4 or drawn.feature != "groups"
    assert found == CELLS["paged_attention"]


def test_drawn_merges_are_as_far_apart_as_they_say() -> None:
    for index in range(24):
        drawn = bounds_problems.merging(0, index, None)
        problem: Any = drawn.problem
        apart = abs(problem.lse_a.astype(float) - problem.lse_b)
        low = float(drawn.feature.split()[1])
        assert (apart >= low - 1e-4).all()
        assert np.isfinite(merge_states.bound(problem)[0]).all()


@pytest.mark.parametrize(
    ("count", "decade"),
    [(1, "1-9"), (9, "1-9"), (10, "10-99"), (99, "10-99"), (1000, "1000-9999"), (12345, "10000-99999")],
)
def test_decades(count: int, decade: str) -> None:
    assert bounds_problems.decade_of(count) == decade
