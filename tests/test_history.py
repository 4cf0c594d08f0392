"""The web history without a network, seen through a browser: its summary, and plots that show the stored results."""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from headless_browser import BROWSER, Page, browser

from bench import _history

needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")

# Two benchmarks as asv stores them: a figure with parameters (None: n/a), and one without.
REGISTERS: dict[str, list[int | None]] = {"('triton', 'decode')": [64, 66, 66], "('cupy', 'decode')": [40, None, 48]}
WASTE = [1.5, 1.25, 1.75]


@contextmanager
def served(html_dir: Path) -> Iterator[str]:
    server = _history.serve(html_dir)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def git(folder: Path, *arguments: str) -> str:
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org"}
    identity |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}
    command = ["git", "-C", str(folder), "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, env=os.environ | identity, check=True, capture_output=True, text=True).stdout.strip()


def benchmark(name: str, parameters: list[list[str]], names: list[str]) -> dict[str, Any]:
    return {"name": name, "type": "track", "unit": "registers", "code": "", "version": "1", "params": parameters,
            "param_names": names, "pretty_name": name}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of three commits on `main`, results of each as asv stores them, and the project's own settings."""
    root = tmp_path_factory.mktemp("project")
    git(root, "init", "-q", "-b", "main")
    shutil.copy(_history.CONFIG, root / "asv.conf.json")
    (root / "bench").mkdir()
    machine = {"machine": "laptop", "os": "Linux", "ram": "8GB", "arch": "x86_64", "cpu": "some CPU", "num_cpu": "2"}
    folder = root / "results" / "asv" / "laptop"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(json.dumps(machine | {"version": 1}))
    for i in range(3):
        git(root, "commit", "-q", "--allow-empty", "-m", f"commit {i}")
        store_result(folder, git(root, "rev-parse", "HEAD"), i, machine)
    parameters = [["'triton'", "'cupy'"], ["'decode'"]]
    described = {
        "codegen.Codegen.track_registers": benchmark(
            "codegen.Codegen.track_registers", parameters, ["provider", "workload"]
        ),
        "kv_blocks.track_waste": benchmark("kv_blocks.track_waste", [], []),
        "dequant.OnDevice.track_seconds": benchmark(
            "dequant.OnDevice.track_seconds", parameters, ["provider", "workload"]
        ),
        "dequant.OnDevice.track_never_ran": benchmark("dequant.OnDevice.track_never_ran", [], []),
        "version": 2,
    }
    (root / "results" / "asv" / "benchmarks.json").write_text(json.dumps(described))
    return root


def store_result(folder: Path, commit: str, i: int, machine: dict[str, str]) -> None:
    parameters = [["'triton'", "'cupy'"], ["'decode'"]]
    registers: list[int | None] = [series[i] for series in REGISTERS.values()]
    columns = ["result", "params", "version", "started_at", "duration"]
    result = {
        "commit_hash": commit,
        "env_name": "virtualenv-py3.11",
        "date": 1_700_000_000_000 + i * 86_400_000,
        "params": machine | {"python": "3.11"},
        "python": "3.11",
        "requirements": {},
        "env_vars": {},
        "result_columns": columns,
        "results": {
            "codegen.Codegen.track_registers": [registers, parameters, "1", 0, 0.1],
            "kv_blocks.track_waste": [[WASTE[i]], [], "1", 0, 0.1],
            "dequant.OnDevice.track_seconds": [[None, None], parameters, "1", 0, 0.1],  # n/a: no GPU
        },
        "durations": {},
        "version": 2,
    }
    (folder / f"{commit[:8]}-virtualenv-py3.11.json").write_text(json.dumps(result))


def copy_results(project: Path, clone: Path) -> None:
    shutil.copy(project / "asv.conf.json", clone)
    for name in ("bench", "results"):
        shutil.copytree(project / name, clone / name)


@pytest.fixture(scope="module")
def html(project: Path) -> Path:
    _history.publish(project / "html", project / "asv.conf.json")
    return project / "html"


def plotted(page: Page) -> list[list[float]]:
    """The points of every series in the page's main plot, as flot drew them."""
    page.wait_for("$('#main-graph').data('plot') && $('#main-graph').data('plot').getData().length > 0")
    script = """$('#main-graph').data('plot').getData().map(series =>
        series.data.map(point => point[1]).filter(value => value !== null))"""
    return [list(points) for points in page.evaluate(script)]


def painted(page: Page) -> int:
    """Pixels of the main plot's canvas that are not empty."""
    script = """(() => { const canvas = $('#main-graph canvas.flot-base')[0];
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0; for (let i = 3; i < data.length; i += 4) count += data[i] > 0; return count; })()"""
    return int(page.evaluate(script))


def stayed_local(page: Page, url: str) -> None:
    assert page.requests, "nothing was recorded, so nothing was checked"
    outside = [request for request in page.requests if not request.startswith((f"{url}/", "data:", "about:"))]
    assert not outside
    assert page.errors == []


@needs_browser
def test_page_shows_summary_and_plots_without_a_network(html: Path, tmp_path: Path) -> None:
    with served(html) as url, browser(tmp_path / "profile") as page:
        page.open(f"{url}/index.html")
        page.wait_for("$('#summarygrid-display .benchmark-plot').length >= 2")
        grid = page.evaluate("$('#summarygrid-display').text()")
        assert "track_registers" in grid
        assert "track_waste" in grid
        assert "OnDevice" not in grid
        page.open(f"{url}/index.html#kv_blocks.track_waste")
        page.wait_for("$('#main-graph').data('plot') && $('#graph-display').is(':visible')")
        assert plotted(page) == [WASTE]
        assert painted(page) > 1000

        page.open(f"{url}/index.html#codegen.Codegen.track_registers")
        page.wait_for("$('#main-graph').data('plot').getData().length == 2")
        assert plotted(page) == [[64, 66, 66], [40, 48]]
        labels = page.evaluate("$('#main-graph').data('plot').getData().map(series => series.label)")
        assert labels == ["provider-triton", "provider-cupy"]
        page.screenshot(tmp_path / "plot.png")

        page.open(f"{url}/index.html#summarylist")
        page.wait_for("$('#summarylist-display tbody tr').length >= 3")
        page.open(f"{url}/index.html#regressions")
        page.wait_for("$('#regressions-display').is(':visible') && $('#regressions-body table').length")
        assert "track_registers" in page.evaluate("$('#regressions-display').text()")
        stayed_local(page, url)


@needs_browser
def test_browser_has_no_network(html: Path, tmp_path: Path) -> None:
    """The test above means something: this browser reports what tries to leave, and nothing leaves."""
    with served(html) as url, browser(tmp_path / "profile") as page:
        page.open(f"{url}/index.html")
        page.wait_for("$('#summarygrid-display').length")
        page.open("http://example.org/")
        page.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")
        with pytest.raises(AssertionError):
            stayed_local(page, url)


Case = tuple[str, ...]  # a benchmark's parameters, as asv writes them


def stored_series(results: Path, machine: str, name: str, commits: list[str]) -> dict[Case, list[float]]:
    """The finite figures of benchmark `name` on `machine` by its parameters, in the order of `commits`."""
    version = json.loads((results / "benchmarks.json").read_text())[name]["version"]
    series: dict[Case, dict[str, float]] = {}
    for path in (results / machine).glob("*.json"):
        stored = json.loads(path.read_text())
        row = stored.get("results", {}).get(name)
        columns: dict[str, Any] = dict(zip(stored.get("result_columns", []), row or [], strict=False))
        if columns.get("version") != version or stored["commit_hash"] not in commits:
            continue
        cases: list[Case] = list(itertools.product(*columns["params"]))
        for case, value in zip(cases, columns["result"] or [], strict=False):
            if value is not None and math.isfinite(value):
                series.setdefault(case, {})[stored["commit_hash"]] = value
    return {case: [points[c] for c in commits if c in points] for case, points in series.items()}


def shown_series(page: Page, url: str, name: str, machine: str, case: Case, expected: list[float]) -> list[float]:
    """Points of the one series that is left when every parameter is chosen; `expected` are given time to arrive."""
    names = page.evaluate(f"$.asv.main_json.benchmarks[{json.dumps(name)}].param_names")
    chosen = {"machine": machine} | {f"p-{n}": value for n, value in zip(names, case, strict=True)}
    page.open(f"{url}/index.html#{name}?{urllib.parse.urlencode(chosen, quote_via=urllib.parse.quote)}")
    page.wait_for(f"$('#title').text().includes({json.dumps(name)})")
    deadline = time.monotonic() + 60
    while (series := plotted(page)) != [pytest.approx(expected)] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(series) == 1, series
    return series[0]


@needs_browser
def test_projects_own_results_show(tmp_path: Path) -> None:
    """The figures stored in this repository are the points of their plots, for each machine."""
    if not any((_history.CONFIG.parent / "results" / "asv").glob("*/machine.json")):
        pytest.skip("no results stored yet")
    found = _history.coverage()
    assert found.shown, f"none of the measured commits is in this history: {found}"
    compare_with_plots(_history.CONFIG, tmp_path)


def compare_with_plots(config: Path, tmp_path: Path, benchmarks_of_a_machine: int = 4) -> None:
    """Some benchmarks of every machine, the first and the last of each one's series."""
    results = config.parent / "results" / "asv"
    html = _history.publish(tmp_path / "html", config).parent
    revisions = json.loads((html / "index.json").read_text())["revision_to_hash"]
    shown = _history.coverage(config).shown
    commits = [commit for _, commit in sorted(revisions.items(), key=lambda item: int(item[0])) if commit in shown]
    names = sorted(set(json.loads((results / "benchmarks.json").read_text())) - {"version"})
    compared = 0
    with served(html) as url, browser(tmp_path / "profile") as page:
        page.open(f"{url}/index.html")
        page.wait_for("$('#summarygrid-display .benchmark-plot').length")
        for machine in sorted(path.name for path in results.iterdir() if path.is_dir()):
            stored = {name: stored_series(results, machine, name, commits) for name in names}
            filled = [name for name in names if stored[name]]
            for name in filled[:: max(len(filled) // benchmarks_of_a_machine, 1)]:
                cases = list(stored[name])
                for case in dict.fromkeys([cases[0], cases[-1]]):
                    points = shown_series(page, url, name, machine, case, stored[name][case])
                    assert points == pytest.approx(stored[name][case]), (machine, name, case)
                    compared += 1
        page.screenshot(tmp_path / "own.png")
        stayed_local(page, url)
    assert compared


@needs_browser
def test_every_plot_shows_what_is_stored(project: Path, tmp_path: Path) -> None:
    compare_with_plots(project / "asv.conf.json", tmp_path)


def test_nothing_fetched_from_elsewhere(html: Path) -> None:
    for page in html.glob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*>", page.read_text()):
            assert "//" not in tag, tag
    for style in html.rglob("*.css"):
        assert not re.search(r"(@import|url\(\s*['\"]?(https?:)?//)", style.read_text())
    text = (html / "index.html").read_text()
    assert "integrity=" not in text
    for name in re.findall(r'(?:src|href)="([^"#:]+)"', text):
        assert (html / name).is_file(), name


def test_vendored_files_are_the_named_ones() -> None:
    rows = json.loads((_history.WEB / "vendored.json").read_text())
    for row in rows:
        assert hashlib.sha256((_history.WEB / row["file"]).read_bytes()).hexdigest() == row["sha256"], row["file"]
    kept = {path.name for path in _history.WEB.iterdir()} - {"vendored.json", "README.md", "LICENSES.md"}
    assert kept == {row["file"] for row in rows}


def test_unknown_file_of_a_newer_page_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<head><script src="https://cdn.example.org/new.min.js"></script></head>')
    with pytest.raises(_history.HistoryError, match=r"new\.min\.js, of which bench/web has no copy"):
        _history.make_self_contained(tmp_path)


def test_server_is_reachable_from_this_machine_only(html: Path) -> None:
    server = _history.serve(html)
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()
    with served(html) as url, urllib.request.urlopen(f"{url}/index.json") as answer:
        assert json.load(answer)["project"] == "pagebench"


def test_detached_clone_without_the_branch(project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(project), str(clone)], check=True)
    git(clone, "checkout", "-q", "--detach")
    git(clone, "branch", "-q", "-D", "main")
    git(clone, "remote", "remove", "origin")
    copy_results(project, clone)
    _history.publish(tmp_path / "html", clone / "asv.conf.json")
    assert "showing the history of HEAD" in capfd.readouterr().err
    (graph,) = (tmp_path / "html" / "graphs").rglob("branch-HEAD/**/kv_blocks.track_waste.json")
    assert [value for _, value in json.loads(graph.read_text())] == WASTE


def test_shallow_clone_says_what_is_missing(project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "2", f"file://{project}", str(clone)], check=True)
    copy_results(project, clone)
    _history.publish(tmp_path / "html", clone / "asv.conf.json")
    said = capfd.readouterr().err
    assert "2 of 3 measured commits are on main and shown" in said
    assert "git fetch --unshallow" in said


def test_results_of_another_history_are_an_error(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q", "-b", "main")
    git(other, "commit", "-q", "--allow-empty", "-m", "unrelated")
    copy_results(project, other)
    with pytest.raises(_history.HistoryError, match="0 of 3 measured commits are on main"):
        _history.publish(tmp_path / "html", other / "asv.conf.json")
    assert not (tmp_path / "html").exists()


def test_no_results_is_an_error_that_says_what_to_do(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "asv.conf.json", tmp_path)
    with pytest.raises(_history.HistoryError, match="nox -s bench -- --machine NAME"):
        _history.publish(tmp_path / "html", tmp_path / "asv.conf.json")


def test_another_folder_is_not_replaced(project: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(_history.HistoryError, match="html_dir must be empty or an earlier history"):
        _history.publish(tmp_path, project / "asv.conf.json")
    assert (tmp_path / "thesis.tex").is_file()


def test_publishing_twice_replaces_the_page(project: Path, html: Path) -> None:
    assert _history.publish(html, project / "asv.conf.json") == html / "index.html"
