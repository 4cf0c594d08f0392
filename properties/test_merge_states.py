"""Merging two partial results of attention: what every provider's `merge_states` must do."""

import dataclasses
from typing import Any

from pagebench.properties import contracts, far_blocks, merge_states_relations
from pagebench.properties.claims import claim, fixed
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.subject import Subject

OP = "merge_states"


@claim(OP, examples=40)
def test_values(subject: Subject, data: Any) -> None:
    """Within the derived bound; where a side has no key, the other one bit for bit."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=15)
def test_poison(subject: Subject, data: Any) -> None:
    """The out of a side without keys, gaps between rows, and results as they were before the call do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=10)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every variant that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@claim(OP, examples=15)
def test_sides_swapped(subject: Subject, data: Any) -> None:
    """Within the bound: the order of the sides means nothing."""
    case = data.draw(subject.cases(OP))
    problem = case.problem
    sides = {"out_a": problem.out_b, "lse_a": problem.lse_b, "out_b": problem.out_a, "lse_b": problem.lse_a}
    subject.hold(contracts.check, dataclasses.replace(problem, **sides), case.variant)


@fixed(OP)
def test_far_rows(subject: Subject) -> None:
    """Offsets of rows do not wrap at 2^31."""
    problem = MergeRecipe(num_heads=2).build()
    subject.hold_if_accepted(far_blocks.check_far_blocks, problem)


@claim("paged_attention", examples=12)
def test_halves_make_the_whole(subject: Subject, data: Any) -> None:
    """Within the bounds: attention over the first keys merged with that over the rest is attention over all."""
    subject.hold_drawn(data, "paged_attention", merge_states_relations.check_halves)
