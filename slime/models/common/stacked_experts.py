"""The routed experts of a layer that one rank has, stacked: a tensor per projection, whatever the number of experts.

Optimizer, gradient buffers and memory know two parameters a layer. Weight tables, checkpoints and the engines go on to
speak of every expert: `training.model.names` gives views under their names.

Invariants
1. Rows come ordered by expert. What leaves an expert is that of Megatron's sequential experts: with float32 on a CPU
   bit for bit, gradients of rows and weights among them.
2. Experts are whole on their rank: tensor-parallel ranks are data-parallel to them (`ExpertLayer`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter, functional

from slime.models.common.norm import current_device
from slime.ops.experts import RowGroups, form_of, grouped_linear, weighted_swiglu


class StackedLinear(Module):
    """A linear layer without bias for each expert."""

    def __init__(self, config: TransformerConfig, num_experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        shape = (num_experts, size_out, size_in)
        self.weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        # The norm of a gradient counts what is marked on every tensor-parallel rank; they share out experts.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """x [rows, in], ordered by expert -> [rows, out]."""
        return self.product(x, self.weight, groups)

    @staticmethod
    def product(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """x [rows, in], weight [experts, out, in] -> [rows, out], in the form that the device has."""
        return grouped_linear(x, weight, groups, form_of(x))


class StackedExperts(Module):
    """In place of Megatron's `SequentialMLP`: SwiGLU experts without bias."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_unused: Any) -> None:
        """Weights are undefined until a checkpoint fills them."""
        super().__init__()
        gated = config.gated_linear_unit and config.activation_func is functional.silu
        assert gated and not config.add_bias_linear, "experts of all families are SwiGLU without bias"
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = StackedLinear(config, num_local_experts, hidden, 2 * size)
        """weight [experts, 2F, H]: gates, then values."""
        self.linear_fc2 = StackedLinear(config, num_local_experts, size, hidden)
        """weight [experts, H, F]."""

    def forward(self, x: Tensor, sizes: RowGroups | Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """x [rows, H] ordered by expert, weights of the router [rows] -> [rows, H], and Megatron's bias: none.

        `sizes`: the rows of each expert [experts], if they are not known as groups yet.
        """
        groups = sizes if isinstance(sizes, RowGroups) else RowGroups.of(sizes, x.device)
        inner = weighted_swiglu(self.linear_fc1(x, groups), weights, form_of(x))
        return self.linear_fc2(inner, groups), None
