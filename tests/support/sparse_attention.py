"""Sparse attention as a formula: one mask of all queries and all keys, and nothing absorbed."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_of(selected: Tensor, num_keys: int) -> Tensor:
    """selected [n, k] -> bool [n, num_keys]: what is selected and not after the query; the last are aligned."""
    n = selected.size(0)
    seen = torch.zeros(n, num_keys, dtype=torch.bool, device=selected.device)
    return seen.scatter_(1, selected.long(), True).tril_(num_keys - n)


def masked_attention(query: Tensor, up: Tensor, latents: Tensor, selected: Tensor, *, scale: float) -> Tensor:
    """The formula of `slime.ops.attention.to_selected`, in the dtype of its arguments."""
    rank = up.size(-1)
    latent, turned = latents.split([rank, latents.size(-1) - rank], dim=-1)
    nope = query.size(-1) - turned.size(-1)
    key, value = torch.einsum("hoc,mc->mho", up, latent).split([nope, up.size(1) - nope], dim=-1)
    key = torch.cat([key, turned.unsqueeze(1).expand(-1, query.size(1), -1)], dim=-1)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * scale
    weights = scores.masked_fill(~mask_of(selected, latents.size(0)), -float("inf")).softmax(-1)
    return torch.einsum("hnm,mhv->nhv", weights, value)


def choice(n: int, m: int, k: int, seed: int = 0) -> Tensor:
    """A random selection int32 [n, k] as of an indexer: `k` keys up to each query, or all of them and later ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n, m, generator=generator)
    later = torch.arange(m) > torch.arange(m - n, m).unsqueeze(1)
    return scores.masked_fill_(later, -1.0).topk(k, dim=-1).indices.int()
