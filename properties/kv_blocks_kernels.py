"""The state machine's second mode: real caches on the provider's device, which only its kernels write.

New tokens go through write_kv, copies on write through copy_blocks, swaps through swap_blocks. After every step each
sequence is read through its table, in NumPy and by gather_kv, and compared byte for byte with what the plain model says
was written to it. What the provider lacks or rejects is done by the reference instead, and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from pagebench.properties import poison
from pagebench.properties.block_copy_rows_recipes import DTYPES, cache_views, random_bits, random_scale
from pagebench.properties.kv_blocks_forms import Form, forms
from pagebench.properties.kv_blocks_machine import KVBlocksMachine, MakeAllocator
from pagebench.properties.kv_blocks_store import Direction, Reading
from pagebench.properties.runs import IN_PLACE
from pagebench.properties.subject import REPRO, Subject
from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_quantise import dequantise, quantise, row_scales
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dtypes import FLOAT32, INT32, INT64, Array
from pagebench.reference.error_bounds import assert_same_bits
from pagebench.reference.kv_blocks_paged import PagedAllocator
from pagebench.reference.kv_blocks_pairs import as_pairs
from pagebench.reference.placement import Placement, place, raw_bytes
from pagebench.reference.problem import Problem

OPS = ("write_kv", "copy_blocks", "swap_blocks", "gather_kv")
EXAMPLES, STEPS = 10, 20  # of the default profile
SIDES = ("key", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Both pools' caches, in one order: for each layer the keys, the values, and where computed their scales."""

    device: tuple[Any, ...]
    host: tuple[Any, ...]

    @property
    def pinned_fields(self) -> tuple[str, ...]:
        return ("host",)


@dataclass(frozen=True, slots=True)
class Rows:
    """One token of one layer and side. rows [num_kv_heads, head_size] as written, stored as the cache holds them, read
    back as gather_kv gives them; scale [num_kv_heads] where it is computed."""

    rows: Array
    stored: Array
    read: Array
    scale: Array | None


