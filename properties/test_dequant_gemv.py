"""The fused product: what every provider's `dequant_gemv` must do."""

from typing import Any

import numpy as np

from pagebench.properties import contracts, dequant_probes, far_blocks
from pagebench.properties.claims import claim, fixed
from pagebench.properties.dequant_recipes import GemvRecipe
from pagebench.properties.subject import Subject
from pagebench.reference.dequant_formats import FORMATS

OP = "dequant_gemv"


@claim(OP, examples=32)
def test_product(subject: Subject, data: Any) -> None:
    """Every element of y is within the bound, and infinities and NaN stay in the rows they belong to."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=10)
def test_poison(subject: Subject, data: Any) -> None:
    """Unused groups, gaps between the elements of views, and outputs and scratch as they were do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=8)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every variant that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@fixed(OP)
def test_identity(subject: Subject) -> None:
    """Rows of the identity give the dequantised columns of finite weights bit for bit, the sign of zero excepted."""
    for i, format in enumerate(FORMATS):
        problem = subject.with_contract(dequant_probes.identity(format, m=(1, 16)[i % 2], seed=i))
        subject.hold_if_accepted(dequant_probes.check_identity, problem)


@fixed(OP)
def test_exact_sums(subject: Subject) -> None:
    """Small integers in x and powers of two as scales: every partial sum is exact, and so is y."""
    for i, format in enumerate(dequant_probes.EXACT_FORMATS):
        problem = subject.with_contract(dequant_probes.exact(format, m=(1, 5)[i % 2], dtype=np.dtype(np.float16)))
        subject.hold_if_accepted(dequant_probes.check_exact, problem)


@fixed(OP)
def test_far_rows(subject: Subject) -> None:
    """Offsets of rows do not wrap at 2^31: of x, and of packed arrays along either side of the weight."""
    for format in (
        "q8_0",
        "gptq_v2",
        "pack_quantized_4",
    ):  # the packed arrays of every format are held to it as `dequantize`
        problem = subject.with_contract(GemvRecipe(format, rows=3, columns=3, m=3).build())
        subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
