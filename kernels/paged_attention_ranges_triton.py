"""Which keys and which query rows a program of paged attention works on, in Triton, and how many programs that takes.

A sequence of at most `split_queries` queries is *short*: its keys are cut into splits, each of which has a program of
its own. The others are *long*: they have programs enough without. Row r of a KV head is query r // group with query
head r % group of the group, so that a tile of rows shares what it reads of K and V.

Whether a sequence is short, and where its splits end, depends on nothing but its own numbers of queries and keys: its
result has the same bits in any batch.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@triton.jit
def split_size(length, queries, window, split, max_splits, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """(first key that a query of a short sequence sees, keys per split, number of splits: 1 for an empty one)."""
    first = tl.maximum(length - queries - window + 1, 0) if WINDOW else 0
    keys = length - first
    size = tl.maximum(split, tl.cdiv(tl.cdiv(keys, max_splits), TILE) * TILE)
    return first, size, tl.maximum(tl.cdiv(keys, size), 1)


@triton.jit
def sequence_of(start, query_start, ss0, last_seq, group, ROWS: tl.constexpr, OWN: tl.constexpr):
    """The last sequence s <= last_seq with OWN * s + query_start[s] * group // ROWS <= start; 0 for a last_seq of 0."""
    low, above = 0, last_seq + 1
    while above - low > 1:
        middle = (low + above) // 2
        before = OWN * middle + tl.load(query_start + middle * ss0) * group // ROWS <= start
        low, above = tl.where(before, middle, low), tl.where(before, above, middle)
    return low


@triton.jit
def long_tile(tile, query_start, ss0, num_seqs, group, ROWS: tl.constexpr):
    """(sequence, tile of its rows) of a tile of the batch, when each sequence begins a tile of its own.

    Sequence s begins with tile s + query_start[s] * group // ROWS, which leaves room for a last, partial tile of each
    sequence before it; some sequences have a tile too many, which holds no row.
    """
    seq = sequence_of(tile, query_start, ss0, num_seqs - 1, group, ROWS, 1)
    return seq, tile - (tl.load(query_start + seq * ss0) * group // ROWS + seq)


@triton.jit
def short_tile(tile, query_start, ss0, num_seqs, group, row_tiles, ROWS: tl.constexpr):
    """(sequence, tile of its rows): the first `row_tiles` of each sequence, then what sequences have beyond those.

    What sequence s has beyond its first tiles begins at query_start[s] * group // ROWS, counted from the end of those.
    """
    beyond = tile - num_seqs * row_tiles
    # The search is over at once where it is not needed.
    seq = sequence_of(beyond, query_start, ss0, tl.where(beyond < 0, 0, num_seqs - 1), group, ROWS, 0)
    late_tile = beyond - tl.load(query_start + seq * ss0) * group // ROWS + row_tiles
    return tl.where(beyond < 0, tile // row_tiles, seq), tl.where(beyond < 0, tile % row_tiles, late_tile)


@triton.jit
def scratch_query(slot, query_start, ss0, num_seqs, split_queries, by_token):
    """(sequence, index of a query in it) of a row of scratch; the index may be too large unless `by_token`."""
    seq, index = slot // split_queries, slot % split_queries
    if by_token:
        # Nearly always token i is the one query of sequence i.
        guess = tl.minimum(slot, num_seqs - 1)
        right = (tl.load(query_start + guess * ss0) == slot) & (tl.load(query_start + (guess + 1) * ss0) > slot)
        seq = sequence_of(slot, query_start, ss0, tl.where(right, 0, num_seqs - 1), 1, 1, 0)
        seq = tl.where(right, guess, seq)
        index = slot - tl.load(query_start + seq * ss0)
    return seq, index


@triton.jit
def tile_keys(lowest, highest, start, stop, length, queries, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Of the keys [start, stop), those that one of the queries `lowest` to `highest` of a sequence sees."""
    if CAUSAL:
        stop = tl.minimum(stop, length - queries + highest + 1)
        if WINDOW:
            start = tl.maximum(start, length - queries + lowest - window + 1)
    return start, stop


@dataclass(frozen=True, slots=True)
class Grid:
    """What the launches for a batch must provide for, from the shapes of its arrays alone.

    row_tiles: tiles of rows that each sequence has at hand among the short_tiles; num_splits: of a short sequence, at
    most; long_tiles: tiles of rows of the long sequences, 0 where there cannot be any; scratch_tokens: rows of scratch,
    one for each token where `by_token`, else `split_queries` for each sequence.
    """

    row_tiles: int
    short_tiles: int
    long_tiles: int
    num_splits: int
    scratch_tokens: int
    by_token: bool

    @classmethod
    def of(cls, problem: Any, *, rows: int, long_rows: int, split: int, max_splits: int, split_queries: int) -> "Grid":
        num_tokens, num_heads, _ = problem.query.shape
        block_size, num_kv_heads = problem.key_cache.shape[1:3]
        num_seqs, group = problem.seq_lens.shape[0], num_heads // num_kv_heads
        queries = min(num_tokens, split_queries)  # of a short sequence
        keys = problem.block_table.shape[1] * block_size
        if problem.window is not None:
            keys = min(keys, queries + problem.window - 1)
        # With as many sequences as tokens nearly all have one query; the others find their further tiles by a search.
        decode = num_tokens <= num_seqs
        row_tiles = triton.cdiv((1 if decode else queries) * group, rows)
        by_token = num_tokens <= num_seqs * split_queries
        return cls(
            row_tiles=row_tiles,
            short_tiles=num_seqs * row_tiles + (num_tokens * group // rows if decode and queries > 1 else 0),
            long_tiles=num_seqs + num_tokens * group // long_rows if num_tokens > split_queries else 0,
            num_splits=max(1, min(max_splits, triton.cdiv(keys, split))),
            scratch_tokens=num_tokens if by_token else num_seqs * split_queries,
            by_token=by_token,
        )
