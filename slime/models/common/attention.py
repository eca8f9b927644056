"""Packed causal attention, which stock Megatron lacks without Transformer Engine; whole rows and context parallel.

`PackedAttention` attends inside each sequence of a packed row, with grouped queries: `scaled_dot_product_attention` per
sequence on a CPU, `varlen_attn` on a GPU. Under context parallelism the queries are this rank's chunks, the keys those
of the whole row (all-gather; Llama 3, arXiv:2407.21783, section 3.3.2), and causality is aligned at the end of both.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.core.errors import ConfigError


class Choices(Protocol):
    """Where experts come from, as a router asks while its layer runs. See `slime.models.common.routing_replay`."""

    def choose(self, layer: int, own: Tensor, num_experts: int) -> Tensor:
        """own [T, topk] of layer `layer`, counted from 0 over the whole model -> the choice [T, topk] int64."""


class RowShard(Protocol):
    """What context parallelism makes of a packed row, as attention and the output layer need it.

    See `slime.training.model.context`.
    """

    @property
    def positions(self) -> Tensor:
        """[T / cp] int64: where in the row the tokens of this rank stand."""

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [T / cp, g, d_k], value [T / cp, g, d_v] -> those that each local chunk sees, end to end, [K, g, d]."""

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of row positions [R]: which are held here [R_own], and their index among this rank's tokens [R_own]."""

    def whole(self, part: Tensor, which: Tensor, size: int) -> Tensor:
        """Results of this rank [R_own, ...] at `which` [R_own] -> those of all ranks [R, ...], R = `size`."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a packed row begin.

    Megatron's rotary embedding reads `cu_seqlens_q` with `.tolist()` in every layer, so those stay on the host; the
    attention kernel reads the copies on the device.
    """

    query_lengths: tuple[int, ...] = ()
    """[N] tokens of each sequence; of each local chunk [2 N] under context parallelism."""
    key_lengths: tuple[int, ...] = ()
    """[N] or [2 N] keys that each of them sees."""
    cu_query: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the device of the model."""
    cu_key: Tensor | None = None
    """[N + 1] or [2 N + 1] int32 on the device of the model."""
    positions: Tensor | None = None
    """[T] int64 on the device of the model: where each of this rank's tokens stands in its sequence."""
    shard: RowShard | None = None
    """This rank's part of the row; None without context parallelism."""
    chosen_keys: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """By number of the layer that chose for the layers behind it: see `sparse_indexer`."""
    routing: Choices | None = None
    """Where the tokens' experts come from; None: routers choose by themselves."""


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

        T is this rank's part of the row under context parallelism. `masks`: per sequence which keys a query sees,
        bool [n, n], or None for all that are not behind it.
        """
        packed = packed_seq_params
        assert packed is not None, "the trainer always packs its sequences"
        if packed.shard is not None:
            key, value = packed.shard.keys_and_values(key, value)
        if query.is_cuda and query.dtype != torch.float32 and masks is None:
            return self._varlen(query, key, value, packed).reshape(query.size(0), -1)
        masks = masks or [None] * len(packed.query_lengths)
        return self._per_sequence(query, key, value, packed, masks).reshape(query.size(0), -1)

    def _per_sequence(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, masks: Sequence[Tensor | None]
    ) -> Tensor:
        # [1, heads, T, d], the layout of scaled_dot_product_attention; a view, no copy.
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        parts = []
        for a, b, c, mask in zip(
            q.split(packed.query_lengths, dim=2),
            k.split(packed.key_lengths, dim=2),
            v.split(packed.key_lengths, dim=2),
            masks,
            strict=True,
        ):
            num_queries, num_keys = a.size(2), b.size(2)
            if num_keys != num_queries:  # is_causal would align the first query with the first key
                mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=a.device).tril(num_keys - num_queries)
            out = torch.nn.functional.scaled_dot_product_attention(
                a,
                b,
                c,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )
            parts.append(out)
        return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn

        # torch 2.10 calls causality `is_causal`; later it is a window of (-1, 0). Grouped queries came later still.
        # Both align the last query of a sequence with its last key (FlashAttention since 2.1).
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
        out: Tensor = varlen_attn(
            *(x.contiguous() for x in (query, key, value)),
            packed.cu_query,
            packed.cu_key,
            max(packed.query_lengths),
            max(packed.key_lengths),
            **options,
        )
        return out
