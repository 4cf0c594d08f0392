"""A provider in about 30 lines of NumPy, without any of the optional methods: the example to start from."""

import numpy as np


class Provider:
    name = "numpy"

    def unavailable(self):
        return None

    def rejects(self, problem):
        if problem.op == "paged_attention":
            extra = ("window", "soft_cap", "alibi_slopes", "sinks", "key_scale", "value_scale")
            found = [name for name in extra if getattr(problem, name) is not None]
            found += [] if problem.causal else ["causal=False"]
            found += [] if problem.key_cache.dtype == problem.query.dtype else ["quantised cache"]
            return f"not supported: {', '.join(found)}" if found else None
        return "only q8_0" if problem.op == "dequantize" and problem.format != "q8_0" else None

    def to_device(self, array):
        return array

    def to_host(self, array):
        return array

    def synchronize(self):
        pass

    def paged_attention(self, problem):
        out, lse = np.zeros_like(problem.query), np.full(problem.query.shape[:2], -np.inf, np.float32)
        for seq, length in enumerate(problem.seq_lens):
            first, stop = problem.query_start[seq : seq + 2]
            if first == stop:
                continue  # its table entries may be anything
            blocks = problem.block_table[seq, : -(-length // problem.block_size)]
            key, value = (
                cache[blocks].reshape(-1, *cache.shape[2:])[:length]
                for cache in (problem.key_cache, problem.value_cache)
            )
            for row in range(first, stop):
                seen = max(length - (stop - row) + 1, 0)  # the last row sits at the last key
                for head in range(problem.num_query_heads if seen else 0):
                    k, v = (x[:seen, head // problem.group].astype(np.float32) for x in (key, value))
                    score = k @ problem.query[row, head].astype(np.float32) * np.float32(problem.scale)
                    weight = np.exp(score - score.max())
                    out[row, head] = weight @ v / weight.sum()
                    lse[row, head] = score.max() + np.log(weight.sum())
        return out, lse

    def copy_blocks(self, problem):
        src, dst = problem.pairs.T
        for cache in problem.caches:
            cache[dst] = cache[src]  # NumPy reads everything before it writes

    def dequantize(self, problem):
        blocks = problem.packed["blocks"].reshape(problem.shape[0], -1, 34)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        with np.errstate(all="ignore"):
            return (blocks[..., 2:].view(np.int8) * scale).reshape(problem.shape).astype(problem.dtype)
