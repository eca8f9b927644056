"""Packed attention, context parallelism and QK norms, which Megatron supports only with Transformer Engine.

`PackedAttention` computes attention within each sequence of a packed row (`slime.ops.attention`). Under context
parallelism, queries come from this rank's chunks and keys from the whole row (all-gather; Llama 3, arXiv:2407.21783,
section 3.3.2), with the causal mask aligned at the end of both. With `--cp-comm-type a2a`, each rank instead computes
some heads of the whole row (all-to-all; DeepSpeed Ulysses, arXiv:2309.14509). If a sequence continues a shared prefix,
a copy of the prefix's keys is prepended to its own. `RotatingAttention` is the layer around it. It is Megatron's
attention, except that a single op (`slime.ops.qk_rotary`) computes queries and keys from the projection, using the
row's rotary angles.
"""

from __future__ import annotations

import dataclasses
import functools
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
from slime.ops import invariant
from slime.ops.norm import rms_norm
from slime.ops.qk_rotary import Heads, split_and_rotate
from slime.ops.repeats import Repeats, repeated
from slime.ops.select import REFERENCE, is_invariant, name_of

ALL_TO_ALL = "a2a"
"""The value of `--cp-comm-type` with which context-parallel ranks split heads instead of gathering keys and values."""


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension (Zhang and Sennrich 2019) with the same arithmetic as `transformers`: float32
    statistics, weight in the model's dtype.

    Unlike Megatron's wrapper of `torch.nn.RMSNorm`, it supports sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # A sequence-parallel rank sees only some tokens, so Megatron sums the gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


def current_device() -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Choices(Protocol):
    """Chooses the experts for a row. See `slime.models.common.mlp`."""

    def choose(self, layer: int, own: Tensor, num_experts: int) -> Tensor:
        """`own` [T, topk]: the router's choices in global layer `layer` -> the choices to use [T, topk] int64."""


class RowShard(Protocol):
    """This rank's shard of a packed row under context parallelism. See `slime.training.model.row_shards`."""

    @property
    def positions(self) -> Tensor:
        """[T / cp] int64: row positions of this rank's tokens."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """[N] full lengths of the sequences."""

    @property
    def cu_lengths(self) -> Tensor:
        """[N + 1] int32 on the model's device: cumulative full lengths of the sequences, starting with 0."""

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """[N] full numbers of keys, including the shared prefixes."""

    @property
    def cu_keys(self) -> Tensor:
        """[N + 1] int32 on the model's device: cumulative `key_lengths`, starting with 0."""

    def of_keys(self, rows: Tensor) -> Tensor:
        """rows [T / cp, ...] of this rank's tokens -> the key rows of all local chunks, concatenated [K, ...]."""

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [T / cp, g, d_k], value [T / cp, g, d_v] of this rank's tokens -> both of all ranks' tokens [T, g, d]."""

    @property
    def keys(self) -> Repeats:
        """The rows of `keys_and_values` that the local chunks attend to, chunk by chunk."""

    def by_heads(self, part: Tensor) -> Tensor:
        """All heads of this rank's tokens [T / cp, h, d] -> this rank's heads of all tokens [T, h / cp, d]."""

    def by_tokens(self, share: Tensor) -> Tensor:
        """The inverse of `by_heads`."""

    def own_heads(self, parameter: Tensor) -> Tensor:
        """A parameter of all heads [n, ...] -> its slice for this rank's heads [n / cp, ...]."""

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Row positions [R] -> which of them are on this rank [R_own], and their indices among its tokens [R_own]."""

    def whole(self, part: Tensor, which: Tensor, size: int) -> Tensor:
        """This rank's results [R_own, ...] at indices `which` [R_own] -> the results of all ranks [size, ...]."""


