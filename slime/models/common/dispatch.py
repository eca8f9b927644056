"""Ways of tokens to the experts of a layer and back, in Megatron's protocol of a dispatcher.

    dispatch_preprocess, token_dispatch, dispatch_postprocess      tokens -> rows ordered by expert
    combine_preprocess, token_combine, combine_postprocess         rows of experts -> tokens

Without expert parallelism rows are put in order on their rank, and no GPU waits for the host or the other way round
(`LocalDispatcher`). With it Megatron's two dispatchers carry them. Split sizes of the all-to-all have to be known to
the host: it waits once in each forward pass of a layer. The all-gather waits several times, for its selections too.

Invariants
1. Every token reaches all experts that its router chose; nothing is dropped.
2. Ranks of one expert group may hold rows of different lengths.
3. On a CPU all are bit for bit Megatron's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor

from slime.ops.experts import RowGroups, RowPlan, form_of, gather_rows, plan_rows, row_weights, sum_rows


class LocalDispatcher(MoETokenDispatcher):
    """All experts are on this rank: rows are put in their order and back."""

    _plan: RowPlan
    _shape: torch.Size

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, experts] -> rows [T * topk, H], their weights [T * topk]."""
        self._shape = hidden_states.shape
        self._plan = plan_rows(routing_map, self.config.moe_router_topk)
        rows = gather_rows(hidden_states.view(-1, self._shape[-1]), self._plan, form_of(hidden_states))
        return rows, row_weights(probs, self._plan)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As they are."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, RowGroups, Tensor]:
        """Adds which rows are whose."""
        return hidden_states, self._plan.groups, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As they are."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """As they are."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows [T * topk, H] -> [T, 1, H]."""
        return sum_rows(hidden_states, self._plan, form_of(hidden_states)).view(self._shape)


class OneWaitAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's, with our order of rows: its own waits for the device to count them, and adds rows in their dtype."""

    _plan: RowPlan

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, experts] -> rows [T * topk, H], their weights [T * topk]."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        sizes = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", sizes)
        self._plan = plan_rows(routing_map, self.config.moe_router_topk)
        rows = gather_rows(hidden_states.view(-1, self.hidden_shape[-1]), self._plan, form_of(hidden_states))
        return rows, row_weights(probs, self._plan)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Rows [T * topk, H] -> [T, 1, H]."""
        rows = permutated_local_input_tokens
        return sum_rows(rows, self._plan, form_of(rows)).view(self.hidden_shape)


class UnevenAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Pads each rank's tokens to the longest row of the expert group; Megatron's own assumes equal lengths."""

    num_tokens: int
    """Tokens of this rank without padding."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, experts] -> hidden [T_max, H], probs [T_max, experts]."""
        hidden, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.num_tokens = hidden.size(0)
        longest = torch.tensor([self.num_tokens], device=hidden.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        missing = int(longest) - self.num_tokens
        self.routing_map = _pad(routing_map, missing)
        return _pad(hidden, missing), _pad(probs, missing)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T_max, H] -> [T, 1, H]."""
        result: Tensor = super().combine_postprocess(hidden_states[: self.num_tokens])
        return result


def _pad(x: Tensor, num_rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(num_rows, *x.shape[1:])]) if num_rows else x
