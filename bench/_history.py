"""Publish the stored asv results as a web page that needs no network, and serve it on this machine only.

    python -m bench._history                     # publish results/asv into html/
    python -m bench._history --serve --port 8080 # and serve it on 127.0.0.1

asv's own page fetches its scripts from content delivery networks and shows an error page without them; here they come
from `bench/web/`. asv shows only results of commits on the configured branch that this clone has: how many those are is
always said, and none at all is an error.
"""

import argparse
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "asv.conf.json"
WEB = Path(__file__).resolve().parent / "web"

# Nothing but the page's own files may load, whatever a script tries.
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'self' 'unsafe-inline' data:">"""

_EXTERNAL = re.compile(r"""(?P<attribute>\b(?:src|href))=(?P<quote>["'])(?P<url>(?:https?:)?//[^"']+)(?P=quote)""")
_FETCHING_TAG = re.compile(r"<(?:script|link|img|iframe)\b[^>]*>", re.IGNORECASE)
_CDN_ATTRIBUTES = re.compile(r"""\s+(?:integrity|crossorigin|referrerpolicy)=(["'])[^"']*\1""")


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


class HistoryError(RuntimeError):
    """The history cannot be published; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which measured commits the page can show: those on `branch`, as far as this clone reaches."""

    branch: str
    shown: tuple[str, ...]
    missing: tuple[str, ...]
    shallow: bool

    def __str__(self) -> str:
        total = len(self.shown) + len(self.missing)
        text = f"{len(self.shown)} of {total} measured commits are on {self.branch} and shown"
        if self.missing:
            names = _first_few([commit[:8] for commit in self.missing])
            remedy = "this clone is shallow: git fetch --unshallow" if self.shallow else "they are on other branches"
            text += f"; not shown: {names} ({remedy})"
        return text


def publish(html_dir: Path, config: Path = CONFIG) -> Path:
    """Publish the results that `config` names into `html_dir`, which is replaced; the path of its index.html.

    Works offline and from a detached or shallow clone. Raises HistoryError when there is nothing to show, when asv
    fails, or when asv's page fetches a file that `bench/web` does not have.
    """
    html_dir = html_dir.resolve()
    settings = _settings(config)
    found = coverage(config)
    print(found, file=sys.stderr)
    if not found.shown:
        raise HistoryError(f"nothing to show in {settings['results_dir']}: {found}")
    with tempfile.TemporaryDirectory(prefix="pagebench-history-") as folder:
        staged = Path(folder) / "html"
        own_config = Path(folder) / "asv.conf.json"
        own_config.write_text(
            json.dumps(settings | {"branches": [found.branch], "html_dir": str(staged), "version": 1})
        )
        _run_asv(own_config)
        drop_empty_series(staged)
        make_self_contained(staged)
        _check_replaceable(html_dir)
        shutil.rmtree(html_dir, ignore_errors=True)
        shutil.copytree(staged, html_dir)
    return html_dir / "index.html"


def coverage(config: Path = CONFIG) -> Coverage:
    """Measured commits against the branch that will be published; HistoryError when there are no results at all."""
    settings = _settings(config)
    results, repository = Path(settings["results_dir"]), settings["repo"]
    measured = measured_commits(results)
    if not measured or not (results / "benchmarks.json").is_file():
        raise HistoryError(f"no results in {results}: store some with `nox -s bench -- --machine NAME`")
    branch = _branch(repository, settings["branches"])
    reachable = set(_git(repository, "rev-list", "--first-parent", branch).split())
    shallow = _git(repository, "rev-parse", "--is-shallow-repository").strip() == "true"
    shown = tuple(commit for commit in measured if commit in reachable)
    return Coverage(branch, shown, tuple(commit for commit in measured if commit not in reachable), shallow)


def measured_commits(results_dir: Path) -> list[str]:
    """Full hashes of the commits with stored results, of every machine, each once."""
    files = [path for path in sorted(results_dir.glob("*/*.json")) if path.name != "machine.json"]
    return list(dict.fromkeys(json.loads(path.read_text())["commit_hash"] for path in files))


def drop_empty_series(html_dir: Path) -> list[str]:
    """Take benchmarks without any figure off the published page, as device times are before a GPU ran; their names.

    asv lists them as empty frames, and asks for graphs that it has not written.
    """
    index_file = html_dir / "index.json"
    index = json.loads(index_file.read_text())
    empty = [name for name in index["benchmarks"] if not _has_figures(html_dir / "graphs" / "summary" / f"{name}.json")]
    if not empty:
        return []
    names = _first_few(empty)
    print(
        f"{len(empty)} of {len(index['benchmarks'])} benchmarks have no figure yet and are left out: {names}",
        file=sys.stderr,
    )
    index["benchmarks"] = {name: value for name, value in index["benchmarks"].items() if name not in empty}
    index_file.write_text(json.dumps(index))
    for listing in html_dir.glob("graphs/**/summary.json"):
        listing.write_text(json.dumps([row for row in json.loads(listing.read_text()) if row["name"] not in empty]))
    return empty


