"""Problems drawn by Hypothesis over the whole contract of each op, or over what a provider supports.

Structure is drawn, numbers come from a drawn seed. Boundaries are what is drawn most: lengths at multiples of the block
and of usual tile sizes and one beside them, heads and sizes that are no power of two, empty everything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagebench.properties.block_copy_recipes import CopyRecipe, SwapRecipe
from pagebench.properties.block_copy_rows_recipes import MAX_ROW, QUANTISED, GatherRecipe, WriteRecipe
from pagebench.properties.dequant_recipes import SCALES, DequantRecipe, GemvRecipe
from pagebench.properties.merge_states_recipes import MergeRecipe
from pagebench.properties.paged_attention_recipes import MAX_KEYS, AttentionRecipe
from pagebench.properties.support import Support, everything
from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dequant import Dequantize
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.paged_attention import PagedAttention

# What keeps a problem within milliseconds for NumPy, whatever its heads: elements of one sequence's keys, and the same
# with each KV head repeated for its group.
MAX_ELEMENTS = 75_000
MAX_PRODUCTS = 500_000
# What keeps it within a second for an interpreter: rows of out, each a program of its own where a kernel reduces
# splits, and those times the keys of a sequence; two queries a sequence in any case.
MAX_RESULTS = 200
MAX_SCORES = 16_000
TILES = (16, 32, 64, 128)  # lengths at which kernels like to change tile or split


def paged_attention_problems(support: Support | None = None) -> SearchStrategy[PagedAttention]:
    """PagedAttention problems; `support` narrows the choices, None is the whole contract."""
    return recipes("paged_attention", support or everything("paged_attention")).map(AttentionRecipe.build)


def copy_blocks_problems(support: Support | None = None) -> SearchStrategy[CopyBlocks]:
    """CopyBlocks problems; `support` narrows the choices, None is the whole contract."""
    return recipes("copy_blocks", support or everything("copy_blocks")).map(CopyRecipe.build)


def dequantize_problems(support: Support | None = None) -> SearchStrategy[Dequantize]:
    """Dequantize problems; `support` narrows the choices, None is the whole contract."""
    return recipes("dequantize", support or everything("dequantize")).map(DequantRecipe.build)


def dequant_gemv_problems(support: Support | None = None) -> SearchStrategy[DequantGemv]:
    """DequantGemv problems; `support` narrows the choices, None is the whole contract."""
    return recipes("dequant_gemv", support or everything("dequant_gemv")).map(GemvRecipe.build)


def recipes(op: str, support: Support) -> SearchStrategy[Any]:
    """Recipes of the op's problems, within `support`."""
    return CHOICES.map(lambda choices: recipe(op, Picker(choices), support))


class Picker:
    """Picks from lists, a byte each: byte 0 is the first of a list, and bytes are what Hypothesis draws and shrinks.

    Choices drawn one by one come in clumps, since Hypothesis builds many examples out of parts of earlier ones; some
    pairs of features would never occur. The bytes of one string are independent, and still shrink one by one.
    """

    def __init__(self, choices: bytes) -> None:
        self._bytes = iter(choices)

    def __call__(self, values: Sequence[Any], *, plain_weight: int = 1) -> Any:
        """One of `values`, the first of them `plain_weight` times as likely as each other one."""
        values = (values[0],) * plain_weight + tuple(values[1:])
        return values[next(self._bytes, 0) * len(values) >> 8]

    def seed(self) -> int:
        """A number below 2^32 for a generator of random data."""
        return sum(next(self._bytes, 0) << 8 * i for i in range(4))


CHOICES = st.binary(min_size=64, max_size=64)  # an attention recipe takes at most 50


def recipe(op: str, pick: Picker, support: Support) -> Any:
    """The recipe of the op that `pick` chooses within `support`."""
    made = {
        "paged_attention": attention_recipe,
        "merge_states": merge_recipe,
        "copy_blocks": copy_recipe,
        "swap_blocks": swap_recipe,
        "write_kv": write_recipe,
        "gather_kv": gather_recipe,
        "dequantize": dequant_recipe,
        "dequant_gemv": gemv_recipe,
    }
    return made[op](pick, support)


