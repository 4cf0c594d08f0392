"""The plain-dictionary model that the allocator is held to: every sequence's tokens, and nothing about blocks."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagebench.reference.kv_blocks_prefix import Extra


@dataclass
class Content:
    """One sequence. `values` says what each token's K and V is: it depends on the token and on all before it.

    known: how many tokens' content the allocator was told. dropped: tokens that a window left behind.
    """

    tokens: list[int]
    values: list[int]
    extras: tuple[Extra, ...]
    placed: dict[int, Extra]
    known: int
    dropped: int = 0
    on_host: bool = False


@dataclass
class Contents:
    """All sequences by id. Values are numbered as they occur: equal numbers mean an equal past, exactly."""

    sequences: dict[int, Content] = field(default_factory=dict)
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def start(
        self, tokens: Sequence[int], extras: tuple[Extra, ...], placed: Mapping[int, Extra], known: bool
    ) -> Content:
        """A sequence that is not one of `sequences` yet."""
        content = Content([], [], extras, dict(placed), 0)
        for token in tokens:
            self.extend(content, token, known)
        return content

    def extend(self, content: Content, token: int, known: bool) -> int:
        """Append a token; its value."""
        position = len(content.tokens)
        before = content.values[-1] if content.values else content.extras
        past = (before, token, content.placed.get(position))
        content.tokens.append(token)
        content.values.append(self.numbers.setdefault(past, len(self.numbers)))
        if known and content.known == position:
            content.known = position + 1
        return content.values[-1]

    def fork(self, seq_id: int) -> Content:
        source = self.sequences[seq_id]
        return Content(
            source.tokens.copy(),
            source.values.copy(),
            source.extras,
            source.placed.copy(),
            source.known,
            source.dropped,
            source.on_host,
        )

    def findable(self, content: Content, block_size: int) -> int:
        """Tokens in the longest run of full blocks that some resident sequence is known to hold from the start on."""
        longest = 0
        for other in self.sequences.values():
            if other.on_host or other.dropped >= block_size:
                continue
            for end in range(block_size, min(content.known, other.known) + 1, block_size):
                block = range(end - block_size, end)
                if content.values[end - 1] != other.values[end - 1]:
                    break
                if any(content.placed.get(at) != other.placed.get(at) for at in block):
                    break
                longest = max(longest, end)
        return longest
