"""Attention features that Megatron lacks without Transformer Engine: packed rows, context parallelism, and the norm of
queries and keys.
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

# A root mean square norm in the arithmetic of `transformers` (float32 statistics, weight in the model's dtype). It
# supports sequence parallelism, which Megatron's wrapper of `torch.nn.RMSNorm` refuses.


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in the arithmetic of `transformers`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees a part of the tokens, so Megatron sums these gradients over the
        # ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


def current_device() -> torch.device:
    """The device for new parameters: this rank's GPU, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# Packed causal attention, which stock Megatron lacks without Transformer Engine; whole rows and context parallel.
#
# `PackedAttention` attends inside each sequence of a packed row (`slime.ops.attention`). Under context parallelism the
# queries are this rank's chunks, the keys are those of the whole row (all-gather; Llama 3, arXiv:2407.21783, section
# 3.3.2), and the causal mask is aligned at the end of both. A sequence that continues a shared prefix has the keys of
# that prefix copied in front of its own. `RotatingAttention` is the layer around it: Megatron's, except that one op
# (`slime.ops.qk_rotary`) turns the projection into queries and keys, with the angles of the whole row.


class Choices(Protocol):
    """Supplies the choice of experts to a router while its layer runs. See `slime.models.common.mlp`."""

    def choose(self, layer: int, own: Tensor, num_experts: int) -> Tensor:
        """own [T, topk] of layer `layer`, counted from 0 over the whole model -> the choice to use [T, topk] int64."""


