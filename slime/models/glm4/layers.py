"""GLM-4's layer has four norms: one before and one after each of attention and MLP.

The two on the outputs belong to attention and MLP here, as `output_norm`, so that Megatron's layer stays unchanged.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.common.mlp import DenseMLP
from slime.models.common.packed_attention import RMSNorm, RotatingAttention


class NormedAttention(RotatingAttention):
    """Attention with a norm on its output."""

    def __init__(self, config: TransformerConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self.output_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *given: Any, **named: Any) -> tuple[Tensor, None]:
        """Returns hidden states [T_local, 1, H] and None for the bias, as Megatron's."""
        output, bias = super().forward(*given, **named)
        assert bias is None, "the norm comes after the output's bias, which this layer does not add"
        return self.output_norm(output), None


class NormedMLP(DenseMLP):
    """The MLP of a dense layer with a norm on its output."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.output_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, None]:
        """Returns hidden states [T_local, 1, H] and None for the bias, as Megatron's."""
        output, bias = super().forward(hidden_states, *given, **named)
        assert bias is None, "the norm comes after the output's bias, which this layer does not add"
        return self.output_norm(output), None
