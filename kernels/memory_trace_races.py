"""Programs of one launch that touch the same byte, where one of them writes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a race: kind "load", "store" or "atomic"; program or block; thread (CUDA); "FILE:LINE: SOURCE" or ""."""

    kind: str
    program: tuple[int, int, int]
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
