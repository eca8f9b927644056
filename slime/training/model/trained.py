"""Selects what to train: LoRA adapters, or the parameters that the settings choose. Everything else is frozen.

Parameters are frozen before Megatron wraps the model, so they have neither gradients nor optimizer states. All experts
of a layer are one parameter and are therefore trained or frozen together.

LoRA (Hu et al. 2021, arXiv:2106.09685): y = W x + scale * b (a x), with W frozen. `a` [rank, in] and `b` [out, rank]
are the parameters `lora_a` and `lora_b` of the linear layer. Tensor parallelism splits the factor that contains the
split dimension of the weight: `b` in column-parallel layers, `a` in row-parallel layers. The other factor is
replicated. Adapters of experts are stacked like the experts.

Invariants of adapters
1. The product is zero at first (b = 0). The initial `a` depends only on the seed and the name, not on the layout.
2. Ranks communicate the low-rank activation wherever the layer communicates, so gradients of split adapters are
   complete. Replicated adapters see all tokens, or only some if Megatron sums their gradient (`sequence_parallel`).
3. Exports merge one weight at a time (`ShardedModel.merged`), without a second copy of the model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Container, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear

from slime.core.errors import ConfigError
from slime.models.common.mlp import StackedLinear
from slime.models.common.table import FamilyTable
from slime.settings import Args
from slime.training.model.parameter_names import global_names
from slime.training.model.policy_model import PolicyModel
from slime.training.state.adapter_files import A, B, with_adapters
from slime.training.state.sharded_model import ShardedModel, split_of
from slime.weights.hf_shards import load_shard


def trained_names(table: FamilyTable, only: Sequence[str] | None, freeze: Sequence[str] | None) -> frozenset[str]:
    """Returns the global names of all trained parameters, on any rank. At most one of `only` and `freeze` can be set.

    Raises `ConfigError` if a pattern matches no parameter or only some experts of a layer, or if everything would be
    frozen.
    """
    trainable = {e.megatron for e in table.entries if e.row.trained}
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    chosen: set[str] = set()
    for pattern in only or freeze or ():
        search = re.compile(pattern).search
        found = {e.megatron for e in table.entries if any(map(search, (e.megatron, *e.hf)))}
        if not found:
            raise ConfigError(
                f"{flag} {pattern!r} matches no parameter of the model; names look like "
                f"{table.entries[len(table.entries) // 2].megatron} or {table.hf_names[len(table.hf_names) // 2]}"
            )
        chosen |= found
    left = trainable & chosen if only else trainable - chosen
    if not left:
        raise ConfigError(f"{flag} {' '.join(only or freeze or ())} freezes all parameters; change the patterns")
    _require_whole_stacks(table, left, f"{flag} {' '.join(only or freeze or ())}")
    return frozenset(left)


def _require_whole_stacks(table: FamilyTable, trained: Container[str], given: str) -> None:
    for run in table.runs:
        odd = next((e for e in run if (e.megatron in trained) != (run[0].megatron in trained)), None)
        if odd is not None:
            raise ConfigError(
                f"{given} separates {odd.megatron} from the other experts of its layer, which are all one parameter; "
                "use a pattern that matches all or none of them"
            )


def freeze_others(chunks: Sequence[PolicyModel], model: ShardedModel) -> None:
    """Disables the gradients of all parameters that are not trained."""
    for own in model.own:
        own.here.parameter.requires_grad_(own.trained)
    for chunk in chunks:
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None and chunk.config.recompute_granularity:
            embedding.register_forward_hook(_with_gradient)


def _with_gradient(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Makes the first block's input require a gradient; otherwise recomputation would not reach its parameters."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight$")
"""Matches Megatron's names for linear weights, but not for routers, gates, embeddings and output layers."""


