"""How far a correct kernel's result may lie from the float64 reference, per element; and the comparison that uses it.

The model. u = 2^-24 is the unit roundoff of float32, u_q that of the query's dtype. A kernel may
  (1) round K and V to the query's dtype (only quantised caches change: u_k = u_q relative per element, else 0),
  (2) form each score in float32, in any order, in base e or 2,
  (3) take exp of the difference to any running maximum, and rescale by exp of the differences of the maxima, a term
      RESCALINGS = 2^10 times at most: whoever meets more new maxima looks for them by the tile,
  (4) round each weight to the query's dtype before multiplying it with V (u_p = u_q, 0 for float32),
  (5) add up the weights and the weighted values in float32, in any order, tiles and split, also one after the other;
      no term goes through more than LONGEST = 2^14 additions: whoever has more keys than that adds them up in parts,
  (6) divide, and round the result to the query's dtype, to an infinity where that does not hold it.
An addition rounds to nearest, u, for a float32 query. Tensor cores cut off instead what is shifted out of the sum:
u_s = 2 u for a 16-bit query.
Nothing here is a probability: the bound holds also where all roundings go one way, as when equal numbers are added up.

Sums. Adding A and B loses at most min(u_s (A + B), A, B) in magnitudes, as A and B are numbers that float32 holds.
Adding up x_1 >= x_2 >= ... >= 0 in any order therefore loses at most
  S(x) = sum over j > 1 of min(u_s (x_1 + ... + x_j), x_j),
which is u_s sum_j (n_b - j) x_j over the n_b largest, and the rest whole: an addition of which both sides hold some of
the n_b costs u_s of both, any other at most what the rest of it holds. The longest chain, the largest terms first,
costs most. For n equal terms S = u_s n / 2 of their sum; keys of a weight below u cost no more than they add.

Scores. |ds| <= (head_size u_s + u_k + 4 u) dot + 3 u |bias| + u |s| + min(4 u cap, 8 u dot), dot = |scale| sum |q||k|,
for the dot product in any order, (1), scaling by at most three factors and the change of base, ALiBi and its addition,
tanh (right to 4 u of 1, and to 8 u of itself). A sink's logit changes its base: ds = 2 u |sink|.

Weights. The differences of the maxima on the way from s_j to the largest, m, add up to m - s_j: their roundings and the
change of base add 3 u |s_j - m|. exp is right to two units in the last place, 4 u, once for the weight and once per
rescaling. Each rescaling goes to a larger maximum, which is the score of some key (or the sink): weight j meets at most
r_j, the number of keys whose score may be larger when it is rounded, up to RESCALINGS. In the weighted sum and in the
denominator alike, p_j carries a factor e^t with
  |t| <= t_j = |ds_j| + u (3 |s_j - m| + 4 + 4 r_j),     e_j = expm1(t_j),
and in each of the two r_j further roundings of the products of the rescaling.

Results, with w_j = p_j / sum p, the sink among them as a key of value 0, and E = sum w_j e_j:
  lse: |dlse| <= log(1 + E) + S(w) + sum w_j r_j u + 3 u |m| + 4 u (1 + |lse - m|) + u |lse|,
       for log, the change of base and the addition of m. The first is exact: log sum w e^t is at most log(1 + E), and
       at least -sum w_j t_j (Jensen). Where float64 does not hold E, since scores are beyond 1e8, it is
       at most log(keys + 1) + max log(w_j e^t_j).
  out: what both sums carry moves the weighted mean, sum w e^t (v - out) / sum w e^t, and errors that all keys share
       cancel. So
       |dout| <= min(sum w_j e_j |v_j - out| / (1 - E), max |v_j - out|)                       (2), (3)
             + sum w_j |v_j| (u_p + u_k + 4 u + r_j u) + N                                     (4), (1), products, (5)
             + |out| (S(w) + sum w_j r_j u + 4 u)                                              (5), (6)
             + sum |v_j| (eta_q + f) / P + keys f c + u_out |out| + eta_out,                   u_out = u_q, (6)
       N = min(S(w) max |v_j|, u_s n_b sum w_j |v_j| + sum of the rest's w_j |v_j|) for the sum of the weighted values,
       of which n_b have weights above u. The first sum is taken as sqrt(sum w e sum w e (v - out)^2), which is no
       smaller (Cauchy and Schwarz).
The 4 u of the products are for p v, for the scales of V and their change of unit; that of |out| for the reciprocal and
its product. The eta are what is lost below the normal range: a weight is at most 1 when it is rounded, relative to a
maximum so far, so a small one loses up to half the smallest subnormal of the query's dtype (eta_q = 2^-25 in float16;
none where (4) is none), and eta_out is the same for the result. P >= 1 is the denominator relative to the overall
maximum. f = 2^-126 is what a float32 unit that flushes subnormals loses, in exp and in each product.
c is 1, or where slots have value scales, the largest code: a weight may be multiplied with such a scale before a code.
First-order terms are multiplied by 1.01 to cover their products.
"""

