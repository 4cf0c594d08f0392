"""Attention over a paged KV cache: the problem, its dense meaning in float64, its bytes and operations.

Decode, prefill, chunked prefill and mixed batches are one op: `query_start` cuts the rows of `query` into sequences,
`block_table` says where each sequence's keys and values lie.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dtypes import COMPUTE_DTYPES, FLOAT32, INT32, QUANTISED_DTYPES, Array, to_float64
from pagebench.reference.problem import Problem
from pagebench.reference.validation import (
    require,
    require_all,
    require_array,
    require_finite,
    require_int,
    require_real,
)

LARGEST_SCORE = float(np.finfo(FLOAT32).max) / math.log2(math.e)
MAX_KEYS = 2**30  # of a sequence: positions, and the ends of splits and tiles behind them, fit 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class PagedAttention(Problem):
    """out = softmax(scale * q k^T, masked and modified as the fields say) v, per sequence and query head.

    Shapes: query [num_tokens, num_query_heads, head_size]; key_cache, value_cache [num_blocks, block_size,
    num_kv_heads, head_size], strided views or not, without negative strides; block_table int32 [num_seqs, max_blocks];
    seq_lens int32 [num_seqs], keys of each, new ones too; query_start int32 [num_seqs + 1]. Query head h reads KV
    head h // (num_query_heads // num_kv_heads). `window` counts the query's own position; `alibi_slopes` and `sinks`
    are float32 [num_query_heads]; `key_scale` and `value_scale` float32 scalar, [num_kv_heads] or [num_blocks,
    block_size, num_kv_heads]. Raises ValueError for invalid values, and for a scale or soft_cap with which the factors
    of a score are not finite float32; the dense reference also for scores that float32 does not hold.
    """

    query: Any
    key_cache: Any
    value_cache: Any
    block_table: Any
    seq_lens: Any
    query_start: Any
    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    key_scale: Any = None
    value_scale: Any = None

    op: ClassVar[str] = "paged_attention"

    @property
    def num_tokens(self) -> int:
        return int(self.query.shape[0])

    @property
    def num_query_heads(self) -> int:
        return int(self.query.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.query.shape[2])

    @property
    def num_blocks(self) -> int:
        return int(self.key_cache.shape[0])

    @property
    def block_size(self) -> int:
        return int(self.key_cache.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.key_cache.shape[2])

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    def validate(self) -> None:
        self._validate_arrays()
        self._validate_modifiers()
        self._validate_tables()
        self._validate_scales()
        self._validate_factors()

    def _validate_arrays(self) -> None:
        require_array("query", self.query, dtypes=COMPUTE_DTYPES, ndim=3)
        storage = (self.query.dtype, *QUANTISED_DTYPES)
        require_array("key_cache", self.key_cache, dtypes=storage, ndim=4)
        require_array("value_cache", self.value_cache, dtypes=(self.key_cache.dtype,), shape=self.key_cache.shape)
        require(self.head_size >= 1, "query", "have a head_size >= 1", self.query.shape)
        require(self.block_size >= 1, "key_cache", "have a block_size >= 1", self.key_cache.shape)
        require(self.num_kv_heads >= 1, "key_cache", "have num_kv_heads >= 1", self.key_cache.shape)
        require(
            self.key_cache.shape[3] == self.head_size,
            "key_cache",
            f"have head_size {self.head_size}",
            self.key_cache.shape,
        )
        heads = self.num_query_heads
        whole = heads >= 1 and heads % self.num_kv_heads == 0
        require(whole, "query", f"have a multiple of {self.num_kv_heads} heads", heads)

    def _validate_tables(self) -> None:
        require_array("seq_lens", self.seq_lens, dtypes=(INT32,), ndim=1)
        require_all("seq_lens", self.seq_lens, self.seq_lens >= 0, "be >= 0")
        require_all("seq_lens", self.seq_lens, self.seq_lens <= MAX_KEYS, f"be at most {MAX_KEYS}")
        require_array("query_start", self.query_start, dtypes=(INT32,), shape=(self.num_seqs + 1,))
        require(self.query_start[0] == 0, "query_start", "begin with 0", int(self.query_start[0]))
        require_all("query_start", self.query_start[1:], np.diff(self.query_start) >= 0, "not decrease")
        require(
            self.query_start[-1] == self.num_tokens,
            "query_start",
            f"end with {self.num_tokens}",
            int(self.query_start[-1]),
        )
        require_array("block_table", self.block_table, dtypes=(INT32,), shape=(self.num_seqs, None))
        room = self.block_table.shape[1] * self.block_size
        require_all("seq_lens", self.seq_lens, self.seq_lens <= room, f"fit the block table's {room} slots")
        for seq in range(self.num_seqs):
            used = self.used_blocks(seq)
            ok = (used >= 0) & (used < self.num_blocks)
            require_all(f"block_table[{seq}]", used, ok, f"hold block ids in [0, {self.num_blocks}) where used")

    def _validate_modifiers(self) -> None:
        require_real("scale", self.scale)
        require(isinstance(self.causal, bool | np.bool_), "causal", "be a bool", self.causal)
        if self.window is not None:
            require_int("window", self.window, low=1)
            require(self.causal, "window", "be None unless causal", self.window)
        if self.soft_cap is not None:
            require_real("soft_cap", self.soft_cap)
            require(self.soft_cap > 0, "soft_cap", "be finite and > 0", self.soft_cap)
        for name in ("alibi_slopes", "sinks"):
            values = getattr(self, name)
            if values is not None:
                require_array(name, values, dtypes=(FLOAT32,), shape=(self.num_query_heads,))
                require_finite(name, values)
        slopes = self.alibi_slopes
        require(slopes is None or self.causal, "alibi_slopes", "be None unless causal", slopes)

    def _validate_scales(self) -> None:
        for name in ("key_scale", "value_scale"):
            values = getattr(self, name)
            if values is None:
                continue
            quantised = self.key_cache.dtype in QUANTISED_DTYPES
            require(quantised, name, f"be None for an unquantised cache ({self.key_cache.dtype})", values)
            require(isinstance(values, np.ndarray | np.float32), name, "be float32", type(values).__name__)
            values = np.asarray(values)
            allowed = ((), (self.num_kv_heads,), self.key_cache.shape[:3])
            require(values.dtype == FLOAT32, name, "be float32", str(values.dtype))
            require(values.shape in allowed, name, f"have one of the shapes {allowed}", values.shape)
            used = values if values.ndim < 3 else values[self._used_slots()]
            require_all(name, used, np.isfinite(used) & (used > 0), "be finite and > 0")

    def _validate_factors(self) -> None:
        """The factors of a score are float32: to base 2, or with a soft cap to the argument of its exp2."""
        whole = None if np.ndim(self.key_scale) == 3 else self.key_scale  # one of slots comes after the others
        smallest = float(np.finfo(FLOAT32).tiny)
        fits = self.scale == 0 or abs(float(self.scale)) >= smallest
        require(fits, "scale", f"be 0 or at least {smallest:.4g}, a normal number of float32", self.scale)
        factor = abs(float(self.scale)) * (1.0 if whole is None else float(np.max(whole)))
        most, log2_e = float(np.finfo(FLOAT32).max), math.log2(math.e)
        if self.alibi_slopes is not None:
            fits = abs(self.alibi_slopes.astype(np.float64)) * log2_e <= most
            require_all("alibi_slopes", self.alibi_slopes, fits, "be within float32 when multiplied by log2(e)")
        if self.soft_cap is None:
            fits = factor * log2_e <= most
            require(fits, "scale", "be within float32 when multiplied by key_scale and log2(e)", self.scale)
            return
        cap = float(self.soft_cap)
        require(factor <= most, "scale", "be within float32 when multiplied by key_scale", self.scale)
        require(cap * log2_e <= most, "soft_cap", "be within float32 when multiplied by log2(e)", self.soft_cap)
        rule = "not be so small that 2 log2(e) / soft_cap, or that times scale and key_scale, leaves float32"
        require(2 * log2_e * max(factor, 1.0) <= most * cap, "soft_cap", rule, self.soft_cap)

    def _used_slots(self) -> tuple[Array, Array]:
        """(block ids, offsets) of every slot that a query sees."""
        pairs = [self.slots(seq) for seq in range(self.num_seqs)]
        blocks = np.concatenate([np.zeros(0, np.int64), *(b for b, _ in pairs)])
        return blocks, np.concatenate([np.zeros(0, np.int64), *(o for _, o in pairs)])

    def query_rows(self, seq: int) -> slice:
        """Rows of `query` that belong to sequence `seq`."""
        return slice(int(self.query_start[seq]), int(self.query_start[seq + 1]))

    def positions(self, seq: int) -> Array:
        """int64 [rows]: key position at which each query of the sequence sits; negative when it has none."""
        rows = self.query_rows(seq)
        n = rows.stop - rows.start
        positions: Array = np.arange(n) + (int(self.seq_lens[seq]) - n)
        return positions

    def visible(self, seq: int) -> Array:
        """bool [rows, seq_len]: which keys each query of the sequence sees."""
        query, key = self.positions(seq)[:, None], np.arange(int(self.seq_lens[seq]))[None, :]
        if not self.causal:
            return np.ones((query.shape[0], key.shape[1]), bool)
        seen: Array = key <= query
        return seen if self.window is None else seen & (query - key < self.window)

    def first_visible(self, seq: int) -> int:
        """The first key that any query of the sequence sees; its length when they see none."""
        length, positions = int(self.seq_lens[seq]), self.positions(seq)
        if positions.size == 0:
            return length
        if not self.causal:
            return 0
        seeing = positions[positions >= 0]
        if seeing.size == 0:
            return length
        return 0 if self.window is None else max(int(seeing[0]) - int(self.window) + 1, 0)

    def used_blocks(self, seq: int) -> Array:
        """int32: the sequence's block table entries that matter."""
        first, length = self.first_visible(seq), int(self.seq_lens[seq])
        stop = -(-length // self.block_size) if first < length else 0
        used: Array = self.block_table[seq, first // self.block_size : stop]
        return used

    def slots(self, seq: int) -> tuple[Array, Array]:
        """(block ids, offsets), int64: where the keys from the first visible one on lie."""
        key = np.arange(self.first_visible(seq), int(self.seq_lens[seq]))
        return self.block_table[seq, key // self.block_size].astype(np.int64), key % self.block_size

    def bytes_moved(self) -> int:
        """Query, visible K and V (with scales, per reading sequence), tables and modifiers in; out and lse out."""
        keys = sum(self.slots(seq)[0].size for seq in range(self.num_seqs))
        per_key = 2 * self.num_kv_heads * self.head_size * self.key_cache.dtype.itemsize
        small = [self.seq_lens, self.query_start, self.alibi_slopes, self.sinks]
        total = 2 * self.query.nbytes + 4 * self.num_tokens * self.num_query_heads + keys * per_key
        total += sum(array.nbytes for array in small if array is not None)
        total += sum(4 * self.used_blocks(seq).size for seq in range(self.num_seqs))
        for scale in (self.key_scale, self.value_scale):
            if scale is not None:
                total += 4 * keys * self.num_kv_heads if np.ndim(scale) == 3 else np.asarray(scale).nbytes
        return int(total)

    def flops(self) -> int:
        """4 * head_size per query head and visible (query, key) pair: a multiply and an add for q k and for p v."""
        pairs = sum(int(self.visible(seq).sum()) for seq in range(self.num_seqs))
        return 4 * self.head_size * self.num_query_heads * pairs


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One sequence, densely, float64: scores [heads, rows, keys], -inf where masked; values [keys, heads, head_size].

    `dot` is sum |q||k| * |scale| and `bias` the |ALiBi| term, both like scores: the size of what was added up.
    """

    rows: slice
    scores: Array
    values: Array
    dot: Array
    bias: Array


def sequences(problem: PagedAttention) -> Iterator[Scores]:
    """The dense scores of each sequence that has a query."""
    for seq in range(problem.num_seqs):
        rows = problem.query_rows(seq)
        if rows.stop > rows.start:
            yield _scores(problem, seq, rows)


def _scores(problem: PagedAttention, seq: int, rows: slice) -> Scores:
    first = problem.first_visible(seq)
    codes = _gather(problem, seq, problem.key_cache)
    key = _scaled(problem, seq, codes, problem.key_scale)
    value = _scaled(problem, seq, _gather(problem, seq, problem.value_cache), problem.value_scale)
    query = to_float64(problem.query[rows])
    scores = problem.scale * np.einsum("rhd,khd->hrk", query, key)
    dot = abs(problem.scale) * np.einsum("rhd,khd->hrk", abs(query), abs(key))
    if problem.soft_cap is not None:
        scores = problem.soft_cap * np.tanh(scores / problem.soft_cap)
    bias = np.zeros_like(scores)
    if problem.alibi_slopes is not None:
        distance = first + np.arange(key.shape[0])[None, :] - problem.positions(seq)[:, None]
        bias = problem.alibi_slopes.astype(np.float64)[:, None, None] * distance
        scores = scores + bias
    visible = problem.visible(seq)[None, :, first:]
    largest = np.max(dot + abs(bias), where=visible, initial=0.0)
    rule = f"keep scale * sum |q||k| + |ALiBi| within {LARGEST_SCORE:.4g} (float32, to base 2)"
    require(not largest > LARGEST_SCORE, "query", f"{rule} in sequence {seq}", float(largest))
    _require_sums(seq, query, codes, value)
    return Scores(rows, np.where(visible, scores, -np.inf), value, dot, abs(bias))


def _require_sums(seq: int, query: Array, key: Array, value: Array) -> None:
    """Refuse a sequence of which float32 might not hold a dot product, before its scales, or a sum of values."""
    most = key.shape[2] * abs(query).max(initial=0.0) * abs(key).max(initial=0.0)  # quick, and seldom in doubt
    if most > LARGEST_SCORE:
        most = np.einsum("rhd,khd->hrk", abs(query), abs(key)).max(initial=0.0)
    rule = f"keep sum |q||k|, before any scale, within {LARGEST_SCORE:.4g}"
    require(not most > LARGEST_SCORE, "query", f"{rule} in sequence {seq}", float(most))
    total = abs(value).sum(axis=0).max(initial=0.0)
    rule = f"keep the sum of |value| over a sequence's keys within {np.finfo(FLOAT32).max:.4g}"
    require(not total > np.finfo(FLOAT32).max, "value_cache", f"{rule} in sequence {seq}", float(total))


def _gather(problem: PagedAttention, seq: int, cache: Array) -> Array:
    """float64 [keys, num_query_heads, head_size]: a sequence's keys or values, each KV head repeated for its group."""
    return np.repeat(to_float64(cache[problem.slots(seq)]), problem.group, axis=1)


def _scaled(problem: PagedAttention, seq: int, rows: Array, scale: Any) -> Array:
    """Gathered rows times their scale, of all, of each KV head or of each slot; as they are without one."""
    if scale is None:
        return rows
    factor = np.asarray(scale).astype(np.float64)
    of_heads = factor[problem.slots(seq)] if factor.ndim == 3 else np.broadcast_to(factor, problem.num_kv_heads)
    scaled: Array = rows * np.repeat(of_heads, problem.group, axis=-1)[..., None]
    return scaled


def paged_attention(problem: PagedAttention) -> tuple[Array, Array]:
    """(out float64 like query, lse float64 [num_tokens, num_query_heads]); lse is the natural log of the denominator.

    A query that sees no key has out 0 and lse -inf, or the sink's logit where there is one.
    """
    out = np.zeros(problem.query.shape)
    lse = np.full(problem.query.shape[:2], -np.inf)
    if problem.sinks is not None:
        lse[:] = problem.sinks
    for part in sequences(problem):
        weights, log_sum = softmax(part.scores, problem.sinks)
        out[part.rows] = np.einsum("hrk,khd->rhd", weights, part.values)
        lse[part.rows] = log_sum.T
    return out, lse


def softmax(scores: Array, sinks: Array | None) -> tuple[Array, Array]:
    """(weights like scores, log of the denominator [heads, rows]); rows that see nothing get weights 0 and -inf."""
    top = scores.max(axis=2, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(scores - top[:, :, None])
    total = weights.sum(axis=2)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64)[:, None] - top)
    with np.errstate(divide="ignore"):
        log_sum = top + np.log(total)
    return weights / np.where(total == 0, 1.0, total)[:, :, None], log_sum
