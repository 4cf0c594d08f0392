"""One sequence of the paged allocator: its block table, and what must be known of its content to share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagebench.reference.kv_blocks_pool import BlockPool, Key
from pagebench.reference.kv_blocks_prefix import (
    ROOT,
    TOKEN_LIMIT,
    Extra,
    Placed,
    block_key,
    chained_keys,
    placed_by_block,
)
from pagebench.reference.validation import require, require_int

_INTEGERS = (int, np.integer)  # a tuple is looked through faster than a union, and every token comes by here


@dataclass(slots=True)
class PagedSequence:
    """A table of blocks in `pool`, the device's or the host's.

    `table[:dropped]` are null blocks. open_tokens are the tokens of the last, partial block; None once one of them is
    not known, from where on nothing of the sequence can be found by key. host_keys keeps the keys of the live blocks
    while they are the host's.
    """

    table: list[int]
    pool: BlockPool
    length: int
    extras: tuple[Extra, ...]
    parent: Key
    open_tokens: list[int] | None
    open_placed: Placed = ()
    dropped: int = 0
    host_keys: list[Key | None] | None = None

    @property
    def live(self) -> list[int]:
        """A new list of the blocks that the sequence references."""
        return self.table[self.dropped :]

    def copy(self) -> "PagedSequence":
        """The same with lists of its own. References are the caller's business."""
        return replace(
            self,
            table=self.table.copy(),
            open_tokens=None if self.open_tokens is None else self.open_tokens.copy(),
            host_keys=None if self.host_keys is None else self.host_keys.copy(),
        )

    def remember(self, token: int | None, block_size: int) -> Key | None:
        """Note the token just appended; the last block's key, if that filled it and its content is known."""
        if self.open_tokens is None:
            return None
        if token is None:
            self.open_tokens = None
            return None
        self.open_tokens.append(token)
        if len(self.open_tokens) < block_size:
            return None
        self.parent = block_key(self.parent, self.open_tokens, self.extras, self.open_placed)
        self.open_tokens, self.open_placed = [], ()
        return self.parent


def prompt(
    tokens: Sequence[int] | int,
    block_size: int,
    pool: BlockPool,
    extras: tuple[Extra, ...],
    placed_extras: Mapping[int, Extra],
) -> tuple[PagedSequence, list[Key]]:
    """(a sequence of these tokens, or of this number of unknown ones, without a table; the keys of its full blocks).

    Raises ValueError for a negative number, a token outside 64 bits, an extra key that is no str, bytes or int, or one
    placed outside the prompt.
    """
    block_key(ROOT, (), extras)  # rejects a bad extra key, whether or not a block is full
    if isinstance(tokens, int | float | np.number):
        require_int("tokens", tokens, low=0)
        tokens = int(tokens)
        placed_by_block(placed_extras, tokens, block_size)
        return PagedSequence([], pool, tokens, extras, ROOT, [] if tokens == 0 else None), []
    full = len(tokens) // block_size
    keys = chained_keys(tokens, block_size, extras, placed_extras)
    open_tokens = list(tokens[full * block_size :])
    block_key(ROOT, open_tokens)  # rejects a bad token now rather than when the block is full
    open_placed = placed_by_block(placed_extras, len(tokens), block_size).get(full, ())
    parent = keys[-1] if keys else ROOT
    return PagedSequence([], pool, len(tokens), extras, parent, open_tokens, open_placed), keys


def require_token(token: object) -> None:
    """ValueError unless `token` is an integer of 64 bits."""
    whole = isinstance(token, _INTEGERS) and -TOKEN_LIMIT <= token < TOKEN_LIMIT
    require(whole, "token", "be an integer of 64 bits", token)
