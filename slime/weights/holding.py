"""Computes which shard of each resident tensor an engine rank holds.

SGLang 0.5.16 follows these rules (`srt/models/`, `layers/dp_attention.py`, `layers/vocab_parallel_embedding.py`,
`layers/moe/fused_moe_triton/layer.py`):
- a pipeline stage holds its own layers. The first stage also has the embedding, and the last stage the final norm. The
  output layer is on the last stage or on every stage (`Spread.stages`); if it is tied to the embedding, the last stage
  has a separate copy. In some models every stage has the embedding (`Spread.every_embedding`);
- attention is split over the ranks of a DP group. So is the embedding, unless it is replicated on each rank (`Spread`).
  With `dp_lm_head`, so is the output layer;
- each EP group has a consecutive range of experts. A rank's position in its group selects its shard of each expert;
- everything else, such as shared experts and dense MLPs, is split over all ranks of a stage;
- a draft model is split in the same way and also has the model's embedding and output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.core.topology import EngineLayout, EngineRank
from slime.models.common.table import ATTENTION, DRAFT, EMBEDDING, HEAD, Entry, FamilyTable, Head

TIED_HEAD = "lm_head.weight"
"""SGLang's name for the separate copy of a tied output layer."""


@dataclass(frozen=True, slots=True)
class Share:
    """One shard (index `part`) of a tensor that is split into `parts` equal shards."""

    part: int = 0
    parts: int = 1
    padded_for: int = 1
    """On a CPU, the number of ranks for which heads and features are padded; can differ from `parts`."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank's shard of a resident tensor. Ranks with equal holdings store the same bytes."""

    share: Share
    experts: range | None = None
    """Indices of the rank's routed experts; None if the tensor has no experts."""

    def entries(self, held: Sequence[Entry]) -> Sequence[Entry]:
        """Selects this rank's entries from all entries of the resident tensor."""
        return held if self.experts is None else held[self.experts.start : self.experts.stop]


def holdings(
    table: FamilyTable, held: Sequence[Entry], layout: EngineLayout
) -> Iterator[tuple[EngineRank, str, Holding]]:
    """Yields (rank, resident name, holding) for every rank that has a shard of these entries."""
    entry = held[0]
    name = entry.row.megatron
    if entry.engine.startswith(DRAFT) and not layout.draft:
        return
    stages = _stages(table, entry, layout)
    for rank in layout.ranks():
        if rank.pp_rank in stages:
            holding = _holding(table, entry, layout, rank.tp_rank)
            yield rank, entry.engine, holding
            if layout.draft and name in (EMBEDDING, HEAD):
                yield rank, DRAFT + entry.engine, holding
        if name == EMBEDDING and table.tied and rank.pp_rank and rank.pp_rank == layout.pp_size - 1:
            yield rank, TIED_HEAD, Holding(_head(layout, rank.tp_rank))


def hf_names_held(table: FamilyTable, layout: EngineLayout) -> dict[EngineRank, frozenset[str]]:
    """Maps each rank to the HF tensors of which it has at least one shard."""
    names: dict[EngineRank, set[str]] = {rank: set() for rank in layout.ranks()}
    for held in table.resident.values():
        for rank, _, holding in holdings(table, held, layout):
            names[rank].update(name for entry in holding.entries(held) for name in entry.hf)
    return {rank: frozenset(own) for rank, own in names.items()}


def _stages(table: FamilyTable, entry: Entry, layout: EngineLayout) -> range:
    last = layout.pp_size - 1
    if entry.row.megatron == HEAD and table.spread.stages is Head.EVERY:
        return range(layout.pp_size)
    if entry.layer is None:
        if entry.row.megatron == EMBEDDING and table.spread.every_embedding:
            return range(layout.pp_size)
        stage = 0 if entry.row in table.before else last
    else:
        layers = table.sizes.num_layers
        stage = next(s for s in range(layout.pp_size) if entry.layer in layout.layers_of(s, layers))
    return range(stage, stage + 1)


def _holding(table: FamilyTable, entry: Entry, layout: EngineLayout, tp_rank: int) -> Holding:
    padded = layout.tp_size
    if entry.expert is not None:
        group, place = divmod(tp_rank, layout.expert_tp_size)
        each = table.sizes.num_experts // layout.ep_size
        share = Share() if entry.row.dim is None else Share(place, layout.expert_tp_size, padded)
        return Holding(share, range(group * each, (group + 1) * each))
    if entry.row.dim is None:
        return Holding(Share())
    name = entry.row.megatron
    if name == HEAD:
        return Holding(_head(layout, tp_rank))
    if name == EMBEDDING and layout.dp_size > 1 and table.spread.whole_embedding:
        return Holding(Share(0, 1, padded))
    if name == EMBEDDING or ATTENTION in name:
        return Holding(Share(tp_rank % layout.attention_tp_size, layout.attention_tp_size, padded))
    if layout.whole_dense_mlp and ".mlp.linear_fc" in name:
        return Holding(Share(0, 1, padded))
    return Holding(Share(tp_rank, layout.tp_size, padded))


def _head(layout: EngineLayout, tp_rank: int) -> Share:
    ranks = layout.attention_tp_size if layout.dp_lm_head else layout.tp_size
    return Share(tp_rank % ranks, ranks, layout.tp_size)