import math
from typing import Any

import numpy as np

from pagebench.reference import paged_attention as attention
from pagebench.reference.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    QUANTISED_DTYPES,
    Array,
    half_smallest_subnormal,
    largest_code,
    round_to,
    to_float64,
    unit_roundoff,
)

U = 2.0**-24
LONGEST = 2**14  # additions that a term goes through
RESCALINGS = 2**10  # of a term
CONFIDENCE = 8.0
SECOND_ORDER = 1.01
FLUSHED = 2.0**-126  # the smallest normal float32
LARGEST_EXPONENT = 700.0  # of exp in float64
AT_A_TIME = 2**21  # scores that are looked at together


def accumulation(terms: int | Array) -> Any:
    """Relative error, of the sum of magnitudes, of adding `terms` float32 numbers that have little in common.

    The smaller of the worst case, one unit per addition, and 8 sqrt(terms): roundings close to independent exceed
    c sqrt(m) u with probability below 2 exp(-c^2 / 2) (Higham and Mary, "A new approach to probabilistic rounding error
    analysis", SIAM J. Sci. Comput. 41, 2019, thm 2.4), here below 1e-13. Not for equal terms, whose roundings all go
    one way.
    """
    return U * np.minimum(np.maximum(terms, 1), CONFIDENCE * np.sqrt(np.maximum(terms, 1)))


