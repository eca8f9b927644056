"""Packed attention, context parallelism, and norms of queries and keys, which Megatron has only with Transformer
Engine.

`PackedAttention` attends inside each sequence of a packed row (`slime.ops.attention`). Under context parallelism the
queries are this rank's chunks, and the keys are those of the whole row (all-gather; Llama 3, arXiv:2407.21783, section
3.3.2); the causal mask is aligned at the end of both. A sequence that continues a shared prefix gets a copy of the
prefix's keys before its own. `RotatingAttention` is the layer around it: Megatron's attention, except that one op
(`slime.ops.qk_rotary`) computes queries and keys from the projection, with the rotary angles of the whole row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.core.errors import ConfigError
from slime.models.common.vision import RowImages
from slime.ops import attention as ops
from slime.ops.norm import rms_norm
from slime.ops.qk_rotary import Heads, split_and_rotate
from slime.ops.repeats import Repeats, repeated
from slime.ops.select import REFERENCE, name_of


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in the arithmetic of `transformers`:
    float32 statistics, weight in the model's dtype.

    Supports sequence parallelism, which Megatron's wrapper of `torch.nn.RMSNorm` refuses.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each rank of sequence parallelism sees some tokens; Megatron sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


def current_device() -> torch.device:
    """Returns this rank's GPU, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Choices(Protocol):
    """The choice of experts for a row. See `slime.models.common.mlp`."""

    def choose(self, layer: int, own: Tensor, num_experts: int) -> Tensor:
        """The router's choice [T, topk] in `layer` (a global number) -> the choice to use [T, topk] int64."""


class RowShard(Protocol):
    """This rank's shard of a packed row under context parallelism. See `slime.training.model.row_shards`."""

    @property
    def positions(self) -> Tensor:
        """[T / cp] int64: positions of this rank's tokens in the row."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """[N] lengths of the whole sequences."""

    @property
    def cu_lengths(self) -> Tensor:
        """[N + 1] int32 on the model's device: the start of each whole sequence, then the total."""

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [T / cp, g, d_k], value [T / cp, g, d_v] -> concatenated keys and values of local chunks [K, g, d]."""

    def by_heads(self, part: Tensor) -> Tensor:
        """This rank's tokens of all heads [T / cp, h, d] -> all tokens of this rank's heads [T, h / cp, d]."""

    def by_tokens(self, share: Tensor) -> Tensor:
        """The inverse of `by_heads`."""

    def own_heads(self, parameter: Tensor) -> Tensor:
        """[n, ...] of all heads -> [n / cp, ...] of this rank's heads."""

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Row positions [R] -> indices of the positions on this rank [R_own], and of these among its tokens [R_own]."""

    def whole(self, part: Tensor, which: Tensor, size: int) -> Tensor:
        """This rank's results [R_own, ...] for the indices `which` [R_own] -> the results of all ranks [size, ...]."""


@dataclass
class PackedSequences(PackedSeqParams):
    """The sequences of a packed row, in Megatron's parameter for attention.

    Megatron's rotary embedding, which a family's own attention may use, reads `cu_seqlens_q` with `.tolist()` in every
    layer, so Megatron's fields stay on the host. The attention kernel reads the copies on the device.
    """

    query_lengths: tuple[int, ...] = ()
    """[N] number of tokens of each sequence; under context parallelism, of each local chunk [2 N]."""
    key_lengths: tuple[int, ...] = ()
    """[N] or [2 N] number of keys for each sequence or chunk, including a shared prefix."""
    cu_query: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the model's device."""
    cu_key: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the model's device."""
    positions: Tensor | None = None
    """[T] int64 on the device of the model: the position of each of this rank's tokens in its sequence."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin [T, r / 2] float32 for all layers; the model computes them in its first pass."""
    shard: RowShard | None = None
    """None without context parallelism."""
    repeats: Repeats | None = None
    """If samples share prefixes: the keys of each sequence, concatenated; under context parallelism in `shard`."""
    asked: Repeats | None = None
    """If samples share prefixes: the hidden states that the micro-batch's outputs are read from, since several tokens
    may follow a shared prefix."""
    chosen_keys: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Number of a layer with an indexer -> its choice, for later layers that share it (`deepseek.layers`)."""
    routing: Choices | None = None
    """None: routers use their own choice."""
    images: RowImages | None = None

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Maximum number of tokens, and of keys, of a sequence (or chunk)."""
        return max(self.query_lengths, default=0), max(self.key_lengths, default=0)


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
                f"attention_dropout is {config.attention_dropout}, but two passes over a sample must have the same "
                "result; set --attention-dropout 0"
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
        masks: Sequence[Tensor | None] | None = None,
        **_unused: Any,
    ) -> Tensor:
        """query [T, heads, d], key [T, groups, d], value [T, groups, d_v] -> [T, heads * d_v].

        Under context parallelism, T counts this rank's tokens. `masks`: for each sequence, the keys that each query
        attends to, bool [n, n], or None for a causal mask.
        """
        packed = packed_seq_params
        assert packed is not None, "the trainer always packs its sequences"
        if packed.shard is not None:
            key, value = packed.shard.keys_and_values(key, value)
        if packed.repeats is None:
            out = self._attend(query, key, value, packed, masks)
        else:
            assert masks is None, "masks do not work with shared prefixes"
            with repeated((key, value), packed.repeats) as (key, value):
                out = self._attend(query, key, value, packed, None)
        return out.reshape(query.size(0), -1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, masks: Sequence[Tensor | None] | None
    ) -> Tensor:
        """query [T, heads, d], key and value of each sequence's keys -> [T, heads, d_v]."""
        kernel = REFERENCE if masks is not None else name_of("attention", query)
        if kernel == REFERENCE:
            lengths = packed.query_lengths, packed.key_lengths
            return ops.per_sequence(query, key, value, *lengths, scale=self.softmax_scale, masks=masks)
        attend = ops.varlen if kernel == "varlen" else ops.flash
        assert packed.cu_query is not None and packed.cu_key is not None, "a row on a GPU has no lengths on the GPU"
        return attend(*(query, key, value, packed.cu_query, packed.cu_key, *packed.longest), scale=self.softmax_scale)


