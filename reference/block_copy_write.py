"""Writing new tokens' keys and values into their slots of a paged cache: the problem, its meaning, its bytes."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.block_copy import overlapping, require_no_internal_overlap
from pagebench.reference.block_copy_quantise import (
    quantise,
    require_rows_with_scales,
    require_scale,
    row_scales,
    scale_at,
)
from pagebench.reference.dtypes import COMPUTE_DTYPES, FLOAT32, INT64, QUANTISED_DTYPES, Array
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_all, require_array, require_writeable


@dataclass(frozen=True, slots=True, eq=False)
class WriteKV(Problem):
    """Row i of key and value goes to slot slot_mapping[i] = block * block_size + offset of the caches, in place.

    Shapes: key, value [n, num_kv_heads, head_size] of float16, bfloat16 or float32, possibly strided views of fused
    QKV; key_cache, value_cache [num_blocks, block_size, num_kv_heads, head_size] of the rows' dtype, fp8 or int8,
    possibly strided; slot_mapping int64 [m <= n]. A negative slot is skipped, rows past m are padding. A quantised
    cache is written as `block_copy_quantise.quantise` says, with key_scale and value_scale float32 scalar or
    [num_kv_heads] (None = 1). With `compute_scales` both are outputs [num_blocks, block_size, num_kv_heads]: each row's
    own scale, in its slot. Raises ValueError for a slot that repeats or is out of range, for outputs that overlap or
    cannot be written, and with `compute_scales` for a row that is not finite or whose scale rounds to 0.
    """

    key: Any
    value: Any
    key_cache: Any
    value_cache: Any
    slot_mapping: Any
    key_scale: Any = None
    value_scale: Any = None
    compute_scales: bool = False

    op: ClassVar[str] = "write_kv"

    @property
    def num_kv_heads(self) -> int:
        return int(self.key.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.key.shape[2])

    @property
    def num_blocks(self) -> int:
        return int(self.key_cache.shape[0])

    @property
    def block_size(self) -> int:
        return int(self.key_cache.shape[1])

    @property
    def quantised(self) -> bool:
        """Whether the caches store fewer bits than the rows have."""
        return bool(self.key_cache.dtype != self.key.dtype)

    def validate(self) -> None:
        require_array("key", self.key, dtypes=COMPUTE_DTYPES, ndim=3)
        require_array("value", self.value, dtypes=(self.key.dtype,), shape=self.key.shape)
        require(min(self.key.shape[1:]) >= 1, "key", "have num_kv_heads and head_size >= 1", self.key.shape)
        storage = (self.key.dtype, *QUANTISED_DTYPES)
        require_array("key_cache", self.key_cache, dtypes=storage, shape=(None, None, *self.key.shape[1:]))
        require_array("value_cache", self.value_cache, dtypes=(self.key_cache.dtype,), shape=self.key_cache.shape)
        require(self.block_size >= 1, "key_cache", "have a block_size >= 1", self.key_cache.shape)
        require(isinstance(self.compute_scales, bool), "compute_scales", "be a bool", self.compute_scales)
        self._validate_slots()
        self._validate_scales()
        self._validate_memory()

    def _validate_slots(self) -> None:
        require_array("slot_mapping", self.slot_mapping, dtypes=(INT64,), ndim=1)
        rows, slots = self.key.shape[0], self.num_blocks * self.block_size
        fits = self.slot_mapping.size <= rows
        require(fits, "slot_mapping", f"have at most as many entries as key has rows, {rows}", self.slot_mapping.size)
        require_all("slot_mapping", self.slot_mapping, self.slot_mapping < slots, f"be below the caches' {slots} slots")
        used, counts = np.unique(self.slot_mapping[self.slot_mapping >= 0], return_counts=True)
        require(not (counts > 1).any(), "slot_mapping", "not repeat a slot", used[counts > 1][:1].tolist())

    def _validate_scales(self) -> None:
        for name in ("key", "value"):
            scale = getattr(self, f"{name}_scale")
            if not self.compute_scales:
                require_scale(f"{name}_scale", scale, self.key_cache)
                continue
            require(self.quantised, "compute_scales", "be False for an unquantised cache", True)
            require_array(f"{name}_scale", scale, dtypes=(FLOAT32,), shape=self.key_cache.shape[:3])
            require_rows_with_scales(name, getattr(self, name)[self.rows()], self.key_cache.dtype)

    def _validate_memory(self) -> None:
        outputs = {"key_cache": self.key_cache, "value_cache": self.value_cache}
        if self.compute_scales:
            outputs |= {"key_scale": self.key_scale, "value_scale": self.value_scale}
        for name, array in outputs.items():
            require_writeable(name, array)
            require_no_internal_overlap(name, array)
        inputs = {"key": self.key, "value": self.value, "slot_mapping": self.slot_mapping}
        both = {**outputs, **inputs}
        for i, j in overlapping(tuple(both.values())):
            first, second = sorted((i, j))
            if first < len(outputs):  # inputs may share memory among themselves
                names = list(both)
                raise ValueError(f"{names[first]} must not overlap other arguments, got {names[second]} in its memory")

    def rows(self) -> Array:
        """int64: indices of the rows that are written."""
        written: Array = np.flatnonzero(self.slot_mapping >= 0)
        return written

    def slots(self) -> tuple[Array, Array]:
        """(block ids, offsets), int64: where `rows()` go."""
        slots = self.slot_mapping[self.rows()]
        return slots // self.block_size, slots % self.block_size

    def bytes_moved(self) -> int:
        """The written rows in and out, with scales; the slot mapping in."""
        elements = 2 * self.rows().size * self.num_kv_heads * self.head_size
        total = self.slot_mapping.nbytes + elements * (self.key.dtype.itemsize + self.key_cache.dtype.itemsize)
        if self.compute_scales:
            return int(total + 2 * 4 * self.rows().size * self.num_kv_heads)
        return int(total + sum(np.asarray(s).nbytes for s in (self.key_scale, self.value_scale) if s is not None))

    def flops(self) -> int:
        return 0


def write_kv(problem: WriteKV) -> dict[str, Array]:
    """What the caches, and the scales where computed, hold after: contiguous copies by field name."""
    names = ["key_cache", "value_cache"] + (["key_scale", "value_scale"] if problem.compute_scales else [])
    after = {name: getattr(problem, name).copy() for name in names}
    write_kv_(dataclasses.replace(problem, **after))
    return after


def write_kv_(problem: WriteKV) -> None:
    """The same in place on the problem's arrays, whatever their strides."""
    blocks, offsets = problem.slots()
    for name in ("key", "value"):
        rows, cache = getattr(problem, name)[problem.rows()], getattr(problem, f"{name}_cache")
        scale = getattr(problem, f"{name}_scale")
        if problem.compute_scales:
            scale[blocks, offsets] = row_scales(rows, cache.dtype)
        if problem.quantised:
            rows = quantise(rows, scale_at(scale, blocks, offsets), cache.dtype)
        cache[blocks, offsets] = rows
