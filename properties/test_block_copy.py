"""Block copy: what every provider's `copy_blocks` must do. Every byte is compared, the gaps of views included."""

import dataclasses
from typing import Any

import numpy as np

from pagebench.properties import block_copy_relations, contracts, far_blocks, relations
from pagebench.properties.block_copy_recipes import DTYPES, CopyRecipe
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
def test_many_pairs(subject: Subject) -> None:
    """More pairs, longer chains and cycles, and more destinations of one source than a program looks at at once."""
    within = subject.support(OP)
    assert within is not None, "an op that is not supported is not asked"
    plain = CopyRecipe.sample(**within.plain)
    blocks_of = {"random": (17, 513), "chain": (66,), "cycle": (257,), "fan out": (10, 71, 301), "forks": (99, 900)}
    for kind, counts in blocks_of.items():
        for blocks in counts:  # of a chain or a source's destinations one more than pairs, of forks half as many more
            recipe = dataclasses.replace(plain, pairs=kind, num_blocks=blocks, count=blocks)
            subject.hold_if_accepted(contracts.check, recipe.build())


@fixed(OP)
def test_large_blocks(subject: Subject) -> None:
    """Blocks of a little more than 32 KiB and 64 KiB, with wide accesses and without."""
    within = subject.support(OP)
    assert within is not None, "an op that is not supported is not asked"
    plain = CopyRecipe.sample(**within.plain)
    dtype, _, layout = plain.caches[0]
    for nbytes in (2**15 + 16, 2**16 + DTYPES[dtype].itemsize):
        shape = (nbytes // DTYPES[dtype].itemsize,)
        recipe = dataclasses.replace(plain, caches=((dtype, shape, layout),), num_blocks=3, pairs="cycle", count=2)
        subject.hold_if_accepted(contracts.check, recipe.build())


@fixed(OP)
def test_far_blocks(subject: Subject) -> None:
    """Block id times stride does not wrap at 2^31, whatever the widest access that suits the blocks."""
    caches = tuple(("uint8", (nbytes,), "contiguous") for nbytes in (1000, 1001, 1024))
    cycle = CopyRecipe(caches, num_blocks=3, pairs="cycle", count=3).build()
    for pairs in (cycle.pairs, np.array([[2, 0]], np.int64), np.array([[0, 2]], np.int64)):
        problem = dataclasses.replace(cycle, pairs=pairs)
        subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
