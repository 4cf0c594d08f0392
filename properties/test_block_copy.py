"""Block copy: what every provider's `copy_blocks` must do. Every byte is compared, the gaps of views included."""

import dataclasses
from typing import Any

import numpy as np

from pagebench.properties import block_copy_relations, contracts, far_blocks, relations
from pagebench.properties.block_copy_recipes import CopyRecipe
from pagebench.properties.claims import claim, fixed
from pagebench.properties.subject import Subject

OP = "copy_blocks"


@claim(OP, examples=70)
def test_every_byte(subject: Subject, data: Any) -> None:
    """All reads before all writes, in all caches, and nothing else touched."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=15)
def test_poison(subject: Subject, data: Any) -> None:
    """Scratch and the gaps between a view's elements do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=8)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every variant that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@claim(OP, examples=15)
def test_pair_order(subject: Subject, data: Any) -> None:
    """Bitwise: the order of the pairs means nothing."""
    subject.hold_drawn(data, OP, relations.check_pair_order)


@claim(OP, examples=12)
def test_copying_twice(subject: Subject, data: Any) -> None:
    """Bitwise: where no source is a destination too, a second copy changes nothing."""
    subject.hold_drawn(data, OP, block_copy_relations.check_copy_twice)


@fixed(OP)
def test_many_layers(subject: Subject) -> None:
    """80 layers of K and V in one call, with a chain and a cycle through them."""
    problem = CopyRecipe((("bfloat16", (4, 2, 8), "halves"),) * 80, num_blocks=6, pairs="cycle", count=4).build()
    subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_every_map_of_three_blocks(subject: Subject) -> None:
    """All partial maps of three blocks onto themselves: every chain, cycle, fan-out and self pair there is."""
    recipe = CopyRecipe((("float16", (3,), "contiguous"), ("uint8", (5,), "padded")), num_blocks=3)
    for number in range(4**3):
        sources = [number // 4**dst % 4 for dst in range(3)]
        pairs = np.array([(src, dst) for dst, src in enumerate(sources) if src < 3], np.int64).reshape(-1, 2)
        problem = type(recipe.build())(recipe.build().caches, pairs)
        subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_far_blocks(subject: Subject) -> None:
    """Block id times stride does not wrap at 2^31, whatever the widest access that suits the blocks."""
    caches = tuple(("uint8", (nbytes,), "contiguous") for nbytes in (1000, 1001, 1024))
    cycle = CopyRecipe(caches, num_blocks=3, pairs="cycle", count=3).build()
    for pairs in (cycle.pairs, np.array([[2, 0]], np.int64), np.array([[0, 2]], np.int64)):
        problem = dataclasses.replace(cycle, pairs=pairs)
        subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
