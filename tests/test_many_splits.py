"""A sequence in more splits than a reduction takes in one turn: every one of them must count, and count right."""

from typing import Any

import numpy as np
import pytest
from numpy_kernels import Attention
from planted_splits import PLANTED

from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.reference.dtypes import FLOAT16
from pagebench.reference.paged_attention import PagedAttention

SPLIT, BLOCK, HEAD = 16, 16, 32
KEYS = (16 * SPLIT + 1, 41 * SPLIT + 3)
# Logits from the first key to the last: "even", so that a lost key shows; "rising" by more than a float32's exponent
# can bridge and "falling" as much, so that it shows which maximum the splits are rescaled to.
RISE = {"even": 0.0, "rising": 200.0, "falling": -200.0}


def problem(keys: int, slope: str) -> PagedAttention:
    rng = np.random.default_rng(keys)
    blocks = -(-keys // BLOCK)
    cache: Any = rng.standard_normal((2, blocks, BLOCK, 1, HEAD)).astype(FLOAT16)
    table = rng.permutation(blocks).astype(np.int32)
    ramp = np.linspace(-0.5, 0.5, blocks * BLOCK).reshape(blocks, BLOCK)
    cache[0][table] = ramp[:, :, None, None]
    return PagedAttention(
        query=np.full((1, 2, HEAD), 1 if RISE[slope] else 0, FLOAT16),
        key_cache=cache[0],
        value_cache=cache[1] + FLOAT16.type(1),
        block_table=table[None],
        seq_lens=np.array([keys], np.int32),
        query_start=np.array([0, 1], np.int32),
        scale=RISE[slope] / HEAD,
    )


@pytest.mark.parametrize("slope", RISE)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("spec", ["triton", "cupy"])
def test_every_split_counts(spec: str, keys: int, slope: str) -> None:
    variant = {"split": SPLIT, "tile": SPLIT}  # a split is never shorter than a tile
    contracts.check(load_provider(spec), problem(keys, slope), variant=variant)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a planted bug does to its numbers on the way
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_wrong_reduction_is_caught(bug: Any) -> None:
    caught = [slope for slope in RISE for keys in KEYS if fails(bug(), keys, slope)]
    assert caught, "not one of the problems shows it"


def test_a_right_reduction_is_not() -> None:
    assert not any(fails(Attention(), keys, slope) for slope in RISE for keys in KEYS)


def fails(kernels: Any, keys: int, slope: str) -> bool:
    try:
        contracts.check(kernels, problem(keys, slope), variant={"split": SPLIT})
    except AssertionError:
        return True
    return False
