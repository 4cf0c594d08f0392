"""A state machine over the paged allocator: any order of calls, against a dictionary of every sequence's tokens.

After every step each sequence is read back through its table, the blocks are counted, and a call that failed must have
left no trace. The allocator and the memory it governs are arguments: the second may run real kernels.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagebench.properties.kv_blocks_model import Content, Contents
from pagebench.properties.kv_blocks_store import MakeStore, Reading
from pagebench.reference.kv_blocks import paged_waste
from pagebench.reference.kv_blocks_paged import PagedAllocator
from pagebench.reference.kv_blocks_pairs import Pairs, merge_copies
from pagebench.reference.kv_blocks_pool import BlockPool, OutOfBlocksError

MakeAllocator = Callable[..., PagedAllocator]

EXAMPLES, STEPS = 110, 40  # of the default profile; enough for each planted bug of the project's own tests

TOKENS = st.lists(st.integers(0, 1), max_size=12)  # two letters: equal prefixes are common
EXTRAS = st.sampled_from([(), (), ("lora",), (1,)])
PLACED = st.dictionaries(st.integers(0, 9), st.sampled_from(["image", b"image"]), max_size=1)
PICK = st.integers(0, 20)  # index into the live sequences, modulo their number
PICKS = st.none() | st.lists(PICK, min_size=1, max_size=3)  # None: all


def some(on_host: bool | None = None) -> Callable[..., Any]:
    """A rule for when there is a sequence, or one of the host's (True) or the device's (False)."""

    def any_there(machine: "KVBlocksMachine") -> bool:
        return any(on_host in (None, content.on_host) for content in machine.contents.sequences.values())

    return precondition(any_there)


class KVBlocksMachine(RuleBasedStateMachine):
    """`make_allocator` takes PagedAllocator's arguments; `make_store(num_blocks, num_host_blocks, block_size)`."""

    stretch = 1  # prompts are so many times as long: larger blocks must fill too
    bookkeeping = True  # whether to take steps that are about the allocator alone

    def __init__(self, make_allocator: MakeAllocator, make_store: MakeStore) -> None:
        super().__init__()
        self.make_allocator = make_allocator
        self.make_store = make_store

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(3, 16),
        num_host_blocks=st.integers(2, 16),
        null_block=st.booleans(),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, block_size: int, num_blocks: int, num_host_blocks: int, null_block: bool, prefix_caching: bool
    ) -> None:
        self.begin(block_size, num_blocks, num_host_blocks, null_block, prefix_caching)

    def begin(
        self, block_size: int, num_blocks: int, num_host_blocks: int, null_block: bool, prefix_caching: bool
    ) -> None:
        """Make an allocator and the memory it governs, both empty."""
        self.block_size = block_size
        self.caching = prefix_caching
        self.allocator = self.make_allocator(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            null_block=null_block,
            prefix_caching=prefix_caching,
        )
        self.store = self.make_store(num_blocks, num_host_blocks, block_size)
        self.contents = Contents()
        self.ended: list[Content] = []  # the sequences freed last: their blocks may still be cached
        self.depths: dict[int, int] = {}  # where in its sequence a block freed in this step was
        self.step = 0
        self.cached: dict[int, tuple[Any, tuple[int, int]]] = {}  # of a block: its key, since when and how deep

    # -- what the steps share

    @property
    def pool(self) -> BlockPool:
        return self.allocator.pool

    @property
    def host(self) -> BlockPool:
        assert self.allocator.host is not None
        return self.allocator.host

    def ids(self, on_host: bool | None = None) -> list[int]:
        return [i for i, content in self.contents.sequences.items() if on_host in (None, content.on_host)]

    def pick(self, index: int, *, on_host: bool | None = None) -> int:
        ids = self.ids(on_host)
        return ids[index % len(ids)]

    def pick_group(self, indices: Sequence[int] | None, *, on_host: bool) -> list[int]:
        if indices is None:
            return self.ids(on_host)
        return list(dict.fromkeys(self.pick(index, on_host=on_host) for index in indices))

    def distinct(self, group: Sequence[int]) -> int:
        """Blocks that the group holds, shared ones counted once."""
        live: set[int] = set()
        for seq_id in group:
            live.update(
                self.allocator.block_table(seq_id)[self.contents.sequences[seq_id].dropped // self.block_size :]
            )
        return len(live)

    def attempt(self, call: Callable[[], Any], fails: bool | None) -> Any:
        """What `call` returns, None if memory is out; that must come as predicted (None: not predicted), and clean."""
        before = self.allocator.snapshot()
        try:
            returned = call()
        except OutOfBlocksError:
            assert fails is not False, "refused although there was room"
            assert self.allocator.snapshot() == before, "a failed call left a trace"
            return None
        assert fails is not True, "succeeded without the memory for it"
        return returned

    def rejected(self, call: Callable[[], Any]) -> None:
        before = self.allocator.snapshot()
        try:
            call()
        except ValueError as error:
            message = str(error)
        else:
            raise AssertionError("a bad call was not rejected")
        assert " must " in message, f"the message does not say what must hold: {message}"
        assert self.allocator.snapshot() == before, "a rejected call left a trace"

    def write(self, seq_id: int, first: int) -> None:
        """Write the values of positions `first` on through the table."""
        values = self.contents.sequences[seq_id].values[first:]
        slots = [self.allocator.slot(seq_id, first + i) for i in range(len(values))]
        if slots:
            self.store.write(slots, values)

    def created(self, content: Content, known: bool) -> int | None:
        """Create `content`'s sequence and write what is not shared; its id, None if memory is out."""
        seq_id = next(self.contents.ids)
        tokens: Any = content.tokens if known else len(content.tokens)
        wanted = -(-len(content.tokens) // self.block_size)
        findable = self.contents.findable(content, self.block_size) if self.caching else 0
        fails = wanted > self.pool.num_available if not (known and self.caching) else None
        if wanted - findable // self.block_size > self.pool.num_available:
            findable = -1  # may fail or find more in the cache
        shared = self.attempt(
            lambda: self.allocator.create(seq_id, tokens, extras=content.extras, placed_extras=content.placed), fails
        )
        if shared is None:
            assert findable == -1 or wanted > self.pool.num_available, "refused although there was room"
            return None
        assert shared % self.block_size == 0, "part of a block was shared"
        assert shared <= len(content.tokens), "more was shared than asked for"
        assert shared >= findable, f"{shared} tokens shared where {findable} are there"
        assert known or shared == 0, "shared without knowing the content"
        self.contents.sequences[seq_id] = content
        self.write(seq_id, shared)
        return seq_id

    # -- steps

    @rule(tokens=TOKENS, extras=EXTRAS, placed=PLACED, known=st.sampled_from([True, True, True, False]))
    def create(self, tokens: list[int], extras: Any, placed: dict[int, Any], known: bool) -> None:
        tokens = tokens * self.stretch
        self.created(self.contents.start(tokens, extras, _within(placed, tokens), known), known)

    @precondition(lambda self: self.contents.sequences or self.ended)
    @rule(pick=PICK, cut=st.integers(0, 6), more=st.lists(st.integers(0, 1), max_size=4))
    def create_like(self, pick: int, cut: int, more: list[int]) -> None:
        """A prompt that begins as a sequence that there is, or was."""
        known = [*self.contents.sequences.values(), *self.ended]
        source = known[pick % len(known)]
        tokens = source.tokens[: max(0, len(source.tokens) - cut)] + more
        self.created(self.contents.start(tokens, source.extras, _within(source.placed, tokens), True), True)

    @some()
    @rule(pick=PICK, apart=st.sampled_from(["extras", "image"]), at=st.integers(0, 5))
    def create_apart(self, pick: int, apart: str, at: int) -> None:
        """The tokens of a sequence there is under other extra keys: none of what these keys change may be shared."""
        source = self.contents.sequences[self.pick(pick)]
        extras = (*source.extras, "other") if apart == "extras" else source.extras
        placed = source.placed | ({at: "other"} if apart == "image" else {})
        self.created(self.contents.start(source.tokens, extras, _within(placed, source.tokens), True), True)

    @some(on_host=False)
    @rule(
        pick=PICK,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        known=st.sampled_from([True, True, True, True, False]),
    )
    def append(self, pick: int, tokens: list[int], known: bool) -> None:
        seq_id = self.pick(pick, on_host=False)
        for token in tokens:
            if not self.append_one(seq_id, token, known):
                return

    @some(on_host=False)
    @rule(picks=PICKS, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def decode(self, picks: list[int] | None, tokens: list[int]) -> None:
        """A step of an engine: a token for each of several sequences, all copies in one call, then all writes."""
        copies: list[tuple[int, int]] = []
        grown: dict[int, int] = {}  # seq_id: where its new token is
        for i, seq_id in enumerate(self.pick_group(picks, on_host=False)):
            position = self.allocator.length(seq_id)
            pairs = self.grow(seq_id, tokens[i % len(tokens)], True)
            if pairs is None:
                break
            copies += pairs
            grown[seq_id] = position
        if copies:
            self.store.copy([(int(source), int(target)) for source, target in merge_copies(copies)])
        if grown:
            slots = [self.allocator.slot(seq_id, position) for seq_id, position in grown.items()]
            self.store.write(slots, [self.contents.sequences[seq_id].values[-1] for seq_id in grown])

    def append_one(self, seq_id: int, token: int, known: bool) -> bool:
        """Append a token, copy what must be copied first, write it; False if memory is out."""
        position = self.allocator.length(seq_id)
        pairs = self.grow(seq_id, token, known)
        if pairs is None:
            return False
        if pairs:
            self.store.copy(pairs)
        self.write(seq_id, position)
        return True

    def grow(self, seq_id: int, token: int, known: bool) -> Pairs | None:
        """Make room for a token; the copies to run before it is written, None if memory is out."""
        table = self.allocator.block_table(seq_id)
        position = self.allocator.length(seq_id)
        full = position % self.block_size == 0
        copies = not full and self.pool.references(table[-1]) > 1
        fails = (full or copies) and self.pool.num_available == 0
        pairs: Pairs | None = self.attempt(lambda: self.allocator.append(seq_id, token if known else None), fails)
        if pairs is None:
            return None
        assert len(pairs) == copies, f"{len(pairs)} blocks to copy, expected {int(copies)}"
        assert not copies or pairs[0][0] == table[-1], "copies another block than the one written to"
        self.contents.extend(self.contents.sequences[seq_id], token, known)
        return pairs

    @some()
    @rule(pick=PICK, times=st.integers(1, 3))
    def fork(self, pick: int, times: int) -> None:
        seq_id = self.pick(pick)
        for _ in range(times):
            self.forked(seq_id)

    def forked(self, seq_id: int) -> int:
        new_id, free = next(self.contents.ids), self.pool.num_available
        self.allocator.fork(seq_id, new_id)
        assert self.pool.num_available == free, "a fork took memory"
        self.contents.sequences[new_id] = self.contents.fork(seq_id)
        return new_id

    @precondition(lambda self: self.bookkeeping and self.block_size > 1)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def image_in_an_open_block(self, tokens: list[int]) -> None:
        """A fork fills the block in which an image lies; the same tokens without the image share none of it."""
        tokens = tokens if len(tokens) % self.block_size else [*tokens, 0]
        seq_id = self.created(self.contents.start(tokens, (), {len(tokens) - 1: "image"}, True), True)
        if seq_id is None:
            return
        fork = self.forked(seq_id)
        missing = -len(tokens) % self.block_size
        if all(self.append_one(fork, 0, True) for _ in range(missing)):
            self.created(self.contents.start([*tokens, *[0] * missing], (), {}, True), True)

    @some(on_host=False)
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def write_alike(self, pick: int, tokens: list[int]) -> None:
        """A sequence and its fork go on alike: two blocks come to hold the same."""
        seq_id = self.pick(pick, on_host=False)
        for writer in (seq_id, self.forked(seq_id)):
            for token in tokens:
                if not self.append_one(writer, token, True):
                    return

    @some()
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self.end(self.pick(pick))

    def end(self, seq_id: int) -> None:
        self.depths = {block: i for i, block in enumerate(self.allocator.block_table(seq_id))}
        self.allocator.free(seq_id)
        self.ended = [*self.ended[-2:], self.contents.sequences.pop(seq_id)]
        self.rejected(lambda: self.allocator.free(seq_id))

    @precondition(lambda self: self.bookkeeping and self.caching)
    @rule(count=st.integers(1, 3))
    def end_in_turn(self, count: int) -> None:
        """Two sequences end one after the other, and `count` of the cached blocks go."""
        started = []
        for token in (2, 3):
            started.append(self.created(self.contents.start([token] * 2 * self.block_size, (), {}, True), True))
            self.the_oldest_are_evicted()  # notes which cached blocks are in use again
        for seq_id in started:
            if seq_id is not None:
                self.end(seq_id)
                self.the_oldest_are_evicted()
        self.evict(count)

    @precondition(lambda self: self.pool.null_block is not None)
    @some(on_host=False)
    @rule(pick=PICK, keep=st.integers(0, 6))
    def drop_before(self, pick: int, keep: int) -> None:
        """A window of `keep` tokens slides to the end of a sequence."""
        seq_id = self.pick(pick, on_host=False)
        content = self.contents.sequences[seq_id]
        position = max(0, len(content.tokens) - keep)
        self.allocator.drop_before(seq_id, position)
        content.dropped = max(content.dropped, position // self.block_size * self.block_size)

    @precondition(lambda self: self.pool.num_cached > 0)
    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        cached = self.pool.num_cached
        evicted = self.allocator.evict(count)
        assert len(evicted) == min(count, cached), "evicted another number than asked for"
        assert self.pool.num_cached == cached - len(evicted)

    @some(on_host=False)
    @rule(picks=PICKS, fork=st.booleans())
    def swap_out(self, picks: list[int] | None, fork: bool) -> None:
        """`fork`: a fork of the first goes along, so that the group shares its blocks."""
        group = self.pick_group(picks, on_host=False)
        group += [self.forked(group[0])] if fork else []
        self.swapped(group, "out", self.distinct(group) > self.host.num_available)

    @some(on_host=True)
    @rule(picks=PICKS)
    def swap_in(self, picks: list[int] | None) -> None:
        group = self.pick_group(picks, on_host=True)
        self.swapped(group, "in", self.distinct(group) > self.pool.num_available)

    def swapped(self, group: list[int], direction: Any, fails: bool) -> None:
        move = self.allocator.swap_out if direction == "out" else self.allocator.swap_in
        expected = self.distinct(group)
        pairs = self.attempt(lambda: move(group), fails)
        if pairs is None:
            return
        assert len(pairs) == expected, "a shared block was not swapped exactly once"
        if pairs:
            self.store.swap(pairs, direction)
        for seq_id in group:
            self.contents.sequences[seq_id].on_host = direction == "out"

    @some()
    @rule(pick=PICK)
    def bad_calls(self, pick: int) -> None:
        """What must be rejected whatever the state, and a prompt that no emptying could make room for."""
        unknown = next(self.contents.ids)
        for call in (
            lambda: self.allocator.append(unknown, 0),
            lambda: self.allocator.free(unknown),
            lambda: self.allocator.fork(unknown, unknown + 1),
            lambda: self.allocator.swap_out([unknown]),
            lambda: self.allocator.swap_in([unknown]),
            lambda: self.allocator.create(unknown, -1),
            lambda: self.allocator.create(unknown, [1 << 63]),
            lambda: self.allocator.create(unknown, [0], extras=(1.5,)),  # type: ignore[arg-type]  # that is the point
            lambda: self.allocator.create(unknown, [0], placed_extras={1: "image"}),
        ):
            self.rejected(call)
        seq_id = self.pick(pick)
        on_host = self.contents.sequences[seq_id].on_host
        self.rejected(lambda: self.allocator.create(seq_id, []))
        self.rejected(lambda: self.allocator.fork(seq_id, seq_id))
        self.rejected(lambda: (self.allocator.swap_in if not on_host else self.allocator.swap_out)([seq_id]))
        self.rejected(lambda: (self.allocator.swap_in if on_host else self.allocator.swap_out)([seq_id, seq_id]))
        if on_host:
            self.rejected(lambda: self.allocator.append(seq_id, 0))
        size = (self.pool.num_blocks + 1) * self.block_size
        self.attempt(lambda: self.allocator.create(unknown, size), True)

    @precondition(lambda self: len(self.contents.sequences) > 4)
    @rule()
    def free_all(self) -> None:
        """Nothing leaks: everything is free or cached, and the whole pool can be handed out once more."""
        for seq_id in list(self.contents.sequences):
            self.allocator.free(seq_id)
        self.contents.sequences.clear()
        usable = self.pool.num_blocks - (self.pool.null_block is not None)
        assert self.pool.num_available == usable, "blocks leaked"
        assert self.host.num_available == self.host.num_blocks, "host blocks leaked"
        blocks = self.pool.allocate(usable)
        assert sorted(blocks) == sorted(set(range(self.pool.num_blocks)) - {self.pool.null_block}), "handed out twice"
        self.pool.free(blocks)

    # -- what holds after every step

    @invariant()
    def contents_read_back(self) -> None:
        self.store.expect(
            [
                Reading(
                    self.allocator.block_table(seq_id),
                    content.dropped,
                    tuple(content.values[content.dropped :]),
                    content.on_host,
                )
                for seq_id, content in self.contents.sequences.items()
            ]
        )

    @invariant()
    def waste_is_exact(self) -> None:
        for seq_id, content in self.contents.sequences.items():
            length = len(content.tokens)
            waste = self.allocator.waste(seq_id)
            assert self.allocator.length(seq_id) == length
            assert waste == paged_waste(length, self.block_size), "waste is not ceil(S / b) * b - S"
            assert 0 <= waste <= self.block_size - 1, "a whole block is wasted"

    @invariant()
    def blocks_are_conserved(self) -> None:
        for pool, on_host in ((self.pool, False), (self.host, True)):
            held = self.counted(on_host)
            assert pool.num_held == len(held), "held blocks are not those of the tables"
            assert pool.num_references == held.total(), "references are not those of the tables"
            assert pool.num_shared == sum(count > 1 for count in held.values()), "shared blocks miscounted"
            assert all(pool.references(block) == count for block, count in held.items()), "a reference is lost"
            null = pool.null_block is not None
            assert pool.num_free + pool.num_held + pool.num_cached + null == pool.num_blocks, "a block is lost"
        self.allocator.check()

    def counted(self, on_host: bool) -> Counter[int]:
        """References by block, from the tables alone."""
        held: Counter[int] = Counter()
        for seq_id, content in self.contents.sequences.items():
            if content.on_host == on_host:
                table = self.allocator.block_table(seq_id)
                dropped = content.dropped // self.block_size
                assert all(block == self.pool.null_block for block in table[:dropped]), "a dropped block is not null"
                held.update(table[dropped:])
        assert on_host or self.pool.null_block not in held, "the null block was handed out"
        return held

    @invariant()
    def the_oldest_are_evicted(self) -> None:
        """Least recently used first, and of the blocks freed with one sequence its last: more share its beginning."""
        self.step += 1
        pool, before = self.pool, self.cached
        keys = {block: pool.key(block) for block in range(pool.num_blocks) if pool.is_cached(block)}
        kept = [since for block, (key, since) in before.items() if keys.get(block) == key]
        evicted = [since for block, (key, since) in before.items() if block not in keys and pool.key(block) != key]
        assert not kept or not evicted or max(evicted) <= min(kept), "evicted before one that was used earlier"
        self.cached = {block: (key, (self.step, -self.depths.get(block, 0))) for block, key in keys.items()}
        self.cached.update((block, cached) for block, cached in before.items() if keys.get(block) == cached[0])
        self.depths = {}

    @invariant()
    def sharing_counts_once(self) -> None:
        usage = self.allocator.usage()
        written: dict[int, int] = {}
        for seq_id, content in self.contents.sequences.items():
            if not content.on_host:
                for position in range(content.dropped, len(content.tokens)):
                    written[self.allocator.slot(seq_id, position)] = content.values[position]
        assert usage.used == len(written), "a shared slot was not counted once"
        assert usage.used + usage.internal_waste == usage.held * self.block_size


def run_machine(make_allocator: MakeAllocator, make_store: MakeStore, how: settings) -> None:
    """Run the machine; AssertionError with the shortest failing order of calls."""
    run_state_machine_as_test(
        lambda: KVBlocksMachine(make_allocator, make_store),  # type: ignore[arg-type]  # called, never subclassed
        settings=how,
    )


def _within(placed: dict[int, Any], tokens: Sequence[int]) -> dict[int, Any]:
    return {at: extra for at, extra in placed.items() if at < len(tokens)}
