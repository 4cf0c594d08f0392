"""How far a correct kernel's result may lie from the float64 reference, per element; and the comparison that uses it.

The model. u = 2^-24 is the unit roundoff of float32, u_q that of the query's dtype. A kernel may
  (1) round K and V to the query's dtype (only quantised caches change: u_q relative per element),
  (2) form each score in float32, in any order, in base e or 2: each of the head_size products and sums rounds once,
      and scaling, soft cap, ALiBi and the change of base round a few times more,
  (3) take exp of the difference to any running maximum, and rescale by exp of maximum differences,
  (4) round each weight p to the query's dtype before multiplying it with V,
  (5) add up the weights and the weighted values in float32, in any order and any split,
  (6) divide, and round the result to the query's dtype.

Sums. Adding m terms in float32 has a relative error (of the sum of magnitudes) of at most (m - 1) u in the worst order.
Rounding errors are close to independent, and then exceed c sqrt(m) u with probability below 2 exp(-c^2 / 2)
(Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019, thm 2.4).
`accumulation(m)` is the smaller of the two with c = 8: 2 exp(-32) is below 1e-13 for each sum.

Scores. |ds| <= accumulation(head_size + 1) * |scale| sum |q||k|            (2), the dot product
             + u_k * |scale| sum |q||k|                                      (1), u_k = u_q for a quantised cache or 0
             + 4 u |s| + 2 u |bias| + 4 u cap                                (2), scaling, change of base, ALiBi, tanh
and exp of a rounded difference s - m to the maximum adds |s - m| u, exp itself two units. Each rescaling to a new
maximum rounds three times (its argument, exp, the product); there are fewer of them than keys, and the differences of
the maxima add up to at most s_max - s_min, so that their roundings add 2 |s - m| u. Weight p_j thus carries the
relative error
  e_j = expm1(|ds_j| + 3 u |s_j - m| + 8 u + 3 accumulation(keys)).

Results, with w_j = p_j / sum p:
  lse: |dlse| <= sum w_j e_j + accumulation(keys) + 4 u (1 + |lse|), the last for log, the base and the addition of m.
  out: |dout| <= sum w_j |v_j| (e_j + u_q + u_k + accumulation(keys)) + |out| (sum w_j e_j + accumulation(keys) + 4 u)
             + sum |v_j| (eta_q + f) / P + keys f + u_out |out| + eta_out,
where u_q is (4), u_k (1) for V, and u_out = u_q is (6). The eta are what is lost below the normal range: a weight is at
most 1 when it is rounded, relative to a maximum so far, so a small one loses up to half the smallest subnormal of the
query's dtype (eta_q = 2^-25 in float16; none where u_q is none), and eta_out is the same for the result. P >= 1 is the
denominator relative to the overall maximum. f = 2^-126 is what a float32 unit that flushes subnormals loses, in exp
and in each product.
First-order terms are multiplied by 1.01 to cover their products.
"""

from typing import Any

import numpy as np

from pagebench.reference import paged_attention as attention
from pagebench.reference.dtypes import (
    FLOAT32,
    QUANTISED_DTYPES,
    Array,
    half_smallest_subnormal,
    to_float64,
    unit_roundoff,
)

U = 2.0**-24
CONFIDENCE = 8.0
SECOND_ORDER = 1.01
FLUSHED = 2.0**-126  # the smallest normal float32


def accumulation(terms: int | Array) -> Any:
    """Relative error, of the sum of magnitudes, of adding `terms` float32 numbers in any order."""
    return U * np.minimum(np.maximum(terms, 1), CONFIDENCE * np.sqrt(np.maximum(terms, 1)))


def paged_attention(problem: attention.PagedAttention) -> tuple[Array, Array]:
    """(bound of out, bound of lse), float64, shaped like the results of `paged_attention.paged_attention`."""
    out_bound = np.zeros(problem.query.shape)
    lse_bound = np.zeros(problem.query.shape[:2])
    for part in attention.sequences(problem):
        out_bound[part.rows], lse_bound[part.rows] = _sequence_bound(problem, part)
    return out_bound, lse_bound


