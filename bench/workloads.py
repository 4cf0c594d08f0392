"""Named shapes of real models, as plain data, and the problems they make. Nothing here depends on a kernel.

Model geometry is from each model's public `config.json`. A workload makes three problems of one specialisation:
`problem()` at its full size, to be timed; `check_problem()`, with the same geometry but few keys, blocks or rows, to be
checked on any machine; and a `codegen_problem()`, from which a launcher chooses the same kernel and, for attention and
dequantisation, the same grid as at full size.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebench.reference.block_copy import CopyBlocks, SwapBlocks
from pagebench.reference.block_copy_gather import GatherKV
from pagebench.reference.block_copy_write import WriteKV
from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gemv import DequantGemv
from pagebench.reference.dequant_layout import ArraySpec
from pagebench.reference.dtypes import BFLOAT16, FLOAT8_E4M3FN, FLOAT16, FLOAT32, INT8, INT32, Array
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.paged_attention import PagedAttention
from pagebench.reference.problem import Problem


@dataclass(frozen=True, slots=True)
class Model:
    """Attention and projection geometry of a decoder."""

    name: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int


LLAMA_2_13B = Model("llama-2-13b", 40, 40, 40, 128, 5120, 13824)
LLAMA_3_8B = Model("llama-3-8b", 32, 32, 8, 128, 4096, 14336)
QWEN2_5_7B = Model("qwen2.5-7b", 28, 28, 4, 128, 3584, 18944)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named problem of `op`. `size` says what `problem()` holds, in words for the tables."""

    name: str
    op: str
    size: str
    problem: Callable[[], Problem]
    check_problem: Callable[[], Problem]
    codegen_problem: Callable[[], Problem]


