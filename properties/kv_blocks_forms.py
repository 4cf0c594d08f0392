"""What the caches of the state machine's second mode look like: drawn from what the provider under test supports."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagebench.properties.block_copy_rows_recipes import QUANTISED, WriteRecipe
from pagebench.properties.subject import Subject

# Of the values that a provider supports, the first few of these, else its own first.
PREFERRED: dict[str, tuple[tuple[Any, ...], int]] = {
    "block_size": ((3, 16, 1, 2, 4), 4),
    "num_kv_heads": ((2, 1, 3), 3),
    "head_size": ((8, 5, 17, 64), 3),
}
STORED = (
    ("float16", None, None),
    ("bfloat16", None, None),
    ("bfloat16", "float8_e4m3fn", "computed"),
    ("float32", None, None),
    ("float16", "int8", "computed"),
    ("float16", "float8_e5m2", "head"),
    ("bfloat16", "int8", "value"),
    ("float32", "float8_e4m3fn", None),
)  # dtype, cache dtype, scale: as in WriteRecipe


@dataclass(frozen=True, slots=True)
class Form:
    """`stored`: (dtype of the rows, of the cache where it differs, kind of scale); the rest as in WriteRecipe.

    padding: rows past the mapping in every write. variant: index into the provider's, modulo their number.
    """

    stored: tuple[str, str | None, str | None] = ("float16", None, None)
    block_size: int = 3
    num_kv_heads: int = 2
    head_size: int = 8
    kv_layout: str = "contiguous"
    host_layout: str = "contiguous"
    num_layers: int = 1
    padding: int = 0
    variant: int = 0
    seed: int = 0


def forms(subject: Subject) -> SearchStrategy[Form]:
    """Forms whose every choice the provider supports on its own; together they may still be rejected."""
    axes = _axes(subject)
    chosen = {name: st.sampled_from(_preferred(axes[name], *PREFERRED[name])) for name in PREFERRED}
    stored = [
        (dtype, cache, scale)
        for dtype, cache, scale in STORED
        if dtype in axes["dtype"] and cache in axes["cache_dtype"] and scale in axes["scale"]
    ]
    return st.builds(
        Form,
        stored=st.sampled_from(stored or [_some_storage(axes)]),
        kv_layout=st.sampled_from(axes["kv_layout"]),
        host_layout=st.sampled_from(["contiguous", "halves"]),
        num_layers=st.sampled_from([2, 1]),
        padding=st.integers(0, 2),
        variant=st.integers(0, 2),
        seed=st.integers(0, 3),
        **chosen,
    )


def _axes(subject: Subject) -> dict[str, tuple[Any, ...]]:
    """Values of WriteRecipe's axes that both write_kv and gather_kv support, where the provider has them."""
    shared = ("dtype", "cache_dtype", "scale", "block_size", "num_kv_heads", "head_size", "kv_layout")
    axes = {name: WriteRecipe.AXES[name] for name in shared}
    for op in ("write_kv", "gather_kv"):
        within = subject.support(op) if callable(getattr(subject.provider, op, None)) else None
        for name in shared if within is not None else ():
            values = within.axes[name]  # type: ignore[union-attr]  # None has no names
            read = (*values, "computed") if "slot" in values else values  # what is computed is read slot by slot
            axes[name] = tuple(value for value in axes[name] if value in read) or axes[name][:1]
    if {1, 4} <= set(axes["block_size"]):
        axes["block_size"] += (2,)
    return axes


def _preferred(supported: tuple[Any, ...], wanted: tuple[Any, ...], most: int) -> list[Any]:
    return [value for value in wanted if value in supported][:most] or list(supported[:1])


def _some_storage(axes: dict[str, tuple[Any, ...]]) -> tuple[str, str | None, str | None]:
    cache = next((value for value in axes["cache_dtype"] if value is None or value in QUANTISED), None)
    scale = next((value for value in axes["scale"] if value is None or cache is not None), None)
    return axes["dtype"][0], cache, scale
