"""Paged attention in Triton: split-KV decode, one query per sequence.

What it computes: for each query head, softmax(scale * q k^T) v over the sequence's keys, and the log of the
denominator. Layout: query and out [num_tokens, num_query_heads, head_size]; key_cache and value_cache [num_blocks,
block_size, num_kv_heads, head_size] through block_table [num_seqs, max_blocks].

One program of `attend_kernel` works for one sequence, one KV head and one split (a run of keys), for all query heads of
the group, so each K and V byte is read once whatever the group. It walks the split in tiles of keys with an online
softmax in base 2, sums in float32. A sequence of one split writes its result at once; of several, each writes its
weighted sum, maximum and denominator to scratch, and `combine_kernel` adds them up. Where splits end depends on the
sequence's own length alone, so a sequence's result has the same bits in any batch.

Traffic: K and V once; query once per split; scratch 4 * (head_size + 2) bytes per query head and split, written and
read, 1/64 of K and V at a group of 4, head size 128, 16-bit values and 512 keys.

Code generation (Triton 3.9; Llama-3-8B, 8 sequences of 4096 keys, blocks of 16, fp16), nothing run: 96 registers on
sm_80, 112 on sm_90, 109 on sm_100, no spill; every K and V load a 16-byte LDGSTS (24), 16 HMMA, 38,144 bytes of shared
memory; 512 programs, four to an SM, with up to 128 KB of K and V on their way per SM. (vLLM 0.33's unified attention on
the same problem, sm_80: 107 registers, 16 LDGSTS of 16 bytes, 21,760 bytes, 80 programs.) Triton 3.6 gives the same
widths, 110 registers on sm_90.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from pagebench.kernels.triton_arrays import numpy_dtype, vector_elements
from pagebench.reference.dtypes import FLOAT32
from pagebench.reference.paged_attention import PagedAttention

MIN_HEAD_SIZE, MAX_HEAD_SIZE = 32, 256
SPLIT = 512  # keys: 1 x 32k and 8 x 4k of 8 KV heads both give 512 programs, 3.9 for each of 132 SMs
MAX_SPLITS = 64  # of one sequence; beyond SPLIT * MAX_SPLITS keys the splits grow, which bounds the scratch
TILE_BYTES = 8192  # of K (and of V) per tile
STAGES = (
    5  # tiles' block ids, K and V are on their way two tiles ahead: 32 KB per program, 128 KB per SM of four programs
)
MIN_TILE, MAX_TILE = 16, 128  # keys per tile; 16 is the depth of a tensor core instruction in P V
PARTS = 16  # splits that `combine_kernel` reads at a time
MIN_DOT_ROWS = 16  # rows of a tensor core instruction; a smaller group is padded, which costs no memory traffic
# Query heads per program; a larger group is split over programs, which share K and V in the L2. In float32, with no
# tensor cores, more than 16 rows of 256 elements do not fit the registers.
MAX_ROWS, MAX_ROWS_FLOAT32 = 64, 16
LOG2_E = 1.4426950408889634
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Integers whose divisibility and whose being 1 change nothing: specialising on them would only compile more variants.
_SIZES = ("block_size", "group", "num_kv_heads", "head_tiles", "num_heads", "split", "max_splits", "num_splits")
_STRIDES = ("qs0", "qs1", "qs2", "ks0", "ks1", "ks2", "ks3", "vs0", "vs1", "vs2", "vs3", "ts0", "ts1", "ls0", "ss0")
_UNSPECIALISED = (*_SIZES, *_STRIDES)


@triton.jit
def _split_size(length, split, max_splits, TILE: tl.constexpr):
    """Keys per split of a sequence of `length` keys, and how many splits it has (1 for an empty one)."""
    size = tl.maximum(split, tl.cdiv(tl.cdiv(length, max_splits), TILE) * TILE)
    return size, tl.maximum(tl.cdiv(length, size), 1)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def attend_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start,
    out,
    lse,
    part_sum,
    part_max,
    part_denominator,
    scale_log2,
    block_size,
    group,
    split,
    max_splits,
    num_splits,
    num_kv_heads,
    head_tiles,
    qs0,
    qs1,
    qs2,
    ks0,
    ks1,
    ks2,
    ks3,
    vs0,
    vs1,
    vs2,
    vs3,
    ts0,
    ts1,
    ls0,
    ss0,
    HEAD_SIZE: tl.constexpr,
    TILE_D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    Q_VECTOR: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head, head_tile = program % (num_kv_heads * head_tiles) // head_tiles, program % head_tiles
    split_index = program // (num_kv_heads * head_tiles) % num_splits
    seq = program // (num_kv_heads * head_tiles * num_splits)

    token = tl.load(query_start + seq * ss0)
    has_query = tl.load(query_start + (seq + 1) * ss0) > token
    length = tl.load(seq_lens + seq * ls0)
    size, splits = _split_size(length, split, max_splits, TILE)
    if has_query & (split_index < splits):
        row = head_tile * ROWS + tl.arange(0, ROWS)  # of the group
        head = kv_head * group + row
        d = tl.arange(0, TILE_D)
        row_d = (row < group)[:, None] & (d < HEAD_SIZE)[None, :]
        # Strides come in units of *_VECTOR elements, so that the compiler knows how far accesses are aligned.
        q_offset = (token.to(tl.int64) * qs0 + head.to(tl.int64) * qs1) * Q_VECTOR
        q_d = d if Q_VECTOR > 1 else d.to(tl.int64) * qs2
        q = tl.load(query + q_offset[:, None] + q_d[None, :], mask=row_d, other=0.0)

        k_d = key_cache + kv_head.to(tl.int64) * ks2 * KV_VECTOR + (d if KV_VECTOR > 1 else d.to(tl.int64) * ks3)
        v_d = value_cache + kv_head.to(tl.int64) * vs2 * KV_VECTOR + (d if KV_VECTOR > 1 else d.to(tl.int64) * vs3)
        table = block_table + seq.to(tl.int64) * ts0

        top = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, TILE_D], tl.float32)
        stop = tl.minimum((split_index + 1) * size, length)
        for start in range(split_index * size, stop, TILE):
            position = start + tl.arange(0, TILE)
            live = position < stop
            block = tl.load(table + (position // block_size).to(tl.int64) * ts1, mask=live, other=0).to(tl.int64)
            slot = (position % block_size).to(tl.int64)
            key_d = live[:, None] & (d < HEAD_SIZE)[None, :]
            k = tl.load(k_d[None, :] + ((block * ks0 + slot * ks1) * KV_VECTOR)[:, None], mask=key_d, other=0.0)
            if MULTIPLY:
                score = tl.sum(q[:, None, :] * k[None, :, :], axis=2)
            else:
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = tl.where(live[None, :], score * scale_log2, float("-inf"))

            new_top = tl.maximum(top, tl.max(score, axis=1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key
            weight = tl.exp2(score - shift[:, None])
            rescale = tl.exp2(top - shift)
            denominator = denominator * rescale + tl.sum(weight, axis=1)
            top = new_top

            v = tl.load(v_d[None, :] + ((block * vs0 + slot * vs1) * KV_VECTOR)[:, None], mask=key_d, other=0.0)
            total = total * rescale[:, None]
            if MULTIPLY:
                total += tl.sum(weight[:, :, None] * v[None, :, :], axis=1)
            else:
                total = tl.dot(weight.to(v.dtype), v, total, input_precision="ieee")

        result = token.to(tl.int64) * (num_kv_heads * group) + head  # row of [num_tokens * num_query_heads]
        if splits == 1:
            safe = tl.where(denominator == 0.0, 1.0, denominator)
            mean = total * tl.div_rn(1.0, safe)[:, None]
            tl.store(out + result[:, None] * HEAD_SIZE + d[None, :], mean.to(out.dtype.element_ty), mask=row_d)
            log = tl.where(denominator == 0.0, float("-inf"), top * LN_2 + tl.log(safe))
            tl.store(lse + result, log, mask=row < group)
        else:
            part = result * num_splits + split_index
            tl.store(part_sum + part[:, None] * HEAD_SIZE + d[None, :], total, mask=row_d)
            tl.store(part_max + part, top, mask=row < group)
            tl.store(part_denominator + part, denominator, mask=row < group)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def combine_kernel(
    seq_lens,
    query_start,
    part_sum,
    part_max,
    part_denominator,
    out,
    lse,
    num_heads,
    split,
    max_splits,
    num_splits,
    ls0,
    ss0,
    HEAD_SIZE: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One query head of one sequence: the sum of its splits. PARTS splits are read at a time."""
    seq, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    token = tl.load(query_start + seq * ss0)
    has_query = tl.load(query_start + (seq + 1) * ss0) > token
    _, splits = _split_size(tl.load(seq_lens + seq * ls0), split, max_splits, TILE)
    if has_query & (splits > 1):
        row = token.to(tl.int64) * num_heads + head
        d = tl.arange(0, TILE_D)
        top = tl.full([], float("-inf"), tl.float32)
        denominator = tl.zeros([], tl.float32)
        total = tl.zeros([TILE_D], tl.float32)
        for start in range(0, splits, PARTS):
            part = start + tl.arange(0, PARTS)
            live = part < splits
            maximum = tl.load(part_max + row * num_splits + part, mask=live, other=float("-inf"))
            size = tl.load(part_denominator + row * num_splits + part, mask=live, other=0.0)
            sums = tl.load(
                part_sum + ((row * num_splits + part) * HEAD_SIZE)[:, None] + d[None, :],
                mask=live[:, None] & (d < HEAD_SIZE)[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(maximum, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(maximum - shift)
            rescale = tl.exp2(top - shift)
            denominator = denominator * rescale + tl.sum(weight * size, axis=0)
            total = total * rescale + tl.sum(weight[:, None] * sums, axis=0)
            top = new_top
        mean = total * tl.div_rn(1.0, denominator)  # more than one split: there are keys
        tl.store(out + row * HEAD_SIZE + d, mean.to(out.dtype.element_ty), mask=d < HEAD_SIZE)
        tl.store(lse + row, top * LN_2 + tl.log(denominator))


def paged_attention(
    problem: PagedAttention,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    split: int = SPLIT,
    max_splits: int = MAX_SPLITS,
    tile: int | None = None,
    num_warps: int = 4,
    num_stages: int = STAGES,
) -> tuple[Any, Any]:
    """(out like query, lse float32 [num_tokens, num_query_heads]) of a problem with device arrays.

    `empty(shape, dtype)` makes every output and scratch array. split: keys per split; max_splits: of one sequence;
    tile: keys per step, a power of two.
    """
    query, key, value, table = problem.query, problem.key_cache, problem.value_cache, problem.block_table
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key.shape[1:3]
    num_seqs = problem.seq_lens.shape[0]
    shape = _shape(query, num_heads // num_kv_heads, tile)
    num_splits = max(1, min(max_splits, triton.cdiv(table.shape[1] * block_size, split)))

    out = empty((num_tokens, num_heads, head_size), numpy_dtype(query))
    lse = empty((num_tokens, num_heads), FLOAT32)
    parts = (lse, lse, lse)  # not used
    if num_splits > 1:
        scratch = (num_tokens, num_heads, num_splits)
        parts = (empty((*scratch, head_size), FLOAT32), empty(scratch, FLOAT32), empty(scratch, FLOAT32))
    if num_seqs == 0:
        return out, lse

    q_vector = vector_elements(query)
    kv_vector = min(vector_elements(key), vector_elements(value))
    head_tiles = triton.cdiv(num_heads // num_kv_heads, shape["ROWS"])
    ranges = (problem.seq_lens, problem.query_start)
    range_strides = (problem.seq_lens.stride(0), problem.query_start.stride(0))
    attend_kernel[(num_seqs * num_splits * num_kv_heads * head_tiles,)](
        query,
        key,
        value,
        table,
        *ranges,
        out,
        lse,
        *parts,
        float(problem.scale) * LOG2_E,
        block_size,
        num_heads // num_kv_heads,
        split,
        max_splits,
        num_splits,
        num_kv_heads,
        head_tiles,
        *(stride // q_vector for stride in query.stride()),
        *(stride // kv_vector for stride in (*key.stride(), *value.stride())),
        *table.stride(),
        *range_strides,
        **shape,
        Q_VECTOR=q_vector,
        KV_VECTOR=kv_vector,
        MULTIPLY=shape["ROWS"] == 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        combine_kernel[(num_seqs * num_heads,)](
            *ranges,
            *parts,
            out,
            lse,
            num_heads,
            split,
            max_splits,
            num_splits,
            *range_strides,
            HEAD_SIZE=head_size,
            TILE_D=shape["TILE_D"],
            TILE=shape["TILE"],
            PARTS=PARTS,
            num_warps=4,
        )
    return out, lse


def _shape(query: Any, group: int, tile: int | None) -> dict[str, int]:
    """The compile-time sizes of a launch: query rows, keys and head elements per tile."""
    head_size = query.shape[2]
    tile_d = triton.next_power_of_2(head_size)
    float32 = query.element_size() == 4
    rows = min(triton.next_power_of_2(group), MAX_ROWS_FLOAT32 if float32 else MAX_ROWS)
    rows = rows if float32 else max(rows, MIN_DOT_ROWS)
    tile = tile or max(MIN_TILE, min(MAX_TILE, TILE_BYTES // (tile_d * query.element_size())))
    return {"HEAD_SIZE": head_size, "TILE_D": tile_d, "ROWS": rows, "TILE": tile}


def rejects(problem: PagedAttention) -> str | None:
    """Why a host problem is not supported; None when it is."""
    if problem.key_cache.dtype != problem.query.dtype:
        return f"a quantised cache ({problem.key_cache.dtype}) is not supported yet"
    for name in ("window", "soft_cap", "alibi_slopes", "sinks"):
        if getattr(problem, name) is not None:
            return f"{name} is not supported yet"
    if problem.num_seqs and np.diff(problem.query_start).max() > 1:
        return "more than one query per sequence is not supported yet"
    if not MIN_HEAD_SIZE <= problem.head_size <= MAX_HEAD_SIZE:
        return f"head_size must be in [{MIN_HEAD_SIZE}, {MAX_HEAD_SIZE}] for now, got {problem.head_size}"
    return None


def variants(problem: PagedAttention) -> list[dict[str, Any]]:
    """Splits and tiles small enough that a test's little problem crosses their edges."""
    return [
        {"split": 16, "tile": 16},
        {"split": 32, "tile": 16, "num_stages": 2},
        {"split": 32, "max_splits": 3, "tile": 32, "num_warps": 2},
    ]
