"""A pool of blocks: which are free, how often each is referenced, which still hold something worth finding again.

A block is *free* (holds nothing), *held* (referenced at least once) or *cached* (not referenced, but its content is
known by key and can be revived until the block is needed). Every call either does all of its work or changes nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from pagebench.reference.validation import require, require_int

Key = bytes


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free or cached; nothing was changed."""

    def __init__(self, wanted: int, available: int, pool: str) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} available in the {pool} pool")
        self.wanted = wanted
        self.available = available


class BlockPool:
    """Block ids 0 to num_blocks - 1 with reference counts, a free list, and an LRU list of cached blocks.

    null_block: block 0 is a placeholder for table entries that point nowhere: never handed out, shared or freed.
    """

    def __init__(self, num_blocks: int, *, null_block: bool = False, name: str = "device") -> None:
        require_int("num_blocks", num_blocks, low=2 if null_block else 1)
        self.num_blocks = num_blocks
        self.null_block = 0 if null_block else None
        self.name = name
        self.num_shared = 0  # blocks with more than one reference
        self._extra = 0  # references beyond the first of each block
        # Taken from the end: the lowest id first on a fresh pool, then the block freed last, still warm in a cache.
        self._free = list(range(num_blocks - 1, -1 if self.null_block is None else 0, -1))
        self._references = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._by_key: dict[Key, int] = {}
        self._siblings: dict[Key, list[int]] = {}  # further blocks that hold the same content, rarely any
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - (self.null_block is not None) - self.num_available

    @property
    def num_references(self) -> int:
        """References to all held blocks together."""
        return self.num_held + self._extra

    def references(self, block: int) -> int:
        """How often `block` is referenced."""
        self._require_id(block)
        return self._references[block]

    def key(self, block: int) -> Key | None:
        """The key under which the content of `block` is known."""
        self._require_id(block)
        return self._keys[block]

    def lookup(self, key: Key) -> int | None:
        """A held or cached block whose content is `key`'s; it is only safe once `share` has referenced it."""
        return self._by_key.get(key)

    def is_cached(self, block: int) -> bool:
        """Whether `block` is unreferenced, but can be revived by its key."""
        return block in self._cached

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; cached ones are evicted, oldest first, when no free one is left.

        Raises OutOfBlocksError when there are not as many, and ValueError for a negative count.
        """
        free = self._free
        if type(count) is int and count == 1 and (free or self._cached):  # what a growing sequence asks for
            if free:
                blocks = [free.pop()]
            else:
                blocks = [self._cached.popitem(False)[0]]
                self._forget(blocks)
            self._references[blocks[0]] = 1
            return blocks
        if type(count) is not int or count < 0:
            require_int("count", count, low=0)
        cut = len(free) - count
        if cut >= 0:
            blocks = free[cut:]
            del free[cut:]
        elif count <= self.num_available:
            blocks = self._evict_oldest(-cut) + free
            free.clear()
        else:
            raise OutOfBlocksError(count, self.num_available, self.name)
        blocks.reverse()
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take one reference from each of `blocks` (twice from one listed twice). The unreferenced become cached if
        their content is known, the first listed being evicted first, and free otherwise.

        Raises ValueError for a block that has no reference left to take.
        """
        references = self._references
        blocks = list(blocks)
        done = 0
        try:
            for block in blocks:  # nearly always the only reference
                if type(block) is not int or references[block] != 1 or block < 0:
                    break
                references[block] = 0
                done += 1
        except IndexError:
            pass  # no block id: _release says which
        if done < len(blocks):
            for block in blocks[:done]:
                references[block] = 1
            blocks = self._release(blocks)
        if not self._by_key:
            self._free += blocks
            return
        keys, free, cached = self._keys, self._free, self._cached
        for block in blocks:
            if keys[block] is None:
                free.append(block)
            else:
                cached[block] = None

    def _release(self, blocks: Sequence[int]) -> list[int]:
        """Take one reference from each of `blocks`, shared ones among them; those that have none left."""
        references = self._references
        released, extra, unshared = [], 0, 0
        for i, block in enumerate(blocks):
            if not self._is_id(block) or references[block] == 0:
                for done in blocks[:i]:
                    references[done] += 1
                raise ValueError(f"blocks must list referenced blocks only, got {block!r} at index {i}")
            left = references[block] - 1
            references[block] = left
            if left == 0:
                released.append(block)
            else:
                extra += 1
                unshared += left == 1
        self._extra -= extra
        self.num_shared -= unshared
        return released

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`, held or cached. Raises ValueError for a free one."""
        for i, block in enumerate(blocks):
            self._require_id(block)
            alive = self._references[block] or block in self._cached
            require(alive, "blocks", "list held or cached blocks only", f"{block} at index {i}")
        for block in blocks:
            before = self._references[block]
            if before == 0:
                del self._cached[block]
            else:
                self._extra += 1
                self.num_shared += before == 1
            self._references[block] = before + 1

    def publish(self, block: int, key: Key) -> None:
        """Make the content of the held `block` known as `key`. Its content must not change while it is known."""
        self._require_id(block)
        require(self._references[block] > 0, "block", "be held", block)
        require(self._keys[block] in (None, key), "block", "have no other key", block)
        first = self._by_key.setdefault(key, block)
        if first != block and self._keys[block] is None:
            self._siblings.setdefault(key, []).append(block)
        self._keys[block] = key

    def evict(self, count: int) -> list[int]:
        """Forget the `count` least recently used cached blocks (all, if fewer); they are free afterwards."""
        require_int("count", count, low=0)
        evicted = self._evict_oldest(min(count, len(self._cached)))
        self._free += evicted
        return evicted

    def _evict_oldest(self, count: int) -> list[int]:
        """Take the `count` least recently used blocks out of the cache, and out of what is known."""
        blocks = list(islice(self._cached, count))
        for block in blocks:
            del self._cached[block]
        self._forget(blocks)
        return blocks

    def _forget(self, blocks: list[int]) -> None:
        """Remove the keys of `blocks`, where no sibling has them too."""
        keys, by_key = self._keys, self._by_key
        for block in blocks:
            key = keys[block]
            assert key is not None
            keys[block] = None
            if self._siblings and key in self._siblings:
                self._forget_sibling(block, key)
            else:
                del by_key[key]

    def _forget_sibling(self, block: int, key: Key) -> None:
        """Remove `block`, and only it, from those known by `key`."""
        siblings = self._siblings[key]
        if self._by_key[key] == block:
            self._by_key[key] = siblings.pop(0)
        else:
            siblings.remove(block)
        if not siblings:
            del self._siblings[key]

    def _require_id(self, block: int) -> None:
        rule = f"be a block id in [0, {self.num_blocks}) and not the null block"
        require(self._is_id(block), "block", rule, block)

    def _is_id(self, block: object) -> bool:
        return type(block) is int and 0 <= block < self.num_blocks and block != self.null_block

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data, orders included: equal before and after a call that failed."""
        return {
            "free": tuple(self._free),
            "cached": tuple(self._cached),
            "references": tuple(self._references),
            "keys": tuple(self._keys),
            "by_key": {key: (block, *self._siblings.get(key, ())) for key, block in self._by_key.items()},
            "counts": (self._extra, self.num_shared),
        }

    def check(self) -> None:
        """AssertionError unless every block is in exactly one state and every count is that of the lists."""
        held = [block for block, count in enumerate(self._references) if count]
        null = [] if self.null_block is None else [self.null_block]
        everything = [*self._free, *self._cached, *held, *null]
        assert sorted(everything) == list(range(self.num_blocks)), "a block is in two states, or in none"
        assert self.num_references == sum(self._references), "references miscounted"
        assert self.num_shared == sum(count > 1 for count in self._references), "shared blocks miscounted"
        assert min(self._references) >= 0, "a negative reference count"
        keyed = {(key, block) for block, key in enumerate(self._keys) if key is not None}
        listed = {*self._by_key.items(), *((key, block) for key, others in self._siblings.items() for block in others)}
        assert keyed == listed, "keys and blocks disagree"
        assert self._siblings.keys() <= self._by_key.keys(), "siblings without a first block"
        assert all(self._siblings.values()), "an empty list of siblings"
        assert all(self._keys[block] is None for block in self._free), "a free block is still known by a key"
        assert all(self._keys[block] is not None for block in self._cached), "a cached block has no key"
