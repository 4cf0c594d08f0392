"""Where the state machine keeps what its tables point to.

A `Store` is memory that is written, copied, swapped and read as the allocator says. `ListStore` is plain lists; the one
of `kv_blocks_kernels` runs a provider's write_kv, copy_blocks, swap_blocks and gather_kv over real caches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Direction = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A sequence's table, and the `values` that it must read from position `start` on, on the host or the device."""

    table: tuple[int, ...]
    start: int
    values: tuple[int, ...]
    on_host: bool


class Store(Protocol):
    """Device and host blocks of `block_size` slots. A value stands for a token's K and V: equal values, equal rows."""

    def write(self, slots: Sequence[int], values: Sequence[int]) -> None:
        """Put values into device slots (block * block_size + offset)."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks, simultaneously."""

    def swap(self, pairs: Sequence[tuple[int, int]], direction: Direction) -> None:
        """Copy blocks (device, host) "out" or (host, device) "in"."""

    def expect(self, readings: Sequence[Reading]) -> None:
        """AssertionError unless every sequence reads its values, byte for byte."""


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

    def expect(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            self.expect_one(reading.table, reading.start, list(reading.values), reading.on_host)

    def expect_one(self, table: Sequence[int], start: int, values: list[int], on_host: bool) -> None:
        """AssertionError unless the blocks of `table` hold `values` from position `start` on."""
        blocks = self.host if on_host else self.device
        size = self.block_size
        read = [blocks[table[at // size]][at % size] for at in range(start, start + len(values))]
        assert read == values, f"table {list(table)} reads {read} from position {start}, not {values}"


def _copy(source: list[list[int | None]], target: list[list[int | None]], pairs: Sequence[tuple[int, int]]) -> None:
    moved = [(dst, source[src].copy()) for src, dst in pairs]
    for dst, block in moved:
        target[dst] = block
