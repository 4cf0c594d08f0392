"""Faults in kernels for any packed format must be caught within the default number of examples."""

import inspect
from typing import Any

import planted_dequant
import pytest
from claim_runner import caught_by
from planted_dequant import AnyFormat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BUGS = [c for c in vars(planted_dequant).values() if inspect.isclass(c) and issubclass(c, AnyFormat)]
FUSED = [c for c in BUGS if {"row_product", "dequant_gemv"} & set(vars(c))]


@pytest.mark.parametrize("bug", [c for c in BUGS if c not in FUSED and c is not AnyFormat], ids=lambda c: c.__name__)
def test_a_fault_in_the_weights_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "dequantize") is not None


@pytest.mark.parametrize("bug", FUSED, ids=lambda c: c.__name__)
def test_a_fault_in_the_product_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "dequant_gemv") is not None


@pytest.mark.parametrize("op", ["dequantize", "dequant_gemv"])
def test_a_correct_kernel_of_every_format_passes(op: str) -> None:
    caught = caught_by(AnyFormat(), op)
    assert caught is None, f"{caught[0]}: {caught[1]}"  # type: ignore[index]  # the message is made only when it is not None
