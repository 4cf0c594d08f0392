"""Neither of the project's providers rejects a valid problem of dequantisation; nothing runs."""

from typing import Any

import numpy as np
import pytest

from pagebench.kernels.providers import load_provider
from pagebench.properties.dequant_recipes import SCALES, DequantRecipe, GemvRecipe
from pagebench.reference.dequant_formats import FORMATS

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
