"""asv benchmarks of the block allocators, on any machine: our pool beside vLLM's where that package can be imported.

Imports are inside `setup`: a commit or an environment without the module then shows as n/a, and the series survives.
"""

from collections.abc import Callable, Sequence
from typing import Any

LOTS = [1, 8, 64, 512]
NUM_BLOCKS = 8192
Calls = tuple[Callable[[int], Any], Callable[[Any], None]]


def _pagebench() -> Calls:
    from pagebench.reference.kv_blocks_pool import BlockPool

    pool = BlockPool(NUM_BLOCKS + 1, null_block=True)
    return pool.allocate, pool.free


def _vllm(caching: bool) -> Calls:
    try:
        from vllm.v1.core.block_pool import BlockPool  # type: ignore[import-not-found]  # installed or n/a
    except Exception as error:  # whatever its own imports raise on this machine
        raise NotImplementedError(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error
    pool = BlockPool(NUM_BLOCKS + 1, caching, 16)
    return pool.get_new_blocks, pool.free_blocks


POOLS: dict[str, Callable[[], Calls]] = {
    "pagebench": _pagebench,
    "vllm": lambda: _vllm(True),
    "vllm without prefix caching": lambda: _vllm(False),
}


class BlockPoolOperations:
    """The whole pool handed out in lots and given back: 2 x 8192 block operations a call."""

    params = (list(POOLS), LOTS)
    param_names = ("pool", "blocks_at_a_time")

    def setup(self, name: str, lot: int) -> None:
        try:
            self.allocate, self.free = POOLS[name]()
        except ImportError as error:
            raise NotImplementedError(str(error)) from error

    def time_allocate_and_free_all(self, name: str, lot: int) -> None:
        allocate, free = self.allocate, self.free
        for blocks in [allocate(lot) for _ in range(NUM_BLOCKS // lot)]:
            free(blocks)


class PagedAllocatorOperations:
    """What a scheduler asks of the allocator, on sequences of the length given. An append is one of 1000 in a call."""

    params = ([256, 4096, 65536],)
    param_names = ("seq_len",)
    number, warmup_time = 1, 0.0  # appends add up: every call starts from a fresh `setup`

    def setup(self, seq_len: int) -> None:
        try:
            from pagebench.reference.kv_blocks_paged import PagedAllocator
        except ImportError as error:
            raise NotImplementedError(str(error)) from error
        self.allocator = PagedAllocator(seq_len // 4 + 4096, 16)
        self.tokens: Sequence[int] = range(seq_len)
        self.allocator.create(0, seq_len)
        self.allocator.create(1, self.tokens)

    def time_append_token_of_unknown_content(self, seq_len: int) -> None:
        append = self.allocator.append
        for _ in range(1000):
            append(0)

    def time_append_known_token(self, seq_len: int) -> None:
        append = self.allocator.append
        for token in range(1000):
            append(1, token)

    def time_create_and_free_unshared(self, seq_len: int) -> None:
        self.allocator.create(2, seq_len)
        self.allocator.free(2)

    def time_create_and_free_with_the_whole_prompt_shared(self, seq_len: int) -> None:
        self.allocator.create(2, self.tokens)
        self.allocator.free(2)

    def time_fork_and_free(self, seq_len: int) -> None:
        self.allocator.fork(1, 2)
        self.allocator.free(2)


class TraceReplay:
    """500 requests of the synthetic trace, every token a call of the allocator."""

    params = (["naive 8192", "paged 16", "paged 16 shared"],)
    param_names = ("layout",)
    timeout = 120

    def setup(self, name: str) -> None:
        try:
            from bench.memory_layouts import NaiveLayout, PagedLayout
            from bench.request_trace import synthetic_trace
            from bench.trace_replay import Server, replay
        except ImportError as error:
            raise NotImplementedError(str(error)) from error
        self.trace, self.server, self.replay = synthetic_trace(500), Server(62_594), replay
        self.layouts: dict[str, Callable[[], Any]] = {
            "naive 8192": lambda: NaiveLayout(62_594, 8192),
            "paged 16": lambda: PagedLayout(62_594, 16),
            "paged 16 shared": lambda: PagedLayout(62_594, 16, share=True),
        }

    def time_replay(self, name: str) -> None:
        self.replay(self.trace, self.layouts[name](), self.server)

    def track_share_of_slots_without_use_at_end(self, name: str) -> float:
        """Exact and the same on every machine; lower is better."""
        return 1 - self.replay(self.trace, self.layouts[name](), self.server).useful_share

    track_share_of_slots_without_use_at_end.unit = "share of held slots"  # type: ignore[attr-defined]  # read by asv
    track_share_of_slots_without_use_at_end.version = "1"  # type: ignore[attr-defined]  # editing it keeps its history
