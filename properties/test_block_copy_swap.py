"""Swapping blocks with the host: what every provider's `swap_blocks` must do, in every byte of both pools."""

import dataclasses
from typing import Any

from pagebench.properties import block_copy_relations as relations
from pagebench.properties import contracts, far_blocks
from pagebench.properties.block_copy_recipes import SwapRecipe
from pagebench.properties.claims import claim, fixed
from pagebench.properties.subject import Subject

OP = "swap_blocks"


@claim(OP, examples=50)
def test_every_byte(subject: Subject, data: Any) -> None:
    """Each destination block holds its source, and nothing else is touched."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=15)
def test_poison(subject: Subject, data: Any) -> None:
    """Blocks that no pair reads, and the gaps between a view's elements, do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=25)
def test_there_and_back(subject: Subject, data: Any) -> None:
    """Bitwise: swapping out and in again is the identity."""
    subject.hold_drawn(data, OP, relations.check_swap_there_and_back)


@claim(OP, examples=8)
def test_swapping_twice(subject: Subject, data: Any) -> None:
    """Bitwise: a second swap of the same blocks changes nothing."""
    subject.hold_drawn(data, OP, relations.check_swap_twice)


@fixed(OP)
def test_many_layers(subject: Subject) -> None:
    """80 layers of K and V, adjacent blocks."""
    cache = ("bfloat16", (4, 2, 8), "halves", "contiguous")
    problem = SwapRecipe((cache,) * 80, num_src=6, num_dst=6, count=4, adjacent=True).build()
    subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_many_pairs(subject: Subject) -> None:
    """17 to 600 pairs, all over the pools and adjacent."""
    within = subject.support(OP)
    assert within is not None, "an op that is not supported is not asked"
    plain = SwapRecipe.sample(**within.plain)
    for count in (17, 300, 600):
        for adjacent in (False, True):
            recipe = dataclasses.replace(plain, num_src=count, num_dst=count + 1, count=count, adjacent=adjacent)
            subject.hold_if_accepted(contracts.check, recipe.build())


@fixed(OP)
def test_far_blocks(subject: Subject) -> None:
    """Block id times stride does not wrap at 2^31 in the device's pool, neither as the source nor as the target."""
    for direction in ("out", "in"):
        cache = ("uint8", (1000,), "contiguous", "contiguous")
        problem = SwapRecipe((cache,) * 2, num_src=3, num_dst=3, count=3, direction=direction).build()
        subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
