"""The memory layouts that a trace is replayed on: one reservation per request, or blocks on demand."""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from bench.request_trace import Request
from pagebench.reference.kv_blocks_contiguous import ContiguousAllocator, Fit, OutOfSlotsError
from pagebench.reference.kv_blocks_paged import PagedAllocator
from pagebench.reference.kv_blocks_pool import OutOfBlocksError
from pagebench.reference.validation import require, require_int

Reserve = Literal["max", "pow2", "exact"]
OWN = 1 << 40  # content ids from here on belong to one request alone


class Layout(Protocol):
    """What a replay asks of memory. Slots throughout, shared_blocks aside."""

    name: str

    @property
    def reserved(self) -> int:
        """Slots that no other request can have."""

    @property
    def shared_slots(self) -> int:
        """Slots counted more than once in the sum of all requests' lengths."""

    @property
    def shared_blocks(self) -> int:
        """Blocks that several requests hold."""

    def can_ever_hold(self, total: int) -> bool:
        """Whether a request that grows to `total` tokens fits when it is alone."""

    def admit(self, seq_id: int, request: Request, context: int, *, alone: bool) -> int | None:
        """Make room for `context` tokens; how many are there already, None if there is no room now."""

    def append_each(self, seq_ids: Iterable[int]) -> int:
        """Room for one more token for each of them in turn; how many got it before memory was out."""

    def release(self, seq_id: int) -> None:
        """Give up everything the request holds."""

    def length(self, seq_id: int) -> int:
        """Slots that it has written."""

    def held(self, seq_id: int) -> int:
        """Slots that it holds."""

    def unusable(self, request: Request) -> int:
        """Free slots that would hold the refused request, were they in one piece; else 0."""


class NaiveLayout:
    """One contiguous reservation per request.

    reserve: "max" takes max_len for each; "pow2" the next power of two of what the request will need, "exact" just that
    (both know the future, and show external fragmentation). Requests longer than max_len are refused.
    """

    shared_slots = 0
    shared_blocks = 0

    def __init__(self, num_slots: int, max_len: int, *, reserve: Reserve = "max", fit: Fit = "first") -> None:
        require_int("max_len", max_len, low=1)
        require(reserve in ("max", "pow2", "exact"), "reserve", "be 'max', 'pow2' or 'exact'", reserve)
        self.name = f"naive {max_len}" if reserve == "max" else f"naive {reserve} ({fit} fit)"
        self.max_len = max_len
        self.reserve = reserve
        self.allocator = ContiguousAllocator(num_slots, fit=fit)

    @property
    def reserved(self) -> int:
        return self.allocator.reserved

    def size(self, total: int) -> int:
        """Slots reserved for a request that will hold `total`."""
        if self.reserve == "max":
            return self.max_len
        return max(1, total) if self.reserve == "exact" else 1 << max(0, total - 1).bit_length()

    def can_ever_hold(self, total: int) -> bool:
        return total <= self.max_len and self.size(total) <= self.allocator.num_slots

    def admit(self, seq_id: int, request: Request, context: int, *, alone: bool) -> int | None:
        try:
            self.allocator.reserve(seq_id, self.size(request.total_tokens), context)
        except OutOfSlotsError:
            return None
        return 0

    def append_each(self, seq_ids: Iterable[int]) -> int:
        done = 0
        append = self.allocator.append
        for seq_id in seq_ids:
            append(seq_id)
            done += 1
        return done

    def release(self, seq_id: int) -> None:
        self.allocator.free(seq_id)

    def length(self, seq_id: int) -> int:
        return self.allocator.reservation(seq_id).length

    def held(self, seq_id: int) -> int:
        return self.allocator.reservation(seq_id).size

    def unusable(self, request: Request) -> int:
        free = self.allocator.free_slots
        return free if free >= self.size(request.total_tokens) else 0


class PagedLayout:
    """Blocks on demand. `watermark` of the blocks stay free when a request is let in, for those that are growing."""

    def __init__(self, num_slots: int, block_size: int, *, share: bool = False, watermark: float = 0.01) -> None:
        require(0 <= watermark < 1, "watermark", "be in [0, 1)", watermark)
        require_int("block_size", block_size, low=1)
        num_blocks = num_slots // block_size
        require(num_blocks >= 1, "num_slots", f"hold a block of {block_size}", num_slots)
        self.name = f"paged {block_size}" + (" shared" if share else "")
        self.block_size = block_size
        self.share = share
        self.allocator = PagedAllocator(num_blocks, block_size, prefix_caching=share)
        self.pool = self.allocator.pool
        self.spare = int(watermark * num_blocks)

    @property
    def reserved(self) -> int:
        return self.pool.num_held * self.block_size

    @property
    def shared_slots(self) -> int:
        return (self.pool.num_references - self.pool.num_held) * self.block_size  # only full blocks are shared here

    @property
    def shared_blocks(self) -> int:
        return self.pool.num_shared

    def can_ever_hold(self, total: int) -> bool:
        return -(-total // self.block_size) <= self.pool.num_blocks

    def admit(self, seq_id: int, request: Request, context: int, *, alone: bool) -> int | None:
        content = self.content(seq_id, request, context)
        try:
            return self.allocator.create(seq_id, content, spare=0 if alone else self.spare)
        except OutOfBlocksError:
            return None

    def content(self, seq_id: int, request: Request, context: int) -> Sequence[int] | int:
        """The prompt: token ids that are equal where requests share content, or only their number."""
        if not (self.share and request.prefix):
            return context
        tokens: list[int] = []
        for content_id, count in request.prefix:
            tokens += range(content_id << 20, (content_id << 20) + count)
        own = context - len(tokens)
        return tokens[:context] if own <= 0 else [*tokens, *range((OWN + seq_id) << 20, ((OWN + seq_id) << 20) + own)]

    def append_each(self, seq_ids: Iterable[int]) -> int:
        done = 0
        append = self.allocator.append
        try:
            for seq_id in seq_ids:
                append(seq_id)
                done += 1
        except OutOfBlocksError:
            pass
        return done

    def release(self, seq_id: int) -> None:
        self.allocator.free(seq_id)

    def length(self, seq_id: int) -> int:
        return self.allocator.length(seq_id)

    def held(self, seq_id: int) -> int:
        return self.allocator.length(seq_id) + self.allocator.waste(seq_id)

    def unusable(self, request: Request) -> int:
        return 0