def random_floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Finite values of magnitude 2^-3 to 2^-1 from random bits: gigabytes in seconds, no zeros to run fast on."""
    masks = {FLOAT16: (0x87FF, 0x3000), BFLOAT16: (0x80FF, 0x3E00), FLOAT32: (0x80FF_FFFF, 0x3E00_0000)}
    if dtype not in masks:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    each = 8 // dtype.itemsize  # elements to a word
    keep, add = (np.uint64(sum(mask << 8 * dtype.itemsize * i for i in range(each))) for mask in masks[dtype])
    count = int(np.prod(shape, dtype=np.int64))
    words = rng.integers(0, 1 << 64, -(-count // each), np.uint64)
    words &= keep
    words |= add
    return words.view(dtype)[:count].reshape(shape)


def decode(
    model: Model, batch: int, seq_len: int, block_size: int, dtype: np.dtype[Any], seed: int = 0
) -> PagedAttention:
    """One decode step of one layer: `batch` sequences of `seq_len` keys, their blocks scattered over the cache."""
    rng = np.random.default_rng(seed)
    blocks = -(-seq_len // block_size)
    cache = random_floats(rng, (2, batch * blocks, block_size, model.num_kv_heads, model.head_size), dtype)
    return PagedAttention(
        query=random_floats(rng, (batch, model.num_query_heads, model.head_size), dtype),
        key_cache=cache[0],
        value_cache=cache[1],
        block_table=rng.permutation(batch * blocks).astype(INT32).reshape(batch, blocks),
        seq_lens=np.full(batch, seq_len, INT32),
        query_start=np.arange(batch + 1, dtype=INT32),
        scale=model.head_size**-0.5,
    )


def prefill(
    model: Model, batch: int, queries: int, seq_len: int, block_size: int, dtype: np.dtype[Any], seed: int = 0
) -> PagedAttention:
    """A chunk of prefill of one layer: the last `queries` tokens of `batch` sequences of `seq_len` keys."""
    rng = np.random.default_rng(seed + 1)
    return dataclasses.replace(
        decode(model, batch, seq_len, block_size, dtype, seed),
        query=random_floats(rng, (batch * queries, model.num_query_heads, model.head_size), dtype),
        query_start=np.arange(0, (batch + 1) * queries, queries, dtype=INT32),
    )


def merge_states(model: Model, tokens: int, dtype: np.dtype[Any], seed: int = 0) -> MergeStates:
    """Attention of `tokens` tokens of one layer over two sets of keys that weigh about the same."""
    rng = np.random.default_rng(seed)
    shape = (tokens, model.num_query_heads, model.head_size)
    out_a, out_b = (random_floats(rng, shape, dtype) for _ in range(2))
    lse_a, lse_b = (rng.standard_normal(shape[:2]).astype(FLOAT32) for _ in range(2))
    return MergeStates(out_a, lse_a, out_b, lse_b)


def copy_blocks(
    model: Model,
    num_layers: int,
    pairs: int,
    block_size: int,
    dtype: np.dtype[Any],
    how: str = "apart",
    seed: int = 0,
) -> CopyBlocks:
    """Copies of `pairs` blocks in K and V of `num_layers` layers; `how` as in copy_pairs."""
    rng = np.random.default_rng(seed)
    shape = (2 * pairs, block_size, model.num_kv_heads, model.head_size)
    caches = tuple(random_floats(rng, shape, dtype) for _ in range(2 * num_layers))
    return CopyBlocks(caches, copy_pairs(rng, pairs, how))


def copy_pairs(rng: np.random.Generator, pairs: int, how: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [pairs, 2] among 2 * pairs blocks: "apart" as in copy-on-write, "fork" one to eight, "chain" of eight."""
    order = rng.permutation(2 * pairs).astype(np.int64)
    if how == "apart":
        return order.reshape(pairs, 2)
    eight = min(8, pairs)
    groups = order[: pairs // eight * (eight + 1)].reshape(-1, eight + 1)
    src = groups[:, :-1] if how == "chain" else np.repeat(groups[:, :1], eight, axis=1)
    return np.stack([src, groups[:, 1:]], axis=-1).reshape(-1, 2)


def swap_blocks(
    model: Model, num_layers: int, pairs: int, block_size: int, dtype: np.dtype[Any], seed: int = 0
) -> SwapBlocks:
    """Blocks of K and V of `num_layers` layers to the host's pool: runs of eight, as an allocator hands them out."""
    rng = np.random.default_rng(seed)
    shape = (2 * pairs, block_size, model.num_kv_heads, model.head_size)
    pools = [tuple(random_floats(rng, shape, dtype) for _ in range(2 * num_layers)) for _ in range(2)]
    runs = np.stack([rng.permutation(2 * pairs // 8) for _ in range(2)], axis=1)[: -(-pairs // 8)]
    ids = (8 * runs[:, None, :] + np.arange(8)[None, :, None]).reshape(-1, 2)[:pairs]
    return SwapBlocks(pools[0], pools[1], ids.astype(np.int64), "out")


def write_kv(
    model: Model, tokens: int, dtype: np.dtype[Any], storage: np.dtype[Any], scale: str | None = None, seed: int = 0
) -> WriteKV:
    """Keys and values of `tokens` tokens, slices of fused QKV, to scattered slots of one layer in blocks of 16.

    scale: None, "tensor" or "computed".
    """
    rng = np.random.default_rng(seed)
    heads, queries, size = model.num_kv_heads, model.num_query_heads, model.head_size
    qkv = random_floats(rng, (tokens, queries + 2 * heads, size), dtype)
    blocks = -(-tokens // 16) + 8
    caches = np.zeros((2, blocks, 16, heads, size), storage)
    scales = np.ones((2, blocks, 16, heads), FLOAT32) if scale == "computed" else np.full(2, 0.01, FLOAT32)
    given = [None, None] if scale is None else [part if scale == "computed" else part.reshape(()) for part in scales]
    slots = rng.permutation(blocks * 16)[:tokens].astype(np.int64)
    rows = qkv[:, queries : queries + heads], qkv[:, queries + heads :]
    return WriteKV(*rows, caches[0], caches[1], slots, *given, compute_scales=scale == "computed")


def gather_kv(
    model: Model, batch: int, seq_len: int, dtype: np.dtype[Any], storage: np.dtype[Any], seed: int = 0
) -> GatherKV:
    """`batch` sequences of one layer, their blocks of 16 scattered; a quantised cache has a scale per tensor."""
    rng = np.random.default_rng(seed)
    blocks = -(-seq_len // 16)
    shape = (batch * blocks, 16, model.num_kv_heads, model.head_size)
    if storage == dtype:
        caches, scale = [random_floats(rng, shape, dtype) for _ in range(2)], None
    else:
        caches = [rng.integers(1, 0x70, shape, np.uint8).view(storage) for _ in range(2)]
        scale = np.full((), 0.01, FLOAT32)
    table = rng.permutation(batch * blocks).astype(INT32).reshape(batch, blocks)
    return GatherKV(caches[0], caches[1], table, np.full(batch, seq_len, INT32), dtype, scale, scale)


GROUPS = {"nf4": 64, "fp4": 64}  # elements that share a scale, where a format leaves the choice; else 128


def packed_weight(format: str, form: str, n: int, k: int, dtype: np.dtype[Any], seed: int = 0) -> Dequantize:
    """A projection [n, k] of any bits, with finite codes and ordinary scales; groups in natural order."""
    rng, chosen = np.random.default_rng(seed), FORMATS[format]
    group_size = GROUPS.get(format, 128) if chosen.grouped(form) else None
    packed = {}
    for name, spec in chosen.specs(form, (n, k), group_size).items():
        packed[name] = _packed_array(rng, spec)
        if name == "g_idx":
            packed[name] = (np.arange(k) // (group_size or 1)).astype(INT32)
    return Dequantize(format, packed, (n, k), group_size, dtype, default_contract(format))


def _packed_array(rng: np.random.Generator, spec: ArraySpec) -> Array:
    """Random bits; scales of magnitude 2^-3 to 2^-1 among them, and no NaN among the codes."""
    dtype = spec.dtypes[0]
    if spec.scale is not None and spec.scale_offsets is None and dtype.itemsize > 1:
        return np.asarray(random_floats(rng, spec.shape, FLOAT16).astype(dtype))
    nbytes = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    data = rng.integers(0, 1 << 64, -(-nbytes // 8), np.uint64).view(np.uint8)[:nbytes]
    if spec.number is not None or (spec.scale is not None and spec.scale_offsets is None):
        data &= 0xBF  # numbers of 8 bits below 2; powers of two below 2^64
    array = data.view(dtype).reshape(spec.shape)
    for offset in spec.scale_offsets or ():
        blocks = array.reshape(-1, spec.period)
        halves = random_floats(rng, (len(blocks), 1), FLOAT16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return array


def gemv(weight: Dequantize, m: int, seed: int = 0) -> DequantGemv:
    """`m` rows of x with the weight."""
    fields = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return DequantGemv(**fields, x=random_floats(np.random.default_rng(seed), (m, weight.shape[1]), weight.dtype))


def _decode_workload(
    model: Model, batch: int, seq_len: int, block_size: int = 16, dtype: np.dtype[Any] = FLOAT16
) -> Workload:
    short = {FLOAT16: "fp16", BFLOAT16: "bf16"}[dtype]
    return Workload(
        name=f"{model.name}-decode-b{batch}-s{seq_len}-block{block_size}-{short}",
        op="paged_attention",
        size=f"batch {batch}, {seq_len} keys",
        problem=lambda: decode(model, batch, seq_len, block_size, dtype),
        # One more key than a default split holds, and a short last block.
        check_problem=lambda: _ragged(decode(model, 2, 513 + block_size, block_size, dtype)),
        # The table's width tells a launcher how long sequences may be; the cache behind it is not touched.
        codegen_problem=lambda: _same_table(
            decode(model, batch, block_size, block_size, dtype), -(-seq_len // block_size)
        ),
    )


def _contiguous_workload(model: Model, batch: int, seq_len: int) -> Workload:
    """A decode in fp16 whose keys lie in order: each sequence is one block."""
    return Workload(
        name=f"{model.name}-decode-b{batch}-s{seq_len}-contiguous-fp16",
        op="paged_attention",
        size=f"batch {batch}, {seq_len} keys",
        problem=lambda: decode(model, batch, seq_len, seq_len, FLOAT16),
        check_problem=lambda: _ragged(decode(model, 2, 529, 529, FLOAT16)),
        codegen_problem=lambda: _one_block(decode(model, batch, 1, 1, FLOAT16), seq_len),
    )


def _prefill_workload(model: Model, batch: int, queries: int, seq_len: int) -> Workload:
    return Workload(
        name=f"{model.name}-prefill-b{batch}-q{queries}-s{seq_len}-block16-fp16",
        op="paged_attention",
        size=f"batch {batch}, {queries} queries, {seq_len} keys",
        problem=lambda: prefill(model, batch, queries, seq_len, 16, FLOAT16),
        # More queries than a sequence has whose keys are split, and a short last block.
        check_problem=lambda: _ragged(prefill(model, 2, 70, 130, 16, FLOAT16)),
        codegen_problem=lambda: _same_table(prefill(model, batch, queries, 16, 16, FLOAT16), -(-seq_len // 16)),
    )


def _ragged(problem: PagedAttention) -> PagedAttention:
    """The same problem with one key less in every other sequence."""
    problem.seq_lens[::2] -= 1
    return problem


def _same_table(problem: PagedAttention, width: int) -> PagedAttention:
    """The problem with a block table `width` blocks wide, every entry the sequence's one block."""
    wide = np.repeat(problem.block_table[:, :1], width, axis=1)
    lengths = np.full(problem.num_seqs, width * problem.block_size, INT32)
    return dataclasses.replace(problem, block_table=wide, seq_lens=lengths)


def _one_block(problem: PagedAttention, seq_len: int) -> PagedAttention:
    """The problem with sequences of `seq_len` keys that share one block, whose memory is not touched."""
    cache = np.zeros((2, 1, seq_len, *problem.key_cache.shape[2:]), problem.key_cache.dtype)
    return dataclasses.replace(
        problem,
        key_cache=cache[0],
        value_cache=cache[1],
        block_table=np.zeros((problem.num_seqs, 1), INT32),
        seq_lens=np.full(problem.num_seqs, seq_len, INT32),
    )


def _merge_workload(model: Model, tokens: int) -> Workload:
    return Workload(
        name=f"{model.name}-merge-{tokens}-fp16",
        op="merge_states",
        size=f"{tokens} tokens",
        problem=lambda: merge_states(model, tokens, FLOAT16),
        check_problem=lambda: merge_states(model, 5, FLOAT16),
        codegen_problem=lambda: merge_states(model, tokens, FLOAT16),
    )


def _copy_workload(
    model: Model, pairs: int, how: str = "apart", block_size: int = 16, dtype: np.dtype[Any] = FLOAT16
) -> Workload:
    few = 1 if how == "apart" else 2
    block = block_size * model.num_kv_heads * model.head_size * dtype.itemsize
    return Workload(
        name=f"{model.name}-copy-{pairs}x{block_size}-" + ("" if how == "apart" else f"{how}-") + "fp16",
        op="copy_blocks",
        size=f"{pairs} blocks of {block >> 10} KiB in {2 * model.num_layers} caches",
        problem=lambda: copy_blocks(model, model.num_layers, pairs, block_size, dtype, how),
        check_problem=lambda: copy_blocks(model, 2, 3, block_size, dtype, how),
        codegen_problem=lambda: copy_blocks(model, model.num_layers, few, block_size, dtype, how),
    )


def _swap_workload(model: Model, pairs: int) -> Workload:
    block = 16 * model.num_kv_heads * model.head_size * 2
    return Workload(
        name=f"{model.name}-swap-{pairs}x16-fp16",
        op="swap_blocks",
        size=f"{pairs} blocks of {block >> 10} KiB in {2 * model.num_layers} caches to the host",
        problem=lambda: swap_blocks(model, model.num_layers, pairs, 16, FLOAT16),
        check_problem=lambda: swap_blocks(model, 2, 8, 16, FLOAT16),
        codegen_problem=lambda: swap_blocks(model, 2, 8, 16, FLOAT16),
    )


def _write_workload(
    model: Model,
    tokens: int,
    storage: np.dtype[Any] = FLOAT16,
    scale: str | None = None,
    dtype: np.dtype[Any] = FLOAT16,
) -> Workload:
    kind = {FLOAT16: "fp16", BFLOAT16: "bf16", FLOAT8_E4M3FN: "e4m3", INT8: "int8"}[storage]
    return Workload(
        name=f"{model.name}-write-{tokens}-{kind}" + (f"-{scale}" if scale else ""),
        op="write_kv",
        size=f"{tokens} tokens",
        problem=lambda: write_kv(model, tokens, dtype, storage, scale),
        check_problem=lambda: write_kv(model, 5, dtype, storage, scale),
        codegen_problem=lambda: write_kv(model, tokens, dtype, storage, scale),
    )


def _gather_workload(model: Model, batch: int, seq_len: int, storage: np.dtype[Any] = FLOAT16) -> Workload:
    kind = {FLOAT16: "fp16", FLOAT8_E4M3FN: "e4m3", INT8: "int8"}[storage]
    return Workload(
        name=f"{model.name}-gather-b{batch}-s{seq_len}-{kind}",
        op="gather_kv",
        size=f"batch {batch}, {seq_len} keys",
        problem=lambda: gather_kv(model, batch, seq_len, FLOAT16, storage),
        check_problem=lambda: gather_kv(model, 2, 33, FLOAT16, storage),
        codegen_problem=lambda: gather_kv(model, batch, seq_len, FLOAT16, storage),
    )


# What a workload's name calls a format, and its form. `gptq` and `q8_0` have long been in the history under theirs.
PACKED = {
    "gptq": ("gptq_v2", "plain"),
    "q8_0": ("q8_0", "plain"),
    "awq": ("awq", "plain"),
    "fp8-block": ("fp8_e4m3", "block"),
    "int8-channel": ("int8", "channel"),
    "mxfp4": ("mxfp4", "plain"),
    "nvfp4": ("nvfp4", "plain"),
    "nvfp4-ct": ("nvfp4_ct", "plain"),
    "nf4": ("nf4", "plain"),
    "nf4-nested": ("nf4", "nested"),
    "q4_k": ("q4_k", "plain"),
    "q6_k": ("q6_k", "plain"),
}
FUSED = ("gptq", "awq", "fp8-block", "int8-channel", "mxfp4", "nvfp4", "q8_0", "q4_k")


def projections(model: Model) -> dict[str, tuple[int, int]]:
    """(n, k) of the four shapes of a decoder layer's projections: q and o; k and v; gate and up; down."""
    hidden, wide = model.hidden_size, model.intermediate_size
    kv = model.num_kv_heads * model.head_size
    return {"qo": (hidden, hidden), "kv": (kv, hidden), "gate": (wide, hidden), "down": (hidden, wide)}


def _small(name: str) -> tuple[int, int]:
    """(n, k) of the weight that is checked: ragged tiles, and whole blocks of the format."""
    return 264, 512 if PACKED[name][0] in ("q4_k", "q6_k") else 384


def _dequant_workload(model: Model, name: str, projection: str) -> Workload:
    n, k = projections(model)[projection]
    return Workload(
        name=f"{model.name}-{name}-{projection}-fp16",
        op="dequantize",
        size=f"{n} x {k}",
        problem=lambda: packed_weight(*PACKED[name], n, k, FLOAT16),
        check_problem=lambda: packed_weight(*PACKED[name], *_small(name), FLOAT16),
        codegen_problem=lambda: packed_weight(*PACKED[name], n, k, FLOAT16),
    )


def _gemv_workload(model: Model, name: str, projection: str, m: int) -> Workload:
    n, k = projections(model)[projection]
    return Workload(
        name=f"{model.name}-gemv-{name}-{projection}-m{m}-fp16",
        op="dequant_gemv",
        size=f"{m} x {k} with {n} x {k}",
        problem=lambda: gemv(packed_weight(*PACKED[name], n, k, FLOAT16), m),
        check_problem=lambda: gemv(packed_weight(*PACKED[name], *_small(name), FLOAT16), m),
        codegen_problem=lambda: gemv(packed_weight(*PACKED[name], n, k, FLOAT16), m),
    )


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of x, until arithmetic binds

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _decode_workload(LLAMA_3_8B, 8, 4096),
        _decode_workload(LLAMA_3_8B, 64, 4096),
        _decode_workload(LLAMA_3_8B, 1, 32768),
        _decode_workload(LLAMA_3_8B, 8, 32768),
        _decode_workload(LLAMA_3_8B, 8, 32768, dtype=BFLOAT16),
        _decode_workload(LLAMA_2_13B, 8, 4096),
        _decode_workload(LLAMA_2_13B, 64, 4096),
        _decode_workload(LLAMA_2_13B, 8, 32768),
        _decode_workload(QWEN2_5_7B, 8, 4096),
        _prefill_workload(LLAMA_3_8B, 4, 512, 4096),
        _merge_workload(LLAMA_3_8B, 64),
        _merge_workload(LLAMA_3_8B, 8192),
        _copy_workload(LLAMA_3_8B, 64),
        _copy_workload(LLAMA_2_13B, 64),
        _copy_workload(QWEN2_5_7B, 64),
        _copy_workload(LLAMA_3_8B, 64, "fork"),
        _copy_workload(LLAMA_3_8B, 64, "chain"),
        _swap_workload(LLAMA_3_8B, 64),
        _write_workload(LLAMA_3_8B, 64),
        _write_workload(LLAMA_3_8B, 8192),
        _write_workload(LLAMA_3_8B, 8192, FLOAT8_E4M3FN, "tensor"),
        _write_workload(LLAMA_3_8B, 8192, INT8, "computed"),
        _gather_workload(LLAMA_3_8B, 8, 4096),
        _gather_workload(LLAMA_3_8B, 8, 4096, FLOAT8_E4M3FN),
        *(_dequant_workload(LLAMA_3_8B, name, "gate") for name in PACKED),
        *(_dequant_workload(LLAMA_3_8B, "gptq", projection) for projection in ("qo", "kv", "down")),
        *(_dequant_workload(model, name, "gate") for model in (LLAMA_2_13B, QWEN2_5_7B) for name in ("gptq", "q8_0")),
        *(_gemv_workload(LLAMA_3_8B, name, "gate", 1) for name in FUSED),
        *(_gemv_workload(LLAMA_3_8B, "awq", projection, 1) for projection in ("qo", "kv", "down")),
        *(_gemv_workload(LLAMA_3_8B, "mxfp4", "gate", m) for m in BATCHES[1:]),
    )
}

# Decodes whose speed on a GPU is judged, and what they are compared with there, which is tracked nowhere else.
JUDGED_DECODES = tuple((model, *size) for model in (LLAMA_3_8B, LLAMA_2_13B) for size in ((64, 4096), (8, 32768)))
COUNTERPARTS: dict[str, Workload] = {
    workload.name: workload
    for decoded in JUDGED_DECODES
    for workload in (_decode_workload(*decoded, block_size=128), _contiguous_workload(*decoded))
}
