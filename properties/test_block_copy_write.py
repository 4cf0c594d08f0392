"""Writing rows into a cache: what every provider's `write_kv` must do. Every byte of the destination is compared."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from pagebench.properties import block_copy_relations as relations
from pagebench.properties import contracts, far_blocks
from pagebench.properties.block_copy_rows_recipes import DTYPES, QUANTISED, WriteRecipe
from pagebench.properties.claims import claim, fixed
from pagebench.properties.subject import Subject
from pagebench.reference.block_copy_write import WriteKV

OP = "write_kv"


@claim(OP, examples=90)
def test_every_byte(subject: Subject, data: Any) -> None:
    """Each mapped row is in its slot, rounded as the contract says, and nothing else is touched."""
    subject.hold_drawn(data, OP, contracts.check)


@claim(OP, examples=15)
def test_poison(subject: Subject, data: Any) -> None:
    """Rows that are skipped or past the mapping, and the gaps of views, do not matter."""
    subject.hold_drawn(data, OP, contracts.check_poison)


@claim(OP, examples=10)
def test_every_variant(subject: Subject, data: Any) -> None:
    """The same under every variant that the provider offers."""
    case = data.draw(subject.cases(OP))
    subject.hold(contracts.check_variants, case.problem)


@claim(OP, examples=15)
def test_row_order(subject: Subject, data: Any) -> None:
    """Bitwise: rows may come in any order with their slots."""
    subject.hold_drawn(data, OP, relations.check_row_order)


@claim(OP, examples=8)
def test_slot_relabelling(subject: Subject, data: Any) -> None:
    """Bitwise: slots may lie anywhere, with the mapping following."""
    subject.hold_drawn(data, OP, relations.check_slot_relabelling)


@claim(OP, examples=10)
def test_writing_twice(subject: Subject, data: Any) -> None:
    """Bitwise: writing is idempotent."""
    subject.hold_drawn(data, OP, relations.check_write_twice)


@claim(OP, examples=20)
def test_write_then_gather(subject: Subject, data: Any) -> None:
    """What is read back is the row, or the number of the cache's format nearest to it."""
    subject.hold_drawn(data, OP, relations.check_write_then_gather)


@fixed(OP)
def test_every_code_is_a_fixed_point(subject: Subject) -> None:
    """Every number of a quantised format, halfway to each neighbour and just beside, times scales of every kind.

    Many quotients by the last two scales are halfway exactly, where a product with the reciprocal is not.
    """
    for name in QUANTISED:
        for scale in (None, np.float32(2.0**-7), np.float32(0.3), np.float32(0.0117)):
            problem = _edges(name, scale)
            subject.hold_if_accepted(contracts.check, problem)


def _edges(name: str, scale: Any) -> WriteKV:
    recipe = WriteRecipe("float32", name, 1, 256, num_rows=4, mapped=4, block_size=2, scale=None)
    plain = recipe.build()
    numbers = np.arange(256, dtype=np.uint8).view(plain.key_cache.dtype).astype(np.float32)
    finite = np.unique(numbers[np.isfinite(numbers)])
    halves = np.resize((finite[1:] + finite[:-1]) / 2, 256)
    rows = [numbers, halves, np.nextafter(halves, np.float32(np.inf)), np.nextafter(halves, np.float32(-np.inf))]
    key = (np.stack(rows) * (1 if scale is None else scale)).astype(np.float32)[:, None]
    return WriteKV(key, -key, plain.key_cache, plain.value_cache, plain.slot_mapping, scale, scale)


@fixed(OP)
def test_rows_of_every_launch_size(subject: Subject) -> None:
    """Heads whose words fill 512 and 1024 threads, one less and one more; 128 heads of 128; odd head sizes."""
    for dtype, cache_dtype in (("bfloat16", None), ("float32", None), ("float16", "float8_e4m3fn")):
        for heads, size in ((31, 128), (33, 128), (64, 128), (65, 128), (128, 128), (33, 100), (7, 13)):
            problem = WriteRecipe(dtype, cache_dtype, heads, size, num_rows=2, mapped=2, block_size=1).build()
            subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_many_tokens(subject: Subject) -> None:
    """33 to 1,100 tokens, skipped ones among them, to a cache of the rows' type and to one with computed scales."""
    within = subject.support(OP)
    assert within is not None, "an op that is not supported is not asked"
    plain = WriteRecipe.sample(**within.plain)
    for tokens in (33, 300, 1100):
        many = dataclasses.replace(plain, num_rows=tokens, mapped=tokens, skip_every=7)
        quantised = dataclasses.replace(many, cache_dtype="int8", scale="computed")
        for recipe in (many, quantised):
            subject.hold_if_accepted(contracts.check, recipe.build())


@fixed(OP)
def test_scales_of_rows_of_every_kind(subject: Subject) -> None:
    """Computed for rows longer than 512 and 1024 elements: with the largest one anywhere, zero, -0, tiny and huge."""
    for name in QUANTISED:
        for dtype, head_size in (("float32", 513), ("float16", 600), ("bfloat16", 600), ("float32", 1025)):
            problem = _rows_of_every_kind(dtype, name, head_size)
            subject.hold_if_accepted(contracts.check, problem)


def _rows_of_every_kind(dtype: str, cache_dtype: str, head_size: int) -> WriteKV:
    """A token each, all scales being positive; values are the keys in another order."""
    rng = np.random.default_rng(head_size)
    normal = rng.standard_normal(head_size)
    limits = ml_dtypes.finfo(DTYPES[dtype])
    most, least = float(limits.max), float(limits.smallest_subnormal)
    tiny = max(least, 2.0**-133) * 2  # its scale would be 0 if it were 1/57344 of float32's least number
    peaks = [np.where(np.arange(head_size) == at, -9.5, 0.25 * normal) for at in (0, head_size // 2, head_size - 1)]
    subnormal = [normal * float(limits.smallest_normal), np.full(head_size, tiny), -tiny * np.arange(head_size)]
    rows = [normal, 0 * normal, np.full(head_size, -0.0), *subnormal, np.full(head_size, most), -most * (normal > 1)]
    key = np.stack([*rows, *peaks])[:, None].astype(DTYPES[dtype])
    count = key.shape[0]
    recipe = WriteRecipe(dtype, cache_dtype, 1, head_size, num_rows=count, mapped=count, scale="computed")
    return dataclasses.replace(recipe.build(), key=key, value=key[::-1].copy())


@fixed(OP)
def test_broadcast_rows(subject: Subject) -> None:
    """Rows with a stride of 0: one row for all heads, one element for all of a head or of a token."""
    for cache_dtype in (None, "int8"):
        plain = WriteRecipe("float16", cache_dtype, 8, 20, num_rows=5, mapped=4).build()
        for one in (plain.key[:, :1], plain.key[..., :1], plain.key[:, :1, :1], plain.key[:1, :1, :1]):
            problem = dataclasses.replace(plain, key=np.broadcast_to(one, plain.key.shape))
            subject.hold_if_accepted(contracts.check, problem)


@fixed(OP)
def test_far_blocks(subject: Subject) -> None:
    """Offsets do not wrap at 2^31: of blocks and their scales, and of the rows."""
    for cache_dtype, scale in ((None, None), ("int8", "computed")):
        recipe = WriteRecipe("float16", cache_dtype, 1, 16, block_size=2, num_rows=3, mapped=3, scale=scale, seed=4)
        problem = recipe.build()
        assert set(problem.slots()[0].tolist()) >= {2}
        subject.hold_if_accepted(far_blocks.check_far_blocks, problem)
