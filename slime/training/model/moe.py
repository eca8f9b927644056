"""Mixture-of-experts layers on Megatron's local specification: sequential experts, two ways to dispatch tokens.

The router takes no auxiliary loss, no capacity and no noise: each would make a token's gradient depend on the other
tokens of its micro-batch (Law 3).

Invariants
1. Every token reaches all experts that its router chose; nothing is dropped.
2. Ranks of one expert group may hold rows of different lengths. The all-to-all dispatcher takes them as they are; the
   all-gather dispatcher pads them with tokens that no expert sees.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.core.errors import ConfigError

REFUSED = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_router_force_load_balancing",
)
"""Settings under which a token's gradient would depend on the other tokens of its micro-batch."""


def check_moe(config: TransformerConfig) -> None:
    """Raises `ConfigError` for settings of experts that this release cannot train."""
    for name in REFUSED:
        value = getattr(config, name)
        if any(value) if isinstance(value, list) else value:
            raise ConfigError(
                f"got --{name.replace('_', '-')} {value}, because it makes a token's gradient depend on the other "
                "tokens of its micro-batch; leave it out"
            )
    if config.moe_token_dispatcher_type not in ("allgather", "alltoall"):
        raise ConfigError(
            f"got --moe-token-dispatcher-type {config.moe_token_dispatcher_type}, because it needs DeepEP; "
            "use alltoall or allgather"
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"got --tensor-model-parallel-size {config.tensor_model_parallel_size} without --sequence-parallel, "
            "because Megatron's experts need both; add --sequence-parallel"
        )


class ExpertLayer(MoELayer):
    """Megatron's layer of experts, with a dispatcher that takes rows of different lengths."""

    def __init__(self, config: TransformerConfig) -> None:
        groups = get_default_pg_collection()
        parts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        super().__init__(config, parts.submodules, pg_collection=groups)
        for parameter in self.experts.parameters():
            # Megatron sets this under expert parallelism only, as if experts were otherwise cut like dense layers. Ours
            # are whole on a rank, so tensor-parallel ranks are data-parallel to them and sum their gradients.
            parameter.allreduce = False
        if config.moe_token_dispatcher_type == "allgather":
            self.token_dispatcher = UnevenAllGatherDispatcher(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )


class UnevenAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Pads each rank's tokens to the longest row of the expert group; Megatron's own assumes equal lengths."""

    num_tokens: int
    """Tokens of this rank without padding."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, experts] -> hidden [T_max, H], probs [T_max, experts]."""
        hidden, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.num_tokens = hidden.size(0)
        if self.tp_ep_group.size() == 1:
            return hidden, probs
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
