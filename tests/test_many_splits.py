"""A sequence in more splits than a reduction takes in one turn: every one of them must count."""

from typing import Any

import numpy as np
import pytest

from pagebench.kernels.providers import load_provider
from pagebench.properties import contracts
from pagebench.reference.dtypes import FLOAT16
from pagebench.reference.paged_attention import PagedAttention

SPLIT, BLOCK = 16, 16


@pytest.mark.parametrize("keys", [16 * SPLIT + 1, 41 * SPLIT + 3])
@pytest.mark.parametrize("spec", ["triton", "cupy"])
def test_every_split_counts(spec: str, keys: int) -> None:
    rng = np.random.default_rng(keys)
    blocks = -(-keys // BLOCK)
    cache: Any = rng.standard_normal((2, blocks, BLOCK, 1, 32)).astype(FLOAT16)
    problem = PagedAttention(
        query=np.zeros((1, 2, 32), FLOAT16),  # every key weighs the same, so that a lost one shows
        key_cache=cache[0],
        value_cache=cache[1] + FLOAT16.type(1),
        block_table=rng.permutation(blocks).astype(np.int32)[None],
        seq_lens=np.array([keys], np.int32),
        query_start=np.array([0, 1], np.int32),
        scale=1.0,
    )
    contracts.check(load_provider(spec), problem, variant={"split": SPLIT})
