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

from pagebench.reference.block_copy import CopyBlocks
from pagebench.reference.dequant import Dequantize
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, INT32, Array
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
    masks = {FLOAT16: (0x87FF, 0x3000), BFLOAT16: (0x80FF, 0x3E00)}
    if dtype not in masks:
        raise ValueError(f"dtype must be float16 or bfloat16, got {dtype}")
    keep, add = (np.uint64(mask * 0x0001_0001_0001_0001) for mask in masks[dtype])  # four elements to a word
    count = int(np.prod(shape, dtype=np.int64))
    words = rng.integers(0, 1 << 64, -(-count // 4), np.uint64)
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


def copy_blocks(
    model: Model, num_layers: int, pairs: int, block_size: int, dtype: np.dtype[Any], seed: int = 0
) -> CopyBlocks:
    """Copy-on-write of `pairs` blocks in K and V of `num_layers` layers; no block is both read and written."""
    rng = np.random.default_rng(seed)
    shape = (2 * pairs, block_size, model.num_kv_heads, model.head_size)
    caches = tuple(random_floats(rng, shape, dtype) for _ in range(2 * num_layers))
    return CopyBlocks(caches, rng.permutation(2 * pairs).astype(np.int64).reshape(pairs, 2))


def gptq(n: int, k: int, dtype: np.dtype[Any], group_size: int = 128, seed: int = 0) -> Dequantize:
    """A GPTQ int4 projection [n, k] with `group_size` input features a scale, in natural order."""
    rng = np.random.default_rng(seed)
    groups = -(-k // group_size)
    packed = {
        "qweight": rng.integers(-(1 << 31), 1 << 31, (k // 8, n), np.int64).astype(INT32),
        "qzeros": rng.integers(-(1 << 31), 1 << 31, (groups, n // 8), np.int64).astype(INT32),
        "scales": random_floats(rng, (groups, n), FLOAT16),
        "g_idx": (np.arange(k) // group_size).astype(INT32),
    }
    return Dequantize("gptq_v2", packed, (n, k), group_size, dtype, "exact")


def q8_0(n: int, k: int, dtype: np.dtype[Any], seed: int = 0) -> Dequantize:
    """A GGUF Q8_0 projection [n, k] with finite scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, k // 32, 34), np.uint8)
    blocks[..., :2] = random_floats(rng, (n, k // 32), FLOAT16).view(np.uint8).reshape(n, k // 32, 2)
    return Dequantize("q8_0", {"blocks": blocks.reshape(n, -1)}, (n, k), None, dtype, "exact")


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


def _ragged(problem: PagedAttention) -> PagedAttention:
    """The same problem with one key less in every other sequence."""
    problem.seq_lens[::2] -= 1
    return problem


def _same_table(problem: PagedAttention, width: int) -> PagedAttention:
    """The problem with a block table `width` blocks wide, every entry the sequence's one block."""
    wide = np.repeat(problem.block_table[:, :1], width, axis=1)
    lengths = np.full(problem.num_seqs, width * problem.block_size, INT32)
    return dataclasses.replace(problem, block_table=wide, seq_lens=lengths)


def _copy_workload(model: Model, pairs: int, block_size: int = 16, dtype: np.dtype[Any] = FLOAT16) -> Workload:
    block = block_size * model.num_kv_heads * model.head_size * dtype.itemsize
    return Workload(
        name=f"{model.name}-copy-{pairs}x{block_size}-fp16",
        op="copy_blocks",
        size=f"{pairs} blocks of {block >> 10} KiB in {2 * model.num_layers} caches",
        problem=lambda: copy_blocks(model, model.num_layers, pairs, block_size, dtype),
        check_problem=lambda: copy_blocks(model, 2, 3, block_size, dtype),
        codegen_problem=lambda: copy_blocks(model, model.num_layers, 1, block_size, dtype),
    )


def _dequant_workload(make: Callable[..., Dequantize], model: Model, projection: str, n: int, k: int) -> Workload:
    return Workload(
        name=f"{model.name}-{make.__name__}-{projection}-fp16",
        op="dequantize",
        size=f"{n} x {k}",
        problem=lambda: make(n, k, FLOAT16),
        check_problem=lambda: make(264, 384, FLOAT16),
        codegen_problem=lambda: make(n, k, FLOAT16),
    )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _decode_workload(LLAMA_3_8B, 8, 4096),
        _decode_workload(LLAMA_3_8B, 64, 4096),
        _decode_workload(LLAMA_3_8B, 1, 32768),
        _decode_workload(LLAMA_3_8B, 8, 32768, dtype=BFLOAT16),
        _decode_workload(LLAMA_2_13B, 8, 4096),
        _decode_workload(QWEN2_5_7B, 8, 4096),
        _copy_workload(LLAMA_3_8B, 64),
        _copy_workload(LLAMA_2_13B, 64),
        _copy_workload(QWEN2_5_7B, 64),
        _dequant_workload(gptq, LLAMA_3_8B, "gate", LLAMA_3_8B.intermediate_size, LLAMA_3_8B.hidden_size),
        _dequant_workload(gptq, LLAMA_2_13B, "gate", LLAMA_2_13B.intermediate_size, LLAMA_2_13B.hidden_size),
        _dequant_workload(gptq, QWEN2_5_7B, "gate", QWEN2_5_7B.intermediate_size, QWEN2_5_7B.hidden_size),
        _dequant_workload(q8_0, LLAMA_3_8B, "gate", LLAMA_3_8B.intermediate_size, LLAMA_3_8B.hidden_size),
        _dequant_workload(q8_0, LLAMA_2_13B, "gate", LLAMA_2_13B.intermediate_size, LLAMA_2_13B.hidden_size),
        _dequant_workload(q8_0, QWEN2_5_7B, "gate", QWEN2_5_7B.intermediate_size, QWEN2_5_7B.hidden_size),
    )
}
