from my_engine import decode  # your kernel, taking torch tensors

from pagebench.kernels.torch_arrays import TorchArrays


class Mine(TorchArrays):
    name = "mine"

    def rejects(self, problem):  # reject, or be right
        if problem.op != "paged_attention" or problem.key_cache.dtype != problem.query.dtype:
            return "attention over an unquantised cache only"
        extras = [f for f in ("window", "soft_cap", "alibi_slopes", "sinks") if getattr(problem, f) is not None]
        one_row_each = (problem.query_start[1:] - problem.query_start[:-1] == 1).all()
        return None if one_row_each and not extras else "plain decode only"

    def paged_attention(self, p):
        out = decode(p.query, p.key_cache, p.value_cache, p.block_table, p.seq_lens, p.scale)
        return out, None  # this kernel returns no lse
