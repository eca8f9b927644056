"""GLM-4's layer, with norms before and after attention and MLP.

The norms after attention and MLP are part of these two modules (`output_norm`), so Megatron's layer needs no change.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.common.mlp import DenseMLP
from slime.models.common.packed_attention import RMSNorm, RotatingAttention


class NormedAttention(RotatingAttention):
    def __init__(self, config: TransformerConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self.output_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *given: Any, **named: Any) -> tuple[Tensor, None]:
        output, bias = super().forward(*given, **named)
        assert bias is None, "the output norm needs an output without a separate bias"
        return self.output_norm(output), None


class NormedMLP(DenseMLP):
    def __init__(self, config: TransformerConfig, **named: Any) -> None:
        super().__init__(config, **named)
        self.output_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, None]:
        output, bias = super().forward(hidden_states, *given, **named)
        assert bias is None, "the output norm needs an output without a separate bias"
        return self.output_norm(output), None
