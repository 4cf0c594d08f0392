# ruff: noqa: N803  # a kernel's constexpr parameters are capitals, as everywhere in Triton
"""The sum of each sequence's rows through a block table, a program per block, and then the sum of the parts."""

import triton
import triton.language as tl


@triton.jit
def sum_kernel(
    values, table, lens, parts, block_stride, row_stride, num_splits, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    seq, split = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    length = tl.load(lens + seq)
    if split * BLOCK < length:
        block = tl.load(table + seq * num_splits + split).to(tl.int64)
        live = split * BLOCK + row < length
        at = values + block * block_stride + row[:, None] * row_stride + column[None, :]
        rows = tl.load(at, mask=live[:, None], other=0).to(tl.float32)
        part = seq * num_splits + split
        tl.store(parts + part * WIDTH + column, tl.sum(rows, axis=0))


@triton.jit
def combine_kernel(lens, parts, out, num_splits, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    seq = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for split in range(tl.cdiv(tl.load(lens + seq), BLOCK)):
        total += tl.load(parts + (seq * num_splits + split) * WIDTH + column)
    tl.store(out + seq * WIDTH + column, total)
