"""Paged attention: what every provider's `paged_attention` must do."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from pagebench.properties import contracts, far_blocks, probes, relations
from pagebench.properties.claims import claim, fixed
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.properties.subject import Subject

OP = "paged_attention"
EDGES = st.integers(0, 200)


@claim(OP, examples=48)
def test_values(subject: Subject, data: Any) -> None:
    """Within the derived bound of the dense float64 reference; no byte of an input or beside an array changed."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=15)
def test_poison(subject: Subject, data: Any) -> None:
    """What must not matter does not: tails, unused blocks, table entries past the end, scratch, old output."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=7)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every split, tile and warp count that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@claim(OP, examples=18)
def test_counting(subject: Subject, data: Any) -> None:
    """Every key is counted once: no dropped and no extra key."""
    case = data.draw(subject.cases(OP))
    subject.hold_if_accepted(contracts.check, probes.counting(case.problem), case.variant)


@claim(OP, examples=24)
def test_needle(subject: Subject, data: Any) -> None:
    """A single key that matters is found at every edge of block, tile and window, and not found just outside."""
    case = data.draw(subject.cases(OP))
    subject.hold_if_accepted(contracts.check, probes.needle(case.problem, data.draw(EDGES)), case.variant)


@claim(OP, examples=12)
def test_constant_value(subject: Subject, data: Any) -> None:
    """If every value is c, out is c."""
    case = data.draw(subject.cases(OP))
    subject.hold_if_accepted(contracts.check, probes.constant_value(case.problem), case.variant)


@claim(OP, examples=12)
def test_large_logits(subject: Subject, data: Any) -> None:
    """Scores of 1e5 neither overflow nor lose the winner."""
    case = data.draw(subject.cases(OP))
    subject.hold_if_accepted(contracts.check, probes.large_logits(case.problem), case.variant)


@claim(OP, examples=8)
def test_large_sinks(subject: Subject, data: Any) -> None:
    """A sink of 1e5 takes all the weight, and one of -1e5 none, without an infinity or NaN."""
    case = data.draw(subject.cases(OP))
    subject.hold_if_accepted(contracts.check, probes.large_sinks(case.problem), case.variant)


@claim(OP, examples=10)
def test_relabelling_blocks(subject: Subject, data: Any) -> None:
    """Bitwise: where a block lies means nothing."""
    subject.hold_drawn(data, OP, relations.check_relabelling)


@claim(OP, examples=9)
def test_batch_permutation(subject: Subject, data: Any) -> None:
    """The order of the sequences means nothing."""
    subject.hold_drawn(data, OP, relations.check_batch_permutation)


@claim(OP, examples=10)
def test_batch_split(subject: Subject, data: Any) -> None:
    """A sequence's result does not depend on its company."""
    subject.hold_drawn(data, OP, relations.check_batch_split)


@claim(OP, examples=10)
def test_block_size(subject: Subject, data: Any) -> None:
    """The same keys in blocks of another size give the same result."""
    case = data.draw(subject.cases(OP))
    subject.hold(relations.check_block_size, case.problem)


@claim(OP, examples=8)
def test_grouped_heads(subject: Subject, data: Any) -> None:
    """Grouped-query attention is multi-head attention with the KV heads repeated."""
    case = data.draw(subject.cases(OP))
    subject.hold(relations.check_gqa_is_mha, case.problem)


@claim(OP, examples=8)
def test_wide_window(subject: Subject, data: Any) -> None:
    """A window no shorter than the sequence is no window."""
    case = data.draw(subject.cases(OP))
    if case.problem.causal and case.problem.window is None:
        longest = int(case.problem.seq_lens.max(initial=0))
        subject.hold_if_accepted(contracts.check, dataclasses.replace(case.problem, window=longest + 1), case.variant)


@fixed(OP)
def test_largest_scale(subject: Subject) -> None:
    """No factor of a score becomes infinite for the largest scale there is, with a soft cap or without."""
    for soft_cap in (None, 0.5, 30.0):
        for cache_dtype, kv_scale in ((None, None), ("int8", "head")):
            recipe = AttentionRecipe(soft_cap=soft_cap, cache_dtype=cache_dtype, kv_scale=kv_scale)
            problem = probes.indifferent(recipe.build())
            subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_long_sequences(subject: Subject) -> None:
    """Of 1,000, 4,000 and 33,000 keys each counts, and the last is found: far more than drawn problems have."""
    within = subject.support(OP)
    assert within is not None, "an op that is not supported is not asked"
    plain = AttentionRecipe.sample(**within.plain)
    for keys in (1040, 4112, 33008):
        whole = keys // plain.block_size * plain.block_size  # so that the last candidate is the last key
        for problem in (
            probes.counting(dataclasses.replace(plain, sequences=((1, keys - 3),)).build()),
            probes.needle(dataclasses.replace(plain, sequences=((1, whole),)).build(), -1),
        ):
            subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_far_blocks(subject: Subject) -> None:
    """Offsets do not wrap at 2^31: of blocks and their scales, of rows of the query and of the table."""
    recipe = AttentionRecipe(sequences=((1, 35), (1, 3), (1, 20)), shared=True, spare_blocks=0, group=2)
    problem = recipe.build()
    if subject.accepted(problem):
        for variant in subject.variants(problem):
            subject.hold(far_blocks.check_far_blocks, problem, variant)
    quantised = dataclasses.replace(recipe, cache_dtype="int8", kv_scale="slot").build()
    subject.hold_if_accepted(far_blocks.check_far_blocks, quantised)
