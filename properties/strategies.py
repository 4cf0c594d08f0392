"""Problems drawn by Hypothesis over the whole contract of each op, or over what a provider supports.

Structure is drawn, numbers come from a drawn seed. Boundaries are what is drawn most: lengths at multiples of the block
and of usual tile sizes and one beside them, heads and sizes that are no power of two, empty everything. Choices are
sampled from lists rather than ranges: Hypothesis draws mostly small integers, and 100 examples are soon spent.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pagebench.properties.block_copy_recipes import CopyRecipe
from pagebench.properties.dequant_recipes import SCALES, DequantRecipe
from pagebench.properties.paged_attention_recipes import MAX_KEYS, AttentionRecipe
from pagebench.properties.support import Support, everything
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dequant import Dequantize
from pagebench.reference.paged_attention import PagedAttention

# What keeps a problem within milliseconds for NumPy, whatever its heads: elements of one sequence's keys, and the same
# with each KV head repeated for its group.
MAX_ELEMENTS = 75_000
MAX_PRODUCTS = 500_000
TILES = (16, 32, 64, 128)  # lengths at which kernels like to change tile or split


def paged_attention_problems(support: Support | None = None) -> SearchStrategy[PagedAttention]:
    """PagedAttention problems; `support` narrows the choices, None is the whole contract."""
    return attention_recipes(support or everything("paged_attention")).map(AttentionRecipe.build)


def copy_blocks_problems(support: Support | None = None) -> SearchStrategy[CopyBlocks]:
    """CopyBlocks problems; `support` narrows the choices, None is the whole contract."""
    return copy_recipes(support or everything("copy_blocks")).map(CopyRecipe.build)


def dequantize_problems(support: Support | None = None) -> SearchStrategy[Dequantize]:
    """Dequantize problems; `support` narrows the choices, None is the whole contract."""
    return dequant_recipes(support or everything("dequantize")).map(DequantRecipe.build)


def recipes(op: str, support: Support) -> SearchStrategy[Any]:
    """Recipes of the op's problems, within `support`."""
    made = {"paged_attention": attention_recipes, "copy_blocks": copy_recipes, "dequantize": dequant_recipes}
    return made[op](support)


def _choice(values: tuple[Any, ...], *, plain_weight: int = 1) -> SearchStrategy[Any]:
    """One of `values`, the first of them `plain_weight` times as likely as each other one."""
    return st.sampled_from((values[0],) * plain_weight + values[1:])


@st.composite
def attention_recipes(draw: DrawFn, support: Support) -> AttentionRecipe:
    axes = support.axes
    group, heads = draw(st.sampled_from(axes["group"])), draw(st.sampled_from(axes["num_kv_heads"]))
    head_size, block_size = draw(st.sampled_from(axes["head_size"])), draw(st.sampled_from(axes["block_size"]))
    heads = heads if heads * group <= 64 else 1
    causal = draw(_choice(axes["causal"], plain_weight=3))
    cache_dtype = draw(_choice(axes["cache_dtype"], plain_weight=2))
    most_keys = max(min(MAX_KEYS, MAX_ELEMENTS // (heads * head_size), MAX_PRODUCTS // (heads * group * head_size)), 2)
    decode = draw(st.sampled_from(axes["sequences"])) == "decode"
    count = draw(st.sampled_from((1, 2, 2, 3, 3, 4, 4, 4, 4, 0)))
    sequences = tuple(draw(_sequence(decode, block_size, most_keys)) for _ in range(count))
    return AttentionRecipe(
        dtype=draw(st.sampled_from(axes["dtype"])),
        head_size=head_size,
        group=group,
        num_kv_heads=heads,
        block_size=block_size,
        sequences=sequences,
        query_layout=draw(st.sampled_from(axes["query_layout"])),
        kv_layout=draw(st.sampled_from(axes["kv_layout"])),
        table_layout=draw(st.sampled_from(axes["table_layout"])),
        shared=draw(st.booleans()),
        spare_blocks=draw(st.sampled_from((1, 0, 2))),
        spare_entries=draw(st.sampled_from((1, 0, 2))),
        garbage=draw(st.sampled_from(("zero", "minus one", "huge", "random", "valid"))),
        dead=draw(st.sampled_from(("random", "nan", "large"))),
        values=draw(st.sampled_from(("normal", "normal", "special", "zero"))),
        scale=draw(st.sampled_from((None, None, None, 1.0, -0.25, 0.0))),
        causal=causal,
        window=draw(_choice(axes["window"], plain_weight=5)) if causal else None,
        soft_cap=draw(_choice(axes["soft_cap"], plain_weight=4)),
        alibi=draw(st.sampled_from(axes["alibi"])) if causal else False,
        sinks=draw(st.sampled_from(axes["sinks"])),
        cache_dtype=cache_dtype,
        kv_scale=draw(st.sampled_from(axes["kv_scale"])) if cache_dtype else None,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def _sequence(draw: DrawFn, decode: bool, block_size: int, most_keys: int) -> tuple[int, int]:
    """(queries, keys)."""
    unit = draw(st.sampled_from((block_size, block_size, *TILES)))
    multiples = (*range(1, max(most_keys // unit, 1) + 1),) * 2 + (0,)
    keys = unit * draw(st.sampled_from(multiples)) + draw(st.sampled_from((0, 1, -1)))
    keys = min(max(keys, 0), max(most_keys, 1))
    if decode:
        return draw(st.sampled_from((1, 1, 1, 1, 1, 1, 1, 0))), keys
    return draw(st.sampled_from((0, 1, 2, 3, min(keys, 20), min(keys, 20) + 1))), keys


@st.composite
def copy_recipes(draw: DrawFn, support: Support) -> CopyRecipe:
    axes = support.axes
    cache = st.tuples(*(st.sampled_from(axes[name]) for name in ("dtype", "shape", "layout")))
    caches = tuple(draw(cache) for _ in range(draw(st.sampled_from((1, 2, 3, 4)))))
    num_blocks = draw(st.sampled_from((4, 5, 9, 7, 3, 2, 1, 0)))
    return CopyRecipe(
        caches=caches,
        num_blocks=num_blocks,
        pairs=draw(st.sampled_from(axes["pairs"])),
        count=draw(st.sampled_from((num_blocks, 2, 3, 5, 1))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def dequant_recipes(draw: DrawFn, support: Support) -> DequantRecipe:
    axes = support.axes
    size = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 40))
    return DequantRecipe(
        format=draw(st.sampled_from(axes["format"])),
        dtype=draw(st.sampled_from(axes["dtype"])),
        rows=draw(size),
        columns=draw(size),
        group_size=draw(st.sampled_from(axes["group_size"])),
        scale_dtype=draw(st.sampled_from(axes["scale_dtype"])),
        scales=draw(st.sampled_from(SCALES)),
        order=draw(st.sampled_from(axes["order"])),
        bits=draw(st.sampled_from(("random", "one nibble", "sign", "zero and fifteen"))),
        layout=draw(st.sampled_from(axes["layout"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
