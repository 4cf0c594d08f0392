"""KV memory in numbers: bytes of a cache, blocks of a sequence, slots that hold nothing.

The story's other parts: `kv_blocks_contiguous` (one reservation per request), `kv_blocks_pool` and `kv_blocks_paged`
(blocks on demand, shared and copied on write), `kv_blocks_prefix` (when two blocks hold the same keys),
`kv_blocks_batching` (what the memory saved is worth).
"""

from dataclasses import dataclass
from fractions import Fraction

from pagebench.reference.models import Model
from pagebench.reference.validation import require, require_int


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one number of the cache is stored: its bytes, and `scale_bytes` for every `scale_group` numbers of a row.

    A row is one token's K (or V) of one head, or its latent vector. scale_group None: one scale per row.
    """

    name: str
    bytes_per_element: float
    scale_bytes: int = 0
    scale_group: int | None = None

    def row_bytes(self, size: int) -> int:
        """Bytes of a row of `size` numbers with its scales; a partial last byte or group counts whole."""
        return _row_bytes(size, self.bytes_per_element, self.scale_bytes, self.scale_group)


KV_FORMATS: dict[str, KVFormat] = {
    item.name: item
    for item in (
        KVFormat("fp32", 4),
        KVFormat("fp16", 2),
        KVFormat("bf16", 2),
        KVFormat("fp8", 1),  # one scale per tensor: nothing per token
        KVFormat("int8", 1, scale_bytes=4),  # a float32 scale per token and head, as WriteKV's compute_scales
        KVFormat("int4", 0.5, scale_bytes=2, scale_group=32),  # a float16 scale per 32 numbers, as GGUF's Q4_0
    )
}


def kv_bytes(
    batch: int,
    seq_len: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    bytes_per_element: float,
    *,
    scale_bytes: int = 0,
    scale_group: int | None = None,
) -> int:
    """Bytes of K and V of `batch` sequences of `seq_len` tokens: 2 * B * S * L * num_kv_heads * head_size * p.

    bytes_per_element p: 2 for FP16, 1 for INT8 and FP8, 0.5 for INT4. With as many KV heads as query heads this is
    2 * B * S * L * d_model * p. A quantised cache adds `scale_bytes` per `scale_group` numbers of a head's row (None:
    per row). Raises ValueError for a negative count or a p that is not a whole number of bits.
    """
    for name, value in (("batch", batch), ("seq_len", seq_len), ("num_layers", num_layers)):
        require_int(name, value, low=0)
    require_int("num_kv_heads", num_kv_heads, low=1)
    row = _row_bytes(head_size, bytes_per_element, scale_bytes, scale_group)
    return 2 * batch * seq_len * num_layers * num_kv_heads * row


def latent_kv_bytes(
    batch: int, seq_len: int, num_layers: int, rank: int, rope_size: int, bytes_per_element: float
) -> int:
    """Bytes of a latent cache (MLA): B * S * L * (rank + rope_size) * p. One vector, neither times 2 nor per head."""
    for name, value in (("batch", batch), ("seq_len", seq_len), ("num_layers", num_layers)):
        require_int(name, value, low=0)
    require_int("rank", rank, low=1)
    require_int("rope_size", rope_size, low=0)
    return batch * seq_len * num_layers * _row_bytes(rank + rope_size, bytes_per_element, 0, None)


def model_kv_bytes(model: Model, seq_len: int, form: KVFormat, batch: int = 1) -> int:
    """Bytes that `batch` sequences of `seq_len` tokens of `model` need; windowed layers hold their window only."""
    require_int("batch", batch, low=0)
    return batch * model.cached_tokens(seq_len) * token_layer_bytes(model, form)


def token_layer_bytes(model: Model, form: KVFormat) -> int:
    """Bytes that one token adds to one layer."""
    if model.latent is not None:
        return form.row_bytes(model.cache_row)
    return 2 * model.num_kv_heads * form.row_bytes(model.head_size)


def token_bytes(model: Model, form: KVFormat) -> int:
    """Bytes that one token adds to all layers, as long as no window is full."""
    return model.num_layers * token_layer_bytes(model, form)


def _row_bytes(size: int, bytes_per_element: float, scale_bytes: int, scale_group: int | None) -> int:
    require_int("head_size", size, low=1)
    require_int("scale_bytes", scale_bytes, low=0)
    if scale_group is not None:
        require_int("scale_group", scale_group, low=1)
    number = isinstance(bytes_per_element, int | float) and not isinstance(bytes_per_element, bool)
    positive = number and 0 < bytes_per_element < float("inf")
    require(positive, "bytes_per_element", "be a positive number", bytes_per_element)
    bits = Fraction(bytes_per_element) * 8
    require(bits.denominator == 1, "bytes_per_element", "be a whole number of bits", bytes_per_element)
    scales = 1 if scale_group is None else -(-size // scale_group)
    return -(-size * int(bits) // 8) + scales * scale_bytes


def blocks_for(seq_len: int, block_size: int) -> int:
    """Blocks that hold `seq_len` tokens: ceil(S / b)."""
    require_int("seq_len", seq_len, low=0)
    require_int("block_size", block_size, low=1)
    return -(-seq_len // block_size)


def paged_waste(seq_len: int, block_size: int) -> int:
    """Slots allocated but unused with blocks on demand: ceil(S / b) * b - S, at most b - 1."""
    return blocks_for(seq_len, block_size) * block_size - seq_len


def naive_waste(seq_len: int, max_len: int) -> int:
    """Slots reserved but unused when each request reserves max_len: max_len - S. ValueError if S > max_len."""
    require_int("seq_len", seq_len, low=0)
    require_int("max_len", max_len, low=1)
    require(seq_len <= max_len, "seq_len", f"be at most max_len = {max_len}", seq_len)
    return max_len - seq_len
