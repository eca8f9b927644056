"""Decoder MLPs: the dense gated MLP, and MoE with router, dispatchers, stacked experts and routing replay.

Dispatchers move tokens to a layer's experts and back. They implement Megatron's interface:

    dispatch_preprocess, token_dispatch, dispatch_postprocess      tokens -> rows ordered by expert
    combine_preprocess, token_combine, combine_postprocess         rows of experts -> tokens

Without expert parallelism, rows are reordered locally, and neither GPU nor host waits for the other
(`LocalDispatcher`). With expert parallelism, the host waits for the GPU once in each forward pass of a layer, for the
numbers of rows to send (`AllToAllDispatcher`), or several times, with Megatron's all-gather dispatcher.

Invariants
1. Every token reaches all experts that the router chose; none is dropped.
2. Within an expert group, ranks can have rows of different lengths.
3. On a CPU, all dispatchers are bitwise equal to Megatron's. In float32, experts and the gradients of their rows and
   weights are bitwise equal to those of Megatron's sequential experts.
4. Tensor parallelism does not split experts. Tensor-parallel ranks are data-parallel for experts (`ExpertLayer`).

Router. It has no auxiliary loss, capacity or noise, because each of these would make a token's gradient depend on other
tokens in its micro-batch (Law 3); `slime.settings.megatron.FIXED` rejects them. A family derives these Megatron
settings from the HF config:

- `num_moe_experts`, `moe_router_topk`, `moe_ffn_hidden_size`: routed experts per layer, experts per token, expert size;
- `moe_router_score_function`: "softmax" or "sigmoid" over the experts, in float32;
- `moe_router_pre_softmax`: the negation of HF's `norm_topk_prob`, for both functions. The chosen scores are used as is
  (True) or divided by their sum (False);
- `moe_router_topk_scaling_factor`: HF's `routed_scaling_factor`; None means 1;
- `moe_router_num_groups`, `moe_router_group_topk`: HF's `n_group` and `topk_group`; None means one group. A group's
  score is the sum of its two best experts' scores;
- `moe_router_enable_expert_bias` (sigmoid only): `expert_bias` is added to the scores for choosing experts, but not for
  weighting them. It is an untrained float32 buffer;
- `moe_router_dtype`: "fp32" if transformers computes router logits in float32 (DeepSeek, GLM); None for the model's
  dtype (Qwen), to which the weights of the chosen experts are rounded;
- `moe_shared_expert_intermediate_size`: total size of all shared experts; None without them. `moe_shared_expert_gate`:
  their output is scaled by the sigmoid of a gate with weight `gate_weight` (Qwen3-Next).

Routing replay (R3). Engine and trainer round differently, and a rounding error can make a router choose a different
expert. So the trainer uses the experts chosen when the token was sampled, but weights them by its own logits, so that
the router still gets gradients (arXiv:2510.11370, "rollout routing replay"). A row's `RowRouting` is stored in its
`PackedSequences`, and `RoutedLayer` passes it to the router while the layer runs.

Invariants
5. A router always reads the record of the row that its layer was called with. This holds even if the layer is
   recomputed for the backward pass after other rows, because records are never looked up by order or time.
6. If a token has no record, the trainer's router chooses its experts.
7. If a row has no record, the router's output is bitwise the same as without replay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter, functional

from slime.models.common.packed_attention import Choices, current_device
from slime.ops.experts import (
    RowGroups,
    RowPlan,
    form_of,
    gather_rows,
    grouped_linear,
    interleave,
    permute_rows,
    plan_rows,
    row_weights,
    sum_rows,
    weigh,
    weighted_swiglu,
)
from slime.ops.swiglu import swiglu


class GatedMLP(MLP):
    """Megatron's MLP with a fused silu(gate) * up (`slime.ops.swiglu`). Gate and up are one projection."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T_local, 1, H] -> [T_local, 1, H], and the output bias, if any.

        `per_token_scale` [T]: scales the activations of an expert, as in Megatron.
        """
        mixed, bias = self.linear_fc1(hidden_states)
        out = swiglu(mixed if bias is None else mixed + bias)
        if per_token_scale is not None:
            out = (out * per_token_scale.unsqueeze(-1)).to(out.dtype)
        output, output_bias = self.linear_fc2(out)
        assert output_bias is None or per_token_scale is None, "experts have no biases"
        return output, output_bias


class DenseMLP(GatedMLP):
    def __init__(self, config: TransformerConfig, **_unused: Any) -> None:
        super().__init__(config, _linear_parts(), ffn_hidden_size=config.ffn_hidden_size)


def _linear_parts() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class GatedSharedExperts(SharedExpertMLP, GatedMLP):
    """Megatron's shared experts (one MLP and an optional gate), based on `GatedMLP`."""