class Adapters:
    table: FamilyTable
    """Rows for the model and its adapters. The HF name of an adapter is its Megatron name."""

    def __init__(self, chunks: Sequence[PolicyModel], table: FamilyTable, args: Args) -> None:
        """Attaches adapters to the layers in `chunks`. Raises `ConfigError` if a target pattern matches nothing."""
        rank = args.lora_rank
        assert rank is not None, "adapters need --lora-rank"
        self.scale = float(args.lora_alpha or 2.0 * rank) / rank
        adapted = _adapted(table, args.lora_target_modules)
        self.table = with_adapters(table, adapted, rank)
        self.names = frozenset(self.table.megatron_names) - frozenset(table.megatron_names)
        """Global names of all adapters, on any rank."""
        for chunk in chunks:
            for local_name, module in list(chunk.named_modules()):
                names = global_names(chunk, f"{local_name}.weight")
                if names[0] in adapted:
                    self._attach(names, module, int(args.seed))

    def _attach(self, names: Sequence[str], layer: Module, seed: int) -> None:
        """Adds an adapter to `layer`. `names` holds the name of its weight, or one name per expert for a stack."""
        weight = layer.weight
        assert isinstance(weight, Parameter), f"{names[0]} is not a parameter"
        is_stack = isinstance(layer, StackedLinear)
        for part in (A, B):
            shards = [self._start(name, part, seed) for name in names]
            shard = torch.stack(shards) if is_stack else shards[0]
            parameter = Parameter(torch.empty_like(shard, dtype=weight.dtype, device=weight.device))
            parameter.data.copy_(shard)
            _mark(layer, weight, parameter, part)
            layer.register_parameter(part, parameter)
        layer.register_forward_hook(self._add)

    def _start(self, name: str, part: str, seed: int) -> Tensor:
        entry = self.table.entry(name.removesuffix("weight") + part)
        own, shape, (rank, size) = entry.megatron, entry.row.shapes[0], split_of(entry)
        whole = _uniform(shape, f"{seed} {own}") if part == A else torch.zeros(shape)
        return load_shard(self.table, own, {own: whole}.__getitem__, tp_rank=rank, tp_size=size)

    def _add(self, layer: Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Adds the adapter's output in a forward hook. inputs[0]: [..., in]."""
        if isinstance(layer, StackedLinear):
            low = layer.product(inputs[0], getattr(layer, A), inputs[1]) * self.scale
            return output + layer.product(low, getattr(layer, B), inputs[1])
        low = linear(inputs[0], getattr(layer, A)) * self.scale
        group = layer.tp_group if isinstance(layer, ColumnParallelLinear | RowParallelLinear) else None
        if group is None or group.size() == 1:
            more = linear(low, getattr(layer, B))
        elif isinstance(layer, ColumnParallelLinear):
            if layer.sequence_parallel:
                low = tp.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
            else:
                low = tp.copy_to_tensor_model_parallel_region(low, group=group)
            more = linear(low, getattr(layer, B))
            if layer.gather_output:
                more = tp.gather_from_tensor_model_parallel_region(more, group=group)
        else:
            reduce = tp.reduce_from_tensor_model_parallel_region
            if layer.sequence_parallel:
                reduce = tp.reduce_scatter_to_sequence_parallel_region
            more = linear(reduce(low, group=group), getattr(layer, B))
        return (output[0] + more, *output[1:]) if isinstance(output, tuple) else output + more


def _mark(layer: Module, weight: Tensor, parameter: Any, part: str) -> None:
    """Tells Megatron over which ranks to sum the gradient, and whether the gradient norm counts it once."""
    parameter.allreduce = getattr(weight, "allreduce", True)
    split = {ColumnParallelLinear: (B, 0), RowParallelLinear: (A, 1)}
    held, dim = next((v for kind, v in split.items() if isinstance(layer, kind)), (None, 0))
    shared_out = isinstance(layer, StackedLinear)  # experts' optimizer states are also split over tensor-parallel ranks
    if shared_out or part == held:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    else:
        parameter.sequence_parallel = getattr(layer if held else weight, "sequence_parallel", False)


def _uniform(shape: tuple[int, ...], key: str) -> Tensor:
    """Draws float32 values from +-1 / sqrt(in), the initial range of `torch.nn.Linear` and of PEFT's adapters."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def _adapted(table: FamilyTable, patterns: Sequence[str] | None) -> frozenset[str]:
    linears = [run for run in table.runs if LINEAR.search(run[0].megatron) and run[0].row.trained]
    chosen: set[str] = set()
    for pattern in patterns or ("",):
        search = re.compile(pattern).search
        found = [run for run in linears if any(search(name) for e in run for name in (e.megatron, *e.hf))]
        if not found:
            raise ConfigError(
                f"--lora-target-modules {pattern!r} does not match any linear layer in the model; names look like "
                f"{linears[0][0].megatron} or {linears[0][0].hf[0]}"
            )
        chosen |= {e.megatron for run in found for e in run}
    return frozenset(chosen)


def choose_trained(chunks: Sequence[PolicyModel], table: FamilyTable, args: Args) -> ShardedModel:
    """Attaches adapters if requested, builds the `ShardedModel` and freezes all other parameters. Collective."""
    if args.lora_rank:
        adapters = Adapters(chunks, table, args)
        model = ShardedModel.of(chunks, adapters.table, adapters.names, adapters.scale)
    else:
        lists = args.only_train_params_name_list, args.freeze_params_name_list
        model = ShardedModel.of(chunks, table, trained_names(table, *lists))
    freeze_others(chunks, model)
    return model
