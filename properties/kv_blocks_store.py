"""Where the state machine keeps what its tables point to.

A `Store` is memory that is written, copied, swapped and read as the allocator says. `ListStore` is plain lists; a store
that runs a provider's write_kv, copy_blocks and swap_blocks over real caches has the same four methods.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

Direction = Literal["out", "in"]


class Store(Protocol):
    """Device and host blocks of `block_size` slots. A value stands for a token's K and V: equal values, equal rows."""

    def write(self, slots: Sequence[int], values: Sequence[int]) -> None:
        """Put values into device slots (block * block_size + offset)."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks, simultaneously."""

    def swap(self, pairs: Sequence[tuple[int, int]], direction: Direction) -> None:
        """Copy blocks (device, host) "out" or (host, device) "in"."""

    def expect(self, table: Sequence[int], start: int, values: Sequence[int], *, on_host: bool) -> None:
        """AssertionError unless the sequence of `table` reads `values` from position `start` on, byte for byte."""


MakeStore = Callable[[int, int, int], Store]  # (num_blocks, num_host_blocks, block_size)


class ListStore:
    """Blocks as lists of values, None where nothing was written."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]

    def write(self, slots: Sequence[int], values: Sequence[int]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.device[slot // self.block_size][slot % self.block_size] = value

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy(self.device, self.device, pairs)

    def swap(self, pairs: Sequence[tuple[int, int]], direction: Direction) -> None:
        source, target = (self.device, self.host) if direction == "out" else (self.host, self.device)
        _copy(source, target, pairs)

    def expect(self, table: Sequence[int], start: int, values: Sequence[int], *, on_host: bool) -> None:
        blocks = self.host if on_host else self.device
        size = self.block_size
        read = [blocks[table[at // size]][at % size] for at in range(start, start + len(values))]
        assert read == list(values), f"table {list(table)} reads {read} from position {start}, not {list(values)}"


def _copy(source: list[list[int | None]], target: list[list[int | None]], pairs: Sequence[tuple[int, int]]) -> None:
    moved = [(dst, source[src].copy()) for src, dst in pairs]
    for dst, block in moved:
        target[dst] = block
