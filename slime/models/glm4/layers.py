"""GLM-4's layer has norms on both sides: besides those ahead of attention and MLP, one on what each of them answers.

The other two are part of the attention and of the MLP here, as `output_norm`, so that Megatron's layer stays as it is.
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
        """As Megatron's: hidden states [T_local, 1, H] and no bias."""
        output, bias = super().forward(*given, **named)
        assert bias is None, "the norm comes after the output's bias, which this layer does not add"
        return self.output_norm(output), None


class NormedMLP(DenseMLP):
    """The MLP of a dense layer with a norm on its output."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.output_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, None]:
        """As Megatron's: hidden states [T_local, 1, H] and no bias."""
        output, bias = super().forward(hidden_states, *given, **named)
        assert bias is None, "the norm comes after the output's bias, which this layer does not add"
        return self.output_norm(output), None
