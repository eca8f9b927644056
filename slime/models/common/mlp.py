"""The gated MLP of decoders, on Megatron's: one op between its two linear layers (`slime.ops.swiglu`)."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.ops.swiglu import swiglu


class GatedMLP(MLP):
    """Megatron's MLP with the activation of the families: silu(gate) * up, gate and up in one projection."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T_local, 1, H] -> [T_local, 1, H] and the output's bias, if any.

        `per_token_scale`: [T], of an expert; it multiplies the activation, as in Megatron.
        """
        mixed, bias = self.linear_fc1(hidden_states)
        out = swiglu(mixed if bias is None else mixed + bias)
        if per_token_scale is not None:
            out = (out * per_token_scale.unsqueeze(-1)).to(out.dtype)
        output, output_bias = self.linear_fc2(out)
        assert output_bias is None or per_token_scale is None, "experts have no biases"
        return output, output_bias


class DenseMLP(GatedMLP):
    """That of a dense layer."""

    def __init__(self, config: TransformerConfig) -> None:
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, parts, ffn_hidden_size=config.ffn_hidden_size)


class GatedSharedExperts(SharedExpertMLP, GatedMLP):
    """Megatron's shared experts, which are one MLP and perhaps a gate, with that activation."""
