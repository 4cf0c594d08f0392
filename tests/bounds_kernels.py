"""Attention in float32 in the orders of adding up that lose most, all of them right; and two kernels that lose more."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy_kernels import Attention

from pagebench.reference.dtypes import FLOAT16, FLOAT32, Array
from pagebench.reference.paged_attention import PagedAttention


def chain(terms: Array) -> Array:
    """The sum over the first axis, one after the other, in the terms' own dtype."""
    return np.add.accumulate(terms, axis=0, dtype=terms.dtype)[-1]


class Sequential(Attention):
    """Two passes over all keys: the maximum, then one sum of plain additions."""

    dtype: Any = FLOAT32

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        return [{}]

    def paged_attention(self, p: PagedAttention, split: int = 2**30) -> tuple[Array, Array | None]:
        return super().paged_attention(p, split)

    def partial(self, p: PagedAttention, seq: int, keys: Array, i: int) -> Array:
        score = np.where(self.mask(p, seq, keys)[:, None], self.scores(p, seq, keys), -np.inf).astype(FLOAT32)
        top = score.max(axis=2, initial=-np.inf)
        weight = self.exp(score - np.where(np.isinf(top), 0, top)[..., None])
        value = self.load(p, seq, keys, p.value_cache, p.value_scale)
        parts = np.zeros((*top.shape, p.head_size + 2), FLOAT32)
        parts[..., -2] = top
        for row, head in np.ndindex(*top.shape):
            own = weight[row, head][self.order(weight[row, head])]
            terms = own[:, None] * value[self.order(weight[row, head]), head]
            parts[row, head, :-2] = chain(terms.astype(self.dtype))
            parts[row, head, -1] = chain(own)
        return parts

    def order(self, weight: Array) -> Array:
        return np.arange(weight.size)


class Descending(Sequential):
    """The largest weights first, so that every later addition rounds a large sum."""

    def order(self, weight: Array) -> Array:
        return np.argsort(-weight, kind="stable")


class Online(Sequential):
    """One pass, one key after the other, the smallest scores first: every key is a new maximum."""

    def partial(self, p: PagedAttention, seq: int, keys: Array, i: int) -> Array:
        score = np.where(self.mask(p, seq, keys)[:, None], self.scores(p, seq, keys), -np.inf).astype(FLOAT32)
        value = self.load(p, seq, keys, p.value_cache, p.value_scale)
        order = np.argsort(score, axis=2, kind="stable")
        score = np.take_along_axis(score, order, 2)
        heads = np.arange(p.num_query_heads)[None]
        parts = np.zeros((*score.shape[:2], p.head_size + 2), FLOAT32)
        parts[..., -2] = -np.inf
        for key in range(score.shape[2]):
            top = np.maximum(parts[..., -2], score[..., key])
            shift = np.where(np.isinf(top), np.float32(0), top)
            factor, weight = self.exp(parts[..., -2] - shift), self.exp(score[..., key] - shift)
            parts[..., -1] = parts[..., -1] * factor + weight
            parts[..., :-2] = parts[..., :-2] * factor[..., None] + weight[..., None] * value[order[..., key], heads]
            parts[..., -2] = top
        return parts


class ScoresInHalf(Attention):
    """Wrong: scores kept in float16."""

    def dot(self, query: Array, key: Array) -> Array:
        return super().dot(query, key).astype(FLOAT16).astype(FLOAT32)


class AccumulatedInBfloat16(Sequential):
    """Wrong: weighted values added up in bfloat16."""

    dtype = np.dtype(ml_dtypes.bfloat16)
