"""Neither of the project's providers rejects a valid problem of dequantisation, nor one of sizes at their limits."""

from typing import Any

import numpy as np
import pytest

from pagebench.kernels.providers import load_provider
from pagebench.properties.contracts import check
from pagebench.properties.dequant_recipes import SCALES, DequantRecipe, GemvRecipe
from pagebench.reference.dequant import Dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.dequant_samples import random_packed
from pagebench.reference.dtypes import FLOAT16

DRAWN = 1000
PATTERNS = ("random", "one nibble", "sign", "zero and fifteen")


def drawn(recipe: type[DequantRecipe], rng: np.random.Generator) -> Any:
    """A recipe with each axis drawn by itself, and sizes across the edges of tiles."""
    axes = {name: values[rng.integers(len(values))] for name, values in recipe.AXES.items()}
    sizes = {"rows": int(rng.integers(1, 40)), "columns": int(rng.integers(1, 60)), "seed": int(rng.integers(1 << 30))}
    return recipe(**axes, **sizes, scales=str(rng.choice(SCALES)), bits=str(rng.choice(PATTERNS)))


@pytest.mark.parametrize("recipe", [DequantRecipe, GemvRecipe])
def test_no_valid_problem_is_rejected(recipe: type[DequantRecipe]) -> None:
    """Under each provider's own contract, and under the format's."""
    providers = [load_provider(name) for name in ("triton", "cupy")]
    rng = np.random.default_rng(0)
    formats, forms = set(), set()
    for _ in range(DRAWN):
        problem = drawn(recipe, rng).build()
        formats.add(problem.format)
        forms.add((problem.format, FORMATS[problem.format].form(problem.packed)))
        for provider in providers:
            assert provider.contract(problem.format) == problem.contract
            assert provider.rejects(problem) is None
    assert formats == set(FORMATS)
    assert len(forms) == sum(len(known.forms) for known in FORMATS.values())


@pytest.mark.parametrize("provider", ["triton", "cupy"])
@pytest.mark.parametrize("group_size", [64, 65, 2**31 - 1, 2**40, np.int16(64)])
def test_one_group_of_all_k_may_have_any_size(provider: str, group_size: Any) -> None:
    """And sizes may be NumPy's integers."""
    ours, rng = load_provider(provider), np.random.default_rng(0)
    for format in ("gptq_v2", "awq", "int8"):
        shape = (np.int32(32), np.int64(64))
        form = "group" if format == "int8" else "plain"
        packed = random_packed(format, (32, 64), 64, rng, form=form, finite=True)
        fields = (format, packed, shape, group_size, FLOAT16, ours.contract(format))
        check(ours, Dequantize(*fields))
        check(ours, DequantGemv(*fields, x=rng.standard_normal((2, 64)).astype(np.float16)))
