"""How a quantised KV cache stores a number: rounding on write, scales computed from a row, and reading it back.

Formats and rules are those of serving engines' caches: FP8 (OCP E4M3 without infinities, E5M2) stored saturating, INT8
symmetric; a float32 scale per tensor, per KV head, or per row (token, head).
"""

from typing import Any

import numpy as np

from pagebench.reference.dtypes import (
    CODE_LIMITS,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT32,
    INT8,
    QUANTISED_DTYPES,
    Array,
    round_to,
    to_float64,
)
from pagebench.reference.validation import require, require_all

NAN_CODES = {FLOAT8_E4M3FN: 0x7F, FLOAT8_E5M2: 0x7F, INT8: 0}


def quantise(rows: Array, scale: Any, dtype: np.dtype[Any]) -> Array:
    """`rows` / `scale` in `dtype` (fp8 or int8): RN(RN32(x / scale)), saturating, NaN as the canonical code.

    `scale` is float32 and broadcasts against `rows`; None divides by nothing.
    """
    low, high = (np.float32(limit) for limit in CODE_LIMITS[dtype])
    with np.errstate(all="ignore"):
        quotient: Array = rows.astype(FLOAT32)
        if scale is not None:
            quotient = quotient / np.asarray(scale, FLOAT32)
        clipped = np.clip(quotient, low, high)
        nan = np.isnan(clipped)
        rounded = np.rint(np.where(nan, 0, clipped)) if dtype == INT8 else clipped
        stored = np.ascontiguousarray(rounded.astype(dtype))
    stored.view(np.uint8)[nan] = NAN_CODES[dtype]
    return stored


def row_scales(rows: Array, dtype: np.dtype[Any]) -> Array:
    """float32 [..., 1 head_size less]: RN32(largest magnitude of the row / highest stored number), 1 for a zero row."""
    with np.errstate(all="ignore"):
        largest = np.abs(rows.astype(FLOAT32)).max(axis=-1)
        return np.where(largest == 0, FLOAT32.type(1), largest / FLOAT32.type(CODE_LIMITS[dtype][1]))


def dequantise(stored: Array, scale: Any, dtype: np.dtype[Any]) -> Array:
    """`stored` * `scale` in `dtype`, rounding contract `f32`: RN(RN32(x * scale)); None multiplies by nothing."""
    with np.errstate(all="ignore"):
        exact = stored.astype(FLOAT32)
        return round_to(exact if scale is None else exact * np.asarray(scale, FLOAT32), dtype)


def scale_at(scale: Any, blocks: Array, offsets: Array) -> Any:
    """What broadcasts against rows [len(blocks), num_kv_heads, head_size] of these slots; None for None."""
    if scale is None:
        return None
    scale = np.asarray(scale)
    if scale.ndim == 3:
        return scale[blocks, offsets][:, :, None]
    return scale[None, :, None] if scale.ndim == 1 else scale


def require_scale(name: str, scale: Any, cache: Array, *, per_slot: Any = None) -> None:
    """Require None, or float32 > 0 of a shape that suits the quantised `cache` [num_blocks, block_size, heads, ...].

    per_slot: None forbids the shape [num_blocks, block_size, num_kv_heads]; otherwise the index of the slots that
    matter in it.
    """
    if scale is None:
        return
    require(cache.dtype in QUANTISED_DTYPES, name, "be None for an unquantised cache", str(cache.dtype))
    require(isinstance(scale, np.ndarray | np.float32), name, "be float32", type(scale).__name__)
    values = np.asarray(scale)
    require(values.dtype == FLOAT32, name, "be float32", str(values.dtype))
    shapes = [(), (cache.shape[2],)] + ([] if per_slot is None else [cache.shape[:3]])
    require(values.shape in shapes, name, f"have one of the shapes {shapes}", values.shape)
    require(all(s >= 0 for s in values.strides), name, "have no negative stride", values.strides)
    used = values[per_slot] if values.ndim == 3 else values
    require_all(name, used, np.isfinite(used) & (used > 0), "be finite and > 0")


def require_rows_with_scales(name: str, rows: Array, dtype: np.dtype[Any]) -> None:
    """Require rows [n, num_kv_heads, head_size] of which a scale can be computed: finite, and the scale not 0."""
    finite = np.isfinite(to_float64(rows))
    require_all(name, rows, finite, "be finite where its scale is computed")
    scales = row_scales(rows, dtype)
    require_all(f"{name}'s computed scale", scales, scales > 0, "not round to 0")
