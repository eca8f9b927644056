"""The indexer of sparse attention (DeepSeek-V3.2, section 2.1; GLM-5): which keys each query of a long sequence sees.

A small attention of its own scores all keys at or before a query; the best `index_topk` are kept. The choice has no
derivative, so the policy loss gives the indexer no gradient: its parameters are frozen, loaded, exported and synced as
they are. A sequence of at most `index_topk` tokens sees everything, and nothing is computed for it.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import skip_init

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.attention import PackedSequences
from slime.models.common.norm import current_device
from slime.models.common.rotary import rotate

SCORES_AT_ONCE = 1 << 27
"""Scores of heads, queries and keys that are held in memory together (float32)."""


class SparseIndexer(torch.nn.Module):
    """Chooses keys for one layer. Whole on each tensor-parallel rank, where all compute the same choice."""

    def __init__(self, config: TransformerConfig, hf_config: HfConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.heads, self.dim, self.topk = (int(hf_config[f"index_{n}"]) for n in ("n_heads", "head_dim", "topk"))
        self.rope_dim = int(hf_config["qk_rope_head_dim"])
        # Halves, whatever the pairs of the attention itself, unless the checkpoint says otherwise.
        self.interleaved = bool(hf_config.get("indexer_rope_interleave", False))

        def linear(size: int, out: int) -> torch.nn.Linear:
            made = skip_init(torch.nn.Linear, size, out, bias=False, device=current_device(), dtype=config.params_dtype)
            assert isinstance(made, torch.nn.Linear), "skip_init keeps the class"
            return made

        self.linear_wq_b = linear(int(hf_config["q_lora_rank"]), self.heads * self.dim)
        self.linear_wk = linear(config.hidden_size, self.dim)
        self.k_norm = torch.nn.LayerNorm(self.dim, eps=1e-6, device=current_device(), dtype=torch.float32)
        self.linear_weights_proj = linear(config.hidden_size, self.heads)
        self.requires_grad_(False)

    def needed(self, packed: PackedSequences) -> bool:
        """Whether a sequence of the row is longer than what a query may see.

        Raises `ConfigError` for such a row under context parallelism.
        """
        longest = int(packed.cu_seqlens_q.diff().max())
        if longest > self.topk and packed.shard is not None:
            raise ConfigError(
                f"got a sequence of {longest} tokens for sparse attention under context parallelism, which is trained "
                f"for at most index_topk {self.topk} tokens; drop --context-parallel-size or shorten the sequences"
            )
        return longest > self.topk

    @torch.no_grad()
    def forward(
        self, hidden: Tensor, query_latent: Tensor, cos: Tensor, sin: Tensor, packed: PackedSequences
    ) -> list[Tensor | None]:
        """Per sequence the chosen keys of each query, int32 [n, topk], or None where the sequence is short.

        hidden [T_local, 1, H] and query_latent [T_local, 1, rank] are a part of the row under sequence parallelism;
        cos and sin [T, 1, d / 2] are of the whole row. Of a query with fewer keys before it, the rest lies behind it.
        """
        projected = [self.linear_wq_b(query_latent), self.linear_wk(hidden), self.linear_weights_proj(hidden)]
        row = torch.cat(projected, dim=-1)
        if self.sequence_parallel:
            row = gather_from_sequence_parallel_region(row)
        q, k, weights = row.squeeze(1).split([self.heads * self.dim, self.dim, self.heads], dim=-1)
        k = self.k_norm(k.float()).to(k.dtype).unsqueeze(1)
        q, k = (self._rotated(x, cos, sin).float() for x in (q.unflatten(-1, (self.heads, self.dim)), k))
        weights = weights.float() * self.heads**-0.5
        rows = zip(*(x.split(packed.query_lengths) for x in (q, k.squeeze(1), weights)), strict=True)
        return [None if a.size(0) <= self.topk else self._choose(a, b, c) for a, b, c in rows]

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, still = x.split([self.rope_dim, self.dim - self.rope_dim], dim=-1)
        return torch.cat([rotate(turned, cos, sin, interleaved=self.interleaved), still], dim=-1)

    def _choose(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """q [n, heads, d], k [n, d], weights [n, heads] of one sequence -> [n, topk]."""
        n = k.size(0)
        place = torch.arange(n, device=k.device)
        step = max(1, SCORES_AT_ONCE // (self.heads * n))
        chosen = []
        for a in range(0, n, step):
            b = min(a + step, n)
            scores = functional.relu(q[a:b] @ k.T * self.dim**-0.5)
            score = (weights[a:b].unsqueeze(1) @ scores).squeeze(1)
            score = score.masked_fill(place > place[a:b].unsqueeze(1), -float("inf"))
            chosen.append(score.topk(self.topk, dim=-1).indices.int())
        return torch.cat(chosen)


def masks_of(chosen: list[Tensor | None]) -> list[Tensor | None]:
    """Chosen keys [n, topk] -> which keys each query sees, bool [n, n]; None stays None."""
    return [None if c is None else _mask(c) for c in chosen]


def _mask(chosen: Tensor) -> Tensor:
    n = chosen.size(0)
    seen = torch.zeros(n, n, dtype=torch.bool, device=chosen.device)
    return seen.scatter_(1, chosen.long(), True).tril_()
