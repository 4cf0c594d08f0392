"""Bytes that must not matter, filled with values that would show: dead input elements, fresh outputs, scratch.

Two fills suffice for every dtype: repeated, the byte NAN is a NaN of every float format and -1 as an integer, LARGE a
large finite number (61,280 in float16, 1.3e36 in bfloat16 and float32, 352 in float8 e4m3) and 2,071,690,107 in int32.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pagebench.properties.host_arrays import copy_of, member
from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dequant import PackedWeight
from pagebench.reference.dtypes import Array
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.placement import ALIGNMENT, FENCE, FENCE_BYTE, FenceError, arrays_of
from pagebench.reference.problem import Problem

NAN = 0xFF
LARGE = 0x7B

P = TypeVar("P", bound=Problem)


def filler(dtype: np.dtype[Any], byte: int) -> Any:
    """The value of `dtype` whose every byte is `byte`."""
    return np.frombuffer(bytes([byte] * dtype.itemsize), dtype)[0]


# --- inputs


def poisoned(problem: P, byte: int) -> P:
    """The same problem with every byte that must not matter set to `byte`: dead elements, and gaps between views."""
    placed = copy_of(problem)
    for base in placed.bases:
        base.device[FENCE : FENCE + base.host.nbytes] = byte
    for name, array in arrays_of(problem):
        live = live_elements(problem, name)
        member(placed.problem, name)[live] = array[live]
    placed.problem.validate()
    return placed.problem


def live_elements(problem: Problem, name: str) -> Any:
    """Index of the elements of array `name` that may influence the result."""
    if isinstance(problem, PagedAttention):
        return _live_in_attention(problem, name)
    if isinstance(problem, SwapBlocks) and name.startswith("src_caches"):
        return np.unique(problem.pairs[:, 0])
    if isinstance(problem, WriteKV) and name in ("key", "value"):
        return problem.rows()
    if isinstance(problem, GatherKV):
        return _live_in_gather(problem, name)
    if isinstance(problem, MergeStates) and name.startswith("out"):
        return getattr(problem, name.replace("out", "lse")) > -np.inf
    if isinstance(problem, PackedWeight) and name.startswith("packed["):
        return problem.live(name[7:-1])
    return ...


def _live_in_attention(problem: PagedAttention, name: str) -> Any:
    if name in ("key_cache", "value_cache"):
        return live_slots(problem)
    if name in ("key_scale", "value_scale") and getattr(problem, name).ndim == 3:
        return live_slots(problem)
    return live_entries(problem) if name == "block_table" else ...


def _live_in_gather(problem: GatherKV, name: str) -> Any:
    if name == "block_table":
        return problem.used_entries()
    per_slot = name in ("key_cache", "value_cache") or (name.endswith("_scale") and getattr(problem, name).ndim == 3)
    return problem.slots() if per_slot else ...


def live_slots(problem: PagedAttention) -> Array:
    """bool [num_blocks, block_size]: slots whose key at least one query sees."""
    live = np.zeros((problem.num_blocks, problem.block_size), bool)
    for seq in range(problem.num_seqs):
        live[problem.slots(seq)] = True
    return live


def live_entries(problem: PagedAttention) -> Array:
    """bool like block_table: entries that hold a block some query sees a key of."""
    live = np.zeros(problem.block_table.shape, bool)
    for seq in range(problem.num_seqs):
        first, length = problem.first_visible(seq), int(problem.seq_lens[seq])
        if first < length:
            live[seq, first // problem.block_size : -(-length // problem.block_size)] = True
    return live


def has_dead_bytes(problem: Problem) -> bool:
    """Whether an array of `problem` has elements that must not matter, or gaps between them."""
    if isinstance(problem, CopyBlocks):
        return any(not cache.flags.c_contiguous for cache in problem.caches)
    arrays = list(arrays_of(problem))
    return any(
        np.size(array[live_elements(problem, name)]) < array.size or not array.flags.c_contiguous
        for name, array in arrays
    )


# --- outputs and scratch


@dataclass
class PoisonedEmpty:
    """Stands in for a provider's `empty`: every array starts as `byte` all over, between fences.

    `provider` is the original one; needs its `as_strided`.
    """

    provider: Any
    byte: int
    taken: list[tuple[Any, int]] = field(default_factory=list)

    def __call__(self, shape: Any, dtype: Any) -> Any:
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        base = np.full(2 * FENCE + -(-nbytes // ALIGNMENT) * ALIGNMENT, FENCE_BYTE, np.uint8)
        base[FENCE : FENCE + nbytes] = self.byte
        device = self.provider.to_device(base)
        self.taken.append((device, nbytes))
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return self.provider.as_strided(device, dtype, shape, strides, FENCE // dtype.itemsize)

    def check_fences(self) -> None:
        """Raise FenceError if a byte beside any array handed out changed."""
        for i, (device, nbytes) in enumerate(self.taken):
            everything = np.asarray(self.provider.to_host(device)).view(np.uint8)
            for side, fence in (("before", everything[:FENCE]), ("after", everything[FENCE + nbytes :])):
                broken = int((fence != FENCE_BYTE).sum())
                if broken:
                    raise FenceError(f"output or scratch array {i} ({nbytes} bytes): {broken} bytes written {side} it")


def with_poisoned_empty(provider: Any, byte: int) -> tuple[Any, PoisonedEmpty | None, str | None]:
    """(shallow copy of `provider` that takes its arrays from a PoisonedEmpty, that, None) or (provider, None, why)."""
    for name in ("empty", "as_strided"):
        if not callable(getattr(provider, name, None)):
            return provider, None, f"the provider has no {name}"
    empty = PoisonedEmpty(provider, byte)
    try:
        copied = copy.copy(provider)
        copied.empty = empty
        swapped = copied is not provider and provider.empty is not empty
    except (TypeError, AttributeError, copy.Error) as error:
        return provider, None, f"the provider cannot be copied ({type(error).__name__}: {error})"
    return (copied, empty, None) if swapped else (provider, None, "copy.copy(provider) is the provider itself")
