"""Launcher of block_copy_gather.cu: one launch, chosen by whether rows are moved as they are or converted.

Code generation, NVRTC 13.2, sm_80 / sm_90 / sm_100, no spills: gather_kv<uint4> 40 registers, 4 LDG.128 and 4 STG.128;
dequantise_kv<half, unsigned char> 32 registers, one LDG.128 and two STG.128 for a chunk, its narrow accesses are the
ways for unaligned arrays.
"""

from typing import Any

import numpy as np

from pagebench.kernels.block_copy_write_cupy import (
    CHUNK,
    THREADS,
    WARP,
    WORDS,
    WORDS_PER_THREAD,
    chunk_word,
    chunked_heads,
    format_of,
    joined_heads,
    scale_arguments,
    word_of,
)
from pagebench.kernels.cupy_launch import C_TYPES, ceil_div, strides_of

SOURCE = "block_copy_gather.cu"
RAW_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}


def gather_kv(provider: Any, problem: Any, *, threads: int = THREADS) -> tuple[Any, Any]:
    """(key, value) [num_tokens, num_kv_heads, head_size]. `provider` supplies `device` and `empty`.

    threads: of a program, a multiple of 32.
    """
    shape = (problem.num_tokens, problem.num_kv_heads, problem.head_size)
    out = tuple(provider.empty(shape, problem.dtype) for _ in range(2))
    if problem.num_tokens:
        launch = _copy if problem.key_cache.dtype == problem.dtype else _convert
        launch(provider, problem, out, threads)
    return out


def _copy(provider: Any, problem: Any, out: tuple[Any, ...], threads: int) -> None:
    arrays = (problem.key_cache, problem.value_cache, *out)
    heads, head_size, strides = joined_heads(arrays)
    word = word_of(arrays, strides, head_size)
    words = head_size * problem.key_cache.itemsize // word
    if words != head_size:
        strides = [(*outer, word) for *outer, _ in strides]
    tokens_each = max(1, threads * WORDS_PER_THREAD // (2 * heads * words))
    tiles = ceil_div(problem.block_table.shape[1] * problem.block_size, tokens_each)
    slices = ceil_div(2 * heads * words * tokens_each, threads * WORDS_PER_THREAD)
    kernel = provider.device.kernel(SOURCE, f"gather_kv<{WORDS[word]}>")
    sizes = (heads, words, problem.block_size, tokens_each, tiles)
    args = (*out, *_inputs(problem, strides), *(np.int32(size) for size in sizes))
    kernel((problem.num_seqs * tiles, slices), (threads,), args)


def _convert(provider: Any, problem: Any, out: tuple[Any, ...], threads: int) -> None:
    caches = (problem.key_cache, problem.value_cache)
    heads, head_size, strides = chunked_heads((*caches, *out), problem)
    row_chunks = 2 * heads * ceil_div(head_size, CHUNK)
    tokens_each = max(1, threads // row_chunks)
    tiles = ceil_div(problem.block_table.shape[1] * problem.block_size, tokens_each)
    itemsize = problem.key_cache.itemsize
    types = f"{C_TYPES[np.dtype(problem.dtype).name]}, {RAW_TYPES[itemsize]}"
    kernel = provider.device.kernel(SOURCE, f"dequantise_kv<{types}>")
    words = (chunk_word(caches, strides[:2], head_size), chunk_word(out, strides[2:], head_size))
    sizes = (heads, head_size, problem.block_size, format_of(problem.key_cache), tokens_each, tiles, *words)
    args = (
        *out,
        *_inputs(problem, [[s // itemsize for s in some] for some in strides[:2]]),
        *scale_arguments(provider, problem.key_scale),
        *scale_arguments(provider, problem.value_scale),
        *(np.int32(size) for size in sizes),
    )
    kernel((problem.num_seqs * tiles, ceil_div(row_chunks * tokens_each, threads)), (threads,), args)


def _inputs(problem: Any, strides: Any) -> list[Any]:
    caches = (problem.key_cache, *map(np.int64, strides[0]), problem.value_cache, *map(np.int64, strides[1]))
    return [arg for part in (caches, _table(problem.block_table), _table(problem.seq_lens)) for arg in part]


def _table(array: Any) -> tuple[Any, ...]:
    return (array, *strides_of(array))


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and programs small enough that little rows take several."""
    return [{}, {"threads": WARP}]
