"""The CUDA C++ kernels against the reference, and facts of their launchers: through CuPy on a GPU, else on the host."""

import dataclasses
import weakref

import ml_dtypes
import numpy as np
import pytest

from pagebench.kernels import block_copy_cupy, paged_attention_cupy
from pagebench.kernels.cupy_launch import Device, aligned16
from pagebench.kernels.cupy_provider import CupyProvider, provider
from pagebench.reference import error_bounds
from pagebench.reference.block_copy import CopyBlocks, copy_blocks_
from pagebench.reference.paged_attention import PagedAttention, paged_attention
from pagebench.reference.placement import place

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.skipif(provider.unavailable() is not None, reason=str(provider.unavailable()))


class PoisonedProvider(CupyProvider):
    """Every output and scratch buffer begins as NaN, or as bytes that point nowhere."""

    def empty(self, shape, dtype):
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.to_device(np.full(nbytes, 0xFF, np.uint8).view(dtype).reshape(shape))


POISONED = PoisonedProvider()


# --- paged attention


def attention_problem(dtype, *, head_size, group, lens, block_size=16, layout="halves", queries=None, seed=0):
    """Two KV heads, shuffled blocks, NaN in every slot that is not used and any number in every unused table entry."""
    rng = np.random.default_rng(seed)
    lens, dtype = np.array(lens, np.int32), np.dtype(dtype)
    blocks = -(-lens // block_size)
    num_blocks = int(blocks.sum()) + 2
    keys, values = empty_caches(layout, num_blocks, block_size, head_size, dtype)
    table = rng.integers(-(2**31), 2**31, (lens.size, int(blocks.max(initial=0)) + 1)).astype(np.int32)
    free = iter(rng.permutation(num_blocks))
    for seq, length in enumerate(lens):
        table[seq, : blocks[seq]] = [next(free) for _ in range(blocks[seq])]
        for key in range(length):
            slot = table[seq, key // block_size], key % block_size
            keys[slot], values[slot] = rng.standard_normal((2, 2, head_size)).astype(dtype)
    rows = np.ones(lens.size, np.int32) if queries is None else np.array(queries, np.int32)
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    query = rng.standard_normal((int(start[-1]), 2 * group, head_size)).astype(dtype)
    return PagedAttention(query, keys, values, table, lens, start, head_size**-0.5)


def empty_caches(layout, num_blocks, block_size, head_size, dtype):
    def nan(*shape):
        return np.full(shape, np.nan, np.float32).astype(dtype)

    if layout == "halves":  # of one tensor
        both = nan(num_blocks, 2, block_size, 2, head_size)
        return both[:, 0], both[:, 1]
    if layout == "heads first":  # and the value cache with slots innermost, as nobody can load it in wide words
        keys, values = nan(num_blocks, 2, block_size, head_size), nan(num_blocks, 2, head_size, block_size)
        return keys.transpose(0, 2, 1, 3), values.transpose(0, 3, 1, 2)
    return nan(num_blocks, block_size, 2, head_size + 1)[..., :-1], nan(num_blocks, block_size, 2, head_size)


def check_attention(problem, **variant):
    assert provider.rejects(problem) is None
    placed = place(problem, POISONED)
    out, lse = POISONED.paged_attention(placed.problem, **variant)
    placed.check_fences()
    out_bound, lse_bound = error_bounds.paged_attention(problem)
    expected_out, expected_lse = paged_attention(problem)
    error_bounds.assert_close("out", POISONED.to_host(out), expected_out, out_bound)
    error_bounds.assert_close("lse", POISONED.to_host(lse), expected_lse, lse_bound)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(attention_problem(np.float16, head_size=80, group=4, lens=[70, 0, 1, 33]), id="fp16"),
        pytest.param(
            attention_problem(np.float16, head_size=128, group=17, lens=[65], layout="heads first"), id="group 17"
        ),
        pytest.param(attention_problem(np.float16, head_size=65, group=65, lens=[20], block_size=3), id="odd"),
        pytest.param(attention_problem(BFLOAT16, head_size=40, group=1, lens=[64, 17], block_size=100), id="bf16"),
        pytest.param(
            attention_problem(BFLOAT16, head_size=64, group=8, lens=[48, 5], layout="gap", queries=[0, 1]), id="gap"
        ),
        pytest.param(attention_problem(np.float32, head_size=96, group=5, lens=[50, 16], block_size=1), id="fp32"),
        pytest.param(attention_problem(np.float32, head_size=128, group=33, lens=[19], layout="gap"), id="fp32 gap"),
        pytest.param(attention_problem(np.float32, head_size=96, group=2, lens=[]), id="nothing"),
    ],
)
def test_attention_is_within_the_bound_under_every_variant(problem):
    for variant in provider.variants(problem):
        check_attention(problem, **variant)