def attention_recipe(pick: Picker, support: Support) -> AttentionRecipe:
    axes = support.axes
    group, heads = pick(axes["group"]), pick(axes["num_kv_heads"])
    head_size, block_size = pick(axes["head_size"]), pick(axes["block_size"])
    heads = heads if heads * group <= 64 else 1
    causal = pick(axes["causal"], plain_weight=3)
    cache_dtype = pick(axes["cache_dtype"], plain_weight=2)
    most_keys = max(min(MAX_KEYS, MAX_ELEMENTS // (heads * head_size), MAX_PRODUCTS // (heads * group * head_size)), 2)
    decode = pick(axes["sequences"]) == "decode"
    count = pick((1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 0))
    count = min(count, max(MAX_RESULTS // (heads * group), 2))
    rows = heads * group * max(count, 1)  # of out, for each query of every sequence
    sequences = tuple(_sequence(pick, decode, rows, block_size, most_keys) for _ in range(count))
    return AttentionRecipe(
        dtype=pick(axes["dtype"]),
        head_size=head_size,
        group=group,
        num_kv_heads=heads,
        block_size=block_size,
        sequences=sequences,
        query_layout=pick(axes["query_layout"]),
        kv_layout=pick(axes["kv_layout"]),
        table_layout=pick(axes["table_layout"]),
        shared=pick((False, True)),
        spare_blocks=pick((1, 0, 2)),
        spare_entries=pick((1, 0, 2)),
        garbage=pick(("zero", "minus one", "huge", "random", "valid")),
        dead=pick(("random", "nan", "large")),
        values=pick(("normal", "normal", "special", "zero")),
        scale=pick((None, None, None, 1.0, -0.25, 0.0)),
        causal=causal,
        window=pick(axes["window"], plain_weight=5) if causal else None,
        soft_cap=pick(axes["soft_cap"], plain_weight=4),
        alibi=pick(axes["alibi"]) if causal else False,
        sinks=pick(axes["sinks"]),
        cache_dtype=cache_dtype,
        kv_scale=pick(axes["kv_scale"]) if cache_dtype else None,
        seed=pick.seed(),
    )


def _sequence(pick: Picker, decode: bool, rows: int, block_size: int, most_keys: int) -> tuple[int, int]:
    """(queries, keys)."""
    unit = pick((block_size, block_size, *TILES))
    multiples = (*range(1, max(most_keys // unit, 1) + 1),) * 2 + (0,)
    keys = unit * pick(multiples) + pick((0, 1, -1))
    keys = min(max(keys, 0), max(most_keys, 1))
    if decode:
        return pick((1, 1, 1, 1, 1, 1, 1, 0)), keys
    most_queries = max(min(MAX_RESULTS, MAX_SCORES // max(keys, 1)) // rows, 2)
    return min(pick((0, 1, 2, 3, min(keys, 20), min(keys, 20) + 1)), most_queries), keys


def merge_recipe(pick: Picker, support: Support) -> MergeRecipe:
    axes = support.axes
    return MergeRecipe(
        dtype=pick(axes["dtype"]),
        head_size=pick(axes["head_size"]),
        num_heads=pick((1, 2, 3, 5, 8)),
        num_tokens=pick((3, 1, 2, 7, 17, 0)),
        layout=pick(axes["layout"]),
        lse=pick(axes["lse"]),
        empty=pick(axes["empty"], plain_weight=2),
        dead=pick(("nan", "inf", "zero")),
        seed=pick.seed(),
    )


def copy_recipe(pick: Picker, support: Support) -> CopyRecipe:
    axes = support.axes
    caches = tuple((pick(axes["dtype"]), pick(axes["shape"]), pick(axes["layout"])) for _ in range(pick((1, 2, 3, 4))))
    num_blocks = pick((4, 5, 9, 7, 3, 2, 1, 0))
    return CopyRecipe(
        caches=caches,
        num_blocks=num_blocks,
        pairs=pick(axes["pairs"]),
        count=pick((num_blocks, 2, 3, 5, 1)),
        seed=pick.seed(),
    )


def swap_recipe(pick: Picker, support: Support) -> SwapRecipe:
    names = ("dtype", "shape", "src_layout", "dst_layout")
    caches = tuple(tuple(pick(support.axes[name]) for name in names) for _ in range(pick((1, 2, 3))))
    return SwapRecipe(
        caches=caches,
        num_src=pick((5, 9, 3, 1, 0)),
        num_dst=pick((7, 5, 2, 1, 0)),
        count=pick((5, 3, 2, 1, 0)),
        adjacent=pick((False, True)),
        direction=pick(support.axes["direction"]),
        seed=pick.seed(),
    )


def write_recipe(pick: Picker, support: Support) -> WriteRecipe:
    axes = support.axes
    heads, size = _row(pick, axes)
    cache_dtype = pick(axes["cache_dtype"], plain_weight=2)
    num_rows = pick((3, 2, 5, 1, 17, 0) if heads * size <= 1024 else (2, 1, 3, 0))
    block_size = min(pick(axes["block_size"]), max(2 * MAX_ROW // (heads * size), 1))
    return WriteRecipe(
        dtype=pick(axes["dtype"]),
        cache_dtype=cache_dtype,
        num_kv_heads=heads,
        head_size=size,
        block_size=block_size,
        num_rows=num_rows,
        mapped=max(num_rows - pick((0, 1, 0, 2)), 0),
        skip_every=pick((0, 2, 0, 3, 2, 1)),
        row_layout=pick(axes["row_layout"]),
        kv_layout=pick(axes["kv_layout"]),
        scale=pick(axes["scale"]) if cache_dtype in QUANTISED else None,
        values=pick(("bits", "normal", "ties", "zeros")),
        seed=pick.seed(),
    )


def gather_recipe(pick: Picker, support: Support) -> GatherRecipe:
    axes = support.axes
    heads, size = _row(pick, axes)
    cache_dtype = pick(axes["cache_dtype"], plain_weight=2)
    block_size = min(pick(axes["block_size"]), max(2 * MAX_ROW // (heads * size), 1))
    most = max(MAX_ROW // (heads * size), 2)
    lengths = tuple(min(n, most) for n in (block_size, block_size + 1, 2 * block_size - 1, 1, 0, 33))
    return GatherRecipe(
        dtype=pick(axes["dtype"]),
        cache_dtype=cache_dtype,
        num_kv_heads=heads,
        head_size=size,
        block_size=block_size,
        sequences=tuple(pick(lengths) for _ in range(pick((2, 3, 1, 5, 0)))),
        kv_layout=pick(axes["kv_layout"]),
        table_layout=pick(axes["table_layout"]),
        scale=pick(axes["scale"]) if cache_dtype in QUANTISED else None,
        garbage=pick((-1, 2**31 - 1, -(2**31), 0)),
        spare_entries=pick((1, 0, 2)),
        seed=pick.seed(),
    )


# (heads, head size) whose words of 16 bytes are just below, at and beyond 512 and 1024 threads, in 16 and 32 bits.
LAUNCH_EDGES = ((31, 128), (32, 128), (33, 128), (63, 128), (64, 128), (65, 128), (16, 128), (17, 128))


def _row(pick: Picker, axes: dict[str, tuple[Any, ...]]) -> tuple[int, int]:
    """(num_kv_heads, head_size), one in five on the edge of a launch."""
    heads, size = pick(axes["num_kv_heads"]), pick(axes["head_size"])
    edges = [e for e in LAUNCH_EDGES if e[0] in axes["num_kv_heads"] and e[1] in axes["head_size"]]
    if edges and pick((False, False, False, False, True)):
        edge: tuple[int, int] = pick(edges)
        return edge
    return (heads if heads * size <= MAX_ROW else axes["num_kv_heads"][0]), size


def dequant_recipe(pick: Picker, support: Support) -> DequantRecipe:
    return DequantRecipe(**_weight(pick, support.axes))


def gemv_recipe(pick: Picker, support: Support) -> GemvRecipe:
    axes = support.axes
    return GemvRecipe(m=pick(axes["m"]), x=pick(axes["x"]), **_weight(pick, axes))


def _weight(pick: Picker, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The choices of a DequantRecipe."""
    sizes = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 40)
    return {
        "format": pick(axes["format"]),
        "form": pick(axes["form"]),
        "dtype": pick(axes["dtype"]),
        "rows": pick(sizes),
        "columns": pick(sizes),
        "group_size": pick(axes["group_size"]),
        "scale_dtype": pick(axes["scale_dtype"]),
        "scales": pick(SCALES),
        "order": pick(axes["order"]),
        "bits": pick(("random", "one nibble", "sign", "zero and fifteen")),
        "layout": pick(axes["layout"]),
        "seed": pick.seed(),
    }
