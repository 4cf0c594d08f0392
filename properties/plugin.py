"""pytest plugin: `pytest --pyargs pagebench.properties --provider PATH.py:NAME` holds any provider to every claim.

Loaded by every pytest of an environment where pagebench is installed, so it imports nothing heavy and touches nothing
but the functions marked in `claims`.
"""

import dataclasses
import json
import os
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagebench.properties import profile
from pagebench.properties.tally import Tally

if TYPE_CHECKING:
    from pagebench.properties.subject import Subject

OURS = ("triton", "cupy")
PROPERTY = "pagebench"  # name of the user property in which a test's tally travels (also between xdist processes)


@dataclasses.dataclass
class Session:
    """What the plugin keeps for one pytest session."""

    named: tuple[str, ...]
    subjects: dict[str, "Subject"] = dataclasses.field(default_factory=dict)
    tally: Tally = dataclasses.field(default_factory=Tally)

    def subject(self, spec: str) -> "Subject":
        """The provider named `spec`, loaded once."""
        if spec not in self.subjects:
            from pagebench.kernels.providers import load_provider
            from pagebench.properties.subject import Subject

            self.subjects[spec] = Subject(spec, load_provider(spec))
        return self.subjects[spec]


SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagebench", "pagebench: properties of LLM serving kernels")
    group.addoption(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="provider to test, repeatable: a registered name, MODULE:NAME or PATH.py:NAME (default: triton and cupy)",
    )
    group.addoption(
        "--pagebench-profile",
        choices=sorted(profile.PROFILES),
        default="default",
        help="examples per property: quick (a quarter, failures not shrunk), default, deep (twenty times)",
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen = profile.PROFILES[config.getoption("--pagebench-profile")]
    profile.activate(dataclasses.replace(chosen, home=config.rootpath / ".hypothesis"))
    here = config.invocation_params.dir
    state = config.stash[SESSION] = Session(tuple(absolute(spec, here) for spec in config.getoption("--provider")))
    config.pluginmanager.register(Recorder(state), "pagebench-recorder")


def absolute(spec: str, directory: Path) -> str:
    """`spec` with a relative PATH.py taken from `directory`."""
    path, colon, name = spec.rpartition(":")
    return f"{(directory / path).resolve()}{colon}{name}" if path.endswith(".py") else spec


def pytest_sessionstart(session: pytest.Session) -> None:
    """A provider named on the command line must load and run here: anything else is an error, not a skip."""
    state = session.config.stash[SESSION]
    for spec in state.named:
        try:
            provider = state.subject(spec).provider
        except ValueError as error:
            raise pytest.UsageError(f"--provider: {error}") from error
        except Exception as error:
            raise pytest.UsageError(f"--provider {spec} cannot be loaded:\n{traceback.format_exc()}") from error
        reason = provider.unavailable()
        if reason is not None:
            raise pytest.UsageError(f"--provider {spec} cannot run here: {reason}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if hasattr(metafunc.function, "pagebench_ops") and "subject" in metafunc.fixturenames:
        named = metafunc.config.stash[SESSION].named
        ids = [os.path.basename(spec) for spec in named or OURS]
        metafunc.parametrize("subject", named or OURS, indirect=True, scope="session", ids=ids)


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> "Subject":
    """The provider under test."""
    found = request.config.stash[SESSION].subject(request.param)
    reason = found.provider.unavailable()
    if reason is not None:
        pytest.skip(f"{found.provider.name} cannot run here: {reason}")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    ops = getattr(pyfuncitem.function, "pagebench_ops", None)
    found: Any = pyfuncitem.funcargs.get("subject")
    if ops is None or found is None:
        return (yield)
    found.tally = Tally()
    try:
        lacking = {op: why for op in ops if (why := found.lacks(op)) is not None}
        found.tally.not_exercised.update((found.label, op, why) for op, why in lacking.items())
        if len(lacking) == len(ops):
            pytest.skip("; ".join(lacking.values()))
        for op in ops:
            found.tally.unsupported.update((found.label, op, feature) for feature in found.unsupported(op))
        return (yield)
    finally:
        pyfuncitem.user_properties.append((PROPERTY, json.dumps(found.tally.to_json())))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the snippet that reproduces a failure in a section of the report, without pytest's margin: to be copied."""
    report = yield
    if call.excinfo is not None and hasattr(getattr(item, "function", None), "pagebench_ops"):
        from pagebench.properties.subject import repros_of

        report.sections += [(f"to reproduce {item.name}", text) for text in repros_of(call.excinfo.value)]
    return report


class Recorder:
    """Adds up the tallies of finished tests, prints them, and refuses a green session in which nothing was checked."""

    def __init__(self, state: Session) -> None:
        self.state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == PROPERTY:
                    self.state.tally.add(Tally.from_json(json.loads(str(value))))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.state.tally.idle() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        tally = self.state.tally
        if tally.empty():
            return
        terminalreporter.section("pagebench: what was checked")
        for line in tally.lines():
            terminalreporter.line(line)
        for provider in tally.idle():
            terminalreporter.line(f"NOTHING EXERCISED: not one problem of any op was checked on {provider}", red=True)
