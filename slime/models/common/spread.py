"""How SGLang's model of a family spreads over the ranks of an engine, beyond tensor parallelism, which all have.

It stands in the model's own code (SGLang 0.5.16, `srt/models/`), family by family. A family says here what was read
there and proven; anything else is refused before a run starts (`problem`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slime.core.topology import EngineLayout


class Head(str, Enum):
    """Which pipeline stages hold the output layer."""

    LAST = "last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Spread:
    """What an engine may do with a family."""

    dp_attention: bool = False
    """Attention, embedding and output layer may be shared by the ranks of a DP group alone."""
    dp_lm_head: bool = True
    """With DP attention the output layer, too, may be shared by a DP group alone."""
    whole_embedding: bool = False
    """With DP attention the embedding is whole on each rank instead."""
    stages: Head | None = None
    """It may run in pipeline stages, and which of them hold the output layer; None: it may not."""
    tied_stages: bool = False
    """In stages, a tied output layer is a tensor of its own on the last one, loaded from the embedding."""
    whole_dense_mlp: bool = False
    """`moe_dense_tp_size` 1 makes the MLP of dense layers whole on each rank."""
    every_embedding: bool = False
    """In stages, each one holds the embedding."""
    whole_stages: bool = False
    """A stage is one rank: its loader divides no experts."""


PLAIN = Spread()
"""Tensor and expert parallelism alone."""


def problem(spread: Spread, layout: EngineLayout, *, tied: bool, num_experts: int) -> str | None:
    """Why an engine cannot have this layout, in a half sentence; None if it can."""
    if layout.dp_size > 1 and not spread.dp_attention:
        return "its attention in SGLang knows no DP attention"
    if layout.dp_lm_head and not spread.dp_lm_head:
        return "its output layer in SGLang does not heed enable_dp_lm_head"
    if layout.tp_size > 1 and spread.whole_stages:
        return "its experts have biases, which ranks of SGLang do not share; give engines of one GPU a pipeline stage"
    if layout.pp_size > 1 and spread.stages is None:
        return "its model in SGLang does not run in pipeline stages"
    if layout.pp_size > 1 and tied and not spread.tied_stages:
        return "its tied output layer would not be updated on the last pipeline stage"
    if layout.whole_dense_mlp and not spread.whole_dense_mlp:
        return "its dense MLP in SGLang does not heed moe_dense_tp_size"
    if layout.ep_size > 1 and (num_experts == 0 or num_experts % layout.ep_size):
        return f"it has {num_experts} experts, which {layout.ep_size} groups cannot share evenly"
    return None
