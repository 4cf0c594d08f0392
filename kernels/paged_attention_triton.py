"""Paged attention in Triton: decode, prefill, chunked prefill and mixed batches, split over the keys.

What it computes: for each query head, softmax(scale * q k^T) v over the keys that the query sees, and the log of the
denominator; with causal masks, windows, soft caps, ALiBi, sinks and quantised caches as the problem says. Layout: query
and out [num_tokens, num_query_heads, head_size]; key_cache and value_cache [num_blocks, block_size, num_kv_heads,
head_size] through block_table [num_seqs, max_blocks].

One program of `attend_kernel` works for one sequence, one KV head, a tile of rows (query, query head of the group) and
one split (a run of keys), so each K and V byte is read once for all rows of a tile: once in all when the query heads of
a decode fit a tile. It walks the keys in tiles with an online softmax in base 2, sums in float32. A short sequence of
several splits writes its weighted sums, maxima and denominators to scratch, and `combine_kernel` adds them up; every
other writes its result at once. `paged_attention_ranges_triton` says which sequences are short and where splits end: by
a sequence's own lengths alone, so that its result has the same bits in any batch. Short and long sequences get launches
of their own, with tiles of their own. Features are compiled in where a problem has them and cost nothing where not.

Traffic: K and V once per tile of rows; query once per split; scratch 4 * (head_size + 2) bytes per query head and
split, written and read, 1/64 of K and V at a group of 4, head size 128, 16-bit values and 512 keys. Heads of more than
MAX_COLUMNS elements are cut into parts, each of which reads all of K and its own columns of V.

Code generation (Triton 3.9; Llama-3-8B, 8 sequences of 4096 keys, blocks of 16, fp16), nothing run: 96 registers on
sm_80, 114 on sm_90, no spill; every K and V load a 16-byte LDGSTS (24), 16 HMMA, 38,144 bytes of shared memory; 512
programs, four to an SM, with up to 128 KB of K and V on their way per SM (and 128 programs that look for sequences of
several queries and find none).

Quantised caches: codes are copied as they are, 16 bytes at a time by LDGSTS, and decoded behind the pipeline, on their
way from shared memory to the tensor cores. For a right operand whose columns are contiguous, V's, Triton 3.9 lays
shared memory out in runs of 8 elements and narrows the copies to them: 8 bytes where an element is a code. So an
element of V is two codes, and even and odd columns have sums of their own. At head size 128, sm_90: 96 registers where
8-byte copies took 128, no spill, five programs to an SM and 16 KB of K and V on their way for each. Heads of
fewer than 32 elements, and rows of an odd number of bytes, are copied in what their alignment allows. Scales of slots
are multiplied with scores and weights in float32, never with codes, whose product float16 might not hold.

vLLM 0.33's unified attention on the same problem, sm_80: 107 registers, 816 instructions, 16 LDGSTS of 16 bytes, 16
HMMA, 21,760 bytes, 80 programs. It binds four queries to a program, which leaves most SMs idle in a decode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pagebench.kernels.paged_attention_ranges_triton import (
    Grid,
    long_tile,
    scratch_query,
    short_tile,
    split_size,
    tile_keys,
)
from pagebench.kernels.paged_attention_scores_triton import (
    FORMATS,
    add_weighted,
    aligned_elements,
    capped,
    codes_of,
    numbers,
    pairs_of,
    scale_arguments,
    with_sink,
)
from pagebench.kernels.triton_arrays import numpy_dtype, vector_elements
from pagebench.reference.dtypes import FLOAT32
from pagebench.reference.paged_attention import MAX_KEYS, PagedAttention
from pagebench.reference.validation import require_option

SPLIT = 512  # keys: 1 x 32k and 8 x 4k of 8 KV heads both give 512 programs, 3.9 for each of 132 SMs
MAX_SPLITS = 64  # of one sequence; beyond SPLIT * MAX_SPLITS keys the splits grow, which bounds the scratch
# Queries of a short sequence, at most. With as many tokens as this, or fewer, a batch needs no launch for long ones.
SPLIT_QUERIES = 64
TILE_BYTES = 8192  # of K (and of V) per tile
STAGES = (
    5  # tiles' block ids, K and V are on their way two tiles ahead: 32 KB per program, 128 KB per SM of four programs
)
# Keys of a quantised cache per tile, and where each slot has scales: more of them take more registers than there are.
MAX_CODE_TILE, MAX_SCALED_TILE = 64, 32
# Registers per thread, at most, of 16 rows where each slot has scales: three programs per SM. Left alone the assembler
# aims at four, 128 registers, and spills a handful.
SCALED_REGISTERS = 168
# Of more rows on tensor cores: as many as a thread can have. Left alone the assembler aims at one program per SM more,
# and spills up to 58; for long sequences in eight warps with 128 columns on sm_100 ten; with 224 eight on sm_80.
ALL_REGISTERS = 255
MAX_STAGES = 8
MIN_TILE, MAX_TILE = 16, 128  # keys per tile; 16 is the depth of a tensor core instruction in P V
MIN_COLUMNS, MAX_COLUMNS = 16, 256  # head elements per program; 16 is the depth of a tensor core instruction in Q K^T
PARTS = 16  # splits that `combine_kernel` reads at a time
MIN_DOT_ROWS = 16  # rows of a tensor core instruction; a smaller group is padded, which costs no memory traffic
# Rows per program; a larger group is split over programs, which share K and V in the L2. In float32, with no tensor
# cores, more than 16 rows of 256 elements do not fit the registers of four warps. Large groups of short sequences take
# sixteen, whose registers hold the sums of 64 rows of 128 elements (91 on sm_90), and 32 for 64 rows of 256, where
# sm_80, sm_90 and sm_100 spill 19, 22 and 28 times (27, 55 and 55 in sixteen).
MAX_ROWS, MAX_ROWS_FLOAT32 = 64, 16
MANY_WARPS, MOST_WARPS, MANY_SUMS = 16, 32, 64 * 128
# Groups above 64 of short sequences have 128 rows, so that K and V are read once: once from memory is worth the
# spills that wide heads cost. Spills on sm_80, sm_90 and sm_100, nothing run, of plain decodes (masks, caps and
# slopes add to them), where there are any: in 16 bits 198, 0 and 8 for heads of 256; of codes 76, 0 and 0 for heads
# of 128 (39, 0 and 0 with scales of slots), 40, 31 and 0 for 256 (72, 51 and 0), where 64 rows with scales of slots
# spill 0, 125 and 0 too; in float32 0, 12 and 16 for heads of 128, where each thread copies 8 bytes. In float32 128
# rows of 256 columns are 128 KB of queries, 169 KB with the tiles, which sm_80 does not have: such heads keep 64
# rows, and read K and V once for each 64.
MANY_ROWS, MANY_ROWS_FLOAT32_COLUMNS = 128, 128
MANY_ROWS_KEYS = 32  # in float32, and of more than 64 columns
# Of heads of more than MAX_COLUMNS elements, whose queries take shared memory for each stage: 64 rows in three stages
# 160 KB on sm_90, in five 240 KB, which it does not have; 32 in three 64 KB. Float32 spills 49 times in three stages.
PART_ROWS, PART_STAGES = 32, 2
SCALED_ROWS = 32  # of long sequences where each slot has scales, whose weights take twice the registers
LONG_TILE_BYTES, LONG_STAGES = 16384, 3  # of long sequences, which compute on 64 rows for each tile of K and V
PADDED_STAGES = 2  # of 64 rows and codes of heads between 64 and 128: with three sm_80 spills 59 times
LONG_FLOAT32_TILE_BYTES = 4096  # with twice as much 64 columns spill 33 times on sm_90
# Four warps hold 64 rows of up to 64 columns and 64 keys. For 128 columns they want more than 255 registers on sm_80
# (37 spills), for 256 on sm_90 and sm_100 too (51, 35); so they do for 128 keys of 64 columns on sm_80 (10).
# sm_80 has no conversion from fp8, and decodes 64 codes of 128 columns at once with 723 spills, 32 with none.
MAX_LONG_TILE, MAX_LONG_CODE_TILE = 64, 32
WARPS, WIDE_WARPS, WIDE_COLUMNS = 4, 8, 64
LOG2_E = 1.4426950408889634
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2_E_: tl.constexpr = tl.constexpr(LOG2_E)

# Integers whose divisibility and whose being 1 change nothing: specialising on them would only compile more variants.
_SIZES = (
    *("block_size", "group", "num_kv_heads", "row_tiles", "num_heads", "split", "max_splits", "num_splits", "window"),
    *("num_seqs", "split_queries", "by_token"),
)
_STRIDES = (
    *("qs0", "qs1", "qs2", "ks0", "ks1", "ks2", "ks3", "vs0", "vs1", "vs2", "vs3", "ts0", "ts1", "ls0", "ss0"),
    *("as0", "sinks0", "kss0", "kss1", "kss2", "vss0", "vss1", "vss2"),
)
_UNSPECIALISED = (*_SIZES, *_STRIDES)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def attend_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start,
    alibi_slopes,
    sinks,
    key_scale,
    value_scale,
    out,
    lse,
    part_sum,
    part_max,
    part_denominator,
    factor,
    cap_factor,
    cap,
    value_factor,
    window,
    block_size,
    group,
    num_seqs,
    split,
    max_splits,
    num_splits,
    split_queries,
    by_token,
    num_kv_heads,
    row_tiles,
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
    as0,
    sinks0,
    kss0,
    kss1,
    kss2,
    vss0,
    vss1,
    vss2,
    HEAD_SIZE: tl.constexpr,
    TILE_D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    Q_VECTOR: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    MULTIPLY: tl.constexpr,
    LONG: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
):
    """Programs of short sequences, or, LONG, of long ones; the others find that their sequence is of the other kind."""
    program = tl.program_id(0)
    COLUMNS: tl.constexpr = (HEAD_SIZE + TILE_D - 1) // TILE_D
    column = program % COLUMNS  # of the parts of a head
    kv_head = program // COLUMNS % num_kv_heads
    rest = program // (num_kv_heads * COLUMNS)
    if LONG:
        split_index = 0
        seq, row_tile = long_tile(rest, query_start, ss0, num_seqs, group, ROWS)
    else:
        split_index = rest % num_splits
        seq, row_tile = short_tile(rest // num_splits, query_start, ss0, num_seqs, group, row_tiles, ROWS)

    token = tl.load(query_start + seq * ss0)
    queries = tl.load(query_start + (seq + 1) * ss0) - token
    length = tl.load(seq_lens + seq * ls0)
    if LONG:
        begin, end, splits = 0, length, 1
        stop_row = tl.where(queries > split_queries, tl.minimum(queries * group, (row_tile + 1) * ROWS), 0)
    else:
        first, size, splits = split_size(length, queries, window, split, max_splits, TILE, WINDOW)
        begin = first + split_index * size
        end = tl.minimum(begin + size, length)
        stop_row = tl.where((queries <= split_queries) & (split_index < splits), queries * group, 0)

    d = tl.arange(0, TILE_D)
    column_d = d + column * TILE_D
    if KEY_SCALE == 1:
        factor *= tl.load(key_scale + kv_head.to(tl.int64) * kss2)
    k_head = key_cache + kv_head.to(tl.int64) * ks2 * KV_VECTOR
    # PAIRS: an element of the value cache is two codes, and all even columns of a tile come before the odd ones.
    V_VECTOR: tl.constexpr = KV_VECTOR // 2 if PAIRS else KV_VECTOR
    V_COLUMNS: tl.constexpr = TILE_D // 2 if PAIRS else TILE_D
    V_SIZE: tl.constexpr = HEAD_SIZE // 2 if PAIRS else HEAD_SIZE
    # With a scale for each slot, which float16 may not hold, weights are the sum of two numbers of bfloat16.
    TWO: tl.constexpr = VALUE_SCALE == 2 and query.dtype.element_ty == tl.float16
    V_TYPE: tl.constexpr = tl.bfloat16 if TWO else query.dtype.element_ty
    value_d = tl.arange(0, V_COLUMNS) + column * V_COLUMNS
    v_head = value_cache + kv_head.to(tl.int64) * vs2 * V_VECTOR
    k_d = k_head + (d if KV_VECTOR > 1 else d.to(tl.int64) * ks3)
    v_d = v_head + (value_d if KV_VECTOR > 1 else value_d.to(tl.int64) * vs3)
    table = block_table + seq.to(tl.int64) * ts0

    first_row = row_tile * ROWS
    if first_row < stop_row:
        row = first_row + tl.arange(0, ROWS)
        real = row < queries * group
        index = row // group  # of the query in its sequence
        head = kv_head * group + row % group
        # Strides come in units of *_VECTOR elements, so that the compiler knows how far accesses are aligned.
        q_row = query + ((token + index).to(tl.int64) * qs0 + head.to(tl.int64) * qs1) * Q_VECTOR
        q_d = d if Q_VECTOR > 1 else d.to(tl.int64) * qs2
        q = tl.load(q_row[:, None] + q_d[None, :], mask=real[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
        at = length - queries + index  # position of the query
        if ALIBI:
            slope = tl.load(alibi_slopes + head.to(tl.int64) * as0, mask=real, other=0.0) * LOG2_E_

        top = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, V_COLUMNS], tl.float32)
        odd = tl.zeros([ROWS, V_COLUMNS if PAIRS else 1], tl.float32)
        lowest, highest = first_row // group, tl.minimum((first_row + ROWS - 1) // group, queries - 1)
        start, stop = tile_keys(lowest, highest, begin, end, length, queries, window, CAUSAL, WINDOW)
        # The last of these keys that a row sees.
        last = tl.where(real, tl.minimum(at, stop - 1) if CAUSAL else stop - 1, -1)
        for tile in range(start, stop, TILE):
            position = tile + tl.arange(0, TILE)
            live = position < stop
            block = tl.load(table + (position // block_size).to(tl.int64) * ts1, mask=live, other=0).to(tl.int64)
            slot = (position % block_size).to(tl.int64)
            key_d = live[:, None] & (d < HEAD_SIZE)[None, :]
            k = tl.load(k_d[None, :] + ((block * ks0 + slot * ks1) * KV_VECTOR)[:, None], mask=key_d, other=0)
            k = numbers(k, FORMAT, q.dtype)
            if MULTIPLY:
                score = tl.sum(q[:, None, :] * k[None, :, :], axis=2)
            else:
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
            for part in range(TILE_D, HEAD_SIZE, TILE_D):  # of a head that does not fit a tile
                e = part + d
                q_e = (e if Q_VECTOR > 1 else e.to(tl.int64) * qs2)[None, :]
                k_e = (e if KV_VECTOR > 1 else e.to(tl.int64) * ks3)[None, :]
                inside = (e < HEAD_SIZE)[None, :]
                q_more = tl.load(q_row[:, None] + q_e, mask=real[:, None] & inside, other=0.0)
                k_slot = k_head + ((block * ks0 + slot * ks1) * KV_VECTOR)[:, None]
                k_more = numbers(tl.load(k_slot + k_e, mask=live[:, None] & inside, other=0), FORMAT, q.dtype)
                if MULTIPLY:
                    score += tl.sum(q_more[:, None, :] * k_more[None, :, :], axis=2)
                else:
                    score = tl.dot(q_more, tl.trans(k_more), score, input_precision="ieee")
            score *= factor
            if KEY_SCALE == 2:  # after the other factors, whose product is finite
                scale_of = key_scale + block * kss0 + slot * kss1 + kv_head.to(tl.int64) * kss2
                score *= tl.load(scale_of, mask=live, other=0.0)[None, :]
            if CAP:  # a factor of its own: float32 might not hold its product with the others
                score = capped(score, cap_factor, cap)
            if ALIBI:
                score += slope[:, None] * (position[None, :] - at[:, None]).to(tl.float32)
            seen = position[None, :] <= last[:, None]
            if WINDOW:
                seen = seen & (position[None, :] > at[:, None] - window)
            score = tl.where(seen, score, float("-inf"))

            new_top = tl.maximum(top, tl.max(score, axis=1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key
            weight = tl.exp2(score - shift[:, None])
            rescale = tl.exp2(top - shift)
            denominator = denominator * rescale + tl.sum(weight, axis=1)
            top = new_top

            v_slot = v_d[None, :] + ((block * vs0 + slot * vs1) * V_VECTOR)[:, None]
            v = tl.load(v_slot, mask=live[:, None] & (value_d < V_SIZE)[None, :], other=0)
            if VALUE_SCALE == 2:
                scale_of = value_scale + block * vss0 + slot * vss1 + kv_head.to(tl.int64) * vss2
                weight *= tl.load(scale_of, mask=live, other=0.0)[None, :]
            total = total * rescale[:, None]
            if PAIRS:
                odd = add_weighted(odd * rescale[:, None], weight, numbers(v >> 8, FORMAT, V_TYPE), MULTIPLY, TWO)
                v = v & 0xFF
            total = add_weighted(total, weight, numbers(v, FORMAT, V_TYPE), MULTIPLY, TWO)

        if PAIRS:
            total = tl.interleave(total, odd)
        if FORMAT != 0:
            if VALUE_SCALE == 1:
                value_factor = tl.load(value_scale + kv_head.to(tl.int64) * vss2)
            if VALUE_SCALE != 2:
                total = total * value_factor
        row_d = real[:, None] & (column_d < HEAD_SIZE)[None, :]
        result = (token + index).to(tl.int64) * (num_kv_heads * group) + head  # row of [num_tokens * num_query_heads]
        if splits == 1:
            if SINKS:
                own_sink = tl.load(sinks + head.to(tl.int64) * sinks0, mask=real, other=0.0)
                sink = own_sink * LOG2_E_
                top, denominator, rescale = with_sink(top, denominator, sink)
                total = total * rescale[:, None]
            safe = tl.where(denominator == 0.0, 1.0, denominator)
            mean = total * tl.div_rn(1.0, safe)[:, None]
            tl.store(out + result[:, None] * HEAD_SIZE + column_d[None, :], mean.to(out.dtype.element_ty), mask=row_d)
            log = tl.where(denominator == 0.0, float("-inf"), top * LN_2 + tl.log(safe))
            if SINKS:  # its own logit where it outweighs all keys, since in base 2 it may be beyond float32
                log = tl.where(rescale == 0.0, own_sink, log)
            tl.store(lse + result, log, mask=real & (column == 0))
        else:
            base = token if by_token else seq * split_queries
            result = (base + index).to(tl.int64) * (num_kv_heads * group) + head
            part = result * num_splits + split_index
            tl.store(part_sum + part[:, None] * HEAD_SIZE + column_d[None, :], total, mask=row_d)
            tl.store(part_max + part, top, mask=real & (column == 0))
            tl.store(part_denominator + part, denominator, mask=real & (column == 0))


@triton.jit(do_not_specialize=_UNSPECIALISED)
def combine_kernel(
    seq_lens,
    query_start,
    sinks,
    part_sum,
    part_max,
    part_denominator,
    out,
    lse,
    window,
    num_heads,
    split,
    max_splits,
    num_splits,
    split_queries,
    by_token,
    num_seqs,
    ls0,
    ss0,
    sinks0,
    HEAD_SIZE: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One query head of one query of a short sequence: the sum of its splits. PARTS splits are read at a time."""
    program = tl.program_id(0)
    COLUMNS: tl.constexpr = (HEAD_SIZE + TILE_D - 1) // TILE_D
    column, head = program % COLUMNS, program // COLUMNS % num_heads
    slot = program // (COLUMNS * num_heads)
    seq, index = scratch_query(slot, query_start, ss0, num_seqs, split_queries, by_token)
    token = tl.load(query_start + seq * ss0)
    queries = tl.load(query_start + (seq + 1) * ss0) - token
    _, _, splits = split_size(tl.load(seq_lens + seq * ls0), queries, window, split, max_splits, TILE, WINDOW)
    if (index < queries) & (queries <= split_queries) & (splits > 1):
        row = slot.to(tl.int64) * num_heads + head
        d = column * TILE_D + tl.arange(0, TILE_D)
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
        if SINKS:
            own_sink = tl.load(sinks + head.to(tl.int64) * sinks0)
            top, denominator, rescale = with_sink(top, denominator, own_sink * LOG2_E_)
            total = total * rescale
        safe = tl.where(denominator == 0.0, 1.0, denominator)  # a query before the first key sees none
        result = (token + index).to(tl.int64) * num_heads + head
        mean = total * tl.div_rn(1.0, safe)
        tl.store(out + result * HEAD_SIZE + d, mean.to(out.dtype.element_ty), mask=d < HEAD_SIZE)
        log = tl.where(denominator == 0.0, float("-inf"), top * LN_2 + tl.log(safe))
        if SINKS:
            log = tl.where(rescale == 0.0, own_sink, log)
        tl.store(lse + result, log, mask=column == 0)


