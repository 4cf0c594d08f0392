"""KV memory as servers held it before paging: one contiguous reservation per request, for as long as it may become.

What is reserved and not yet written is internal waste. Free extents too small for a request although there is enough
free in total are external fragmentation.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

from pagebench.reference.validation import require, require_int

Fit = Literal["first", "best"]


class OutOfSlotsError(Exception):
    """No free extent is long enough; nothing was changed. `fragmented`: the free total would have sufficed."""

    def __init__(self, wanted: int, largest: int, free: int) -> None:
        super().__init__(f"{wanted} slots wanted in one piece, largest free extent {largest}, {free} free in all")
        self.wanted = wanted
        self.largest = largest
        self.free = free

    @property
    def fragmented(self) -> bool:
        return self.free >= self.wanted


@dataclass(slots=True)
class Reservation:
    """Slots [start, start + size) of the slab, the first `length` of them written."""

    start: int
    size: int
    length: int


class ContiguousAllocator:
    """One slab of `num_slots` token slots. `fit` chooses the first free extent that is long enough, or the smallest."""

    def __init__(self, num_slots: int, *, fit: Fit = "first") -> None:
        require_int("num_slots", num_slots, low=1)
        require(fit in ("first", "best"), "fit", "be 'first' or 'best'", fit)
        self.num_slots = num_slots
        self.fit = fit
        self.reserved = 0  # slots in reservations
        self.refused = 0  # reservations that failed
        self.refused_fragmented = 0  # those of them that the free total would have held
        self._extents: list[tuple[int, int]] = [(0, num_slots)]  # free (start, size), by address, never adjacent
        self._sequences: dict[int, Reservation] = {}

    @property
    def free_slots(self) -> int:
        return self.num_slots - self.reserved

    @property
    def largest_extent(self) -> int:
        """Slots of the largest free extent, 0 when nothing is free."""
        return max((size for _, size in self._extents), default=0)

    @property
    def used(self) -> int:
        """Slots written."""
        return sum(item.length for item in self._sequences.values())

    def reserve(self, seq_id: int, max_len: int, length: int = 0) -> int:
        """Reserve max_len slots, `length` of them written already; the first slot's index.

        Raises OutOfSlotsError if no extent is long enough, ValueError for a known seq_id or a length above max_len.
        """
        require(seq_id not in self._sequences, "seq_id", "be new", seq_id)
        require_int("max_len", max_len, low=1)
        require_int("length", length, low=0)
        require(length <= max_len, "length", f"be at most max_len = {max_len}", length)
        fitting = [i for i, (_, size) in enumerate(self._extents) if size >= max_len]
        if not fitting:
            error = OutOfSlotsError(max_len, self.largest_extent, self.free_slots)
            self.refused += 1
            self.refused_fragmented += error.fragmented
            raise error
        chosen = fitting[0] if self.fit == "first" else min(fitting, key=lambda i: self._extents[i][1])
        start, size = self._extents[chosen]
        self._extents[chosen : chosen + 1] = [(start + max_len, size - max_len)] if size > max_len else []
        self._sequences[seq_id] = Reservation(start, max_len, length)
        self.reserved += max_len
        return start

    def append(self, seq_id: int) -> int:
        """Write the next token's slot; its index. ValueError when the reservation is full or unknown."""
        item = self.reservation(seq_id)
        require(item.length < item.size, "seq_id", f"have room in its {item.size} slots", seq_id)
        item.length += 1
        return item.start + item.length - 1

    def free(self, seq_id: int) -> None:
        """Give the reservation back; free neighbours become one extent."""
        item = self.reservation(seq_id)
        start, size = item.start, item.size
        at = bisect_left(self._extents, (start, 0))
        if at < len(self._extents) and self._extents[at][0] == start + size:
            size += self._extents.pop(at)[1]
        if at > 0 and sum(self._extents[at - 1]) == start:
            at -= 1
            start, before = self._extents.pop(at)
            size += before
        self._extents.insert(at, (start, size))
        del self._sequences[seq_id]
        self.reserved -= item.size

    def reservation(self, seq_id: int) -> Reservation:
        """Where the sequence lies. ValueError for an unknown one."""
        item = self._sequences.get(seq_id)
        if item is None:
            raise ValueError(f"seq_id must be of a live sequence, got {seq_id!r}")
        return item

    def waste(self, seq_id: int) -> int:
        """Internal waste of one sequence in slots: max_len - S."""
        item = self.reservation(seq_id)
        return item.size - item.length

    def layout(self) -> list[tuple[int, int, int | None]]:
        """The slab in address order: (start, size, seq_id), None for a free extent."""
        held = [(item.start, item.size, seq_id) for seq_id, item in self._sequences.items()]
        return sorted([*held, *((start, size, None) for start, size in self._extents)], key=lambda part: part[0])

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data, but for the counts of refusals."""
        held = {seq_id: (item.start, item.size, item.length) for seq_id, item in self._sequences.items()}
        return {"extents": tuple(self._extents), "held": held, "reserved": self.reserved}

    def check(self) -> None:
        """AssertionError unless reservations and free extents tile the slab and no two free extents touch."""
        at, free_before = 0, False
        for start, size, seq_id in self.layout():
            assert start == at, "the slab has a gap or an overlap"
            assert size > 0, "an empty part"
            assert not (free_before and seq_id is None), "two free extents touch"
            at, free_before = start + size, seq_id is None
        assert at == self.num_slots, "the slab's end is lost"
        assert self.reserved == sum(item.size for item in self._sequences.values()), "reserved miscounted"
