"""The parts of a decoder layer that stock Megatron lacks without Transformer Engine: a norm and packed attention.

`RMSNorm` does what `transformers` does (float32 statistics, weight in the model's dtype) and allows sequence
parallelism, which Megatron's wrapper of `torch.nn.RMSNorm` refuses. `PackedAttention` attends inside each sequence of
a packed row, with grouped queries: `scaled_dot_product_attention` per sequence on a CPU, `varlen_attn` on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.core.errors import ConfigError


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a packed row begin.

    Megatron's rotary embedding reads `cu_seqlens_q` with `.tolist()` in every layer, so those stay on the host; the
    attention kernel reads the copy on the device.
    """

    cu_seqlens_device: Tensor | None = None
    """[N + 1] int32 on the device of the model."""

    @classmethod
    def build(cls, cu_seqlens: Tensor, *, max_seqlen: int, device: torch.device) -> PackedSequences:
        """`cu_seqlens`: [N + 1] int32 on the host, from 0 to T."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            cu_seqlens_device=cu_seqlens.to(device, non_blocking=True),
        )


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in the arithmetic of `transformers`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        if config.layernorm_zero_centered_gamma:
            raise ConfigError("got layernorm_zero_centered_gamma, because no supported family has it; leave it out")
        device = torch.device("cpu") if config.use_cpu_initialization else _current_device()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums such gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the dtype of `x`."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed row; Megatron's core-attention interface."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ConfigError(
                f"got attention_dropout={config.attention_dropout}, because a policy must be evaluated twice with "
                "the same result; set --attention-dropout 0"
            )
        assert attention_type == "self", f"attention of type {attention_type} in layer {layer_number}"
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_unused: Any,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
        assert packed_seq_params is not None, "the trainer always packs its sequences"
        if query.is_cuda and query.dtype != torch.float32:
            return self._varlen(query, key, value, packed_seq_params)
        return self._per_sequence(query, key, value, packed_seq_params)

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        lengths = packed.cu_seqlens_q.diff().tolist()
        # [1, heads, T, d], the layout of scaled_dot_product_attention; a view, no copy.
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        grouped = query.size(1) != key.size(1)
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                a, b, c, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
            )
            for a, b, c in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1).reshape(query.size(0), -1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn

        # torch 2.10 calls causality `is_causal`; later it is a window of (-1, 0). Grouped queries came later still.
        names = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
        if query.size(1) != key.size(1):
            if "enable_gqa" in names:
                options["enable_gqa"] = True
            else:
                repeats = query.size(1) // key.size(1)
                key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if self.softmax_scale is not None:
            options["scale"] = self.softmax_scale
        cu, longest = packed.cu_seqlens_device, packed.max_seqlen_q
        out = varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), cu, cu, longest, longest, **options)
        result: Tensor = out.reshape(query.size(0), -1)
        return result


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layer specification with our norm and attention in place of its own, for each layer."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[_checked(layer)] * config.num_layers, layer_norm=RMSNorm)


def _checked(layer: ModuleSpec) -> ModuleSpec:
    assert hasattr(layer.submodules, "mlp"), f"unexpected layer specification {layer}"
    return layer