def paged_attention(
    problem: PagedAttention,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    split: int = SPLIT,
    max_splits: int = MAX_SPLITS,
    split_queries: int = SPLIT_QUERIES,
    tile: int | None = None,
    rows: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[Any, Any]:
    """(out like query, lse float32 [num_tokens, num_query_heads]) of a problem with device arrays.

    `empty(shape, dtype)` makes every output and scratch array. split: keys per split; max_splits: of one sequence;
    split_queries: queries of a sequence that is split, at most; tile: keys per step, rows: rows of a tile of a long
    sequence, both powers of two from 16 to 128; num_warps: a power of two up to 32; num_stages: tiles on their way, up
    to 8. None chooses. Raises ValueError for others.

    A decode reads K and V once for groups of up to 128 (in float32 beyond 128 head elements: 64); what that spills on
    which GPU stands at MANY_ROWS. Larger groups read them once for each tile of so many query heads.
    """
    for name, value in (("split", split), ("max_splits", max_splits), ("split_queries", split_queries)):
        require_option(name, value, 1, MAX_KEYS)
    most = {
        "tile": (tile, MIN_TILE, MAX_TILE),
        "rows": (rows, MIN_DOT_ROWS, MANY_ROWS),
        "num_warps": (num_warps, 1, 32),
    }
    for name, (size, low, high) in most.items():
        if size is not None:
            require_option(name, size, low, high, power_of_two=True)
    if num_stages is not None:
        require_option("num_stages", num_stages, 1, MAX_STAGES)
    query = problem.query
    num_tokens, num_heads, head_size = query.shape
    num_seqs, num_kv_heads = problem.seq_lens.shape[0], problem.key_cache.shape[2]
    short = _Tiles.short(problem, tile)
    long = _Tiles.long(problem, rows, tile)
    splitting = {"split": split, "max_splits": max_splits, "split_queries": split_queries}
    grid = Grid.of(problem, rows=short.rows, long_rows=long.rows, **splitting)

    out = empty((num_tokens, num_heads, head_size), numpy_dtype(query))
    lse = empty((num_tokens, num_heads), FLOAT32)
    parts = (lse, lse, lse)  # not used
    if grid.num_splits > 1:
        scratch = (grid.scratch_tokens, num_heads, grid.num_splits)
        parts = (empty((*scratch, head_size), FLOAT32), empty(scratch, FLOAT32), empty(scratch, FLOAT32))
    if num_seqs == 0 or num_tokens == 0:
        return out, lse

    columns = triton.cdiv(head_size, short.columns)
    arguments = _arguments(problem, out, lse, parts, grid, **splitting)
    attend_kernel[(grid.short_tiles * grid.num_splits * num_kv_heads * columns,)](
        **arguments, **short.constants(), LONG=False, **short.launch(num_warps, num_stages)
    )
    if grid.num_splits > 1:
        shared = {name: value for name, value in arguments.items() if name in combine_kernel.arg_names}
        combine_kernel[(grid.scratch_tokens * num_heads * columns,)](
            **shared,
            num_heads=num_heads,
            TILE_D=short.columns,
            TILE=short.tile,
            PARTS=PARTS,
            num_warps=4,
        )
    if grid.long_tiles:
        attend_kernel[(grid.long_tiles * num_kv_heads * columns,)](
            **arguments, **long.constants(), LONG=True, **long.launch(num_warps, num_stages)
        )
    return out, lse


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The compile-time sizes of a launch: rows, keys and head elements of a tile, tiles on their way.

    registers: for each thread, at most; 0 where the assembler chooses.
    """

    rows: int
    tile: int
    columns: int
    stages: int
    warps: int = WARPS
    registers: int = 0

    @classmethod
    def short(cls, problem: PagedAttention, tile: int | None) -> "_Tiles":
        query, group = problem.query, problem.query.shape[1] // problem.key_cache.shape[2]
        float32, codes = query.element_size() == 4, problem.key_cache.dtype in FORMATS
        most = MAX_CODE_TILE if codes and not float32 else MAX_TILE
        most = MAX_SCALED_TILE if _scaled(problem) else most
        columns = _columns(query)
        if query.shape[2] > MAX_COLUMNS:
            return cls._in_parts(query, triton.next_power_of_2(group), tile)
        if group > MAX_ROWS and (not float32 or columns <= MANY_ROWS_FLOAT32_COLUMNS):
            return cls._many_rows(columns, float32, tile)
        rows = min(triton.next_power_of_2(group), MAX_ROWS)
        rows = rows if float32 else max(rows, MIN_DOT_ROWS)
        keys = min(most, _keys(query, TILE_BYTES))
        if float32 and rows > MAX_ROWS_FLOAT32:
            warps = MANY_WARPS if rows * columns <= MANY_SUMS else MOST_WARPS
            return cls(rows, tile or MIN_TILE, columns, LONG_STAGES, warps)
        # 64 rows of 256 columns, in four warps, spill 90 times on sm_80; with codes 128 columns do, 72 times.
        wide = not float32 and rows > 32 and columns > (WIDE_COLUMNS if codes else 128)
        if not float32 and rows > MIN_DOT_ROWS:
            if not wide:
                return cls(rows, tile or keys, columns, STAGES, WARPS, ALL_REGISTERS)
            stages = LONG_STAGES if _scaled(problem) else STAGES  # with five sm_80 spills 39 times
            if codes and query.shape[2] < columns == 128:
                stages = PADDED_STAGES
            return cls(rows, tile or keys, columns, stages, WIDE_WARPS, ALL_REGISTERS)
        return cls(rows, tile or keys, columns, STAGES, WARPS, SCALED_REGISTERS if _scaled(problem) else 0)

    @classmethod
    def _many_rows(cls, columns: int, float32: bool, tile: int | None) -> "_Tiles":
        """Of a short sequence with a group above 64."""
        if float32 and columns > WIDE_COLUMNS:
            return cls(MANY_ROWS, tile or MIN_TILE, columns, LONG_STAGES, MOST_WARPS)
        if float32:
            warps = MANY_WARPS if columns == WIDE_COLUMNS else WIDE_WARPS
            return cls(MANY_ROWS, tile or MANY_ROWS_KEYS, columns, LONG_STAGES, warps)
        if columns > MANY_ROWS_FLOAT32_COLUMNS:
            return cls(MANY_ROWS, tile or MIN_TILE, columns, LONG_STAGES, WIDE_WARPS, ALL_REGISTERS)
        keys = MANY_ROWS_KEYS if columns > WIDE_COLUMNS else MAX_CODE_TILE
        return cls(MANY_ROWS, tile or keys, columns, STAGES, WIDE_WARPS)

    @classmethod
    def _in_parts(cls, query: torch.Tensor, rows: int, tile: int | None) -> "_Tiles":
        """Of a head that is taken MAX_COLUMNS elements at a time, whose queries are on their way like its keys."""
        if query.element_size() == 4:
            return cls(min(rows, MAX_ROWS_FLOAT32), tile or MIN_TILE, MAX_COLUMNS, PART_STAGES)
        rows = min(max(rows, MIN_DOT_ROWS), PART_ROWS)
        return cls(rows, tile or MIN_TILE, MAX_COLUMNS, LONG_STAGES, WARPS, ALL_REGISTERS)

    @classmethod
    def long(cls, problem: PagedAttention, rows: int | None, tile: int | None) -> "_Tiles":
        query = problem.query
        if query.shape[2] > MAX_COLUMNS:
            return cls._in_parts(query, rows or PART_ROWS, tile)
        columns = _columns(query)
        if query.element_size() == 4:
            keys = _keys(query, LONG_FLOAT32_TILE_BYTES)
            return cls(rows or MAX_ROWS_FLOAT32, tile or keys, columns, LONG_STAGES)
        warps = WIDE_WARPS if columns > WIDE_COLUMNS else WARPS
        rows = rows or (SCALED_ROWS if _scaled(problem) else MAX_ROWS)
        codes = problem.key_cache.dtype in FORMATS
        stages = PADDED_STAGES if codes and query.shape[2] < columns == 128 else LONG_STAGES
        keys = min(MAX_LONG_CODE_TILE if codes else MAX_LONG_TILE, _keys(query, LONG_TILE_BYTES))
        registers = ALL_REGISTERS if warps > WARPS or _scaled(problem) else 0
        return cls(rows, tile or keys, columns, stages, warps, registers)

    def launch(self, num_warps: int | None, num_stages: int | None) -> dict[str, int]:
        """Warps and stages, as asked for or as they are best, and the registers that the best warps have."""
        warps = num_warps or self.warps
        limit = {"maxnreg": self.registers} if self.registers and warps == self.warps else {}
        return {"num_warps": warps, "num_stages": num_stages or self.stages, **limit}

    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "TILE": self.tile, "TILE_D": self.columns, "MULTIPLY": self.rows == 1}


def _scaled(problem: PagedAttention) -> bool:
    """Whether each slot of the cache has a scale and the query is of 16 bits."""
    scales = (problem.key_scale, problem.value_scale)
    return problem.query.element_size() == 2 and any(isinstance(s, torch.Tensor) and s.dim() == 3 for s in scales)


def _columns(query: torch.Tensor) -> int:
    """Head elements per program."""
    columns: int = max(MIN_COLUMNS, min(MAX_COLUMNS, triton.next_power_of_2(query.shape[2])))
    return columns


def _keys(query: torch.Tensor, tile_bytes: int) -> int:
    """Keys of a tile: `tile_bytes` of K in the query's dtype, which is what a program computes with."""
    keys: int = tile_bytes // (_columns(query) * query.element_size())
    return max(MIN_TILE, min(MAX_TILE, keys))


def _arguments(problem: PagedAttention, out: Any, lse: Any, parts: Any, grid: Grid, **splitting: int) -> dict[str, Any]:
    """The arguments by name that all launches of a problem have in common."""
    query, key, value = problem.query, codes_of(problem.key_cache), codes_of(problem.value_cache)
    q_vector, kv_vector = vector_elements(query), aligned_elements(key, value)
    key_factor, key_scale, key_strides, key_given = scale_arguments(problem.key_scale, lse)
    value_factor, value_scale, value_strides, value_given = scale_arguments(problem.value_scale, lse)
    pairs = query.element_size() == 2 and key.dtype == torch.uint8 and _columns(query) >= 2 * MIN_COLUMNS
    pairs = (
        pairs and kv_vector > 1 and query.shape[2] % 2 == 0 and all(stride % 2 == 0 for stride in value.stride()[:-1])
    )
    slopes, sinks = problem.alibi_slopes, problem.sinks
    cap = None if problem.soft_cap is None else float(problem.soft_cap)
    longest = problem.block_table.shape[1] * key.shape[1] + query.shape[0]  # no window of more keys hides one
    # In base 2; a soft cap is put in front of it.
    scale = float(problem.scale) * key_factor * (1.0 if cap else LOG2_E)
    strides = {"qs": (query.stride(), q_vector), "ks": (key.stride(), kv_vector), "vs": (value.stride(), kv_vector)}
    strides |= {"kss": (key_strides, 1), "vss": (value_strides, 1), "ts": (problem.block_table.stride(), 1)}
    return {
        "query": query,
        "key_cache": key,
        "value_cache": pairs_of(value) if pairs else value,
        "block_table": problem.block_table,
        "seq_lens": problem.seq_lens,
        "query_start": problem.query_start,
        "alibi_slopes": lse if slopes is None else slopes,
        "sinks": lse if sinks is None else sinks,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "out": out,
        "lse": lse,
        **dict(zip(("part_sum", "part_max", "part_denominator"), parts, strict=True)),
        "factor": scale,
        "cap_factor": 2 * LOG2_E / cap if cap else 0.0,
        "cap": cap * LOG2_E if cap else 0.0,
        "value_factor": value_factor,
        "window": min(int(problem.window or 1), longest),
        "block_size": key.shape[1],
        "group": query.shape[1] // key.shape[2],
        "num_seqs": problem.seq_lens.shape[0],
        "num_kv_heads": key.shape[2],
        "row_tiles": grid.row_tiles,
        "num_splits": grid.num_splits,
        "by_token": int(grid.by_token),
        **splitting,
        **{f"{name}{i}": s // unit for name, (sizes, unit) in strides.items() for i, s in enumerate(sizes)},
        "ls0": problem.seq_lens.stride(0),
        "ss0": problem.query_start.stride(0),
        "as0": 0 if slopes is None else slopes.stride(0),
        "sinks0": 0 if sinks is None else sinks.stride(0),
        "HEAD_SIZE": query.shape[2],
        "Q_VECTOR": q_vector,
        "KV_VECTOR": kv_vector,
        "CAUSAL": bool(problem.causal),
        "WINDOW": problem.window is not None,
        "CAP": cap is not None,
        "ALIBI": slopes is not None,
        "SINKS": sinks is not None,
        "FORMAT": FORMATS.get(problem.key_cache.dtype, 0),
        "PAIRS": pairs,
        "KEY_SCALE": key_given,
        "VALUE_SCALE": value_given,
    }


def rejects(problem: PagedAttention) -> str | None:
    """Why a host problem is not supported; None when it is: every valid one."""
    return None


def variants(problem: PagedAttention) -> list[dict[str, Any]]:
    """Splits and tiles small enough that a test's little problem crosses their edges."""
    return [
        {"split": 16, "tile": 16},
        {"split": 32, "tile": 16, "num_stages": 2, "split_queries": 1, "rows": 16},
        {"split": 32, "max_splits": 3, "tile": 32, "num_warps": 2},
    ]
