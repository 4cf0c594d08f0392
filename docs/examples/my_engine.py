"""Stands for the engine whose kernel you want to check: decode attention in plain torch, one sequence after another."""

import torch


def decode(
    query: torch.Tensor,  # [num_seqs, num_query_heads, head_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: torch.Tensor,
    block_table: torch.Tensor,  # [num_seqs, max_blocks]
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """out like query: the attention of each sequence's one query over its keys; zero for an empty sequence."""
    out = torch.zeros_like(query)
    group = query.shape[1] // key_cache.shape[2]
    for seq, length in enumerate(seq_lens.tolist()):
        blocks = block_table[seq, : -(-length // key_cache.shape[1])].long()
        key, value = (cache[blocks].flatten(0, 1)[:length].float() for cache in (key_cache, value_cache))
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        weight = torch.softmax(torch.einsum("hd,khd->hk", query[seq].float(), key) * scale, dim=1)
        out[seq] = torch.einsum("hk,khd->hd", weight, value).to(query.dtype)
    return out