def paged_attention(problem: attention.PagedAttention) -> tuple[Array, Array]:
    """(bound of out, bound of lse), float64, shaped like the results of `paged_attention.paged_attention`."""
    out_bound = np.zeros(problem.query.shape)
    lse_bound = np.zeros(problem.query.shape[:2])
    for part in attention.sequences(problem):
        heads, rows, keys = part.scores.shape
        some = problem.group * max(1, AT_A_TIME // max(problem.group * rows * keys, 1))
        for first in range(0, heads, some):
            errors = _Errors(problem, part, slice(first, first + some))
            out_bound[part.rows, first : first + some] = errors.of_out().swapaxes(0, 1)
            lse_bound[part.rows, first : first + some] = errors.of_lse().T
    return out_bound, lse_bound


class _Errors:
    """Heads of whole groups of one sequence; arrays are [heads, rows, keys] or [heads, rows] but for the values.

    Names are those of the docstring.
    """

    def __init__(self, problem: attention.PagedAttention, part: attention.Scores, heads: slice) -> None:
        self.dtype = problem.query.dtype
        self.u_q = unit_roundoff(self.dtype)
        self.u_p = 0.0 if self.dtype == FLOAT32 else self.u_q
        self.u_s = U if self.dtype == FLOAT32 else 2 * U
        self.u_k = self.u_q if problem.key_cache.dtype in QUANTISED_DTYPES else 0.0
        self.group = problem.group
        self.code = 1.0  # c
        if np.ndim(problem.value_scale) == 3:
            self.code = largest_code(problem.value_cache.dtype)
        self.values = np.ascontiguousarray(part.values[:, heads][:, :: self.group].swapaxes(0, 1))
        self.size = abs(self.values)  # [num_kv_heads, keys, head_size], as the values
        self.scores = part.scores[heads]
        self.seen = np.isfinite(self.scores)
        self.sinks = None if problem.sinks is None else problem.sinks[heads].astype(np.float64)
        self.weights, self.lse = attention.softmax(self.scores, self.sinks)
        self.some = np.isfinite(self.lse)  # where a key or a sink is seen
        sinks = np.full(self.scores.shape[:1], -np.inf) if self.sinks is None else self.sinks
        top = np.maximum(self.scores.max(axis=2, initial=-np.inf), sinks[:, None])
        self.top = np.where(np.isfinite(top), top, 0.0)
        self.safe_lse = np.where(self.some, self.lse, 0.0)
        self.sink_weight = np.exp(sinks[:, None] - self.safe_lse)
        self._weigh_errors(problem, part, heads)

    def _weigh_errors(self, problem: attention.PagedAttention, part: attention.Scores, heads: slice) -> None:
        scores = np.where(self.seen, self.scores, 0.0)
        of_score = (self.u_s * problem.head_size + self.u_k + 4 * U) * part.dot[heads]
        of_score += U * (3 * part.bias[heads] + abs(scores))
        if problem.soft_cap is not None:
            of_score += np.minimum(4 * U * problem.soft_cap, 8 * U * part.dot[heads])
        self.rescalings = self._rescalings(of_score)
        exponent = of_score + U * (3 * abs(scores - self.top[..., None]) + 4 + 4 * self.rescalings)
        log_weights = self.scores - self.safe_lse[..., None]
        self.shared, grown = _grown(self.weights, log_weights, exponent)  # w_j e_j
        self.grown = grown.max(axis=2, initial=-np.inf)  # max log(w_j e^t_j)
        self.rescaled = (self.weights * self.rescalings).sum(axis=2)  # sum w_j r_j
        self.sink_shared = np.zeros(self.top.shape)
        if self.sinks is not None:
            sinks = self.sinks[:, None]
            larger = (self.scores + of_score > sinks[..., None] - 2 * U * abs(sinks[..., None])).sum(axis=2)
            rescalings = np.minimum(larger, RESCALINGS)
            exponent = U * (2 * abs(sinks) + 3 * (self.top - sinks) + 4 + 4 * rescalings)
            self.sink_shared, grown = _grown(self.sink_weight, sinks - self.safe_lse, exponent)
            self.grown = np.maximum(self.grown, grown)
            self.rescaled += self.sink_weight * rescalings
        self.mean = self.shared.sum(axis=2) + self.sink_shared  # E

    def _rescalings(self, of_score: Array) -> Array:
        """r_j: how many scores, the sink among them, may be larger, each as far off as its error lets it be."""
        keys = self.scores.shape[2]
        both = np.concatenate([self.scores + of_score, np.where(self.seen, self.scores - of_score, np.inf)], axis=2)
        order = np.argsort(both, axis=2, kind="stable")  # of equal ones the upper ends first: they are not larger
        not_larger = np.empty(both.shape, np.int64)
        np.put_along_axis(not_larger, order, np.cumsum(order < keys, axis=2), axis=2)
        larger = keys - not_larger[..., keys:] - (of_score > 0)  # a key is not larger than itself
        if self.sinks is not None:
            sinks = self.sinks[:, None, None]
            larger += sinks + 2 * U * abs(sinks) > self.scores - of_score
        counts: Array = np.clip(larger, 0, RESCALINGS)
        return counts

    def _any_order(self, weights: Array) -> Array:
        """S of the docstring, [heads, rows], for weights that add up to at most 1."""
        ordered = -np.sort(-weights, axis=2)
        lost = np.minimum(self.u_s * np.cumsum(ordered, axis=2), ordered)[..., 1:].sum(axis=2)
        most: Array = np.minimum(lost, self.u_s * LONGEST)
        return most

    def of_out(self) -> Array:
        """Bound of out, [heads, rows, head_size]."""
        out = self._sum(self.weights, self.values)
        own = self.weights * (self.u_p + self.u_k + U * (4 + self.rescalings)) + self._lost_weight()
        keys = np.maximum(self.seen.sum(axis=2), 1)[..., None]
        lowest, highest = self._extremes()
        error = self._sum(own, self.size) + keys * FLUSHED * self.code
        error += np.minimum(self._moved(out), np.maximum(highest - out, out - lowest))
        error += self._of_weighted_sum(np.maximum(abs(lowest), abs(highest)))
        error += abs(out) * ((self._of_denominator() + U * (self.rescaled + 4))[..., None] + self.u_q)
        bound: Array = SECOND_ORDER * error + half_smallest_subnormal(self.dtype)
        return bound

    def of_lse(self) -> Array:
        """Bound of lse, [heads, rows]; 0 where nothing is seen."""
        log = self.safe_lse - self.top
        steps = U * (self.rescaled + 3 * abs(self.top) + 4 * (1 + abs(log)) + abs(self.safe_lse))
        beyond = self.grown + math.log(self.scores.shape[2] + 1)  # of what float64 holds no exp
        of_weights = np.where(self.grown < LARGEST_EXPONENT, np.log1p(self.mean), beyond)
        error = of_weights + self._of_denominator() + steps
        return SECOND_ORDER * np.where(self.some, error, 0.0)

    def _sum(self, weights: Array, values: Array) -> Array:
        """sum over keys, [heads, rows, head_size]; each KV head's values serve its group."""
        heads, rows, keys = weights.shape
        of_groups = np.einsum("hrk,hkd->hrd", weights.reshape(values.shape[0], self.group * rows, keys), values)
        sums: Array = of_groups.reshape(heads, rows, values.shape[2])
        return sums

    def _of_denominator(self) -> Array:
        return self._any_order(np.concatenate([self.weights, self.sink_weight[..., None]], axis=2))

    def _moved(self, out: Array) -> Array:
        """What errors that both sums carry do to the mean, [heads, rows, head_size]."""
        # sum w e (v - out)^2, about a value of each column so that equal values cancel.
        centre = self.values[:, :1] if self.values.size else np.zeros((self.values.shape[0], 1, 1))
        values, mean = self.values - centre, out - np.repeat(centre, self.group, axis=0)
        total, keys = self.mean[..., None], self.shared.sum(axis=2)[..., None]
        lost = (values.shape[1] + 8) * 2.0**-52  # of these sums in float64
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            squares, middle = self._sum(self.shared, values**2), mean**2 * keys
            square = squares - 2 * mean * self._sum(self.shared, values) + middle
            square = np.maximum(square, 0.0) + lost * (squares + middle) + self.sink_shared[..., None] * out**2
            moved: Array = np.sqrt(total * square) / np.maximum(1 - total, 0.0)
        return np.where(total < 1, moved, np.inf)

    def _extremes(self) -> tuple[Array, Array]:
        """Smallest and largest value of the keys that a row sees, and the sink's 0: [heads, rows, head_size]."""
        shape = (self.values.shape[0], self.scores.shape[1], self.values.shape[2])
        lowest, highest = np.zeros(shape), np.zeros(shape)
        for row, seen in enumerate(self.seen[0]):  # alike in all heads
            if seen.any():
                values = self.values if seen.all() else self.values[:, seen]
                lowest[:, row], highest[:, row] = values.min(axis=1), values.max(axis=1)
        if self.sinks is not None:
            lowest, highest = np.minimum(lowest, 0.0), np.maximum(highest, 0.0)
        return np.repeat(lowest, self.group, axis=0), np.repeat(highest, self.group, axis=0)

    def _of_weighted_sum(self, largest: Array) -> Array:
        """N of the docstring, [heads, rows, head_size]."""
        many = self.weights > U
        count = np.minimum(many.sum(axis=2, keepdims=True), LONGEST)
        each = self.weights * (self.u_s * count + np.where(many, 0.0, 1.0))
        lost: Array = np.minimum(self._sum(each, self.size), largest * self._any_order(self.weights)[..., None])
        return lost

    def _lost_weight(self) -> Array:
        """(eta_q + f) / P of the docstring, [heads, rows, keys]; 0 where a key is masked."""
        eta = FLUSHED + (0.0 if self.dtype == FLOAT32 else half_smallest_subnormal(self.dtype))
        share = np.exp(np.where(self.some, self.top - self.safe_lse, 0.0))
        lost: Array = eta * np.where(self.seen, share[..., None], 0.0)
        return lost


def _grown(weight: Array, log_weight: Array, exponent: Array) -> tuple[Array, Array]:
    """(w (e^t - 1), or e^700 where that is more, and log(w e^t)) of a weight w and an exponent t >= 0."""
    log = log_weight + exponent
    exact = weight * np.expm1(np.minimum(exponent, LARGEST_EXPONENT))
    return np.where(exponent < LARGEST_EXPONENT, exact, np.exp(np.minimum(log, LARGEST_EXPONENT))), log


def assert_close(name: str, actual: Array, expected: Array, bound: Array) -> None:
    """Raise AssertionError unless |actual - expected| <= bound everywhere, with the worst element and its bound.

    An infinity is right where one is expected, or where actual is of 16 bits and what may be computed rounds to it
    there: expected to within its bound, less the rounding to the dtype, which the bound counts. NaN is never right
    where a number is expected, and a number never where NaN or an infinity is.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.size == 0:
        return
    if np.isnan(bound).any():
        raise AssertionError(f"{name}: the bound is NaN, which no result could exceed")
    got = to_float64(actual)
    limit = np.broadcast_to(bound, expected.shape)
    ratio = error_over_bound(got, expected, limit)
    if actual.dtype in (FLOAT16, BFLOAT16):
        computed = np.maximum(limit - unit_roundoff(actual.dtype) * abs(expected), 0.0)
        furthest = round_to(expected + np.copysign(computed, got), actual.dtype)
        ratio = np.where(np.isinf(got) & np.isfinite(expected) & (furthest == got), 0.0, ratio)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    if ratio[worst] > 1.0:
        where = [int(i) for i in worst]
        count = int((ratio > 1.0).sum())
        raise AssertionError(
            f"{name}: {count} of {ratio.size} elements are wrong, the worst at {where}: got {got[worst]!r}, "
            f"expected {expected[worst]!r} within {float(limit[worst]):.3g} "
            f"(error is {ratio[worst]:.3g} times the bound)"
        )


def error_over_bound(got: Array, expected: Array, bound: Array) -> Array:
    """|got - expected| / bound, float64; infinite where one of them is not finite and they differ."""
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
