"""A provider under test: draws problems it supports, holds it to claims, and keeps the tally."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pagebench.kernels.providers import how_it_runs
from pagebench.properties import strategies
from pagebench.properties.runs import NotExercised
from pagebench.properties.support import RECIPES, Support, everything, support
from pagebench.properties.tally import Tally
from pagebench.reference.dequant import PackedWeight
from pagebench.reference.problem import Problem

Contract = Callable[..., tuple[str, ...]]
ATTEMPTS = 4
REASONS_SHOWN = 5
REPRO = "_pagebench_repro"  # attribute of an exception: the snippet that raises it again


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """A drawn problem, the recipe it was built from (None for a hand-made one) and one of the provider's variants."""

    problem: Any
    recipe: Any
    variant: dict[str, Any]

    def __repr__(self) -> str:
        return f"Case({self.recipe}, variant={self.variant})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every array


@dataclass(repr=False)
class Subject:
    """`spec` is what `load_provider` takes, for repros; `tally` is the current test's."""

    spec: str
    provider: Any
    tally: Tally = field(default_factory=Tally)
    _support: dict[str, Support | None] = field(default_factory=dict)
    _refused: dict[str, Counter[str]] = field(default_factory=dict)
    _label: str = ""

    def __repr__(self) -> str:
        return f"Subject({self.spec!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def label(self) -> str:
        """The provider and how it runs here, as "triton [interpreter]"."""
        if not self._label:
            self._label = f"{self.provider.name} [{how_it_runs(self.provider)}]"
        return self._label

    def support(self, op: str) -> Support | None:
        if op not in self._support:
            self._refused[op] = Counter()
            self._support[op] = support(self.provider, op, self._refused[op])
        return self._support[op]

    def lacks(self, op: str) -> str | None:
        """Why nothing of `op` can be tried."""
        if not callable(getattr(self.provider, op, None)):
            return f"{self.provider.name} does not implement {op}"
        if self.support(op) is None:
            reasons = self._refused[op].most_common()
            listed = [f"{count} times: {reason}" for reason, count in reasons[:REASONS_SHOWN]]
            more = [f"{len(reasons) - REASONS_SHOWN} more reasons"] if len(reasons) > REASONS_SHOWN else []
            tried = self._refused[op].total()
            return f"{self.provider.name} rejects every {op} problem, {tried} tried; {'; '.join(listed + more)}"
        return None

    def unsupported(self, op: str) -> list[str]:
        """The features of `op` that the provider rejects in an otherwise plain problem, as "window 1, 2, 3"."""
        within = self.support(op)
        if within is None:
            return []
        missing = {axis: [v for v in values if v not in within.axes[axis]] for axis, values in RECIPES[op].AXES.items()}
        return [f"{axis} {', '.join(str(v) for v in values)}" for axis, values in missing.items() if values]

    def cases(self, op: str) -> SearchStrategy[Case]:
        """Cases of `op`: one in four drawn from the whole contract, which may be rejected; the others steered."""
        return _cases(self, op)

    def hold(self, contract: Contract, problem: Problem, variant: dict[str, Any] | None = None) -> None:
        """Hold the provider to `contract`; a failure carries the snippet that reproduces it (see `repros_of`)."""
        key = (self.label, problem.op)
        try:
            missing = contract(self.provider, problem, variant=variant)
            self.tally.examples[key] += 1
        except NotExercised as why:
            missing = (str(why),)
        except Exception as error:
            setattr(error, REPRO, repro(self.spec, contract, problem, variant))
            raise
        self.tally.not_exercised.update((*key, what) for what in missing)

    def hold_drawn(self, data: Any, op: str, contract: Contract) -> None:
        """Hold the provider to `contract` on a drawn case of `op`; data: Hypothesis's `st.data()`."""
        case = data.draw(self.cases(op))
        self.hold(contract, case.problem, case.variant)

    def hold_if_accepted(self, contract: Contract, problem: Problem, variant: dict[str, Any] | None = None) -> None:
        """Hold the provider to `contract` on a problem if it supports it, under `variant` if it offers that for it."""
        if self.accepted(problem):
            offered = variant is not None and variant in self.variants(problem)
            self.hold(contract, problem, variant if offered else None)

    def with_contract(self, problem: Any) -> Any:
        """`problem` under the rounding contract that the provider declares."""
        if isinstance(problem, PackedWeight) and hasattr(self.provider, "contract"):
            return dataclasses.replace(problem, contract=self.provider.contract(problem.format))
        return problem

    def accepted(self, problem: Problem) -> bool:
        """Whether the provider supports `problem`; counts the rejection otherwise."""
        reason = self.provider.rejects(problem)
        if reason is not None:
            self.tally.rejected[self.label, problem.op, reason] += 1
        return reason is None

    def variants(self, problem: Problem) -> list[dict[str, Any]]:
        """The provider's variants of `problem`; [{}] where it has none."""
        return list(self.provider.variants(problem)) if hasattr(self.provider, "variants") else [{}]


@st.composite
def _cases(draw: DrawFn, subject: Subject, op: str) -> Case:
    narrow = subject.support(op)
    assert narrow is not None, "cases are drawn only for an op of which the provider supports something"
    pick = strategies.Picker(draw(strategies.CHOICES))
    attempts = [narrow] * ATTEMPTS
    if pick((False, False, False, True)):
        attempts.insert(0, everything(op))
    for within in attempts:
        recipe = strategies.recipe(op, pick, within)
        problem = subject.with_contract(recipe.build())
        if subject.accepted(problem):
            return Case(problem, recipe, pick(subject.variants(problem)))
        pick = strategies.Picker(draw(strategies.CHOICES))
    recipe = RECIPES[op].sample(**narrow.plain)
    problem = subject.with_contract(recipe.build())
    return Case(problem, recipe, pick(subject.variants(problem)))


def repro(spec: str, contract: Contract, problem: Problem, variant: dict[str, Any] | None) -> str:
    """`Problem.repro` for any contract function, not only `check`."""
    text = problem.repro(spec, variant)
    where = f"from {contract.__module__} import {contract.__name__}"
    text = text.replace("from pagebench.properties.contracts import check", where)
    return text.replace("\ncheck(", f"\n{contract.__name__}(")


def repros_of(error: BaseException) -> Iterator[str]:
    """The snippets that an exception carries, also as a member of a group, as Hypothesis raises for a flaky one."""
    if hasattr(error, REPRO):
        yield getattr(error, REPRO)
    for member in getattr(error, "exceptions", ()):
        yield from repros_of(member)
