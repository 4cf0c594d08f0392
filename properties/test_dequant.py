"""Dequantisation: what every provider's `dequantize` must do. Values are compared bit for bit under its contract."""

from typing import Any

from pagebench.properties import codes, contracts, far_blocks
from pagebench.properties.claims import claim, fixed
from pagebench.properties.dequant_recipes import DequantRecipe
from pagebench.properties.subject import Subject
from pagebench.reference.dequant_formats import FORMATS

OP = "dequantize"


@claim(OP, examples=80)
def test_bits(subject: Subject, data: Any) -> None:
    """Every weight has the bits that the rounding contract gives, whatever the packed bits and scales."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=20)
def test_poison(subject: Subject, data: Any) -> None:
    """Groups that no weight uses, gaps between the elements of views, and the output's old bytes do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=12)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every variant that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@fixed(OP)
def test_every_code(subject: Subject) -> None:
    """Every code under a scale of every class, to every output dtype, in every format."""
    for problem in codes.exhaustive():
        asked = subject.with_contract(problem)
        subject.hold_if_accepted(contracts.check, asked)


@fixed(OP)
def test_far_rows(subject: Subject) -> None:
    """Offsets of packed rows do not wrap at 2^31, in any format and form."""
    for format, known in FORMATS.items():
        for form in range(len(known.forms)):
            problem = subject.with_contract(DequantRecipe(format, form, rows=3, columns=3).build())
            subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