class RowShard(Protocol):
    """The part of a packed row that context parallelism gives a rank, as attention, recurrences and the output layer
    see it.

    See `slime.training.model.row_shards`.
    """

    @property
    def positions(self) -> Tensor:
        """[T / cp] int64: positions of this rank's tokens in the row."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """[N] tokens of each whole sequence."""

    @property
    def cu_lengths(self) -> Tensor:
        """[N + 1] int32 on the model's device: the start of each whole sequence, then the total."""

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [T / cp, g, d_k], value [T / cp, g, d_v] -> the keys and values that each local chunk sees, concatenated,
        [K, g, d].
        """

    def by_heads(self, part: Tensor) -> Tensor:
        """part [T / cp, h, d] of this rank's tokens -> [T, h / cp, d], the whole row for this rank's share of heads."""

    def by_tokens(self, share: Tensor) -> Tensor:
        """share [T, h / cp, d] for this rank's share of heads -> [T / cp, h, d], all heads for this rank's tokens."""

    def own_heads(self, parameter: Tensor) -> Tensor:
        """[n, ...] with all heads along the first dimension -> [n / cp, ...] with this rank's share."""

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Row positions [R] -> the selection that this rank holds [R_own], and its index among this rank's tokens
        [R_own].
        """

    def whole(self, part: Tensor, which: Tensor, size: int) -> Tensor:
        """This rank's results [R_own, ...] for the positions `which` [R_own] -> the results of all ranks [R, ...], R =
        `size`.
        """


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a packed row begin.

    Megatron's own rotary embedding, which a family's attention may still use, reads `cu_seqlens_q` with `.tolist()` in
    every layer, so that tensor stays on the host; the attention kernel reads the copy on the device.
    """

    query_lengths: tuple[int, ...] = ()
    """[N] tokens of each sequence; [2 N], of each local chunk, under context parallelism."""
    key_lengths: tuple[int, ...] = ()
    """[N] or [2 N] keys that each sequence or chunk sees, including those of a shared prefix."""
    cu_query: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the model's device."""
    cu_key: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the model's device."""
    positions: Tensor | None = None
    """[T] int64 on the model's device: the position of each of this rank's tokens in its sequence."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin [T, r / 2] float32 of the positions, for all layers; the model computes them in its first pass."""
    shard: RowShard | None = None
    """This rank's part of the row; None without context parallelism."""
    repeats: Repeats | None = None
    """The keys that each sequence sees, concatenated, if samples share prefixes. Under context parallelism `shard` has
    them.
    """
    asked: Repeats | None = None
    """If samples share prefixes: the hidden states of this rank that the micro-batch asks log-probs of. Several tokens
    may follow one hidden state of a shared prefix.
    """
    chosen_keys: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Keyed by the layer that chose the keys, for later layers to reuse: see `SparseIndexer`."""
    routing: Choices | None = None
    """Supplies the choice of experts; None: routers choose."""
    images: RowImages | None = None
    """The images behind the row's placeholders; None without images."""

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest sequence (or chunk), and the largest number of keys that one sees."""
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
        masks: Sequence[Tensor | None] | None = None,
        **_unused: Any,
    ) -> Tensor:
        """query [T, heads, d], key [T, groups, d], value [T, groups, d_v] -> [T, heads * d_v].

        T is this rank's part of the row under context parallelism. `masks`: for each sequence the keys that a query
        sees, bool [n, n], or None for plain causal attention.
        """
        packed = packed_seq_params
        assert packed is not None, "the trainer always packs its sequences"
        if packed.shard is not None:
            key, value = packed.shard.keys_and_values(key, value)
        if packed.repeats is None:
            out = self._attend(query, key, value, packed, masks)
        else:
            assert masks is None, "a mask of each sequence knows no shared prefix"
            with repeated((key, value), packed.repeats) as (key, value):
                out = self._attend(query, key, value, packed, None)
        return out.reshape(query.size(0), -1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, masks: Sequence[Tensor | None] | None
    ) -> Tensor:
        """query [T, heads, d], keys and values that each sequence sees -> [T, heads, d_v]."""
        kernel = REFERENCE if masks is not None else name_of("attention", query)
        if kernel == REFERENCE:
            lengths = packed.query_lengths, packed.key_lengths
            return ops.per_sequence(query, key, value, *lengths, scale=self.softmax_scale, masks=masks)
        attend = ops.varlen if kernel == "varlen" else ops.flash
        assert packed.cu_query is not None and packed.cu_key is not None, "a row on a GPU has its lengths there"
        return attend(*(query, key, value, packed.cu_query, packed.cu_key, *packed.longest), scale=self.softmax_scale)


class RotatingAttention(SelfAttention):
    """Megatron's attention for packed rows, with one op that splits, norms and rotates.

    Its parameters are Megatron's. A subclass may change the output (`forward`) or the way from hidden states to queries
    and keys (`rotated`).
    """

    def forward(
        self, hidden_states: Tensor, *_given: Any, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T_local, 1, H] -> [T_local, 1, H] (a part of the row under sequence parallelism), and the output's bias.

        The rotary embedding comes from the row, so the caller's is ignored.
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
        """[T_local, 1, H] -> query [T, heads, d], key and value [T, groups, d], and a gate for the output, if any."""
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
    """The weight of the norm of queries or keys; None without a norm, for which Megatron's specification has an
    identity.
    """
    if norm is None or isinstance(norm, IdentityOp):
        return None
    assert isinstance(norm, RMSNorm), f"a norm of heads of type {type(norm).__name__}: override `rotated` for it"
    return norm.weight


# Megatron's attention with packed rows and our norm of q and k.


def packed_attention(config: TransformerConfig, standard: ModuleSpec, module: type | None = None) -> ModuleSpec:
    """`standard`, Megatron's local attention, with a packed core. `module`: the family's own attention class, if any.

    A class that derives from `RotatingAttention` uses the ops of this device. One that derives from Megatron's
    `SelfAttention` directly also works, but with Megatron's rotary embedding, which loops over the sequences in every
    layer.
    """
    parts = dataclasses.replace(standard.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    return ModuleSpec(module=module or RotatingAttention, params=standard.params, submodules=parts)


def rotates_by_megatron(attention: object) -> bool:
    """Whether a layer's attention module needs Megatron's rotary table: `SelfAttention`, or a direct subclass of it."""
    module = attention.module if isinstance(attention, ModuleSpec) else attention
    return isinstance(module, type) and issubclass(module, SelfAttention) and not issubclass(module, RotatingAttention)
