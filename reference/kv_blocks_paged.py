"""Paged KV memory: every sequence a table of blocks, taken one at a time, shared until written.

The allocator decides *where* tokens lie and which blocks must be copied or swapped; it holds no keys and values itself.
Pairs that it returns are to be run (as CopyBlocks or SwapBlocks) before anything else is written. Every call either
does all of its work or raises and changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pagebench.reference.kv_blocks_pairs import Pairs
from pagebench.reference.kv_blocks_pool import BlockPool, Key, OutOfBlocksError
from pagebench.reference.kv_blocks_prefix import Extra, require_several
from pagebench.reference.kv_blocks_sequence import PagedSequence, prompt, require_token
from pagebench.reference.validation import require, require_int


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the slots of the device's pool are. used + internal_waste = block_size * held."""

    free: int  # blocks
    held: int
    cached: int
    shared: int  # held blocks with more than one reference
    references: int
    used: int  # slots written, those of a shared block counted once
    internal_waste: int  # slots of held blocks not written


class PagedAllocator:
    """Block tables over `num_blocks` device blocks and `num_host_blocks` for what is swapped out.

    null_block reserves block 0, to which the table of `drop_before` points. prefix_caching: full blocks of known
    content are found again by later sequences, also after they were freed, until memory is needed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        null_block: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        require_int("block_size", block_size, low=1)
        require_int("num_host_blocks", num_host_blocks, low=0)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, null_block=null_block)
        self.host = BlockPool(num_host_blocks, name="host") if num_host_blocks else None
        self._sequences: dict[int, PagedSequence] = {}

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """The live sequences, oldest first."""
        return tuple(self._sequences)

    def length(self, seq_id: int) -> int:
        """Tokens of the sequence."""
        return self._get(seq_id).length

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Its blocks in order of position; entries of dropped positions are the null block."""
        return tuple(self._get(seq_id).table)

    def swapped_out(self, seq_id: int) -> bool:
        """Whether its blocks are the host's."""
        return self._get(seq_id).pool is self.host

    def slot(self, seq_id: int, position: int) -> int:
        """Slot (block * block_size + offset) of the token at `position`, as slot_mapping holds it."""
        sequence = self._get(seq_id)
        low = sequence.dropped * self.block_size
        inside = isinstance(position, int | np.integer) and low <= position < sequence.length
        require(inside, "position", f"be in [{low}, {sequence.length})", position)
        return sequence.table[position // self.block_size] * self.block_size + position % self.block_size

    def waste(self, seq_id: int) -> int:
        """Slots allocated to the sequence and not written: ceil(S / b) * b - S."""
        sequence = self._get(seq_id)
        return len(sequence.table) * self.block_size - sequence.length

    def create(
        self,
        seq_id: int,
        tokens: Sequence[int] | int,
        *,
        extras: Iterable[Extra] = (),
        placed_extras: Mapping[int, Extra] | None = None,
        spare: int = 0,
    ) -> int:
        """Start a sequence with a prompt; how many of its tokens are in shared blocks already.

        tokens: ids, or only their number, in which case nothing is shared. extras, placed_extras: see `chained_keys`.
        spare: blocks that must stay available, for sequences that are growing. An engine that finds its whole prompt
        shared needs the last token's query again, not its key and value. Raises OutOfBlocksError, or ValueError for a
        known seq_id, a negative number, a bad token or extra key.
        """
        require(seq_id not in self._sequences, "seq_id", "be new", seq_id)
        require_int("spare", spare, low=0)
        require_several(extras)
        new, keys = prompt(tokens, self.block_size, self.pool, tuple(extras), placed_extras or {})
        shared = self._known_prefix(keys)
        wanted = -(-new.length // self.block_size) - len(shared)
        available = self.pool.num_available - sum(self.pool.is_cached(block) for block in shared)
        if wanted + spare > available:
            raise OutOfBlocksError(wanted + spare, available, self.pool.name)
        self.pool.share(shared)
        new.table = shared + self.pool.allocate(wanted)
        if self.prefix_caching:
            for block, key in zip(new.table[len(shared) :], keys[len(shared) :], strict=False):
                self.pool.publish(block, key)
        self._sequences[seq_id] = new
        return len(shared) * self.block_size

    def _known_prefix(self, keys: Sequence[Key]) -> list[int]:
        """Blocks that hold the longest known prefix."""
        found: list[int] = []
        for key in keys if self.prefix_caching else ():
            block = self.pool.lookup(key)
            if block is None:
                break
            found.append(block)
        return found

    def append(self, seq_id: int, token: int | None = None) -> Pairs:
        """Give one more token its slot; the (src, dst) block to copy first, where the last block is shared.

        token: its id, or None if unknown. O(1). Raises OutOfBlocksError, or ValueError for an unknown or swapped
        sequence or a token outside 64 bits.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.host_keys is not None:
            sequence = self._require_on_device(seq_id)  # says what is wrong
        if token is not None:
            require_token(token)
        pairs: Pairs = ()
        pool, length = self.pool, sequence.length
        if length % self.block_size == 0:
            sequence.table += pool.allocate(1)
        elif pool.num_shared and pool.references(sequence.table[-1]) > 1:
            pairs = self._copy_on_write(sequence)
        sequence.length = length + 1
        if sequence.open_tokens is not None:
            key = sequence.remember(token, self.block_size)
            if key is not None and self.prefix_caching:
                pool.publish(sequence.table[-1], key)
        return pairs

    def _copy_on_write(self, sequence: PagedSequence) -> Pairs:
        source = sequence.table[-1]
        (target,) = self.pool.allocate(1)
        self.pool.free([source])
        sequence.table[-1] = target
        return ((source, target),)

    def fork(self, seq_id: int, new_id: int) -> None:
        """Start `new_id` as a copy of `seq_id` that shares all its blocks; the first to write to the last copies it.

        Needs no memory. Raises ValueError for an unknown seq_id or a known new_id.
        """
        source = self._get(seq_id)
        require(new_id not in self._sequences, "new_id", "be new", new_id)
        source.pool.share(source.live)
        self._sequences[new_id] = source.copy()

    def free(self, seq_id: int) -> None:
        """End a sequence, swapped out or not. Its last blocks are the first to be evicted, so that prefixes stay."""
        sequence = self._get(seq_id)
        live = sequence.live
        live.reverse()
        sequence.pool.free(live)
        del self._sequences[seq_id]

    def drop_before(self, seq_id: int, position: int) -> int:
        """Free the blocks that lie wholly before `position` (a sliding window's start); how many it freed.

        Their table entries become the null block. Raises ValueError without a null block, or for a position beyond the
        end, an unknown or a swapped sequence.
        """
        null = self.pool.null_block
        if null is None:
            raise ValueError("null_block must be reserved to drop blocks, got null_block=False")
        sequence = self._require_on_device(seq_id)
        inside = isinstance(position, int | np.integer) and 0 <= position <= sequence.length
        require(inside, "position", f"be in [0, {sequence.length}]", position)
        end = max(sequence.dropped, position // self.block_size)
        gone = sequence.table[sequence.dropped : end]
        self.pool.free(gone[::-1])
        sequence.table[sequence.dropped : end] = [null] * len(gone)
        sequence.dropped = end
        return len(gone)

    def evict(self, count: int) -> list[int]:
        """Forget the least recently used cached blocks now; their ids."""
        return self.pool.evict(count)

    def swap_out(self, seq_ids: Sequence[int]) -> Pairs:
        """Move sequences to the host's pool; the (device, host) pairs to run as SwapBlocks with direction "out".

        A block that several of them share is moved once and stays shared. Raises OutOfBlocksError if the host's pool is
        too small, ValueError for an unknown, repeated or already swapped sequence, or without a host pool.
        """
        if self.host is None:
            raise ValueError("num_host_blocks must be positive to swap, got 0")
        group = self._group(seq_ids, self.pool)
        keys = [[self.pool.key(block) for block in sequence.live] for sequence in group]
        pairs = _move(group, self.pool, self.host)
        for sequence, known in zip(group, keys, strict=True):
            sequence.host_keys = known
        return pairs

    def swap_in(self, seq_ids: Sequence[int]) -> Pairs:
        """Move swapped sequences back; the (host, device) pairs to run as SwapBlocks with direction "in".

        Raises OutOfBlocksError if there is no room on the device, ValueError for an unknown, repeated or resident
        sequence, or without a host pool.
        """
        if self.host is None:
            raise ValueError("num_host_blocks must be positive to swap, got 0")
        group = self._group(seq_ids, self.host)
        pairs = _move(group, self.host, self.pool)
        for sequence in group:
            for block, key in zip(sequence.live, sequence.host_keys or (), strict=True):
                if key is not None:
                    self.pool.publish(block, key)
            sequence.host_keys = None
        return pairs

    def _group(self, seq_ids: Sequence[int], pool: BlockPool) -> list[PagedSequence]:
        require(len(set(seq_ids)) == len(seq_ids), "seq_ids", "not repeat", list(seq_ids))
        group = [self._get(seq_id) for seq_id in seq_ids]
        for seq_id, sequence in zip(seq_ids, group, strict=True):
            require(sequence.pool is pool, "seq_ids", f"list sequences in the {pool.name} pool only", seq_id)
        return group

    def _get(self, seq_id: int) -> PagedSequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise ValueError(f"seq_id must be of a live sequence, got {seq_id!r}")
        return sequence

    def _require_on_device(self, seq_id: int) -> PagedSequence:
        sequence = self._get(seq_id)
        require(sequence.pool is self.pool, "seq_id", "be on the device, not swapped out", seq_id)
        return sequence

    def usage(self) -> Usage:
        """Where the device's slots are, counted block by block."""
        filled: dict[int, int] = {}
        for sequence in self._sequences.values():
            if sequence.pool is self.pool:
                for i, block in enumerate(sequence.live, sequence.dropped):
                    filled[block] = min(self.block_size, sequence.length - i * self.block_size)
        pool, used = self.pool, sum(filled.values())
        waste = self.block_size * pool.num_held - used
        return Usage(pool.num_free, pool.num_held, pool.num_cached, pool.num_shared, pool.num_references, used, waste)

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data: equal before and after a call that failed."""
        sequences = {
            seq_id: {field.name: getattr(item.copy(), field.name) for field in fields(item)}
            for seq_id, item in self._sequences.items()
        }
        host = self.host.snapshot() if self.host else None
        return {"sequences": sequences, "device": self.pool.snapshot(), "host": host}

    def check(self) -> None:
        """AssertionError unless both pools are sound and their references are exactly those of the tables."""
        for pool in (self.pool, self.host):
            if pool is None:
                continue
            pool.check()
            counted = dict.fromkeys(range(pool.num_blocks), 0)
            for sequence in self._sequences.values():
                for block in sequence.live if sequence.pool is pool else ():
                    counted[block] += 1
            if pool.null_block is not None:
                assert counted.pop(pool.null_block) == 0, "a sequence holds the null block"
            assert all(pool.references(b) == count for b, count in counted.items()), "references differ from the tables"
        for sequence in self._sequences.values():
            assert len(sequence.table) == -(-sequence.length // self.block_size), "a table of the wrong length"


def _move(group: Sequence[PagedSequence], source: BlockPool, target: BlockPool) -> Pairs:
    """Give the group's distinct blocks new ones in `target`, with as many references, and free the old ones."""
    live = [block for sequence in group for block in sequence.live]
    distinct = list(dict.fromkeys(live))
    moved = dict(zip(distinct, target.allocate(len(distinct)), strict=True))
    further = Counter(live) - Counter(distinct)  # the first reference came with the allocation
    target.share([moved[block] for block in further.elements()])
    source.free(live[::-1])
    for sequence in group:
        sequence.table[sequence.dropped :] = [moved[block] for block in sequence.live]
        sequence.pool = target
    return tuple(moved.items())