class KernelStore:
    """A `Store` of caches as `form` says, on the device of `subject`'s provider. A value names the rows of a token."""

    def __init__(self, subject: Subject, form: Form, num_blocks: int, num_host_blocks: int) -> None:
        self.subject = subject
        self.form = form
        self.ran: set[str] = set()
        self.known: dict[int, list[Rows]] = {}
        self.gathered: set[Reading] = set()  # found right since an op last changed the memory
        dtype, cache_dtype, self.scaled = form.stored
        self.dtype, self.cache_dtype = DTYPES[dtype], DTYPES[cache_dtype or dtype]
        self.computed = self.scaled == "computed"
        self.per_layer = 4 if self.computed else 2
        rng = np.random.default_rng(form.seed)
        self.memory = Memory(
            self._caches(num_blocks, form.kv_layout, rng), self._caches(num_host_blocks, form.host_layout, rng)
        )
        kind = None if self.computed else self.scaled
        self.scales = [random_scale(kind, self.memory.device[0], rng) for _ in SIDES]
        # Fresh outputs and scratch hold NaN, so that a row that gather_kv leaves out shows.
        self.provider, self.empty, _ = poison.with_poisoned_empty(subject.provider, poison.NAN)
        self.placed: Placement[Any] = place(self.memory, self.provider)

    def _caches(self, blocks: int, layout: str, rng: np.random.Generator) -> tuple[Array, ...]:
        shape = (blocks, self.form.block_size, self.form.num_kv_heads, self.form.head_size)
        caches: list[Array] = []
        for _ in range(self.form.num_layers):
            caches += cache_views(layout, shape, self.cache_dtype, rng)
            if self.computed:
                caches += list(np.exp2(rng.uniform(-9, 9, (2, *shape[:3]))).astype(FLOAT32))
        return tuple(caches)

    # -- what the machine asks for

    def write(self, slots: Sequence[int], values: Sequence[int]) -> None:
        padding = self.form.padding
        mapped = np.array(slots, INT64)
        for layer in range(self.form.num_layers):
            key, value = (self._padded([self.row(v, layer, side).rows for v in values], padding) for side in (0, 1))
            names = ("key_cache", "value_cache", "key_scale", "value_scale")[: self.per_layer]
            where = dict(zip(names, range(layer * self.per_layer, (layer + 1) * self.per_layer), strict=True))
            caches = {name: self.memory.device[i] for name, i in where.items()}
            fixed = {} if self.computed else {"key_scale": self.scales[0], "value_scale": self.scales[1]}
            problem = WriteKV(key, value, slot_mapping=mapped, compute_scales=self.computed, **{**caches, **fixed})
            self.run(problem, {name: ("device", i) for name, i in where.items()})

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        problem = CopyBlocks(self.memory.device, as_pairs(pairs))
        self.run(problem, {f"caches[{i}]": ("device", i) for i in range(len(self.memory.device))})

    def swap(self, pairs: Sequence[tuple[int, int]], direction: Direction) -> None:
        source, target = ("device", "host") if direction == "out" else ("host", "device")
        problem = SwapBlocks(getattr(self.memory, source), getattr(self.memory, target), as_pairs(pairs), direction)
        number = range(len(self.memory.device))
        self.run(
            problem,
            {f"src_caches[{i}]": (source, i) for i in number} | {f"dst_caches[{i}]": (target, i) for i in number},
        )

    def expect(self, readings: Sequence[Reading]) -> None:
        self.pull()
        for reading in readings:
            for layer in range(self.form.num_layers):
                self.expect_stored(reading, layer)
        resident = [reading for reading in readings if not reading.on_host and reading not in self.gathered]
        for layer in range(self.form.num_layers if resident else 0):
            self.expect_gathered(resident, layer)
        self.gathered.update(resident)

    # -- how it is done

    def run(self, problem: Problem, where: dict[str, tuple[str, int]]) -> Any:
        """Run the op on the resident arrays that `where` names; on the host's, by the reference, if it is rejected."""
        provider, op = self.provider, problem.op
        if op in IN_PLACE:
            self.gathered.clear()
        if not callable(getattr(provider, op, None)) or not self.subject.accepted(problem):
            if op in IN_PLACE:
                self.pull()
                IN_PLACE[op](problem)
                self.placed = place(self.memory, provider)
            return None
        resident = {name: getattr(self.placed.problem, field)[i] for name, (field, i) in where.items()}
        placed = place(problem, provider, resident)
        variants = self.subject.variants(problem)
        returned = getattr(provider, op)(placed.problem, **variants[self.form.variant % len(variants)])
        provider.synchronize()
        placed.check_fences()
        if self.empty is not None:
            self.empty.check_fences()
            self.empty.taken.clear()
        if op not in self.ran:
            self.ran.add(op)
            self.subject.tally.examples[self.subject.label, op] += 1
        return returned

    def pull(self) -> None:
        """Bring the host's arrays to what the device holds now; FenceError if a byte beside a cache changed."""
        for base in self.placed.bases:
            raw_bytes(base.host)[:] = self.placed.host_bytes(base)
        if not self.placed.bases:
            for name in ("device", "host"):
                for array, placed in zip(getattr(self.memory, name), getattr(self.placed.problem, name), strict=True):
                    array[...] = self.provider.to_host(placed)

    def expect_stored(self, reading: Reading, layer: int) -> None:
        """Through the table in NumPy: the stored bytes of one layer, and their scales where computed."""
        size, caches = self.form.block_size, self.memory.host if reading.on_host else self.memory.device
        position = np.arange(reading.start, reading.start + len(reading.values))
        if not position.size:
            return
        blocks, offsets = np.array(reading.table, INT64)[position // size], position % size
        first, place_of = layer * self.per_layer, "host" if reading.on_host else "device"
        for side, name in enumerate(SIDES):
            rows = [self.row(value, layer, side) for value in reading.values]
            what = f"{name} of layer {layer} in {place_of} blocks {list(reading.table)} from position {reading.start}"
            assert_same_bits(what, caches[first + side][blocks, offsets], np.stack([row.stored for row in rows]))
            if self.computed:
                scales = np.stack([row.scale for row in rows if row.scale is not None])
                assert_same_bits(f"scales of {what}", caches[first + 2 + side][blocks, offsets], scales)

    def expect_gathered(self, readings: Sequence[Reading], layer: int) -> None:
        """The same by gather_kv, all sequences in one call. Positions that a window dropped may read anything."""
        width = max(len(reading.table) for reading in readings) + 1
        table = np.full((len(readings), width), -1, INT32)
        for i, reading in enumerate(readings):
            table[i, : len(reading.table)] = reading.table
        lengths = np.array([reading.start + len(reading.values) for reading in readings], INT32)
        first, caches = layer * self.per_layer, self.memory.device
        scales = caches[first + 2 : first + 4] if self.computed else self.scales
        problem = GatherKV(caches[first], caches[first + 1], table, lengths, self.dtype, *scales)
        names = ("key_cache", "value_cache", "key_scale", "value_scale")[: self.per_layer]
        returned = self.run(problem, {name: ("device", first + i) for i, name in enumerate(names)})
        if returned is None:
            return
        for side, name in enumerate(SIDES):
            got, stop = np.asarray(self.provider.to_host(returned[side])), 0
            assert got.shape == (lengths.sum(), *self.memory.device[0].shape[2:]), f"{name}: shape {list(got.shape)}"
            for reading in readings:
                start, stop = stop + reading.start, stop + reading.start + len(reading.values)
                if reading.values:
                    rows = np.stack([self.row(value, layer, side).read for value in reading.values])
                    assert_same_bits(
                        f"{name} of layer {layer} gathered from blocks {list(reading.table)} "
                        f"from position {reading.start}",
                        got[start:stop],
                        rows,
                    )

    def row(self, value: int, layer: int, side: int) -> Rows:
        """What token number `value` is in this layer: the same whenever it is asked for."""
        if value not in self.known:
            self.known[value] = self._rows(value)
        return self.known[value][2 * layer + side]

    def _rows(self, value: int) -> list[Rows]:
        rng = np.random.default_rng((self.form.seed, value))
        shape = (2 * self.form.num_layers, self.form.num_kv_heads, self.form.head_size)
        if self.cache_dtype == self.dtype:
            bits = random_bits(rng, shape, self.dtype)  # infinities, subnormals and both zeros among them
            with np.errstate(invalid="ignore"):
                bits[np.isnan(bits)] = 1
            return [Rows(rows, rows, rows, None) for rows in bits]
        made = (rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5))).astype(self.dtype)
        return [self._quantised(rows, self.scales[i % 2]) for i, rows in enumerate(made)]

    def _quantised(self, rows: Array, scale: Any) -> Rows:
        computed = row_scales(rows, self.cache_dtype) if self.computed else None
        factor = scale if computed is None else computed
        if np.ndim(factor):
            factor = factor[:, None]
        stored = quantise(rows, factor, self.cache_dtype)
        return Rows(rows, stored, dequantise(stored, factor, self.dtype), computed)

    def _padded(self, rows: list[Array], padding: int) -> Array:
        """The rows, and `padding` more that no slot is mapped to, all NaN."""
        behind = np.full((padding, *rows[0].shape), np.nan).astype(self.dtype)
        return np.concatenate([np.stack(rows), behind])


