"""Merging two partial results of attention in Triton, elementwise.

What it computes: per row and head lse = log(exp(lse_a) + exp(lse_b)) and out, the mean of out_a and out_b with the
weights exp(lse_a - lse) and exp(lse_b - lse). Layout: outs [num_tokens, num_heads, head_size], lses [num_tokens,
num_heads], all but the results of any strides; a program takes a tile of rows (token, head) and columns. A side whose
lse is -inf is not read, and the other comes back as the bits it is.

Traffic: each state read once and the result written once, in 16-byte accesses where the layout allows; 8 KB of each
side on their way per program.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from pagebench.kernels.triton_arrays import numpy_dtype, vector_elements
from pagebench.reference.dtypes import FLOAT32
from pagebench.reference.merge_states import MergeStates
from pagebench.reference.validation import require_option

TILE_BYTES = 8192  # of each side per program: 64 bytes, four accesses, per thread
MAX_COLUMNS = 512

_UNSPECIALISED = ("num_rows", "num_heads", *(f"{name}s{i}" for name in "ab" for i in range(3)))
_UNSPECIALISED = (*_UNSPECIALISED, *(f"{name}_ls{i}" for name in "ab" for i in range(2)))


@triton.jit(do_not_specialize=_UNSPECIALISED)
def merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows,
    num_heads,
    as0,
    as1,
    as2,
    bs0,
    bs1,
    bs2,
    a_ls0,
    a_ls1,
    b_ls0,
    b_ls1,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < num_rows
    token, head = row // num_heads, row % num_heads
    log_a = tl.load(lse_a + token * a_ls0 + head * a_ls1, mask=real, other=float("-inf"))
    log_b = tl.load(lse_b + token * b_ls0 + head * b_ls1, mask=real, other=float("-inf"))
    no_a, no_b = log_a == float("-inf"), log_b == float("-inf")
    top = tl.maximum(log_a, log_b)
    shift = tl.where(no_a & no_b, 0.0, top)
    weight_a, weight_b = tl.exp(log_a - shift), tl.exp(log_b - shift)
    total = weight_a + weight_b
    inverse = tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total))
    log = tl.where(no_a, log_b, tl.where(no_b, log_a, top + tl.log(total)))
    tl.store(lse + row, log, mask=real & (tl.program_id(1) == 0))

    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < HEAD_SIZE)[None, :]
    # Strides come in units of VECTOR elements, so that the compiler knows how far accesses are aligned.
    a_row, b_row = (token * as0 + head * as1) * VECTOR, (token * bs0 + head * bs1) * VECTOR
    a_d = d if VECTOR > 1 else d.to(tl.int64) * as2
    b_d = d if VECTOR > 1 else d.to(tl.int64) * bs2
    a = tl.load(out_a + a_row[:, None] + a_d[None, :], mask=(real & (log_a > float("-inf")))[:, None] & inside, other=0)
    b = tl.load(out_b + b_row[:, None] + b_d[None, :], mask=(real & (log_b > float("-inf")))[:, None] & inside, other=0)
    mean = a.to(tl.float32) * (weight_a * inverse)[:, None] + b.to(tl.float32) * (weight_b * inverse)[:, None]
    merged = tl.where(no_a[:, None], b, tl.where(no_b[:, None], a, mean.to(a.dtype)))
    tl.store(out + row[:, None] * HEAD_SIZE + d[None, :], merged, mask=real[:, None] & inside)


def merge_states(
    problem: MergeStates,
    empty: Callable[[tuple[int, ...], Any], Any],
    *,
    columns: int | None = None,
    tile_bytes: int = TILE_BYTES,
    num_warps: int = 4,
) -> tuple[Any, Any]:
    """(out like out_a, lse float32 [num_tokens, num_heads]) of a problem with device arrays.

    `empty(shape, dtype)` makes the outputs. columns: head elements per program, a power of two; tile_bytes: of each
    side per program, a power of two; num_warps: a power of two. Raises ValueError for others.
    """
    if columns is not None:
        require_option("columns", columns, 1, MAX_COLUMNS, power_of_two=True)
    require_option("tile_bytes", tile_bytes, 16, 8 * TILE_BYTES, power_of_two=True)
    require_option("num_warps", num_warps, 1, 32, power_of_two=True)
    num_tokens, num_heads, head_size = problem.out_a.shape
    out = empty((num_tokens, num_heads, head_size), numpy_dtype(problem.out_a))
    lse = empty((num_tokens, num_heads), FLOAT32)
    if num_tokens * num_heads == 0:
        return out, lse
    vector = min(vector_elements(problem.out_a), vector_elements(problem.out_b))
    columns = columns or min(MAX_COLUMNS, triton.next_power_of_2(head_size))
    rows = max(1, tile_bytes // (columns * problem.out_a.element_size()))
    grid = (triton.cdiv(num_tokens * num_heads, rows), triton.cdiv(head_size, columns))
    merge_kernel[grid](
        problem.out_a,
        problem.lse_a,
        problem.out_b,
        problem.lse_b,
        out,
        lse,
        num_tokens * num_heads,
        num_heads,
        *(stride // vector for stride in (*problem.out_a.stride(), *problem.out_b.stride())),
        *problem.lse_a.stride(),
        *problem.lse_b.stride(),
        HEAD_SIZE=head_size,
        ROWS=rows,
        COLUMNS=columns,
        VECTOR=vector,
        num_warps=num_warps,
    )
    return out, lse


def rejects(problem: MergeStates) -> str | None:
    """Why a host problem is not supported; None when it is: every valid one."""
    return None


def variants(problem: MergeStates) -> list[dict[str, Any]]:
    """Tiles small enough that a test's little problem crosses their edges."""
    return [{"columns": 16, "tile_bytes": 64}, {"tile_bytes": 256, "num_warps": 1}]