class RotatingAttention(SelfAttention):
    """Megatron's attention with one op that splits, normalises and rotates queries and keys of a packed row.

    Its parameters are Megatron's. A subclass can change the output (`forward`), or how queries and keys are computed
    (`rotated`).
    """

    def forward(
        self, hidden_states: Tensor, *_given: Any, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T_local, 1, H] -> [T_local, 1, H] (a shard of the row under sequence parallelism), and the output's bias.

        The rotary embedding is read from the row, not from the arguments.
        """
        query, key, value, gate = self.rotated(hidden_states, packed_seq_params)
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(query, key, value, None, packed_seq_params=packed_seq_params)
        else:
            out = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        out = out.unsqueeze(1)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(
            out if gate is None else self._apply_output_gate(out, gate)
        )
        return output

    def rotated(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[T_local, 1, H] -> query [T, heads, d], key and value [T, groups, d], and the output's gate, if any."""
        assert packed.rotary is not None, "the model makes cos and sin before its first layer"
        mixed = self.linear_qkv(hidden_states)[0].squeeze(1)
        q_weight, k_weight = (_weight_of(norm) for norm in (self.q_layernorm, self.k_layernorm))
        return *split_and_rotate(mixed, self._heads, *packed.rotary, q_weight, k_weight), None

    @functools.cached_property
    def _heads(self) -> Heads:
        config = self.config
        return Heads(
            groups=self.num_query_groups_per_partition,
            size=self.hidden_size_per_attention_head,
            interleaved=config.rotary_interleaved,
            eps=config.layernorm_epsilon,
            zero_centered=config.layernorm_zero_centered_gamma,
        )


def _weight_of(norm: torch.nn.Module | None) -> Tensor | None:
    """Returns the weight of the norm of queries or keys; None if the module is the identity."""
    if norm is None or isinstance(norm, IdentityOp):
        return None
    assert isinstance(norm, RMSNorm), f"the norm of heads is a {type(norm).__name__}: override `rotated` for it"
    return norm.weight


def packed_attention(config: TransformerConfig, standard: ModuleSpec, module: type | None = None) -> ModuleSpec:
    """Returns Megatron's local attention (`standard`) with packed core attention and our norms. `module`: the class of
    the layer.

    A subclass of `RotatingAttention` uses the ops of this device. A direct subclass of Megatron's `SelfAttention` works
    too, but uses Megatron's rotary embedding, which loops over the sequences in every layer.
    """
    parts = dataclasses.replace(standard.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    return ModuleSpec(module=module or RotatingAttention, params=standard.params, submodules=parts)


def rotates_by_megatron(attention: object) -> bool:
    """Returns whether the attention module of a layer needs Megatron's rotary embedding."""
    module = attention.module if isinstance(attention, ModuleSpec) else attention
    return isinstance(module, type) and issubclass(module, SelfAttention) and not issubclass(module, RotatingAttention)
