"""What turns a function of (subject, data) into a property test over providers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, configuration, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from pagebench.properties import profile

Test = Callable[..., None]

# One launch in the interpreter takes 0.2 s, so drawing is never what is slow.
_SUPPRESSED = (HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large)


def claim(op: str, *, examples: int) -> Callable[[Test], Test]:
    """Mark test(subject, data) as a claim about `op`, tried on `examples` drawn cases under the default profile."""

    def decorate(test: Test) -> Test:
        wrapped: Any = budget(examples)(given(data=st.data())(test))
        wrapped.pagebench_ops = (op,)
        wrapped.pagebench_examples = examples
        return wrapped  # type: ignore[no-any-return]  # a function with attributes

    return decorate


def fixed(*ops: str) -> Callable[[Test], Test]:
    """Mark test(subject) as a claim about `ops` on problems that are the same every time, or of the test's own making.

    Skipped for a provider that has none of them.
    """

    def decorate(test: Any) -> Test:
        test.pagebench_ops = ops
        return test  # type: ignore[no-any-return]  # a function with attributes

    return decorate


def _explored(chosen: profile.Profile) -> dict[str, Any]:
    """The deep profile draws afresh and remembers failures also where Hypothesis would do neither: under CI."""
    if chosen.name != "deep":
        return {}
    return {
        "derandomize": False,
        "database": DirectoryBasedExampleDatabase(Path(chosen.home or ".hypothesis", "examples")),
    }


def budget(examples: int) -> settings:
    """Hypothesis settings for `examples` under the active profile; the rest is the user's default profile."""
    chosen = profile.active
    if chosen.home is not None and "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
        configuration.set_hypothesis_home_dir(str(chosen.home))
    phases = [Phase.explicit, Phase.reuse, Phase.generate] + ([Phase.shrink] if chosen.shrink else [])
    return settings(
        max_examples=chosen.examples(examples),
        deadline=None,  # a first launch compiles
        print_blob=True,
        phases=phases,
        report_multiple_bugs=False,  # one shrunk problem per claim is what a reader can use
        suppress_health_check=_SUPPRESSED,
        **_explored(chosen),
    )
