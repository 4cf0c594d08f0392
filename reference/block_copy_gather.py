"""Reading sequences out of a paged cache into dense keys and values: the problem, its meaning, its bytes."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.block_copy_quantise import dequantise, require_scale, scale_at
from pagebench.reference.dtypes import COMPUTE_DTYPES, INT32, QUANTISED_DTYPES, Array
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_all, require_array, require_dtype


@dataclass(frozen=True, slots=True, eq=False)
class GatherKV(Problem):
    """key, value [sum(seq_lens), num_kv_heads, head_size] of `dtype`: the sequences' rows one after the other.

    Shapes: key_cache, value_cache [num_blocks, block_size, num_kv_heads, head_size] of float16, bfloat16, float32, fp8
    or int8, possibly strided; block_table int32 [num_seqs, max_blocks], entries past a sequence's last block are
    arbitrary; seq_lens int32 [num_seqs], 0 allowed. A quantised cache is multiplied by key_scale and value_scale,
    float32 scalar, [num_kv_heads] or [num_blocks, block_size, num_kv_heads] (None = 1). Rounded as contract `f32`:
    RN(RN32(x * scale)). `num_tokens` = sum(seq_lens) is worked out at construction, since a launcher cannot read it
    from the device. Raises ValueError for invalid values.
    """

    key_cache: Any
    value_cache: Any
    block_table: Any
    seq_lens: Any
    dtype: np.dtype[Any]
    key_scale: Any = None
    value_scale: Any = None
    num_tokens: int = field(init=False)

    op: ClassVar[str] = "gather_kv"

    def __post_init__(self) -> None:
        self.validate()
        object.__setattr__(self, "num_tokens", int(self.seq_lens.sum()))

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
    def head_size(self) -> int:
        return int(self.key_cache.shape[3])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    def validate(self) -> None:
        require_dtype("dtype", self.dtype, COMPUTE_DTYPES)
        require_array("key_cache", self.key_cache, dtypes=(*COMPUTE_DTYPES, *QUANTISED_DTYPES), ndim=4)
        require_array("value_cache", self.value_cache, dtypes=(self.key_cache.dtype,), shape=self.key_cache.shape)
        positive = min(self.key_cache.shape[1:]) >= 1
        require(positive, "key_cache", "have block_size, num_kv_heads and head_size >= 1", self.key_cache.shape)
        require_array("seq_lens", self.seq_lens, dtypes=(INT32,), ndim=1)
        require_all("seq_lens", self.seq_lens, self.seq_lens >= 0, "be >= 0")
        require_array("block_table", self.block_table, dtypes=(INT32,), shape=(self.num_seqs, None))
        room = self.block_table.shape[1] * self.block_size
        require_all("seq_lens", self.seq_lens, self.seq_lens <= room, f"fit the block table's {room} slots")
        used = self.block_table[self.used_entries()]
        ok = (used >= 0) & (used < self.num_blocks)
        require_all("block_table", used, ok, f"hold block ids in [0, {self.num_blocks}) where used")
        for name in ("key_scale", "value_scale"):
            require_scale(name, getattr(self, name), self.key_cache, per_slot=self.slots())

    def used_entries(self) -> Array:
        """bool like block_table: entries that hold a sequence's block."""
        used: Array = np.arange(self.block_table.shape[1]) < -(-self.seq_lens[:, None] // self.block_size)
        return used

    def slots(self) -> tuple[Array, Array]:
        """(block ids, offsets), int64: where the rows of the result lie, in their order."""
        lengths = self.seq_lens.astype(np.int64)
        seq = np.repeat(np.arange(self.num_seqs), lengths)
        position = np.arange(seq.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self.block_table[seq, position // self.block_size].astype(np.int64), position % self.block_size

    def bytes_moved(self) -> int:
        """The rows with their scales in, once for each sequence that has them; the dense rows out; the tables in."""
        rows = int(self.seq_lens.sum())
        elements = 2 * rows * self.num_kv_heads * self.head_size
        total = elements * (self.key_cache.dtype.itemsize + self.dtype.itemsize)
        total += self.seq_lens.nbytes + 4 * int(self.used_entries().sum())
        for scale in (self.key_scale, self.value_scale):
            if scale is not None:
                total += 4 * rows * self.num_kv_heads if np.ndim(scale) == 3 else np.asarray(scale).nbytes
        return int(total)

    def flops(self) -> int:
        return 0


def gather_kv(problem: GatherKV) -> tuple[Array, Array]:
    """(key, value), each [num_tokens, num_kv_heads, head_size] of the problem's dtype."""
    blocks, offsets = problem.slots()
    caches = (problem.key_cache, problem.key_scale), (problem.value_cache, problem.value_scale)
    key, value = (
        dequantise(cache[blocks, offsets], scale_at(scale, blocks, offsets), problem.dtype) for cache, scale in caches
    )
    return key, value