def kernel_machine(subject: Subject, make_allocator: MakeAllocator = PagedAllocator) -> type[KVBlocksMachine]:
    """The state machine over caches that `subject`'s kernels write, in forms that it supports."""

    class KernelMachine(KVBlocksMachine):
        """One machine per example."""

        bookkeeping = False  # the other mode takes those steps, and here each costs launches

        def __init__(self) -> None:
            super().__init__(make_allocator, lambda *sizes: KernelStore(subject, self.form, *sizes[:2]))

        @initialize(
            form=forms(subject),
            num_blocks=st.integers(3, 16),
            num_host_blocks=st.integers(2, 16),
            null_block=st.booleans(),
            prefix_caching=st.sampled_from([True, True, True, False]),
            prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=2),
            again=st.booleans(),
        )
        def start(
            self,
            form: Form,
            num_blocks: int,
            num_host_blocks: int,
            null_block: bool,
            prefix_caching: bool,
            prompts: list[list[int]],
            again: bool,
        ) -> None:
            self.form = form
            self.stretch = max(1, form.block_size // 4)
            self.begin(form.block_size, num_blocks, num_host_blocks, null_block, prefix_caching)
            for tokens in prompts:
                self.create(tokens, (), {}, True)
            self.opening(again)

        def opening(self, again: bool) -> None:
            """What few steps drawn at random reach seldom.

            That is copies on write, a shared prefix, a swap out and in, and where `again` prompts that find the cached
            blocks of sequences that have ended.
            """
            if self.ids():
                for _ in range(2):
                    self.fork(0, 1)
                    self.decode(None, [0, 1])
                self.create_like(0, 1, [1])
                self.swap_out([0, 1], False)
            if self.ids(on_host=True):
                self.swap_in(None)
            if again and self.ids():
                self.contents_read_back()
                for _ in self.ids():
                    self.free(0)
                for pick in (0, 2, 4):  # each of the three that ended last, behind those started again
                    self.create_like(pick, 0, [])

    return KernelMachine


def run_kernel_machine(subject: Subject, how: settings, make_allocator: MakeAllocator = PagedAllocator) -> None:
    """Run it; a failure carries the snippet after which the steps that Hypothesis prints run as they are."""
    try:
        run_state_machine_as_test(kernel_machine(subject, make_allocator), settings=how)
    except Exception as error:
        setattr(error, REPRO, _SNIPPET.format(spec=subject.spec))
        raise


_SNIPPET = """\
from pagebench.kernels.providers import load_provider
from pagebench.properties.kv_blocks_forms import Form
from pagebench.properties.kv_blocks_kernels import kernel_machine
from pagebench.properties.subject import Subject

KernelMachine = kernel_machine(Subject({spec!r}, load_provider({spec!r})))
# and then the steps printed with the failure, from `state = KernelMachine()` on
"""
