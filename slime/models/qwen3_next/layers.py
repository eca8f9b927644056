"""Layers of Qwen3-Next, Qwen3.5 and 3.6: the gated delta net, and gated full attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.packed_attention import PackedSequences, RotatingAttention
from slime.models.qwen3_next.config import split_problem
from slime.ops.delta_rule import delta_rule
from slime.ops.qk_rotary import rotate


class GatedDeltaNet(torch.nn.Module):
    """The gated delta net (Yang et al. 2024, arXiv:2412.06464), a form of linear attention.

    Megatron-core's module requires flash-linear-attention and rejects packed rows. This module is split over
    tensor-parallel ranks by key heads. Per key head, `in_proj` has [q; k; v's; z's; b's; a's] (z gates the output, b is
    the rate, a the decay) and `conv1d` has [q; k; v's], where the plurals cover the key head's value heads.

    Convolution and recurrence need whole sequences, but under context parallelism a rank has only chunks of sequences.
    So key heads are also split over context-parallel ranks. An all-to-all before the convolution gives each rank all
    tokens of its heads, and it is reversed after the recurrence (`RowShard.by_heads`). Projections, norm and gate are
    per token.

    Invariants
    1. Convolution and recurrence restart at each sequence of a packed row.
    2. Decay, recurrence and norm statistics are float32, whatever the model's dtype.
    3. A key head and its value heads are on one rank, so the tensor-parallel size times the context-parallel size must
       divide the number of key heads.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, hf_config: HfConfig, backend: str = "auto", **_unused: Any
    ) -> None:
        super().__init__()
        self.backend = backend
        self.config, self.layer_number = config, layer_number
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        key_heads, value_heads, self.key_dim, self.value_dim = (int(hf_config[name]) for name in names)
        tp_size, cp_size = config.tensor_model_parallel_size, config.context_parallel_size
        if problem := split_problem(key_heads, tp_size, cp_size):
            raise ConfigError(problem)
        self.repeats = value_heads // key_heads  # value heads per key head
        self.groups = key_heads // tp_size  # key heads on this rank
        self.qkv = (self.key_dim, self.key_dim, self.repeats * self.value_dim)  # convolved features per key head
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method}
        linear |= {"bias": False, "skip_bias_add": False, "is_expert": False}
        features = key_heads * (sum(self.qkv) + self.repeats * (self.value_dim + 2))
        self.in_proj = ColumnParallelLinear(config.hidden_size, features, gather_output=False, **linear)
        taps = int(hf_config["linear_conv_kernel_dim"])
        self.conv1d = torch.nn.ParameterDict({"weight": self._shard(self.groups * sum(self.qkv), 1, taps)})
        self.dt_bias = self._shard(self.groups * self.repeats)
        self.A_log = self._shard(self.groups * self.repeats, dtype=torch.float32)
        self.out_norm = GatedNorm(config, self.value_dim, self.in_proj.weight.device)
        size = value_heads * self.value_dim
        self.out_proj = RowParallelLinear(size, config.hidden_size, input_is_parallel=True, **linear)

    def _shard(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Returns an uninitialised parameter that is split over tensor-parallel ranks along dim 0."""
        weight = torch.empty(*shape, dtype=dtype or self.config.params_dtype, device=self.in_proj.weight.device)
        parameter = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self, hidden_states: Tensor, *_given: Any, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, H] -> [T, 1, H] (this rank's shard of the row under sequence or context parallelism), and no bias."""
        packed = packed_seq_params
        mixed = self.in_proj(hidden_states)[0].squeeze(1).unflatten(-1, (self.groups, -1))  # [T, groups, features]
        values, rates = self.repeats * self.value_dim, [self.repeats, self.repeats]
        qkv, z, b, a = mixed.split([sum(self.qkv), values, *rates], dim=-1)
        weights: tuple[Tensor, ...] = (self.conv1d["weight"], self.dt_bias, self.A_log)
        if packed.shard is None:
            out = self._mix((qkv, b, a), weights, packed.query_lengths, packed.cu_query)
        else:
            shard = packed.shard
            parts = shard.by_heads(torch.cat([qkv, b, a], dim=-1)).split([sum(self.qkv), *rates], dim=-1)
            weights = tuple(shard.own_heads(weight) for weight in weights)
            out = shard.by_tokens(self._mix(parts, weights, shard.lengths, shard.cu_lengths))
        z = z.reshape(z.size(0), -1, self.value_dim)  # [T, heads, d_v]
        return self.out_proj(self.out_norm(out, z).flatten(1).unsqueeze(1))[0], None

    def _mix(
        self,
        parts: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        lengths: tuple[int, ...],
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Computes convolution and recurrence over whole sequences for some key heads -> [T, value heads, d_v].

        `parts`: qkv [T, groups, features], b and a [T, groups, value heads per group]. `weights`: convolution, dt_bias
        and A_log of these heads.
        """
        qkv, b, a = parts
        taps, dt_bias, log_rate = weights
        qkv = functional.silu(causal_convolution(qkv.flatten(1), taps, lengths)).unflatten(-1, (qkv.size(1), -1))
        q, k, v = qkv.split(self.qkv, dim=-1)
        q, k = (x.repeat_interleave(self.repeats, dim=1) for x in (q, k))  # [T, heads, d_k]
        v = v.reshape(v.size(0), -1, self.value_dim)  # [T, heads, d_v]
        decay = -log_rate.float().exp() * functional.softplus(a.flatten(1).float() + dt_bias.float())
        rule = delta_rule(q.device, q.dtype, self.backend)
        return rule(q, k, v, decay, b.flatten(1).sigmoid(), lengths, cu_seqlens)


class GatedNorm(torch.nn.Module):
    """Gated RMS norm of each value head: weight * norm(x) * silu(z)."""

    def __init__(self, config: TransformerConfig, size: int, device: torch.device) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [T, heads, d_v] -> [T, heads, d_v] in the dtype of `x`."""
        # The weight is replicated but sees only this rank's heads, so gradients are summed over tensor-parallel ranks.
        weight = copy_to_tensor_model_parallel_region(self.weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (weight * normed.to(x.dtype) * functional.silu(z.float())).to(x.dtype)


def causal_convolution(x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Applies a causal depthwise convolution to each sequence: x [T, C], weight [C, 1, taps] -> [T, C].

    Inserts zeros between sequences so that one convolution over the whole row is enough.
    """
    spacing = weight.size(-1) - 1
    place = _places(lengths, spacing, x.device)
    row = x.new_zeros(x.size(0) + spacing * len(lengths), x.size(1)).index_copy(0, place, x)
    out = functional.conv1d(row.mT.unsqueeze(0), weight, groups=x.size(1)).squeeze(0).mT
    return out.index_select(0, place - spacing)


@functools.lru_cache(maxsize=8)
def _places(lengths: tuple[int, ...], spacing: int, device: torch.device) -> Tensor:
    """Returns each token's index [T] int64 after inserting `spacing` entries before each sequence."""
    ahead = spacing * torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    return (torch.arange(sum(lengths)) + ahead).to(device)


class GatedAttention(RotatingAttention):
    """Full attention with a sigmoid gate on its output. Requires `attention_output_gate` in the config.

    HF's `q_proj` has [q; gate] per head, so `linear_qkv` has [q, gate, q, gate, ..., k, v] per KV head. Megatron's
    gated attention expects [q..., gate..., k, v]. Norms are from `slime.ops`; split and rotation are plain PyTorch.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_given: Any, **_unused: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, 1, H] -> query [T, 1, heads, d], key and value [T, 1, groups, d], gate [T, 1, heads, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = mixed.unflatten(-1, (groups, -1, size))
        queries, key, value = heads.split([heads.size(-2) - 2, 1, 1], dim=-2)
        query, gate = (x.flatten(2, 3) for x in queries.unflatten(-2, (-1, 2)).unbind(-2))
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(-2)), value.squeeze(-2), gate

    def rotated(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T_local, 1, H] -> query [T, heads, d], key and value [T, groups, d], gate [T, 1, heads, d]."""
        assert packed.rotary is not None, "the model computes cos and sin before its first layer"
        query, key, value, gate = self.get_query_key_value_tensors(hidden_states)
        interleaved = self.config.rotary_interleaved
        query, key = (rotate(x.squeeze(1), *packed.rotary, interleaved=interleaved) for x in (query, key))
        return query, key, value.squeeze(1), gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, 1, heads * d], gate [T, 1, heads, d] -> gated x. Megatron's version is
        compiled, which can fail on a CPU."""
        return x * gate.flatten(2).sigmoid()
