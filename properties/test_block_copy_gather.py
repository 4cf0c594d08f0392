"""Gathering sequences from a cache: what every provider's `gather_kv` must do, bit for bit."""

import dataclasses
from typing import Any

import numpy as np

from pagebench.properties import block_copy_relations, contracts, far_blocks, relations
from pagebench.properties.block_copy_rows_recipes import QUANTISED, GatherRecipe
from pagebench.properties.claims import claim, fixed
from pagebench.properties.subject import Subject

OP = "gather_kv"


@claim(OP, examples=70)
def test_values(subject: Subject, data: Any) -> None:
    """The sequences' rows one after the other, dequantised as contract f32."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=15)
def test_poison(subject: Subject, data: Any) -> None:
    """Slots past a sequence's end, unused blocks and their scales, and table entries behind the last do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=10)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every variant that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@claim(OP, examples=15)
def test_sequence_order(subject: Subject, data: Any) -> None:
    """Bitwise: another order of the sequences only reorders their rows."""
    subject.hold_drawn(data, OP, block_copy_relations.check_sequence_order)


@claim(OP, examples=8)
def test_block_relabelling(subject: Subject, data: Any) -> None:
    """Bitwise: blocks may lie anywhere, with the table following."""
    subject.hold_drawn(data, OP, relations.check_relabelling)


@claim(OP, examples=15)
def test_copy_then_gather(subject: Subject, data: Any) -> None:
    """Bitwise: copied blocks read as the originals do."""
    subject.hold_drawn(data, OP, block_copy_relations.check_copy_then_gather)


@fixed(OP)
def test_every_code(subject: Subject) -> None:
    """All 256 codes of each quantised format, to each dtype, under scales that round, overflow and underflow."""
    for name in QUANTISED:
        for dtype in ("float16", "bfloat16", "float32"):
            for scale in (None, np.float32(0.1), np.float32(300), np.float32(1e-7), np.float32(3e38)):
                plain = GatherRecipe(dtype, name, 1, 256, block_size=1, sequences=(1,)).build()
                codes = np.arange(256, dtype=np.uint8).view(plain.key_cache.dtype)
                caches = {"key_cache": np.resize(codes, plain.key_cache.shape)}
                caches["value_cache"] = caches["key_cache"][..., ::-1].copy()
                scales = {"key_scale": scale, "value_scale": scale}
                problem: Any = dataclasses.replace(plain, **caches, **scales)  # type: ignore[arg-type]  # by name
                subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_many_sequences(subject: Subject) -> None:
    """More sequences than a program has threads to add up their lengths with."""
    lengths = tuple(int(n) for n in np.random.default_rng(0).integers(0, 3, 300))
    problem = GatherRecipe("float16", None, 1, 8, block_size=2, sequences=lengths, spare_entries=0).build()
    subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_many_rows(subject: Subject) -> None:
    """Sequences of 70 and of 1,100 rows, from a cache of the result's type and from one with a scale in each slot."""
    within = subject.support(OP)
    assert within is not None, "an op that is not supported is not asked"
    plain = GatherRecipe.sample(**within.plain)
    for sequences in ((70, 0, 65), (1100, 3)):
        many = dataclasses.replace(plain, sequences=sequences)
        for recipe in (many, dataclasses.replace(many, cache_dtype="int8", scale="slot")):
            subject.hold_if_accepted(contracts.check, recipe.build())


@fixed(OP)
def test_broadcast_cache(subject: Subject) -> None:
    """A cache whose heads are one, with a stride of 0."""
    for cache_dtype in (None, "int8"):
        plain = GatherRecipe("float16", cache_dtype, 8, 20).build()
        problem = dataclasses.replace(
            plain, key_cache=np.broadcast_to(plain.key_cache[:, :, :1], plain.key_cache.shape)
        )
        subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_far_blocks(subject: Subject) -> None:
    """Offsets do not wrap at 2^31: of blocks and their scales, and of the table's rows."""
    for cache_dtype, scale in ((None, None), ("float8_e5m2", "slot")):
        recipe = GatherRecipe(
            "float16", cache_dtype, 1, 16, block_size=2, sequences=(1, 0, 2), spare_entries=0, scale=scale, seed=3
        )
        problem = recipe.build()
        assert int(problem.block_table[2, 0]) == 2
        subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