@dataclass
class PackedSequences(PackedSeqParams):
    """The sequences of a packed row, in the form of Megatron's attention parameter.

    Megatron's rotary embedding, which some families use, calls `cu_seqlens_q.tolist()` in every layer, so Megatron's
    fields stay on the host. The attention kernels use device copies.
    """

    query_lengths: tuple[int, ...] = ()
    """Number of tokens of each sequence [N] or, under context parallelism, of each local chunk [2 N]."""
    key_lengths: tuple[int, ...] = ()
    """Number of keys of each sequence [N] or chunk [2 N], including a shared prefix."""
    cu_query: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the model's device."""
    cu_key: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the model's device."""
    positions: Tensor | None = None
    """[T] int64 on the model's device: the position of each of this rank's tokens within its sequence."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin [T, r / 2] float32 for all layers, computed by the model on first use."""
    shard: RowShard | None = None
    """This rank's shard of the row; None without context parallelism."""
    repeats: Repeats | None = None
    """With shared prefixes: which keys of the row each sequence uses. None if context-parallel ranks gather keys: then
    `shard` does this."""
    asked: Repeats | None = None
    """With shared prefixes: the hidden states from which outputs are computed. One state can be used several times,
    because several tokens may follow a shared prefix."""
    chosen_keys: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Keys chosen by a layer with an indexer, by layer number, for later layers that share them (`deepseek.layers`)."""
    routing: Choices | None = None
    """None: routers use their own choices."""
    images: RowImages | None = None

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Maximum number of tokens and of keys per sequence (or chunk)."""
        return max(self.query_lengths, default=0), max(self.key_lengths, default=0)


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed row. Implements Megatron's core-attention interface."""

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
                f"attention_dropout is {config.attention_dropout}, but two passes over a sample must give the same "
                "result; set --attention-dropout 0"
            )
        assert attention_type == "self", f"attention of type {attention_type} in layer {layer_number}"
        self.softmax_scale = softmax_scale
        self.splits_heads = config.cp_comm_type == ALL_TO_ALL

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
        """query [T, heads, d], key [T, groups, d], value [T, groups, d_v] -> [T, heads * d_v].

        Under context parallelism, T is the number of this rank's tokens.
        """
        packed = packed_seq_params
        assert packed is not None, "the trainer always packs its sequences"
        if packed.shard is not None and self.splits_heads:
            out = self._attend_with_own_heads(query, key, value, packed, packed.shard)
            return out.reshape(query.size(0), -1)
        repeats = packed.repeats
        if packed.shard is not None:
            (key, value), repeats = packed.shard.keys_and_values(key, value), packed.shard.keys
        return self._attend_to_keys(query, key, value, packed, repeats).reshape(query.size(0), -1)

    def _attend_to_keys(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, repeats: Repeats | None
    ) -> Tensor:
        """Like `_attend`, for the keys and values of a row, from which `repeats` selects those of each sequence."""
        if repeats is None:
            return self._attend(query, key, value, packed)
        with repeated((key, value), repeats) as (key, value):
            return self._attend(query, key, value, packed)

    def _attend_with_own_heads(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, shard: RowShard
    ) -> Tensor:
        """query [T / cp, heads, d], key [T / cp, groups, d], value [T / cp, groups, d_v] -> [T / cp, heads, d_v], by
        attention over the whole row with heads / cp heads."""
        both = shard.by_heads(torch.cat([key, value], dim=-1))
        key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        row = dataclasses.replace(
            packed,
            query_lengths=shard.lengths,
            key_lengths=shard.key_lengths,
            cu_query=shard.cu_lengths,
            cu_key=shard.cu_keys,
        )
        return shard.by_tokens(self._attend_to_keys(shard.by_heads(query), key, value, row, packed.repeats))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """query [T, heads, d], concatenated keys and values of all sequences -> [T, heads, d_v]."""
        kernel, lengths = name_of("attention", query), (packed.query_lengths, packed.key_lengths)
        if is_invariant():
            cu_lengths = packed.cu_query, packed.cu_key
            return invariant.attend(query, key, value, cu_lengths, lengths, scale=self.softmax_scale)
        if kernel == REFERENCE:
            return ops.per_sequence(query, key, value, *lengths, scale=self.softmax_scale)
        attend = {"flash4": ops.flash4, "varlen": ops.varlen}.get(kernel, ops.flash)
        assert packed.cu_query is not None and packed.cu_key is not None, "lengths must be on the GPU"
        return attend(*(query, key, value, packed.cu_query, packed.cu_key, *packed.longest), scale=self.softmax_scale)


class RotatingAttention(SelfAttention):
    """Megatron's attention with a single op that splits, normalises and rotates the queries and keys of a packed row.

    Has the same parameters as Megatron's. Subclasses can override `forward`, or `rotated` for queries and keys.
    """

    def forward(
        self, hidden_states: Tensor, *_given: Any, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T_local, 1, H] -> [T_local, 1, H] (a shard of the row under sequence parallelism), and the output bias.

        The rotary embedding comes from the row, not from the arguments.
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
        """[T_local, 1, H] -> query [T, heads, d], key and value [T, groups, d], and the output gate, if any."""
        assert packed.rotary is not None, "the model computes cos and sin before its first layer"
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
    """Returns the weight of a query or key norm, or None if there is no norm."""
    if norm is None or isinstance(norm, IdentityOp):
        return None
    assert isinstance(norm, RMSNorm), f"unsupported head norm {type(norm).__name__}: override `rotated`"
    return norm.weight


def packed_attention(config: TransformerConfig, standard: ModuleSpec, module: type | None = None) -> ModuleSpec:
    """Returns Megatron's local attention spec (`standard`) with packed core attention and our norms. `module`: the
    layer class.

    Subclasses of `RotatingAttention` use optimised ops. Direct subclasses of Megatron's `SelfAttention` also work, but
    use Megatron's rotary embedding, which loops over the sequences in every layer.
    """
    parts = dataclasses.replace(standard.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    return ModuleSpec(module=module or RotatingAttention, params=standard.params, submodules=parts)


def rotates_by_megatron(attention: object) -> bool:
    """Returns whether a layer's attention module needs Megatron's rotary embedding."""
    module = attention.module if isinstance(attention, ModuleSpec) else attention
    return isinstance(module, type) and issubclass(module, SelfAttention) and not issubclass(module, RotatingAttention)
