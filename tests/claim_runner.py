"""Runs the property tests in this process, on a provider object, without shrinking."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pagebench.properties import (
    test_block_copy,
    test_block_copy_gather,
    test_block_copy_swap,
    test_block_copy_write,
    test_dequant,
    test_dequant_gemv,
    test_paged_attention,
)
from pagebench.properties.subject import Subject

MODULES: dict[str, ModuleType] = {
    "paged_attention": test_paged_attention,
    "copy_blocks": test_block_copy,
    "swap_blocks": test_block_copy_swap,
    "write_kv": test_block_copy_write,
    "gather_kv": test_block_copy_gather,
    "dequantize": test_dequant,
    "dequant_gemv": test_dequant_gemv,
}


def claims(op: str) -> Iterator[tuple[str, Any]]:
    """(name, test function) of every claim about `op`, in the order of its file."""
    yield from ((n, f) for n, f in vars(MODULES[op]).items() if n.startswith("test_") and hasattr(f, "pagebench_ops"))


def run_claim(test: Any, provider: Any) -> None:
    """One claim within its default number of examples; raises what the claim raises."""
    subject = Subject("a NumPy provider of the tests", provider)
    if not hasattr(test, "pagebench_examples"):
        test(subject)
        return

    @settings(
        max_examples=test.pagebench_examples,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(data=st.data())
    def body(data: Any) -> None:
        test.hypothesis.inner_test(subject, data)

    body()


def caught_by(provider: Any, op: str) -> tuple[str, BaseException] | None:
    """(claim, error) of the first claim about `op` that `provider` breaks; None when it keeps all of them.

    A provider's `shown_by` names the claim to begin with, where only one is meant to show its fault.
    """
    begin = getattr(provider, "shown_by", None)
    for name, test in sorted(claims(op), key=lambda pair: pair[0] != begin):
        try:
            run_claim(test, provider)
        except Exception as error:
            return name, error
    return None
