"""Layers of gpt-oss: experts with biases and a clamped SwiGLU, and attention with sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from slime.models.common.mlp import ExpertLayer
from slime.models.common.packed_attention import PackedAttention, PackedSequences, current_device
from slime.models.gpt_oss import SWIGLU_LIMIT
from slime.ops.experts import RowGroups, form_of, grouped_linear

_ALPHA = 1.702


class BiasedLinear(torch.nn.Module):
    """One linear layer with bias per expert, in checkpoint layout: weights [in, out].

    Biases are float32, as in engines. Uses the same grouped product as other families, on a transposed view.
    """

    def __init__(self, config: TransformerConfig, num_experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        weight = torch.empty((num_experts, size_in, size_out), dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.empty((num_experts, size_out), dtype=torch.float32, device=device))
        for parameter in (self.weight, self.bias):
            # Makes the gradient norm include the experts of all tensor-parallel ranks.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """x [rows, in], ordered by expert -> [rows, out]."""
        product = grouped_linear(x, self.weight.transpose(1, 2), groups, form_of(x))
        rows = torch.arange(x.size(0), dtype=groups.ends.dtype, device=x.device)
        expert = torch.searchsorted(groups.ends, rows, right=True)
        return product + self.bias.index_select(0, expert).to(product.dtype)


class BiasedExperts(torch.nn.Module):
    """Experts with biases and a clamped SwiGLU. Parameters are named as in `StackedExperts`.

    Weights are uninitialised until a checkpoint is loaded.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_unused: Any) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        assert size is not None, "the family sets moe_ffn_hidden_size"
        self.linear_fc1 = BiasedLinear(config, num_local_experts, hidden, 2 * size)
        self.linear_fc2 = BiasedLinear(config, num_local_experts, size, hidden)

    def forward(self, x: Tensor, sizes: RowGroups | Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """x [rows, H] ordered by expert, router weights [rows] -> [rows, H], and no bias."""
        groups = sizes if isinstance(sizes, RowGroups) else RowGroups.of(sizes, x.device)
        out = self.linear_fc2(clamped_swiglu(self.linear_fc1(x, groups)), groups)
        return (out * weights.unsqueeze(-1)).to(x.dtype), None


def clamped_swiglu(x: Tensor) -> Tensor:
    """x [rows, 2F], alternating gates and values -> clamped (value + 1) * gate * sigmoid(1.702 gate) [rows, F]."""
    gate, value = x[..., ::2].clamp(max=SWIGLU_LIMIT), x[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (value + 1) * gate * torch.sigmoid(gate * _ALPHA)


class BiasedExpertLayer(ExpertLayer):
    experts_class = BiasedExperts


QUERIES_AT_ONCE = 1024
"""Number of queries of a sequence that are processed at once."""
_MORE = 8
"""Number of entries appended to query and key heads. Kernels need a multiple of eight."""


class SinkAttention(PackedAttention):
    """Core attention with learned sinks (Xiao et al. 2023, arXiv:2309.17453) and an optional sliding window.

    A head's sink is an extra score in the softmax that contributes no value. It is implemented as an additional key
    with a zero value: queries get an additional entry, sink / scale, and only this key has a one in that entry. So
    every query attends to the sink, even outside its window, and autograd handles the gradients. Queries are processed
    in slices, each with only the keys in its windows, to keep masks small. Uses plain PyTorch on all devices, because
    the packed-row kernel supports neither sinks nor windows.
    """

    def __init__(self, config: TransformerConfig, *given: Any, window: int | None, **named: Any) -> None:
        """`window`: maximum number of keys per query, including the query's own token. None: no window."""
        super().__init__(config, *given, **named)
        self.window = window
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """query [T, heads, d], concatenated keys and values of all sequences -> [T, heads, d]."""
        scale = query.size(-1) ** -0.5
        own = packed.shard.own_heads(self.sinks) if packed.shard is not None and self.splits_heads else self.sinks
        sinks = (own / scale).to(query.dtype).expand(query.size(0), -1)
        query = torch.cat([query, functional.pad(sinks.unsqueeze(-1), (0, _MORE - 1))], dim=-1)
        key = functional.pad(key, (0, _MORE))
        sink = functional.one_hot(torch.tensor(key.size(-1) - _MORE), key.size(-1)).to(key)
        keys, values = (x.split(list(packed.key_lengths)) for x in (key, value))
        rows = zip(query.split(list(packed.query_lengths)), keys, values, strict=True)
        return torch.cat([part for q, k, v in rows for part in self._of_sequence(q, k, v, sink, scale)])

    def _of_sequence(self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, scale: float) -> Iterator[Tensor]:
        """Yields the outputs of one sequence in slices. The last query is aligned with the last key."""
        behind = key.size(0) - query.size(0)
        for start in range(0, query.size(0), QUERIES_AT_ONCE):
            part = query[start : start + QUERIES_AT_ONCE]
            first, end = start + behind, start + behind + part.size(0)
            begin = 0 if self.window is None else max(0, first - self.window + 1)
            # The sink comes before the keys in the windows of the slice.
            seen = torch.cat([sink.expand(1, key.size(1), -1), key[begin:end]])
            values = torch.cat([torch.zeros_like(value[:1]), value[begin:end]])
            yield _softmax_attention(part, seen, values, self._mask(first, end, begin, query.device), scale)

    def _mask(self, first: int, end: int, begin: int, device: torch.device) -> Tensor:
        """Returns the mask for queries `first` to `end`, over the sink and keys `begin` to `end`."""
        places = torch.arange(first, end, device=device).unsqueeze(1)
        keys = torch.arange(begin, end, device=device)
        seen = keys <= places
        if self.window is not None:
            seen &= keys > places - self.window
        return functional.pad(seen, (1, 0), value=True)


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [n, heads, d], key [k, groups, d], value [k, groups, d_v], mask [n, k] -> [n, heads, d_v]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    grouped = query.size(1) != key.size(1)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)
