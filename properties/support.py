"""What a provider supports of an op, asked before anything is drawn, so that the budget is spent on what it runs.

`rejects` is put to one small problem per value of each axis of a recipe. A pure function of the provider: drawing does
not depend on what earlier examples did.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pagebench.properties.block_copy_recipes import CopyRecipe, SwapRecipe
from pagebench.properties.block_copy_rows_recipes import GatherRecipe, WriteRecipe
from pagebench.properties.dequant_recipes import DequantRecipe, GemvRecipe
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import AttentionRecipe

Recipe = Any  # one of those in RECIPES
RECIPES: dict[str, Any] = {
    "paged_attention": AttentionRecipe,
    "merge_states": MergeRecipe,
    "copy_blocks": CopyRecipe,
    "swap_blocks": SwapRecipe,
    "write_kv": WriteRecipe,
    "gather_kv": GatherRecipe,
    "dequantize": DequantRecipe,
    "dequant_gemv": GemvRecipe,
}
MOST_SEARCHED = 4000


@dataclass(frozen=True, slots=True)
class Support:
    """`plain`: the choices of an accepted sample; `axes`: the values of each axis accepted when only it differs."""

    plain: dict[str, Any]
    axes: dict[str, tuple[Any, ...]]


def everything(op: str) -> Support:
    """The whole contract of the op."""
    axes = RECIPES[op].AXES
    return Support({name: values[0] for name, values in axes.items()}, dict(axes))


def support(provider: Any, op: str, refused: Counter[str] | None = None) -> Support | None:
    """What `provider` accepts of `op`; None when it rejects every sample. `refused` counts the reasons it gives."""
    recipe = RECIPES[op]
    axes = recipe.AXES
    refused = Counter() if refused is None else refused
    plain = _accepted_sample(provider, recipe, refused)
    if plain is None:
        return None
    accepted = {
        name: tuple(value for value in values if _accepts(provider, recipe, {**plain, name: value}, refused))
        for name, values in axes.items()
    }
    # A baseline found by search may differ from the default in an axis that the sample leaves out.
    return Support(plain, {name: values or (axes[name][0],) for name, values in accepted.items()})


def _accepted_sample(provider: Any, recipe: Any, refused: Counter[str]) -> dict[str, Any] | None:
    """Choices that differ from the defaults in as few axes as possible, at most three."""
    names = list(recipe.AXES)
    searched = 0
    for changed in range(4):
        for axes in itertools.combinations(names, changed):
            for values in itertools.product(*(recipe.AXES[name][1:] for name in axes)):
                choices = dict(zip(axes, values, strict=True))
                if _accepts(provider, recipe, choices, refused):
                    return choices
                searched += 1
                if searched >= MOST_SEARCHED:
                    return None
    return None


def _accepts(provider: Any, recipe: Any, choices: dict[str, Any], refused: Counter[str]) -> bool:
    try:
        problem = recipe.sample(**choices).build()
    except ValueError:
        return False  # the choices exclude each other
    reason = provider.rejects(problem)
    if reason is not None:
        refused[reason] += 1
    return reason is None