class LocalDispatcher(MoETokenDispatcher):
    """Only reorders rows, because all experts are local."""

    _plan: RowPlan
    _shape: torch.Size

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, experts] -> rows [T * topk, H], their weights [T * topk]."""
        self._shape = hidden_states.shape
        self._plan = plan_rows(routing_map, self.config.moe_router_topk)
        rows = gather_rows(hidden_states.view(-1, self._shape[-1]), self._plan, form_of(hidden_states))
        return rows, row_weights(probs, self._plan)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, RowGroups, Tensor]:
        return hidden_states, self._plan.groups, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows [T * topk, H] -> [T, 1, H]."""
        return sum_rows(hidden_states, self._plan, form_of(hidden_states)).view(self._shape)


class AllToAllDispatcher(MoETokenDispatcher):
    """Sends each row to the rank of its expert and back. A rank owns consecutive experts.

    The host waits once per forward pass, for the numbers of rows that ranks send each other. The GPU orders rows
    meanwhile.
    """

    _plan: RowPlan
    _shape: torch.Size
    _exchange: Exchange

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, 1, H], routing_map and probs [T, experts] -> rows [T * topk, H], their weights [T * topk]."""
        self._shape = hidden_states.shape
        self._exchange = Exchange(routing_map, self.ep_group)
        self._plan = plan_rows(routing_map, self.config.moe_router_topk)
        rows = gather_rows(hidden_states.view(-1, self._shape[-1]), self._plan, form_of(hidden_states))
        return rows, row_weights(probs, self._plan)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and weights of this rank's tokens -> those of this rank's experts, ordered by rank, then by expert."""
        self._exchange.wait()
        return self._exchange.to_experts(hidden_states), self._exchange.to_experts(probs)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, RowGroups, Tensor]:
        order, inverse, groups = self._exchange.by_expert
        return permute_rows(hidden_states, order, inverse), groups, permute_rows(probs, order, inverse)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        order, inverse, _ = self._exchange.by_expert
        return permute_rows(hidden_states, inverse, order)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return self._exchange.to_tokens(hidden_states)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows [T * topk, H] -> [T, 1, H]."""
        return sum_rows(hidden_states, self._plan, form_of(hidden_states)).view(self._shape)


class Exchange:
    """How many rows the ranks of an expert group send each other in one pass of a layer."""

    def __init__(self, routing_map: Tensor, group: dist.ProcessGroup) -> None:
        """routing_map: bool [tokens, experts], this rank's. Starts to collect those of all ranks and does not wait."""
        self._group, self._rank, num_ranks = group, group.rank(), group.size()
        counts = routing_map.sum(0, dtype=torch.int32)
        self._counts = counts.new_empty(num_ranks, counts.numel())
        self._collected = dist.all_gather_into_tensor(self._counts.view(-1), counts, group=group, async_op=True)
        self._on_host = self._counts
        if counts.is_cuda:
            with torch.cuda.stream(_side_stream(counts.device)):
                self._collected.wait()
                self._on_host = torch.empty(self._counts.shape, dtype=torch.int32, pin_memory=True)
                self._on_host.copy_(self._counts, non_blocking=True)
                self._copied = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        """Waits for the other ranks and for the copy to the host."""
        self._collected.wait()
        if self._counts.is_cuda:
            self._copied.synchronize()
        num_ranks = self._group.size()
        rows = self._on_host.view(num_ranks, num_ranks, -1).sum(2)
        self._sent: list[int] = rows[self._rank].tolist()
        """Rows that this rank sends to each rank."""
        self._received: list[int] = rows[:, self._rank].tolist()
        own = self._counts.view(num_ranks, num_ranks, -1)[:, self._rank]  # [ranks, local experts]
        self.by_expert: tuple[Tensor, Tensor, RowGroups] = interleave(own, sum(self._received))
        """The order of received rows by expert, int64 [rows], its inverse, and the groups; on the rows' device."""

    def to_experts(self, rows: Tensor) -> Tensor:
        """[rows of this rank's tokens, ...] -> [rows of this rank's experts, ...]"""
        result: Tensor = all_to_all(self._group, rows, self._received, self._sent)
        return result

    def to_tokens(self, rows: Tensor) -> Tensor:
        """[rows of this rank's experts, ...] -> [rows of this rank's tokens, ...]"""
        result: Tensor = all_to_all(self._group, rows, self._sent, self._received)
        return result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class UnevenAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Pads each rank's tokens to the longest row in the expert group. Megatron's dispatcher assumes equal lengths."""

    num_tokens: int
    """Number of tokens on this rank, excluding padding."""

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


class StackedLinear(Module):
    """One linear layer without bias per expert, with all weights in one tensor."""

    def __init__(self, config: TransformerConfig, num_experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        shape = (num_experts, size_out, size_in)
        self.weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        # Makes the gradient norm include the experts of all tensor-parallel ranks.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """x [rows, in], ordered by expert -> [rows, out]."""
        return self.product(x, self.weight, groups)

    @staticmethod
    def product(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """x [rows, in], weight [experts, out, in] -> [rows, out]."""
        return grouped_linear(x, weight, groups, form_of(x))


class StackedExperts(Module):
    """SwiGLU experts without bias. Each projection is one tensor for all experts. Replaces Megatron's `SequentialMLP`.

    The optimizer and gradient buffers see two parameters per layer. `training.model.parameter_names` provides views of
    single experts for weight tables, checkpoints and engines. Weights are uninitialised until a checkpoint is loaded.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_unused: Any) -> None:
        super().__init__()
        gated = config.gated_linear_unit and config.activation_func is functional.silu
        assert gated and not config.add_bias_linear, "stacked experts are SwiGLU without bias"
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = StackedLinear(config, num_local_experts, hidden, 2 * size)
        """weight [experts, 2F, H]: gate rows, then value rows."""
        self.linear_fc2 = StackedLinear(config, num_local_experts, size, hidden)
        """weight [experts, H, F]."""

    def forward(self, x: Tensor, sizes: RowGroups | Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """x [rows, H] ordered by expert, router weights [rows] -> [rows, H], and no bias.

        `sizes`: row groups, or the number of rows per expert [experts].
        """
        groups = sizes if isinstance(sizes, RowGroups) else RowGroups.of(sizes, x.device)
        inner = weighted_swiglu(self.linear_fc1(x, groups), weights, form_of(x))
        return self.linear_fc2(inner, groups), None


class ExactRouter(TopKRouter):
    """A variant of Megatron's router that chooses and weights experts as `transformers` does.

    Megatron's router always divides sigmoid scores by their sum, computes the softmax of the chosen logits in their own
    dtype, and scores a group by the best topk / group_topk of its experts.
    """

    choices: Choices | None = None
    """Set by `RoutedLayer` while the layer runs."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, experts] -> weights [T, experts] in their dtype (0 if not chosen), and the choices as bool."""
        config = self.config
        logits = logits.view(-1, config.num_moe_experts)
        wide = logits.float()
        scores = wide.sigmoid() if config.moe_router_score_function == "sigmoid" else wide.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores if self.expert_bias is None else scores + self.expert_bias)
            if self.choices is not None:
                chosen = self.choices.choose(self.layer_number - 1, chosen, config.num_moe_experts)
        scale = config.moe_router_topk_scaling_factor or 1.0
        return weigh(scores, chosen, logits.dtype, share=not config.moe_router_pre_softmax, scale=scale)

    def _choose(self, scores: Tensor) -> Tensor:
        """scores [T, experts] -> indices of the chosen experts [T, topk] (DeepSeek-V3, arXiv:2412.19437, section
        2.1.2).
        """
        groups = self.config.moe_router_num_groups or 1
        if (kept := self.config.moe_router_group_topk or groups) < groups:
            grouped = scores.unflatten(1, (groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(outside.unsqueeze(-1), -float("inf")).flatten(1)
        return scores.topk(self.topk, dim=-1).indices


class WideRouter(ExactRouter):
    """A router that keeps its weight in float32 whatever the training dtype, as engines do.

    Its row in the weight table is marked `wide`.
    """

    def reset_parameters(self) -> None:
        """Keeps float32, unlike Megatron's method, which rounds the weight to the training dtype."""
        if self.config.perform_initialization:
            self.config.init_method(self.weight)
        self.weight.sequence_parallel = self.config.sequence_parallel


class ExpertLayer(MoELayer):
    """Megatron's MoE layer with our router, experts and dispatchers."""

    router_class: ClassVar[type[ExactRouter]] = ExactRouter
    experts_class: ClassVar[type[torch.nn.Module]] = StackedExperts

    def __init__(self, config: TransformerConfig, **_unused: Any) -> None:
        groups = get_default_pg_collection()
        shared = ModuleSpec(module=GatedSharedExperts, submodules=_linear_parts())
        parts = MoESubmodules(experts=self.experts_class, shared_experts=shared, router=self.router_class)
        super().__init__(config, parts, pg_collection=groups)
        for parameter in self.experts.parameters():
            # Megatron sets this only under expert parallelism, because otherwise it splits experts like dense layers.
            # Our experts are never split, so their gradients are summed over tensor-parallel ranks as well.
            parameter.allreduce = False
        if groups.ep.size() == 1:
            self.token_dispatcher = LocalDispatcher(config, groups)
        elif config.moe_token_dispatcher_type == "allgather":
            self.token_dispatcher = UnevenAllGatherDispatcher(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )
        else:
            self.token_dispatcher = AllToAllDispatcher(config, groups)


class WideRoutedExperts(ExpertLayer):
    """An MoE layer with a float32 router."""

    router_class = WideRouter


@dataclass(frozen=True, slots=True)
class RowRouting:
    """The recorded expert choices for this rank's T tokens of a row. Implements `packed_attention.Choices`."""

    recorded: Mapping[int, Tensor]
    """Layer -> expert indices [T, topk]. An out-of-range index means that no choice was recorded."""
    replays: bool = True
    """Whether to use the recorded choices. If False, they are only compared with the router's own choices."""
    keeps: dict[int, Tensor] | None = None
    """Layer -> the choices [T, topk] of this pass, stored for a later pass. None: do not store them."""
    counts: Tensor | None = None
    """[2] float64: running counts of recorded choices (one per token and layer) and of those that differ from the
    router's own choice. None: do not count."""

    def choose(self, layer: int, own: Tensor, num_experts: int) -> Tensor:
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
    """Megatron's layer. While it runs, its router has access to the row's recorded choices."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's block passes the row's `PackedSequences` as `packed_seq_params`."""
        packed = kwargs.get("packed_seq_params")
        choices = None if packed is None else packed.routing
        if choices is None or not isinstance(self.mlp, MoELayer):
            return super().forward(*args, **kwargs)
        self.mlp.router.choices = choices
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.mlp.router.choices = None
