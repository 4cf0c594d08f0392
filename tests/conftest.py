"""Set-up of the harness's own tests: helper modules beside them, skips that must be listed."""

import fnmatch
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # numpy_kernels and the like, under any import mode


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        type=Path,
        metavar="FILE",
        help="TOML file of [[skip]] tables (test: glob, reason: regular expression, why); any other skip fails the run",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--allowed-skips")
    if path is not None:
        config.pluginmanager.register(AllowedSkips(_read(config.invocation_params.dir / path)), "allowed-skips")


def _read(path: Path) -> list[dict[str, str]]:
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise pytest.UsageError(f"--allowed-skips: {error}") from error
    skips: list[dict[str, str]] = tables.get("skip", [])
    for skip in skips:
        if set(skip) != {"test", "reason", "why"}:
            raise pytest.UsageError(f"--allowed-skips: each [[skip]] must have test, reason and why, got {skip}")
    return skips


class AllowedSkips:
    """Fails a session in which a test was skipped for a reason that is not listed."""

    def __init__(self, allowed: list[dict[str, str]]) -> None:
        self.allowed = allowed
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._judge(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._judge(report)

    def _judge(self, report: Any) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(fnmatch.fnmatch(report.nodeid, a["test"]) and re.search(a["reason"], reason) for a in self.allowed):
            self.unlisted.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.unlisted:
            terminalreporter.section("skips that --allowed-skips does not list")
            for line in self.unlisted:
                terminalreporter.line(line, red=True)