def test_large_scores_stay_within_the_bound():
    problem = attention_problem(np.float16, head_size=128, group=2, lens=[70])
    problem.query[...] = (problem.query * 300).astype(np.float16)
    check_attention(dataclasses.replace(problem, scale=10.0), split=16, tile=16)


def test_small_float16_weights_keep_their_precision():
    """The first key's weight is almost 1 and its value 0: what the others add must not be rounded as a part of 1."""
    problem = attention_problem(np.float16, head_size=128, group=2, lens=[70])
    problem.query[...] = 1
    for key in range(70):
        slot = problem.block_table[0, key // 16], key % 16
        problem.key_cache[slot] = 1 if key == 0 else 0
        problem.value_cache[slot] = 0 if key == 0 else 30000
    check_attention(dataclasses.replace(problem, scale=16 / 128))


def test_attention_does_not_depend_on_the_batch_or_the_width_of_the_table():
    problem = attention_problem(np.float16, head_size=128, group=4, lens=[70, 33, 0, 300], queries=[1, 0, 1, 1])
    wide = np.pad(problem.block_table, ((0, 0), (0, 200)), constant_values=-1)
    last = {"query": problem.query[2:], "seq_lens": problem.seq_lens[3:], "query_start": np.array([0, 1], np.int32)}
    for variant in ({}, {"split": 32, "max_splits": 4}):
        out, lse = bits_of_attention(problem, variant)
        same_out, same_lse = bits_of_attention(dataclasses.replace(problem, block_table=wide), variant)
        assert np.array_equal(out, same_out)
        assert np.array_equal(lse, same_lse)
        alone_out, alone_lse = bits_of_attention(dataclasses.replace(problem, block_table=wide[3:], **last), variant)
        assert np.array_equal(out[2:], alone_out)
        assert np.array_equal(lse[2:], alone_lse)


def bits_of_attention(problem, variant):
    out, lse = provider.paged_attention(problem.on(provider), **variant)
    return provider.to_host(out).view(np.uint16), provider.to_host(lse).view(np.uint32)


def test_programs_take_several_items_when_there_are_more_than_programs(monkeypatch):
    monkeypatch.setattr(paged_attention_cupy, "MAX_PROGRAMS", 3)
    check_attention(attention_problem(np.float16, head_size=128, group=4, lens=[70, 0, 1, 33]), split=16, tile=16)


def test_work_is_found_among_more_sequences_than_a_program_has_threads():
    lens, queries = [(7 * i) % 40 for i in range(300)], [i % 3 != 0 for i in range(300)]
    check_attention(
        attention_problem(np.float16, head_size=128, group=1, lens=lens, queries=queries), split=16, tile=16
    )


@pytest.mark.skipif(provider.device.on_gpu, reason="untouched pages cost nothing in host memory only")
def test_offsets_beyond_32_bits():
    """Caches of 6 and 5 GB, of which only a few pages are ever touched; placing a problem would copy every page."""
    small = attention_problem(np.float16, head_size=128, group=2, lens=[20])
    last = 180_000
    keys, values = (np.empty((last + 2, 16, 2, 512), np.float16)[..., :128] for _ in range(2))
    for far, near in zip(last + np.arange(2), small.block_table[0], strict=False):
        keys[far], values[far] = small.key_cache[near], small.value_cache[near]
    table = np.array([[last, last + 1]], np.int32)
    large = dataclasses.replace(small, key_cache=keys, value_cache=values, block_table=table)
    assert np.array_equal(provider.paged_attention(large)[0].view(np.uint16), bits_of_attention(small, {})[0])
    cache = np.empty((5000, 10**6), np.uint8)
    cache[4998] = np.arange(10**6) % 251
    provider.copy_blocks(CopyBlocks((cache,), np.array([[4998, 4999]])))
    assert np.array_equal(cache[4999], cache[4998])


# --- block copy


def caches_of_all_kinds(num_blocks, seed=0):
    rng = np.random.default_rng(seed)

    def cache(*shape, dtype=np.uint8):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    both = cache(num_blocks, 2, 3, 2, 8, dtype=BFLOAT16)
    return (
        both[:, 0],
        both[:, 1],
        cache(num_blocks, 17),
        cache(num_blocks, 4112)[:, :4097],
        cache(num_blocks, 2, 16, 4, 8, dtype=np.float16).transpose(0, 2, 1, 3, 4),
        cache(num_blocks, 6, 4, 6, 5, 8, dtype=np.int16)[:, ::2, 1:3, ::3, ::2, ::4],
        cache(num_blocks, 3, 64, dtype=np.float32)[:, 1:, :33],
        cache(num_blocks, dtype=np.float64),
    )


PAIRS = {
    "nothing": [],
    "apart": [(0, 4), (1, 5), (0, 6)],
    "self": [(2, 2), (2, 3)],
    "chain": [(0, 1), (1, 2), (2, 3), (3, 4)],
    "chain against the order": [(3, 4), (2, 3), (1, 2), (0, 1)],
    "tree": [(0, 1), (1, 2), (1, 3), (3, 4), (3, 5), (2, 6), (1, 7)],
    "cycles": [(0, 1), (1, 2), (2, 0), (3, 4), (4, 3)],
    "cycle with trees": [(5, 0), (0, 5), (0, 1), (1, 2), (5, 3), (3, 4), (6, 6), (6, 7)],
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_copies_are_simultaneous_and_touch_nothing_else(pairs):
    check_copy(8, np.array(pairs, np.int64).reshape(-1, 2))


@pytest.mark.parametrize("seed", range(6))
def test_copies_of_random_maps(seed):
    rng = np.random.default_rng(seed)
    dst = rng.permutation(40)[: int(rng.integers(1, 41))]
    src = rng.permutation(dst) if seed % 2 else rng.integers(0, 40, dst.size)
    check_copy(40, np.stack([src, dst], axis=1).astype(np.int64))


def check_copy(num_blocks, pairs):
    problem = CopyBlocks(caches_of_all_kinds(num_blocks), pairs)
    want = place(problem, HOST)
    copy_blocks_(want.problem)
    for variant in provider.variants(problem):
        placed = place(problem, POISONED)
        POISONED.copy_blocks(placed.problem, **variant)
        for got, base in zip(placed.bases, want.bases, strict=True):
            assert np.array_equal(placed.host_bytes(got), want.host_bytes(base)), got.name


class _Host:
    """Places a problem on the host, for the reference to work on the same bytes."""

    def to_device(self, array):
        return array

    def to_host(self, array):
        return array

    def as_strided(self, base, dtype, shape, strides, offset):
        return Device.as_strided(None, base, dtype, shape, strides, offset)  # type: ignore[arg-type]  # NumPy needs no device


HOST = _Host()


def test_layouts_cover_each_payload_byte_once():
    for cache in caches_of_all_kinds(2):
        block = np.zeros(cache.strides[0] + 2**14, np.uint8)
        for layout in block_copy_cupy.layouts_of(0, cache):
            for outer, inner in np.ndindex(layout.outer, layout.inner):
                at = layout.offset + inner * layout.inner_stride + outer * layout.outer_stride
                block[at : at + layout.run] += 1
        shape, strides = (*cache.shape[1:], cache.itemsize), (*cache.strides[1:], 1)
        payload = np.lib.stride_tricks.as_strided(block, shape, strides)
        assert (payload == 1).all()
        assert block.sum() == payload.size


def test_one_cut_keeps_wide_words_for_a_block_with_a_tail():
    main, tail = block_copy_cupy.layouts_of(0, caches_of_all_kinds(2)[3])
    assert (main.run, main.word(0)) == (4096, 16)
    assert (tail.offset, tail.run, tail.word(0)) == (4096, 1, 1)


# --- arrays


def test_alignment_is_of_every_row_not_only_of_the_first():
    room = np.zeros(8 * 64 + 8, np.float16)
    base = room[-room.ctypes.data // 2 % 8 :]
    assert aligned16(base[:512].reshape(8, 64))
    assert not aligned16(base[1:505].reshape(8, 63))
    assert not aligned16(base[:512].reshape(8, 64)[:, :12])
    assert not aligned16(base[:512].reshape(8, 64)[:, ::2])


def test_tables_are_remembered_while_their_arrays_live():
    device = Device()
    device.on_gpu = True
    arrays, made = (np.zeros(1), np.zeros(1)), iter(range(9))
    assert [device.remember(arrays, lambda: next(made)) for _ in range(2)] == [0, 0]
    assert device.remember(arrays[:1], lambda: next(made)) == 1
    (key, found) = next(iter(device._remembered.items()))
    device._remembered[key] = ([weakref.ref(np.zeros(1)), *found[0][1:]], found[1])  # the id of an array that died
    assert device.remember(arrays, lambda: next(made)) == 2


def test_cupy_arrays_hold_every_dtype_without_a_gpu():
    """`Device` leaves the dtype of bfloat16 and float8 arrays to CuPy and only ever moves their bits."""
    cupy = pytest.importorskip("cupy", reason="CuPy is an optional dependency")
    room = np.zeros(64, np.uint8)
    memory = cupy.cuda.UnownedMemory(room.ctypes.data, room.nbytes, room, 0)
    base = cupy.ndarray((64,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
    for dtype in (BFLOAT16, np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)):
        view = Device.as_strided(None, base, dtype, (2, 3), (4, 1), 2)  # type: ignore[arg-type]  # only moves a pointer
        assert (view.dtype, view.shape, view.strides) == (dtype, (2, 3), (4 * dtype.itemsize, dtype.itemsize))
        assert view.data.ptr == room.ctypes.data + 2 * dtype.itemsize
        assert view.T.strides == view.strides[::-1]