def _has_figures(graph: Path) -> bool:
    return graph.is_file() and any(value is not None for _, value in json.loads(graph.read_text()))


def make_self_contained(html_dir: Path) -> None:
    """Replace every file that the published page fetches from elsewhere by its copy from `bench/web`."""
    copies = {row["replaces"]: row["file"] for row in json.loads((WEB / "vendored.json").read_text())}
    target = html_dir / "web"
    target.mkdir(exist_ok=True)
    for page in sorted(html_dir.glob("*.html")):
        text = _FETCHING_TAG.sub(lambda tag: _local_tag(tag.group(0), copies, target), page.read_text())
        if page.name == "index.html":
            text = text.replace("<head>", f"<head>\n    {POLICY}", 1)
        page.write_text(text)
    shutil.copy(WEB / "LICENSES.md", target)


def _local_tag(tag: str, copies: dict[str, str], target: Path) -> str:
    found = _EXTERNAL.search(tag)
    if found is None:
        return tag
    name = found["url"].partition("?")[0].rpartition("/")[2]
    if name not in copies:
        raise HistoryError(f"asv's page fetches {found['url']}, of which bench/web has no copy (see its README.md)")
    shutil.copy(WEB / copies[name], target)
    local = f"{found['attribute']}={found['quote']}web/{copies[name]}{found['quote']}"
    return _CDN_ATTRIBUTES.sub("", tag.replace(found.group(0), local))


def serve(html_dir: Path, port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server of `html_dir` on 127.0.0.1, not yet running: call `serve_forever()`. Port 0 takes a free one, which is
    `server.server_port`; a taken one raises OSError."""
    handler = functools.partial(_QuietHandler, directory=str(html_dir))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a page asks for dozens of files."""


def _settings(config: Path) -> dict[str, Any]:
    """asv's settings with absolute paths. HistoryError when asv is not installed."""
    try:
        from asv.config import Config
    except ImportError as error:
        raise HistoryError(f"asv is needed to publish the history: pip install asv ({error})") from error
    settings: dict[str, Any] = dict(vars(Config.load(str(config))))
    for name in ("repo", "benchmark_dir", "results_dir", "html_dir", "env_dir"):
        settings[name] = str((config.parent / settings[name]).resolve())
    return settings


def _branch(repository: str, wanted: Sequence[str]) -> str:
    """The first configured branch that this clone has, here or at its origin, else what is checked out."""
    for name in [candidate for branch in wanted for candidate in (branch, f"origin/{branch}")]:
        if _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False):
            return name
    print(f"no branch {' or '.join(wanted)} in this clone: showing the history of HEAD", file=sys.stderr)
    return "HEAD"


def _git(repository: str, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise HistoryError(f"git {' '.join(arguments)} failed in {repository}: {done.stderr.strip()}")
    return done.stdout


def _run_asv(config: Path) -> None:
    command = [sys.executable, "-m", "asv", "publish", "--no-pull", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (config.parent / "html" / "index.html").is_file():
        raise HistoryError(f"asv publish exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _check_replaceable(html_dir: Path) -> None:
    """Refuse to replace a folder that is not an earlier history: a mistyped path must not cost anybody their files."""
    if not html_dir.exists():
        return
    if not html_dir.is_dir() or (any(html_dir.iterdir()) and not (html_dir / "graphs").is_dir()):
        raise HistoryError(f"html_dir must be empty or an earlier history, got {html_dir}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 with the reason when there is nothing to publish."""
    parser = argparse.ArgumentParser(prog="python -m bench._history", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--html-dir", type=Path, default=ROOT / "html", help="folder of the page (default: html)")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1 until interrupted")
    parser.add_argument("--port", type=int, default=0, help="port to serve on; a free one by default")
    chosen = parser.parse_args(arguments)
    try:
        index = publish(chosen.html_dir)
    except HistoryError as error:
        print(error, file=sys.stderr)
        return 1
    print(index)
    if chosen.serve:
        with serve(chosen.html_dir, chosen.port) as server:
            print(f"http://127.0.0.1:{server.server_port}/ (interrupt to stop)", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
