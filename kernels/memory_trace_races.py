"""Programs of one launch that touch the same byte, where one of them writes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagebench.kernels.launch_buffers import Buffer
from pagebench.reference.dtypes import Array

Program = tuple[int, int, int]

PAGE = 4096  # bytes whose owners are kept together: large caches are mostly untouched
_ID = np.uint32  # of an access; 0 is none

# What was noted of a byte: who stored to it, and up to two programs that read it or changed it atomically. Two suffice:
# any third program that comes differs from one of them.
_STORE, _READ, _READ_TOO, _ATOMIC, _ATOMIC_TOO = range(5)
_SLOTS = {"store": (_STORE, None), "load": (_READ, _READ_TOO), "atomic": (_ATOMIC, _ATOMIC_TOO)}
_CONFLICTS = {
    "load": (_STORE, _ATOMIC, _ATOMIC_TOO),
    "store": (_STORE, _READ, _READ_TOO, _ATOMIC, _ATOMIC_TOO),
    "atomic": (_STORE, _READ, _READ_TOO),
}


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a race: kind, program or block, thread (CUDA only).

    kind: "load", "store", "atomic", or "cp.async in flight": a copy to shared memory that nobody has waited for.

    line: "FILE:LINE: SOURCE", or "" where that is not known.
    """

    kind: str
    program: Program
    thread: tuple[int, int, int] | None = None
    line: str = ""

    def __str__(self) -> str:
        who = f"program {self.program}" + ("" if self.thread is None else f", thread {self.thread}")
        return f"{self.kind} by {who}" + (f" at {self.line}" if self.line else "")


class RaceError(RuntimeError):
    """Two programs (or threads of a block between barriers) touched one byte, one of them writing, not both atomically.

    `kernel`; `buffer` by the kernel's name for it; `index` of the element in the buffer; `first` and `second`: the two
    accesses in the order in which they ran here.
    """

    def __init__(self, kernel: str, buffer: str, index: int, first: Access, second: Access) -> None:
        self.kernel, self.buffer, self.index, self.first, self.second = kernel, buffer, index, first, second
        super().__init__(f"{kernel}: race on buffer {buffer!r} at element {index}: {first}, and {second}")


class ByteOwners:
    """Which programs of one launch touched each byte of its buffers, as far as later accesses can conflict."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        # Bytes [i * granule, (i + 1) * granule) share an entry, for as long as every access is whole granules.
        self._granule = math.gcd(*(math.gcd(b.itemsize, b.start) for b in buffers), 16)
        self._pages = _Pages(buffers, self._granule)
        self._owners: list[Array] = [np.zeros(0, _ID) for _ in range(5)]
        self._ids: dict[Access, int] = {}
        self._accesses: list[Access] = []
        self._program = np.full(1, -1, np.int64)  # of each access; programs are numbered as they come
        self._numbers: dict[Program, int] = {}

    def touch(self, access: Access, addresses: Array, size: int) -> tuple[int, Access] | None:
        """Note that `access` touches [address, address + size) of each of the distinct `addresses`.

        Returns (address of the byte, earlier access) for one that conflicts with it, if there is any.
        """
        at = self._positions(addresses, size)
        number = self._numbers.setdefault(access.program, len(self._numbers))
        for slot in _CONFLICTS[access.kind]:
            ids = self._owners[slot][at]
            if ids.any():
                bad = np.flatnonzero((ids != 0) & (self._program[ids] != number))
                if bad.size:
                    which = int(bad[0]) // (at.size // addresses.size)
                    offset = int(bad[0]) % (at.size // addresses.size) * self._granule
                    return int(addresses[which]) + offset, self._accesses[int(ids[bad[0]]) - 1]
        self._note(access, number, at)
        return None

    def _note(self, access: Access, number: int, at: Array) -> None:
        first, second = _SLOTS[access.kind]
        id = self._id(access, number)
        held = self._owners[first][at]
        if second is None or not held.any():
            self._owners[first][at] = id
            return
        self._owners[first][at[held == 0]] = id
        others = at[(held != 0) & (self._program[held] != number)]
        self._owners[second][others] = id

    def _id(self, access: Access, number: int) -> int:
        id = self._ids.get(access)
        if id is None:
            self._accesses.append(access)
            id = self._ids[access] = len(self._accesses)
            if id >= self._program.size:
                self._program = np.resize(self._program, 2 * id)
            self._program[id] = number
        return id

    def _positions(self, addresses: Array, size: int) -> Array:
        """Entries of every byte, by address and then by byte."""
        if size % self._granule or (addresses & np.uint64(self._granule - 1)).any():
            self._refine()
        at = self._pages.positions(addresses, size // self._granule)
        if self._pages.count > self._owners[0].size:
            room = max(2 * self._owners[0].size, self._pages.count)
            self._owners = [np.concatenate([o, np.zeros(room - o.size, _ID)]) for o in self._owners]
        return at

    def _refine(self) -> None:
        """An entry for every single byte from now on."""
        self._owners = [np.repeat(o, self._granule) for o in self._owners]
        self._pages.refine()
        self._granule = 1


class _Pages:
    """Where the entries of an address are, in arrays that grow with the pages that are touched."""

    def __init__(self, buffers: Sequence[Buffer], granule: int) -> None:
        self._granule = granule
        self._origins: list[int] = []  # of each region of memory, a multiple of PAGE
        stops: list[int] = []
        for buffer in sorted(buffers, key=lambda b: b.start):
            if stops and buffer.start < stops[-1]:
                stops[-1] = max(stops[-1], buffer.stop)
            else:
                self._origins.append(buffer.start // PAGE * PAGE)
                stops.append(buffer.stop)
        self._starts = np.array(self._origins, np.uint64)
        counts = [-(-(stop - origin) // PAGE) for origin, stop in zip(self._origins, stops, strict=True)]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # page number where each region starts
        self._stops = np.array(stops, np.uint64)
        self._places = np.zeros(int(self._first[-1]), np.int32)  # place + 1 of a page; 0: not touched so far
        self._used = 0

    @property
    def count(self) -> int:
        """Entries in use."""
        return self._used * (PAGE // self._granule)

    def refine(self) -> None:
        self._granule = 1

    def positions(self, addresses: Array, granules: int) -> Array:
        """int64 [len(addresses) * granules]."""
        region = np.searchsorted(self._stops, addresses, side="right")
        offset = (addresses - self._starts[region]).astype(np.int64) // self._granule
        if granules > 1:
            offset = (offset[:, None] + np.arange(granules)).reshape(-1)
            region = np.repeat(region, granules)
        per_page = PAGE // self._granule
        page = self._first[region] + offset // per_page
        place = self._places[page]
        if not place.all():
            missing = np.unique(page[place == 0])
            self._places[missing] = self._used + 1 + np.arange(missing.size)
            self._used += missing.size
            place = self._places[page]
        at: Array = (place.astype(np.int64) - 1) * per_page + offset % per_page
        return at
