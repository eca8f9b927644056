"""Experts of gpt-oss: a clamped SwiGLU between two linear layers with biases, in the layout of its files.

    gate, value = x W1 + b1, entries in turns; clamped at the limit, values on both sides
    (value + 1) * gate * sigmoid(1.702 gate), through W2 and b2, times the router's weight

Weights are [in, out]; biases are float32, as engines hold them. The grouped products are those of other families, on
transposed views.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.common.moe import ExpertLayer
from slime.models.common.norm import current_device
from slime.models.gpt_oss import SWIGLU_LIMIT
from slime.ops.experts import RowGroups, form_of, grouped_linear

_ALPHA = 1.702


class BiasedLinear(torch.nn.Module):
    """A linear layer with bias for each expert."""

    def __init__(self, config: TransformerConfig, num_experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        weight = torch.empty((num_experts, size_in, size_out), dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.empty((num_experts, size_out), dtype=torch.float32, device=device))
        for parameter in (self.weight, self.bias):
            # The norm of a gradient counts what is marked on every tensor-parallel rank; they share out experts.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """x [rows, in], ordered by expert -> [rows, out]."""
        product = grouped_linear(x, self.weight.transpose(1, 2), groups, form_of(x))
        rows = torch.arange(x.size(0), dtype=groups.ends.dtype, device=x.device)
        expert = torch.searchsorted(groups.ends, rows, right=True)
        return product + self.bias.index_select(0, expert).to(product.dtype)


class BiasedExperts(torch.nn.Module):
    """In place of `StackedExperts`; its names are theirs."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_unused: Any) -> None:
        """Weights are undefined until a checkpoint fills them."""
        super().__init__()
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        assert size is not None, "the family says the size of an expert"
        self.linear_fc1 = BiasedLinear(config, num_local_experts, hidden, 2 * size)
        self.linear_fc2 = BiasedLinear(config, num_local_experts, size, hidden)

    def forward(self, x: Tensor, sizes: RowGroups | Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """x [rows, H] ordered by expert, weights of the router [rows] -> [rows, H], and no bias that is left to add."""
        groups = sizes if isinstance(sizes, RowGroups) else RowGroups.of(sizes, x.device)
        out = self.linear_fc2(clamped_swiglu(self.linear_fc1(x, groups)), groups)
        return (out * weights.unsqueeze(-1)).to(x.dtype), None


def clamped_swiglu(x: Tensor) -> Tensor:
    """x [rows, 2F], gates and values in turns -> [rows, F]."""
    gate, value = x[..., ::2].clamp(max=SWIGLU_LIMIT), x[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (value + 1) * gate * torch.sigmoid(gate * _ALPHA)


class BiasedExpertLayer(ExpertLayer):
    """A layer of such experts."""

    experts_class = BiasedExperts
