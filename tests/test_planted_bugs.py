"""Every kind of fault must be caught within the default number of examples, and no correct kernel may fail."""

import warnings
from types import ModuleType
from typing import Any

import numpy_kernels
import planted_attention
import planted_others
import planted_rows
import planted_sizes
import pytest
from claim_runner import MODULES, caught_by

# What a planted bug does to its numbers on the way is no concern of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def planted(base: type, *modules: ModuleType) -> list[Any]:
    """The planted bugs of `modules` that derive from `base`."""
    classes = [c for module in modules for c in vars(module).values() if isinstance(c, type)]
    found = [c for c in classes if issubclass(c, base) and c is not base]
    return [pytest.param(c, id=c.__name__) for c in found]


@pytest.mark.parametrize("bug", planted(numpy_kernels.Attention, planted_attention))
def test_attention_bug_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "paged_attention") is not None


@pytest.mark.parametrize("bug", planted(numpy_kernels.Copy, planted_others, planted_sizes))
def test_copy_bug_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "copy_blocks") is not None


@pytest.mark.parametrize("bug", planted(numpy_kernels.Swap, planted_rows, planted_sizes))
def test_swap_bug_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "swap_blocks") is not None


@pytest.mark.parametrize("bug", planted(numpy_kernels.Write, planted_rows, planted_sizes))
def test_write_bug_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "write_kv") is not None


@pytest.mark.parametrize("bug", planted(numpy_kernels.Gather, planted_rows, planted_sizes))
def test_gather_bug_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "gather_kv") is not None


@pytest.mark.parametrize("bug", planted(numpy_kernels.Dequant, planted_others))
def test_dequant_bug_is_caught(bug: Any) -> None:
    assert caught_by(bug(), "dequantize") is not None


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize(
    "kernels",
    [numpy_kernels.Everything, numpy_kernels.EverythingReversed],
    ids=lambda kernels: kernels.__name__,
)
def test_correct_kernel_passes(kernels: Any, op: str) -> None:
    with warnings.catch_warnings():
        caught = caught_by(kernels(), op)
    assert caught is None, f"{caught[0]}: {caught[1]}"  # type: ignore[index]  # the message is made only when it is not None
