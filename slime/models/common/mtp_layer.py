"""The module for multi-token prediction (`slime.models.common.mtp`): norms, a projection and one layer of the family.

The model's hidden states, embedding and output layer are constants here, so no gradient flows into the model. Training
the model is unaffected, and the layer only learns to predict the model's tokens.

Invariants
1. A sequence in a packed row never reads a token of the next sequence.
2. Under sequence parallelism, each rank has a shard of the row, and Megatron sums the gradients of replicated
   parameters over ranks, as it does for norms.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.common.mtp import HeadForm
from slime.models.common.packed_attention import PackedSequences, RMSNorm, current_device


class MultiTokenLayer(torch.nn.Module):
    def __init__(self, config: TransformerConfig, layer: ModuleSpec, vp_stage: int | None, form: HeadForm) -> None:
        super().__init__()
        self.hidden_first = form.hidden_first
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = RMSNorm(config, hidden, eps=eps), RMSNorm(config, hidden, eps=eps)
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=config.params_dtype, device=device)
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        extra: dict[str, Any] = {} if vp_stage is None else {"vp_stage": vp_stage}
        self.transformer_layer = build_module(layer, config=config, layer_number=1, **extra)
        self.final_layernorm = RMSNorm(config, hidden, eps=eps)

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """`transformer_layer`, under the name that the schedule of Megatron-core 0.19 expects."""
        layer: torch.nn.Module = self.transformer_layer
        return layer

    def forward(self, hidden: Tensor, embedded: Tensor, packed: PackedSequences) -> Tensor:
        """hidden [T_local, 1, H], next tokens' embeddings [T_local, 1, H] -> normed states [T_local, 1, H]."""
        both = [self.enorm(embedded), self.hnorm(hidden)]
        joined = torch.cat(both[::-1] if self.hidden_first else both, dim=-1)
        out, _ = self.transformer_layer(self.eh_proj(joined), attention_mask=None, packed_seq_params=packed)
        return self.final_layernorm(out)


class MultiTokenHead(torch.nn.Module):
    """The single MTP layer, with Megatron's module names."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, vp_stage: int | None, form: HeadForm) -> None:
        super().__init__()
        self.sequence_parallel, self.blind_start = bool(config.sequence_parallel), form.blind_start
        self.layers = torch.nn.ModuleList([MultiTokenLayer(config, layer, vp_stage, form)])

    def forward(self, hidden: Tensor, embedded: Tensor, packed: PackedSequences) -> Tensor:
        """hidden [T_local, 1, H] of this rank (detached), embeddings [T, H] of the next tokens (before the split for
        sequence parallelism) -> states [T_local, 1, H].
        """
        if self.blind_start:
            assert packed.positions is not None, "a packed row must have token positions"
            embedded = embedded.masked_fill((packed.positions == 0).unsqueeze(1), 0.0)
        embedded = embedded.unsqueeze(1)
        if self.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
        states: Tensor = self.layers[0](hidden, embedded, packed)
        return states


def following(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """tokens [T] of a packed row -> each token's successor [T]. The last token of a sequence is its own successor.

    `cu_seqlens` [N + 1]: the start of each sequence, then T.
    """
    ends = cu_seqlens[1:].to(tokens.device, torch.int64) - 1
    return tokens.roll(-1).index_copy(0, ends, tokens.index_select(0, ends))
