"""Routers that take the choice of experts from a record, and keep the weights of the chosen ones their own (R3).

Engine and trainer round differently, and a router turns a rounding error into another expert. So the choice is taken as
it was made when the token was sampled, and the trainer's own logits say what the chosen experts weigh: gradients flow
into the router as they do without a record (arXiv:2510.11370, "rollout routing replay"). `RowRouting` travels with the
row that it is of, in `PackedSequences`; `RoutedLayer` lends it to its router while the layer runs.

Invariants
1. What a router reads belongs to the row that its layer was called with, also when the layer runs again for the
   backward pass, whatever other rows were run between: nothing is looked up by order or time.
2. A token without a record gets the trainer's own choice.
3. Without a row's routing a router computes what it always did, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRouting:
    """The choices of one row, T tokens of it on this rank."""

    recorded: Mapping[int, Tensor]
    """Layer -> [T, topk] numbers of experts; a row of numbers that no expert has was not recorded."""
    replays: bool = True
    """False: recorded choices are compared with the router's own, which stay."""
    keeps: dict[int, Tensor] | None = None
    """Layer -> the choice made [T, topk], filled here for a later pass; None: nothing is kept."""
    counts: Tensor | None = None
    """[2] float64, added to: recorded choices of a token in a layer, and those of them whose experts are not the
    router's own. None: not counted."""

    def choose(self, layer: int, own: Tensor, num_experts: int) -> Tensor:
        """See `slime.models.common.attention.Choices`."""
        choice, given = own, self.recorded.get(layer)
        if given is not None:
            assert given.shape == own.shape, f"recorded {tuple(given.shape)} for {tuple(own.shape)} in layer {layer}"
            given = given.long()
            known = given[:, :1] < num_experts
            if self.counts is not None:
                differs = (given.sort(-1).values != own.sort(-1).values).any(-1, keepdim=True) & known
                self.counts.add_(torch.stack([known.sum(), differs.sum()]).to(self.counts.dtype))
            if self.replays:
                choice = torch.where(known, given, own)
        if self.keeps is not None:
            self.keeps[layer] = choice.to(torch.uint8 if num_experts <= 255 else torch.int16)
        return choice


class RoutedLayer(TransformerLayer):
    """Megatron's layer; while it runs its router has the routing of the row that it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, called by its block with the row's `PackedSequences` as `packed_seq_params`."""
        packed = kwargs.get("packed_seq_params")
        choices = None if packed is None else packed.routing
        if choices is None or not isinstance(self.mlp, MoELayer):
            return super().forward(*args, **kwargs)
        self.mlp.router.choices = choices
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.mlp.router.choices = None
