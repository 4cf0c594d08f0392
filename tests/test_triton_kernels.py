"""The Triton kernels by themselves: what the properties do not draw, in little problems."""

import dataclasses
import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from pagebench.kernels.providers import load_provider
from pagebench.properties.paged_attention_recipes import AttentionRecipe
from pagebench.reference import error_bounds
from pagebench.reference import paged_attention as attention
from pagebench.reference.block_copy import CopyBlocks, copy_blocks_
from pagebench.reference.dequant import Dequantize, dequantize
from pagebench.reference.dtypes import BFLOAT16, COMPUTE_DTYPES, FLOAT8_E4M3FN, FLOAT16, MOVED_DTYPES
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.placement import place, raw_bytes

triton = load_provider("triton")

from pagebench.kernels import block_copy_triton, paged_attention_triton, triton_arrays  # noqa: E402  # once activated

Array = np.ndarray[Any, Any]


# --- paged attention


def decode_problem(
    lens: list[int],
    *,
    dtype: Any = FLOAT16,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 32,
    block_size: int = 16,
    spread: float = 1.0,
    no_query: tuple[int, ...] = (),
) -> PagedAttention:
    """One query for each of `lens` keys, K and V halves of one tensor, NaN in every slot that no sequence uses."""
    rng = np.random.default_rng(0)
    counts = [-(-n // block_size) for n in lens]
    num_blocks, max_blocks = sum(counts) + 2, max(counts) + 1
    table = np.full((len(lens), max_blocks), -(2**31), np.int32)
    cache = np.full((num_blocks, 2, block_size, heads[1], head_size), np.nan, dtype)
    ids = iter(rng.permutation(num_blocks))
    for seq, n in enumerate(lens):
        table[seq, : counts[seq]] = [next(ids) for _ in range(counts[seq])]
        for position in range(n):
            block = table[seq, position // block_size]
            cache[block, :, position % block_size] = spread * rng.standard_normal((2, *cache.shape[3:]))
    starts = np.cumsum([0] + [seq not in no_query for seq in range(len(lens))]).astype(np.int32)
    query = (spread * rng.standard_normal((starts[-1], heads[0], head_size))).astype(dtype)
    return PagedAttention(
        query, cache[:, 0], cache[:, 1], table, np.array(lens, np.int32), starts, scale=head_size**-0.5
    )


def run_decode(problem: PagedAttention, **variant: Any) -> tuple[Array, Array]:
    out, lse = triton.paged_attention(problem.on(triton), **variant)
    return triton.to_host(out), triton.to_host(lse)


def check_decode(problem: PagedAttention, **variant: Any) -> None:
    assert triton.rejects(problem) is None
    for name, *values in zip(
        ("out", "lse"),
        run_decode(problem, **variant),
        attention.paged_attention(problem),
        error_bounds.paged_attention(problem),
        strict=True,
    ):
        error_bounds.assert_close(name, *values)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_size", "block_size"), [((1, 1), 33, 3), ((7, 1), 80, 16), ((34, 2), 40, 5)])
def test_decode_over_splits(dtype: Any, heads: tuple[int, int], head_size: int, block_size: int) -> None:
    problem = decode_problem([0, 1, 37], dtype=dtype, heads=heads, head_size=head_size, block_size=block_size)
    check_decode(problem, split=16, tile=16)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_a_group_larger_than_the_tile_of_rows(dtype: Any) -> None:
    check_decode(decode_problem([20], dtype=dtype, heads=(65, 1)))


def test_sequences_without_a_query_or_keys() -> None:
    check_decode(decode_problem([5, 0, 17, 3], no_query=(0, 2)), split=16, tile=16)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_large_logits(dtype: Any) -> None:
    problem = decode_problem([40], dtype=dtype, spread=100.0)  # |logits| up to 1e5
    check_decode(problem, split=16, tile=16)


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    batch = decode_problem([3, 70, 33])
    rows = slice(1, 2)
    part = {"query": batch.query[rows], "block_table": batch.block_table[rows, :5], "seq_lens": batch.seq_lens[rows]}
    alone = dataclasses.replace(batch, **part, query_start=np.array([0, 1], np.int32))
    variant = {"split": 32, "tile": 16}
    for whole, own in zip(run_decode(batch, **variant), run_decode(alone, **variant), strict=True):
        error_bounds.assert_same_bits("sequence 1", own, whole[rows])


def test_long_sequences_get_longer_splits_not_more() -> None:
    check_decode(decode_problem([100, 33]), split=16, max_splits=2, tile=16)


@pytest.mark.parametrize("gap", [0, 1], ids=["wide accesses", "odd stride"])
def test_addresses_beyond_two_to_the_31(gap: int) -> None:
    if not triton.interpreted:
        pytest.skip("on a GPU untouched memory is not free")
    problem = decode_problem([20])
    last = 2**31 // (16 * 32)  # the first block whose offset in elements passes 2^31
    device = problem.on(triton)
    for name in ("key_cache", "value_cache"):
        room = torch.empty((last + 2) * (512 + gap), dtype=torch.float16)  # 4 GiB, of which a few pages are touched
        cache = room.as_strided((last + 2, 16, 1, 32), (512 + gap, 32, 32, 1))
        cache[last : last + 2] = getattr(device, name)[problem.block_table[0, :2].tolist()]
        object.__setattr__(device, name, cache)
    device.block_table[0, :2] = torch.tensor([last, last + 1], dtype=torch.int32)
    out, _ = triton.paged_attention(device)
    expected, bound = attention.paged_attention(problem)[0], error_bounds.paged_attention(problem)[0]
    error_bounds.assert_close("out", triton.to_host(out), expected, bound)


# --- block copy


def raw(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    """An array of arbitrary bits."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def check_copy(caches: tuple[Array, ...], pairs: Any, **variant: Any) -> None:
    """Every byte of every base is as the reference leaves it, gaps between the views' elements included."""
    problem = CopyBlocks(caches, np.asarray(pairs, np.int64).reshape(-1, 2))
    assert triton.rejects(problem) is None
    placement = place(problem, triton)
    triton.copy_blocks(placement.problem, **variant)
    copy_blocks_(problem)
    for base in placement.bases:
        np.testing.assert_array_equal(placement.host_bytes(base), raw_bytes(base.host), base.name)


CHAIN_AND_TREE = [(0, 1), (1, 2), (1, 3), (3, 4), (0, 5), (6, 6), (6, 7)]
TWO_CYCLES_AND_A_TAIL = [(2, 0), (0, 1), (1, 2), (2, 3), (3, 6), (5, 4), (4, 5)]


@pytest.mark.parametrize("pairs", [CHAIN_AND_TREE, TWO_CYCLES_AND_A_TAIL, [(0, 1)], [(3, 3)], []], ids=str)
@pytest.mark.parametrize("scan", [2, 64])
def test_reads_come_before_writes(pairs: list[tuple[int, int]], scan: int) -> None:
    check_copy((raw((8, 2, 24), FLOAT16, 0),), pairs, scan=scan, tile=64)


def test_random_pairs() -> None:
    rng = np.random.default_rng(0)
    for seed in range(6):
        dst = rng.permutation(9)[: rng.integers(2, 10)]
        src = rng.choice(dst, dst.size) if seed % 2 else rng.permutation(dst)
        check_copy((raw((9, 5), np.int32, seed),), np.stack([src, dst], 1), scan=4)


@pytest.mark.parametrize("nbytes", [1, 3, 8, 17, 4096])
def test_block_sizes(nbytes: int) -> None:
    check_copy((raw((3, nbytes), np.uint8, nbytes),), [(0, 2), (2, 1)])


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint16, BFLOAT16, FLOAT8_E4M3FN, np.float64, np.complex128, np.uint64], ids=str
)
def test_any_dtype(dtype: Any) -> None:
    values = raw((3, 6), np.uint8, 0) % 2 == 1 if dtype is np.bool_ else raw((3, 6), dtype, 0)
    check_copy((values,), [(0, 1)])


def test_views_with_gaps() -> None:
    halves = raw((4, 2, 3, 2, 8), FLOAT16, 0)
    planes = raw((2, 4, 5, 7), np.float32, 1)
    holes = raw((4, 3, 4, 5, 6), np.int16, 2)
    caches = (halves[:, 0], halves[:, 1].swapaxes(1, 2), planes[1, :, 1:, ::2], holes[:, ::2, 1::2, :4, ::3])
    check_copy(caches, [(0, 1), (1, 0), (2, 3)], tile=64)


def test_alike_caches_share_one_launch_and_their_table() -> None:
    caches = tuple(triton.to_device(raw((4, 16, 8), FLOAT16, seed)) for seed in range(5))
    table, classes = block_copy_triton._table(caches, block_copy_triton.TILE)
    assert (len(classes.shapes), classes.lines) == (1, 5)
    assert block_copy_triton._table(caches, block_copy_triton.TILE)[0].data_ptr() == table.data_ptr()


@pytest.mark.parametrize("pairs", [CHAIN_AND_TREE, TWO_CYCLES_AND_A_TAIL], ids=["tree", "cycles"])
def test_no_program_touches_what_another_writes(pairs: list[tuple[int, int]]) -> None:
    if not triton.interpreted:
        pytest.skip("only the interpreter shows every access")
    from pagebench.kernels.triton_memory import observers

    problem = CopyBlocks((raw((8, 40), FLOAT16, 0),), np.array(pairs, np.int64)).on(triton)
    low = problem.caches[0].data_ptr()
    touched: dict[str, set[tuple[int, Any]]] = {"load": set(), "store": set(), "atomic": set()}  # the last in the plan

    def observe(kind: str, addresses: Array, size: int, program: Any) -> None:
        inside = (addresses >= low) & (addresses < low + 8 * 80)
        touched[kind] |= {(int(address), program) for address in addresses[inside]}

    observers.append(observe)
    try:
        triton.copy_blocks(problem, tile=16)
    finally:
        observers.remove(observe)
    writer = dict(touched["store"])
    assert len(writer) == len(touched["store"])  # one program per address
    assert len(writer) == sum(src != dst for src, dst in pairs) * 10  # 80 bytes, 8 at a time
    assert all(writer.get(address, program) == program for address, program in touched["load"])


# --- dequantisation

SCALES = np.array([0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0xBC01, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x2E66], np.uint16)


def check_dequantize(problem: Dequantize, **variant: Any) -> None:
    assert triton.rejects(problem) is None
    weight = triton.to_host(triton.dequantize(problem.on(triton), **variant))
    assert (weight.shape, weight.dtype) == (problem.shape, problem.dtype)
    error_bounds.assert_same_bits("weight", weight, dequantize(problem))


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_q8_0_of_every_code_and_class_of_scale(dtype: Any) -> None:
    blocks = np.zeros((len(SCALES), 8, 34), np.uint8)
    blocks[:, :, :2] = SCALES.view(np.uint8).reshape(-1, 1, 2)
    blocks[:, :, 2:] = np.arange(256, dtype=np.uint8).reshape(8, 32)
    packed = {"blocks": blocks.reshape(len(SCALES), -1)}
    check_dequantize(Dequantize("q8_0", packed, (len(SCALES), 256), None, dtype, "exact"))


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", [FLOAT16, BFLOAT16], ids=str)
def test_gptq_of_every_code_zero_and_class_of_scale(dtype: Any, scale_dtype: Any) -> None:
    """Column n has zero point n % 16 and scale n // 16; rows of k hold all nibbles, in both of two groups."""
    n, k = 16 * len(SCALES), 32
    nibbles = (np.arange(8) * 4).astype(np.uint32)
    words = np.bitwise_or.reduce(np.arange(16, dtype=np.uint32).reshape(2, 8) << nibbles, axis=1)  # codes 0-7 and 8-15
    scales = np.repeat(SCALES, 16).view(scale_dtype)
    packed = {
        "qweight": np.tile(words, 2).view(np.int32)[:, None].repeat(n, axis=1),
        "qzeros": np.tile(words, (2, n // 16)).view(np.int32),
        "scales": np.stack([scales, scales[::-1]]),
        "g_idx": np.array([0, 1, 1, 0] * 8, np.int32),
    }
    check_dequantize(Dequantize("gptq_v2", packed, (n, k), 16, dtype, "exact"))


def spaced(array: Array) -> Array:
    """The same values, every second element along each axis of a larger array."""
    room = np.zeros([2 * size + 1 for size in array.shape], array.dtype)
    view = room[tuple(slice(1, None, 2) for _ in array.shape)]
    view[...] = array
    return view


@pytest.mark.parametrize(("n", "k"), [(8, 8), (40, 24), (72, 136)])
def test_gptq_tails_and_strides(n: int, k: int) -> None:
    groups = -(-k // 7)
    packed = {
        "qweight": raw((k // 8, n), np.int32, 0),
        "qzeros": raw((groups, n // 8), np.int32, 1),
        "scales": raw((groups, n), FLOAT16, 2),
        "g_idx": np.random.default_rng(3).integers(0, groups, k).astype(np.int32),
    }
    for arrays in (packed, {name: spaced(array) for name, array in packed.items()}):
        check_dequantize(Dequantize("gptq_v2", arrays, (n, k), 7, FLOAT16, "exact"), tile=256, columns=16)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (17, 544)])
def test_q8_0_tails_and_strides(n: int, k: int) -> None:
    packed = raw((n, k // 32 * 34), np.uint8, 0)
    for blocks in (packed, spaced(packed), raw((n, packed.shape[1] + 3), np.uint8, 1)[:, 3:]):
        check_dequantize(Dequantize("q8_0", {"blocks": blocks}, (n, k), None, BFLOAT16, "exact"), tile=256, columns=64)


# --- the provider


def test_every_dtype_of_an_array_survives_the_round_trip() -> None:
    for dtype in (*COMPUTE_DTYPES, FLOAT8_E4M3FN, np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint64)):
        array = raw((3, 5), dtype, 0)[:, ::2]
        back = triton.to_host(triton.to_device(array))
        assert back.dtype == dtype
        assert back.tobytes() == array.tobytes()


def test_the_width_of_accesses_follows_the_strides() -> None:
    base = triton.to_device(np.zeros(4096, np.uint8))
    assert triton_arrays.vector_elements(triton.as_strided(base, FLOAT16, (4, 40), (40, 1), 8)) == 8
    for strides, offset in (((44, 1), 0), ((40, 1), 4), ((80, 2), 0)):
        assert triton_arrays.vector_elements(triton.as_strided(base, FLOAT16, (4, 40), strides, offset)) == 1


def test_every_variant_is_one_that_the_launcher_takes() -> None:
    problem = decode_problem([4])
    accepted = inspect.signature(paged_attention_triton.paged_attention).parameters
    for variant in triton.variants(problem):
        assert set(variant) <= set(accepted)
    assert {} in triton.variants(problem)


def test_torch_knows_every_dtype_of_a_block() -> None:
    assert all(map(triton_arrays.knows, MOVED_DTYPES))
    with pytest.raises(ValueError, match="torch has"):
        triton.to_device(np.zeros((2, 2), np.dtype(np.float32).newbyteorder()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_size", [64, 300])
@pytest.mark.parametrize("group", [1, 2, 3, 17, 65])
def test_tiles_have_rows_that_a_tensor_core_takes(dtype: str, head_size: int, group: int) -> None:
    """A power of two, and in 16 bits at least the 16 rows of an instruction, which the interpreter does not ask for."""
    problem: Any = AttentionRecipe(dtype=dtype, head_size=head_size, group=group).build().on(load_provider("triton"))
    tiles = paged_attention_triton._Tiles
    for each in (tiles.short(problem, None), tiles.long(problem, None, None)):
        assert each.rows & (each.rows - 1) == 0
        assert dtype == "float32" or each.rows >= 16
