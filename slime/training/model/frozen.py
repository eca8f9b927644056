"""Which parameters are trained: the patterns of `--only-train-params-name-list` and `--freeze-params-name-list`.

A parameter is frozen before Megatron wraps the model, so that it has neither gradient nor optimizer state. The experts
of a layer are one parameter, and are trained or frozen together.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import ConfigError
from slime.models.common.table import FamilyTable
from slime.training.model.policy import PolicyModel
from slime.training.state.sharded_model import ShardedModel


def trained_names(table: FamilyTable, only: Sequence[str] | None, freeze: Sequence[str] | None) -> frozenset[str]:
    """Global names of the parameters of all ranks that are trained; `only` and `freeze` are not both given.

    Raises `ConfigError` for a pattern that matches no parameter, for some of the experts of a layer, and if nothing is
    left.
    """
    trainable = {e.megatron for e in table.entries if e.row.trained}
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    chosen: set[str] = set()
    for pattern in only or freeze or ():
        search = re.compile(pattern).search
        found = {e.megatron for e in table.entries if any(map(search, (e.megatron, *e.hf)))}
        if not found:
            raise ConfigError(
                f"got {flag} {pattern!r}, which matches no parameter of the model; names look like "
                f"{table.entries[len(table.entries) // 2].megatron} or {table.hf_names[len(table.hf_names) // 2]}"
            )
        chosen |= found
    left = trainable & chosen if only else trainable - chosen
    if not left:
        raise ConfigError(f"got {flag} {' '.join(only or freeze or ())}, which leaves nothing to train; narrow it")
    _require_whole_stacks(table, left, f"{flag} {' '.join(only or freeze or ())}")
    return frozenset(left)


def _require_whole_stacks(table: FamilyTable, trained: Container[str], given: str) -> None:
    for run in table.runs:
        odd = next((e for e in run if (e.megatron in trained) != (run[0].megatron in trained)), None)
        if odd is not None:
            raise ConfigError(
                f"got {given}, which tells {odd.megatron} from other experts of its layer, because all experts of a "
                "layer are one parameter; name all of them or none"
            )


def freeze_others(chunks: Sequence[PolicyModel], model: ShardedModel) -> None:
    """Leaves gradients to the parameters that the record of `chunks` says are trained."""
    for own in model.own:
        own.here.parameter.requires_grad_(own.trained)
    for chunk in chunks:
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None and chunk.config.recompute_granularity:
            embedding.register_forward_hook(_with_gradient)


def _with_gradient(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Megatron's recomputation gives the parameters of a block no gradient unless its input has one."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
