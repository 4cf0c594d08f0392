"""The checks look at what they say: relations, probes, poison and variants at all they run; bounds have no slack."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy_kernels import Attention

from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts, merge_states_relations, probes, relations
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference import error_bounds, merge_states
from pagebench.reference import paged_attention as reference
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import paged_attention

U = 2.0**-24


class EachCallAddsOne(Attention):
    """Right the first time; `of` grows by 1 with every further call."""

    name, of, calls = "grows", 0, 0
    batch_invariant = False

    def paged_attention(self, p: Any, split: int = 64) -> Any:
        results = list(super().paged_attention(p, split))
        cls = type(self)
        results[self.of] = (results[self.of] + cls.calls).astype(results[self.of].dtype)
        cls.calls += 1
        return tuple(results)


RELATIONS = [
    relations.check_relabelling,
    relations.check_batch_permutation,
    relations.check_batch_split,
    relations.check_block_size,
    relations.check_gqa_is_mha,
]


@pytest.mark.parametrize("of", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.__name__)
def test_a_relation_compares_out_and_lse_of_both_runs(relation: Any, of: int) -> None:
    problem = AttentionRecipe(group=2, sequences=((1, 20), (2, 30))).build()
    grows = type("Grows", (EachCallAddsOne,), {"of": of, "calls": 0})
    with pytest.raises(AssertionError):
        relation(grows(), problem)
    relation(Attention(), problem)


def test_transformed_problems_differ_from_their_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks elsewhere, of another size, sequences in another order, as many KV heads as query heads."""
    problem = AttentionRecipe(group=2, sequences=((1, 20), (2, 30), (1, 40))).build()
    seen: list[Any] = []
    right = Attention()

    def run(provider: Any, p: Any, variant: Any = None) -> Any:
        seen.append(p)
        return contracts.run(provider, p, variant)

    monkeypatch.setattr(relations, "run", run)
    relations.check_relabelling(right, problem)
    assert (seen[-1].block_table != seen[-2].block_table).any()
    relations.check_batch_permutation(right, problem)
    assert (seen[-1].seq_lens != seen[-2].seq_lens).any()
    relations.check_block_size(right, problem)
    assert seen[-1].block_size != seen[-2].block_size
    relations.check_gqa_is_mha(right, problem)
    assert seen[-1].num_kv_heads == seen[-1].num_query_heads != seen[-2].num_kv_heads


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_the_halves_must_make_the_whole(monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    provider, problem = load_provider("triton"), AttentionRecipe(sequences=((1, 40),)).build()
    right = reference.paged_attention

    def wrong(p: Any) -> Any:
        results = list(right(p))
        results[result] = results[result] + 0.5
        return tuple(results)

    monkeypatch.setattr(merge_states_relations.attention, "paged_attention", wrong)
    with pytest.raises(AssertionError, match=f"{('out', 'lse')[result]} of two halves"):
        merge_states_relations.check_halves(provider, problem)


def test_probes_are_what_they_say() -> None:
    """Each probe changes what its docstring names, and stays valid."""
    problem = AttentionRecipe(group=2, sequences=((1, 40), (3, 20)), window=6, sinks=True, dead="random").build()
    assert (abs(probes.large_sinks(problem).sinks) == 1e5).all()
    logits = probes.large_logits(dataclasses.replace(problem, window=None))
    scores = np.concatenate([abs(part.scores[np.isfinite(part.scores)]) for part in reference.sequences(logits)])
    assert 2e4 < scores.max() < 1.1e5
    out, _ = paged_attention(probes.constant_value(dataclasses.replace(problem, sinks=None)))
    assert np.ptp(out, axis=(0, 1)).max() < 1e-9
    assert probes.indifferent(problem).scale > 1e37
    found = {reference.paged_attention(probes.needle(problem, edge))[0].max() > 5 for edge in range(12)}
    assert found == {True, False}, "a needle that is seen, and one just outside"
    window = AttentionRecipe(sequences=((5, 70),), window=23, block_size=100).build()
    at = {probes._edge(window, 0, edge) for edge in range(40)}
    assert {int(q) - 23 + d for q in window.positions(0) for d in (-1, 0, 1)} <= at


class LeaksOneBit(Attention):
    """Within the bound, but the last bit of a result depends on a slot that no query sees."""

    def paged_attention(self, p: Any, split: int = 64) -> Any:
        out, lse = super().paged_attention(p, split)
        if np.isnan(p.value_cache.astype(np.float32)).any():
            out = np.nextafter(out, out.dtype.type(np.inf))
        return out, lse


class AddsOne(Attention):
    def paged_attention(self, p: Any, split: int = 64) -> Any:
        out, lse = super().paged_attention(p, split)
        return out + out.dtype.type(1), lse


class WrongUnderSplitsOf16(Attention):
    def paged_attention(self, p: Any, split: int = 64) -> Any:
        out, lse = super().paged_attention(p, split)
        return (out + out, lse) if split == 16 else (out, lse)


@pytest.mark.parametrize("bug", [LeaksOneBit, AddsOne])
def test_poison_compares_both_runs_and_the_values(bug: Any) -> None:
    problem = AttentionRecipe(dtype="float32", sequences=((1, 20),)).build()
    with pytest.raises(AssertionError):
        contracts.check_poison(bug(), problem)
    contracts.check_poison(Attention(), problem)


def test_every_variant_is_looked_at() -> None:
    problem = AttentionRecipe(sequences=((1, 20),)).build()
    assert {"split": 16} in Attention().variants(problem)[1:]
    with pytest.raises(AssertionError):
        contracts.check_variants(WrongUnderSplitsOf16(), problem)


def test_a_merge_with_an_empty_side_is_compared_bit_for_bit() -> None:
    problem = MergeRecipe(dtype="float32", empty="a", num_tokens=7, dead="zero").build()

    class Rounds:
        name = "rounds"

        def to_device(self, array: Any) -> Any:
            return array.copy()

        to_host = to_device

        def synchronize(self) -> None: ...

        def rejects(self, problem: Any) -> None: ...

        def merge_states(self, p: Any) -> Any:
            out, lse = merge_states.merge_states(p)
            out = out.astype(np.float32)
            out[np.isneginf(p.lse_a)] = np.nextafter(out[np.isneginf(p.lse_a)], np.float32(np.inf))
            return out, lse.astype(np.float32)

    with pytest.raises(AssertionError, match="one empty side"):
        contracts.check(Rounds(), problem)


def bounds_of(change: Any = None, **choices: Any) -> tuple[Any, Any]:
    problem = AttentionRecipe(**{"sequences": ((1, 2),), **choices}).build()
    problem.query[...] = 0
    problem.value_cache[...] = 1
    if change is not None:
        change(problem)
    return error_bounds.paged_attention(problem)


def test_each_term_of_the_bound_is_as_large_as_derived() -> None:
    """Problems of which one term is nearly all."""
    out, _ = bounds_of(sequences=((1, 1),))
    assert (out < 1.01 * 2.1 * 2.0**-11).all(), "weight and result are rounded once each"

    def steep(problem: Any) -> None:
        problem.alibi_slopes[...] = -100

    _, lse = bounds_of(steep, alibi=True)
    assert (lse < 1000 * U).all(), "|ALiBi| 3 u, |s| u, |m| 3 u, |lse| u"
    capped, plain = bounds_of(soft_cap=1e4)[1], bounds_of()[1]
    np.testing.assert_allclose(capped, plain)  # tanh of 0 is right to units of itself

    def peaked(problem: Any) -> None:
        problem.query[...], problem.key_cache[...], problem.value_cache[...] = 1, 0, 30000
        first = problem.block_table[0, 0], 0
        problem.key_cache[first], problem.value_cache[first] = 1, 0

    out, _ = bounds_of(peaked, sequences=((1, 70),), scale=16 / 64)
    assert (out < 0.1).all(), "half a subnormal of float16 for each of 69 weights"
    assert (error_bounds.RESCALINGS, error_bounds.LONGEST) == (2**10, 2**14), "as the docstring and README say"


def test_the_bound_of_a_merge_is_as_large_as_derived() -> None:
    out, lse = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    of_out, of_lse = merge_states.bound(MergeStates(out, lse, out, lse))
    assert (of_out < 12 * U).all()
    assert (of_lse < 10 * U).all()


def test_a_key_whose_terms_cancel_may_turn_out_the_largest() -> None:
    """In float64 its score is 62,500 below the other's, and its weight 0; in float32 it may be off by ten million."""
    p: Any = AttentionRecipe(dtype="float32", head_size=16, sequences=((1, 2),), scale=1.0).build()
    query, key, value = np.full_like(p.query, 1e6), np.zeros_like(p.key_cache), np.zeros_like(p.value_cache)
    blocks, offsets = p.slots(0)
    key[blocks[1], offsets[1]] = np.where(np.arange(16) % 2, 1e6, -1e6)
    key[blocks[1], offsets[1], :, 0] -= 0.0625
    value[blocks[1], offsets[1]] = 1
    of_out, of_lse = error_bounds.paged_attention(dataclasses.replace(p, query=query, key_cache=key, value_cache=value))
    assert (of_out >= 1).all()
    assert (of_lse >= 1e6).all()


@pytest.mark.parametrize(("given", "code"), [("scalar", 1), ("head", 1), ("slot", 57344)])
def test_what_flushing_costs_is_as_large_as_derived(given: str, code: int) -> None:
    """Of two keys of value 0, of which nothing else is lost: f, times the largest code where slots have scales."""
    p: Any = AttentionRecipe(dtype="float32", sequences=((1, 2),), cache_dtype="float8_e5m2", kv_scale=given).build()
    p.value_cache[...] = 0
    of_out, _ = error_bounds.paged_attention(p)
    assert (of_out >= 2 * code * error_bounds.FLUSHED).all()
    assert (of_out <= 1.02 * 2 * code * error_bounds.FLUSHED).all()
