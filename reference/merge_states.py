"""Merging two partial results of attention over disjoint keys into one: the problem, its meaning, its error bound.

Meaning, per row and head, with weights w_a = exp(lse_a - lse), w_b = exp(lse_b - lse) that add up to 1:
lse = log(exp(lse_a) + exp(lse_b)) and out = w_a out_a + w_b out_b.

The bound. u = 2^-24 is the unit roundoff of float32, u_d that of the dtype of out, s_d half its smallest subnormal, d =
|lse_a - lse_b|. The larger side weighs 1 before the division, the other exp(-d): a kernel rounds the difference, may
change to base 2 (two roundings relative to d) and takes exp, two units, so that it carries the relative error
r = expm1(3 u d + 4 u). Their sum adds w r, w the share of the smaller side, and a rounding; then come a reciprocal, two
products and a sum:
  out: |dout| <= sum_i w_i |out_i| (r_i + w r + 8 u) + f sum_i |out_i| + u_d |out| + s_d, r_i = 0 for the larger side,
  lse: |dlse| <= w r + 4 u (1 + |lse|), for log and the sum,
where f = 2^-126 is lost by units that flush subnormals. A side whose lse is -inf contributes nothing, whatever its out
holds, and the other comes back bit for bit. First-order terms are multiplied by 1.01 to cover their products.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagebench.reference.dtypes import (
    COMPUTE_DTYPES,
    FLOAT32,
    Array,
    half_smallest_subnormal,
    to_float64,
    unit_roundoff,
)
from pagebench.reference.error_bounds import FLUSHED, LARGEST_EXPONENT, SECOND_ORDER, U
from pagebench.reference.problem import Problem
from pagebench.reference.validation import require, require_all, require_array


@dataclass(frozen=True, slots=True, eq=False)
class MergeStates(Problem):
    """out and lse over the keys of both sides.

    Shapes: out_a, out_b [num_tokens, num_heads, head_size] of one of float16, bfloat16 and float32; lse_a, lse_b
    float32 [num_tokens, num_heads], natural logarithms; any may be strided views. Raises ValueError for other shapes
    and dtypes, and for an lse that holds +inf or NaN.
    """

    out_a: Any
    lse_a: Any
    out_b: Any
    lse_b: Any

    op: ClassVar[str] = "merge_states"

    @property
    def num_tokens(self) -> int:
        return int(self.out_a.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.out_a.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.out_a.shape[2])

    def validate(self) -> None:
        require_array("out_a", self.out_a, dtypes=COMPUTE_DTYPES, ndim=3)
        require(self.head_size >= 1, "out_a", "have a head_size >= 1", self.out_a.shape)
        require_array("out_b", self.out_b, dtypes=(self.out_a.dtype,), shape=self.out_a.shape)
        for name in ("lse_a", "lse_b"):
            lse = getattr(self, name)
            require_array(name, lse, dtypes=(FLOAT32,), shape=self.out_a.shape[:2])
            require_all(name, lse, lse < np.inf, "be finite or -inf")

    def bytes_moved(self) -> int:
        """Both states in, of a side whose lse is -inf only that; the merged state out."""
        rows = int((self.lse_a > -np.inf).sum()) + int((self.lse_b > -np.inf).sum())
        per_row = self.head_size * int(self.out_a.dtype.itemsize)
        return rows * per_row + int(self.out_a.size) * int(self.out_a.dtype.itemsize) + 3 * 4 * int(self.lse_a.size)

    def flops(self) -> int:
        """Two products and a sum for each element of out."""
        return 3 * int(self.out_a.size)


def merge_states(problem: MergeStates) -> tuple[Array, Array]:
    """(out float64 like out_a, lse float64 [num_tokens, num_heads]); 0 and -inf where both lses are -inf."""
    lse_a, lse_b = problem.lse_a.astype(np.float64), problem.lse_b.astype(np.float64)
    larger = np.maximum(lse_a, lse_b)
    out, total = np.zeros(problem.out_a.shape), np.zeros(larger.shape)
    for side, own in ((problem.out_a, lse_a), (problem.out_b, lse_b)):
        there = own > -np.inf
        weight = np.exp(own[there] - larger[there])
        out[there] += weight[:, None] * to_float64(side[there])
        total[there] += weight
    out[total > 0] /= total[total > 0][:, None]
    return out, np.logaddexp(lse_a, lse_b)


def one_sided(problem: MergeStates) -> tuple[Array, Array, Array]:
    """(bool [num_tokens, num_heads], out, lse): where a side is empty, and what then comes back bit for bit."""
    no_a, no_b = np.isneginf(problem.lse_a), np.isneginf(problem.lse_b)
    out = np.where(no_a[..., None], problem.out_b, problem.out_a)
    out[no_a & no_b] = 0
    return no_a | no_b, out, np.where(no_a, problem.lse_b, problem.lse_a)


def bound(problem: MergeStates) -> tuple[Array, Array]:
    """(bound of out, bound of lse), float64, shaped like the results of `merge_states`; 0 where a side is empty."""
    out, lse = merge_states(problem)
    both = ~one_sided(problem)[0]
    lse_a, lse_b, safe = (np.where(both, x.astype(np.float64), 0.0) for x in (problem.lse_a, problem.lse_b, lse))
    relative = np.expm1(np.minimum(U * (3 * abs(lse_a - lse_b) + 4), LARGEST_EXPONENT))
    total = np.exp(np.minimum(lse_a, lse_b) - safe) * relative
    size = np.zeros(out.shape)
    for side, own, other in ((problem.out_a, lse_a, lse_b), (problem.out_b, lse_b, lse_a)):
        error = np.exp(own - safe) * (np.where(own < other, relative, 0.0) + total + 8 * U) + FLUSHED
        size += np.where(both, error, 0.0)[..., None] * np.where(both[..., None], abs(to_float64(side)), 0.0)
    dtype = problem.out_a.dtype
    size = SECOND_ORDER * (size + unit_roundoff(dtype) * abs(out)) + half_smallest_subnormal(dtype)
    log = SECOND_ORDER * (total + 4 * U * (1 + abs(safe)))
    return np.where(both[..., None], size, 0.0), np.where(both, log, 0.0)
