"""Launcher of block_copy_write.cu: one launch, chosen by whether the cache stores the rows' type or a quantised one.

Where heads lie side by side in all four arrays, a token's heads are moved as one row, so that an odd head size does not
narrow the words; to and from a quantised cache where no head has a scale of its own.

Code generation, NVRTC 13.2, sm_80 / sm_90 / sm_100, no spills: write_kv<uint4> 42 / 44 / 44 registers, 4 LDG.128 and 4
STG.128 beside 4 loads of slots; quantise_kv<half> 56 / 56 / 48 registers, 2 LDG.128 and one STG.128 for a chunk, its
narrow accesses are the ways for unaligned arrays.
"""

import math
from typing import Any

import numpy as np

from pagebench.kernels.cupy_launch import C_TYPES, address, ceil_div

SOURCE = "block_copy_write.cu"
WORDS = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
WORDS_PER_THREAD = 4  # as in block_copy_write.cu
CHUNK = 16  # as in block_copy_formats.cuh
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8", "float16", "bfloat16", "float32")  # enum Format there
THREADS = 128  # 8 KB per program, eight programs per SM
WARP = 32


def write_kv(provider: Any, problem: Any, *, threads: int = THREADS) -> None:
    """Write in place. `provider` supplies `device` and `empty`; threads: of a program, a multiple of 32."""
    if problem.slot_mapping.shape[0] == 0:
        return
    launch = _quantise if problem.quantised else _copy
    launch(provider, problem, threads)


def _copy(provider: Any, problem: Any, threads: int) -> None:
    arrays = (problem.key, problem.value, problem.key_cache, problem.value_cache)
    heads, head_size, strides = joined_heads(arrays)
    word = word_of(arrays, strides, head_size)
    words = head_size * problem.key.itemsize // word
    if words != head_size:
        strides = [(*outer, word) for *outer, _ in strides]
    tokens_each = max(1, threads * WORDS_PER_THREAD // (2 * heads * words))
    slices = ceil_div(2 * heads * words * tokens_each, threads * WORDS_PER_THREAD)
    num_tokens = problem.slot_mapping.shape[0]
    kernel = provider.device.kernel(SOURCE, f"write_kv<{WORDS[word]}>")
    sizes = (num_tokens, heads, words, problem.block_size, tokens_each)
    args = (*_with_strides(arrays, strides), *_slots(problem), *(np.int32(size) for size in sizes))
    kernel((ceil_div(num_tokens, tokens_each), slices), (threads,), args)


def _quantise(provider: Any, problem: Any, threads: int) -> None:
    rows, caches = (problem.key, problem.value), (problem.key_cache, problem.value_cache)
    if problem.compute_scales:
        heads, head_size, strides = problem.num_kv_heads, problem.head_size, [*map(byte_strides, (*rows, *caches))]
    else:
        heads, head_size, strides = chunked_heads((*rows, *caches), problem)
    num_tokens = problem.slot_mapping.shape[0]
    lanes = min(WARP, 1 << (ceil_div(head_size, CHUNK) - 1).bit_length())
    kernel = provider.device.kernel(SOURCE, f"quantise_kv<{C_TYPES[np.dtype(problem.key.dtype).name]}>")
    elements = [[s // array.itemsize for s in some] for array, some in zip((*rows, *caches), strides, strict=True)]
    sizes = (num_tokens, heads, head_size, problem.block_size)
    how = (format_of(problem.key_cache), problem.compute_scales, lanes)
    words = (chunk_word(rows, strides[:2], head_size), chunk_word(caches, strides[2:], head_size))
    args = (
        *_with_strides((*rows, *caches), elements),
        *_slots(problem),
        *scale_arguments(provider, problem.key_scale),
        *scale_arguments(provider, problem.value_scale),
        *(np.int32(number) for number in (*sizes, *how, *words)),
    )
    kernel((ceil_div(2 * heads * num_tokens, threads // lanes),), (threads,), args)


def format_of(cache: Any) -> int:
    """The cache's storage type as enum Format of block_copy_formats.cuh."""
    return FORMATS.index(np.dtype(cache.dtype).name)


def byte_strides(array: Any) -> tuple[int, ...]:
    """Strides in bytes; of a dimension of one element 0, and of such a last one the element's size."""
    *outer, last = (stride if n > 1 else 0 for n, stride in zip(array.shape, array.strides, strict=True))
    return (*outer, last if array.shape[-1] > 1 else array.itemsize)


def joined_heads(arrays: tuple[Any, ...]) -> tuple[int, int, list[tuple[int, ...]]]:
    """(heads, head_size, strides in bytes): one long head where heads lie side by side in every array."""
    heads, head_size = arrays[0].shape[-2:]
    strides = [byte_strides(array) for array in arrays]
    if heads == 1 or all(some[-2] == head_size * some[-1] for some in strides):
        return 1, heads * head_size, [(*outer, 0, last) for *outer, _, last in strides]
    return heads, head_size, strides


def chunked_heads(arrays: tuple[Any, ...], problem: Any) -> tuple[int, int, list[tuple[int, ...]]]:
    """As `joined_heads` where heads would end within a chunk and none has a scale of its own, else as they are."""
    scales = (problem.key_scale, problem.value_scale)
    if problem.head_size % CHUNK and not any(np.ndim(scale) and scale.strides[-1] for scale in scales):
        return joined_heads(arrays)
    return problem.num_kv_heads, problem.head_size, [byte_strides(array) for array in arrays]


def word_of(arrays: tuple[Any, ...], strides: list[tuple[int, ...]], head_size: int) -> int:
    """Bytes of the widest word in which a head's row can be moved; an element's where its elements lie apart."""
    itemsize = int(arrays[0].itemsize)
    if any(some[-1] != itemsize for some in strides):
        return itemsize
    together = [address(array) for array in arrays] + [stride for some in strides for stride in some[:-1]]
    return math.gcd(16, head_size * itemsize, *together)


def chunk_word(arrays: tuple[Any, ...], strides: list[tuple[int, ...]], head_size: int) -> int:
    """The same as `word` of load_chunk in block_copy_formats.cuh: 16, 8, 4, or 0 for element by element."""
    if any(some[-1] != array.itemsize for array, some in zip(arrays, strides, strict=True)):
        return 0
    word = word_of(arrays, strides, head_size)
    return word if word >= 4 else 0


def scale_arguments(provider: Any, scale: Any) -> tuple[Any, ...]:
    """As struct Scale of block_copy_formats.cuh: array, value, whether it is in the array, strides in elements."""
    if scale is None or isinstance(scale, np.float32):
        unused = provider.empty((1,), np.float32)
        return (unused, np.float32(1 if scale is None else scale), np.int32(0), *[np.int64(0)] * 3)
    strides = [0] * (3 - scale.ndim) + [s // scale.itemsize for s in scale.strides]
    return (scale, np.float32(1), np.int32(1), *map(np.int64, strides))


def _with_strides(arrays: Any, strides: Any) -> list[Any]:
    return [arg for array, some in zip(arrays, strides, strict=True) for arg in (array, *map(np.int64, some))]


def _slots(problem: Any) -> tuple[Any, np.int64]:
    slots = problem.slot_mapping
    return slots, np.int64(slots.strides[0] // slots.itemsize)


def rejects(problem: Any) -> str | None:
    """Why a host problem is not supported: never."""
    return None


def variants(problem: Any) -> list[dict[str, Any]]:
    """The default, and programs small enough that little rows take several."""
    return [{}, {"threads": 32}]
