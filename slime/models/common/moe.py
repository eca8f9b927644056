"""Mixture-of-experts layers: Megatron's layer with our router and stacked experts; `dispatch` carries tokens.

The router takes no auxiliary loss, no capacity and no noise: each would make a token's gradient depend on the other
tokens of its micro-batch (Law 3); `slime.settings.megatron.FIXED` refuses them. Which Megatron settings select
what (a family sets them from its HF config, see `experts`):

- `num_moe_experts`, `moe_router_topk`, `moe_ffn_hidden_size`: routed experts of a layer, those of a token, their size;
- `moe_router_score_function`: "softmax" or "sigmoid" over the experts, in float32;
- `moe_router_pre_softmax`: not HF's `norm_topk_prob`, for both functions: the chosen scores stay as they are (True) or
  are divided by their sum (False);
- `moe_router_topk_scaling_factor`: HF's `routed_scaling_factor`; None is 1;
- `moe_router_num_groups`, `moe_router_group_topk`: HF's `n_group`, `topk_group`; None is one group. A group counts by
  the sum of its two best experts;
- `moe_router_enable_expert_bias` (sigmoid only): `expert_bias` is added to the scores for the choice and not for the
  weights. It is a float32 buffer that training leaves alone;
- `moe_router_dtype`: "fp32" where transformers computes router logits in float32 (DeepSeek, GLM); None: in the dtype of
  the model (Qwen), and the weights of the chosen experts are rounded to it;
- `moe_shared_expert_intermediate_size`: the sum of the sizes of all shared experts; None without them.
  `moe_shared_expert_gate`: their output is scaled by the sigmoid of `gate_weight` (Qwen3-Next).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.common.attention import Choices
from slime.models.common.dispatch import LocalDispatcher, OneWaitAlltoAllDispatcher, UnevenAllGatherDispatcher
from slime.models.common.mlp import GatedSharedExperts
from slime.models.common.stacked_experts import StackedExperts


class ExactRouter(TopKRouter):
    """Megatron's router with the choice and the weights of `transformers`.

    Megatron's own divides sigmoid scores by their sum whatever the model says, takes softmax over the chosen logits
    in their own dtype, and scores a group by topk / group_topk of its experts.
    """

    choices: Choices | None = None
    """Set while a layer runs whose row has choices of its own: see `routing_replay`."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, experts] -> weights [T, experts] in their dtype, 0 where not chosen, and bool of that shape."""
        config = self.config
        logits = logits.view(-1, config.num_moe_experts)
        wide = logits.float()
        scores = wide.sigmoid() if config.moe_router_score_function == "sigmoid" else wide.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores if self.expert_bias is None else scores + self.expert_bias)
            if self.choices is not None:
                chosen = self.choices.choose(self.layer_number - 1, chosen, config.num_moe_experts)
        weights = scores.gather(1, chosen)
        if not config.moe_router_pre_softmax:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * (config.moe_router_topk_scaling_factor or 1.0)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        return torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype)), routing_map

    def _choose(self, scores: Tensor) -> Tensor:
        """[T, experts] -> numbers of the chosen experts [T, topk] (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
        groups = self.config.moe_router_num_groups or 1
        if (kept := self.config.moe_router_group_topk or groups) < groups:
            grouped = scores.unflatten(1, (groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(outside.unsqueeze(-1), -float("inf")).flatten(1)
        return scores.topk(self.topk, dim=-1).indices


class WideRouter(ExactRouter):
    """A router whose weight is float32 whatever the training dtype, as engines hold it; its row is `wide`."""

    def reset_parameters(self) -> None:
        """As Megatron's, which would round the weight to the training dtype."""
        if self.config.perform_initialization:
            self.config.init_method(self.weight)
        self.weight.sequence_parallel = self.config.sequence_parallel


class ExpertLayer(MoELayer):
    """Megatron's layer of experts, with our router, stacked experts, and dispatchers that do not wait (`dispatch`)."""

    router_class: ClassVar[type[ExactRouter]] = ExactRouter
    """What chooses them."""
    experts_class: ClassVar[type[torch.nn.Module]] = StackedExperts

    def __init__(self, config: TransformerConfig) -> None:
        groups = get_default_pg_collection()
        parts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        parts.submodules.router, parts.submodules.experts = self.router_class, self.experts_class
        if parts.submodules.shared_experts is not None:
            parts.submodules.shared_experts.module = GatedSharedExperts
        super().__init__(config, parts.submodules, pg_collection=groups)
        for parameter in self.experts.parameters():
            # Megatron sets this under expert parallelism only, as if experts were otherwise split like dense layers.
            # Ours are whole on a rank, so tensor-parallel ranks are data-parallel to them and sum their gradients.
            parameter.allreduce = False
        if groups.ep.size() == 1:
            self.token_dispatcher = LocalDispatcher(config, groups)
        else:
            gathers = config.moe_token_dispatcher_type == "allgather"
            kind = UnevenAllGatherDispatcher if gathers else OneWaitAlltoAllDispatcher
            self.token_dispatcher = kind(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )


class WideRoutedExperts(ExpertLayer):
    """Experts behind a float32 router."""

    router_class = WideRouter