def _sequence_bound(problem: attention.PagedAttention, part: attention.Scores) -> tuple[Array, Array]:
    u_q = unit_roundoff(problem.query.dtype)
    u_p = 0.0 if problem.query.dtype == FLOAT32 else u_q  # a float32 weight is not rounded again
    u_k = u_q if problem.key_cache.dtype in QUANTISED_DTYPES else 0.0
    weights, lse = attention.softmax(part.scores, problem.sinks)
    keys = np.maximum(np.isfinite(part.scores).sum(axis=2), 1)  # [heads, rows]
    relative = _weight_error(problem, part, u_k)
    sums = accumulation(keys)
    lost = _lost_weight(problem, part, lse)
    mean = np.einsum("hrk,hrk->hr", weights, relative)
    error = weights * (relative + u_p + u_k + sums[..., None]) + lost
    magnitude = np.einsum("hrk,khd->rhd", error, abs(part.values)) + (keys * FLUSHED).T[..., None]
    size = abs(np.einsum("hrk,khd->rhd", weights, part.values))
    out = magnitude + size * ((mean + sums + 4 * U).T[..., None] + u_q)
    finite = np.where(np.isfinite(lse), lse, 0.0)
    log = np.where(np.isfinite(lse), mean + sums + 4 * U * (1 + abs(finite)), 0.0)
    return SECOND_ORDER * out + half_smallest_subnormal(problem.query.dtype), (SECOND_ORDER * log).T


def _lost_weight(problem: attention.PagedAttention, part: attention.Scores, lse: Array) -> Array:
    """(eta_q + f) / P of the docstring, [heads, rows, keys]; 0 where a key is masked."""
    eta = FLUSHED + (0.0 if problem.query.dtype == FLOAT32 else half_smallest_subnormal(problem.query.dtype))
    top = part.scores.max(axis=2, initial=-np.inf)
    if problem.sinks is not None:
        top = np.maximum(top, problem.sinks[:, None])
    share = np.exp(np.where(np.isfinite(lse), top - np.where(np.isfinite(lse), lse, 0.0), 0.0))
    return eta * np.where(np.isfinite(part.scores), share[..., None], 0.0)


def _weight_error(problem: attention.PagedAttention, part: attention.Scores, u_k: float) -> Array:
    """e_j of the docstring, [heads, rows, keys]; 0 where a key is masked."""
    seen = np.isfinite(part.scores)
    scores = np.where(seen, part.scores, 0.0)
    top = np.max(part.scores, axis=2, keepdims=True, initial=-np.inf)
    if problem.sinks is not None:
        top = np.maximum(top, problem.sinks[:, None, None])
    top = np.where(np.isfinite(top), top, 0.0)
    error = (accumulation(problem.head_size + 1) + u_k) * part.dot + U * (4 * abs(scores) + 2 * part.bias)
    if problem.soft_cap is not None:
        error += 4 * U * problem.soft_cap
    keys = np.maximum(seen.sum(axis=2, keepdims=True), 1)
    error += U * (3 * abs(scores - top) + 8) + 3 * accumulation(keys)
    return np.where(seen, np.expm1(np.minimum(error, 700.0)), 0.0)


def assert_close(name: str, actual: Array, expected: Array, bound: Array) -> None:
    """Raise AssertionError unless |actual - expected| <= bound everywhere, with the worst element and its bound.

    Infinities must be equal; NaN is never right where a number is expected, and a number never where NaN is.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.size == 0:
        return
    got = to_float64(actual)
    ratio = _error_over_bound(got, expected, np.broadcast_to(bound, expected.shape))
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    if ratio[worst] > 1.0:
        where = [int(i) for i in worst]
        count = int((ratio > 1.0).sum())
        raise AssertionError(
            f"{name}: {count} of {ratio.size} elements are wrong, the worst at {where}: got {got[worst]!r}, "
            f"expected {expected[worst]!r} within {float(np.broadcast_to(bound, expected.shape)[worst]):.3g} "
            f"(error is {ratio[worst]:.3g} times the bound)"
        )


def _error_over_bound(got: Array, expected: Array, bound: Array) -> Array:
    special = ~np.isfinite(got) | ~np.isfinite(expected)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(got == expected, 0.0, abs(got - expected) / bound)
    return np.where(special, np.where(same, 0.0, np.inf), ratio)


def assert_same_bits(name: str, actual: Array, expected: Array) -> None:
    """Raise AssertionError unless both have one shape and dtype and equal bits; any NaN equals any NaN."""
    from pagebench.reference.dtypes import as_bits

    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
    wrong = as_bits(actual) != as_bits(expected)
    if actual.dtype.kind not in "iub":
        with np.errstate(invalid="ignore"):  # a signalling NaN raises the flag when it is looked at
            wrong &= ~(np.isnan(actual) & np.isnan(expected))
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.size} elements differ, the first at {list(first)}: "
            f"got {actual[first]!r} (bits {int(as_bits(actual)[first]):#x}), "
            f"expected {expected[first]!r} (bits {int(as_bits(expected)[first]):#x})"
        )
