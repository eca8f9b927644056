"""Quantises and dequantises linear weights in every forward pass, so that training sees the weights of the engines.

Invariants
1. Parameters, their names, gradients and optimizer states do not change. Only the forward pass uses the quantised
   weight, and its gradient goes straight through to the parameter.
2. The quantised weight does not depend on the trainer's parallel layout (`slime.weights.quantised.formats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module, Parameter

from slime.models.common.table import FamilyTable, Row
from slime.settings.args import Args
from slime.training.model.parameter_names import global_names
from slime.training.model.policy_model import PolicyModel
from slime.training.state.sharded_model import split_of
from slime.weights.quantised.formats import QuantisedFormat, fake_quantised, format_of_folder, require_whole_blocks


def fake_quantise(args: Args, chunks: Sequence[PolicyModel], table: FamilyTable) -> None:
    """With `--trainer-weights fake-quantised`, makes this rank's layers compute with the engines' quantised weights.

    Raises `ConfigError` if a quantisation block would span two ranks.
    """
    quantised = format_of_folder(args.hf_checkpoint) if args.trainer_weights != "plain" else None
    if quantised is None:
        return
    for chunk in chunks:
        for local_name, module in chunk.named_modules():
            if isinstance(module._parameters.get("weight"), Parameter):
                entry = table.entry(global_names(chunk, f"{local_name}.weight")[0])
                if quantised.is_quantised(entry.hf):
                    _, num_shards = split_of(entry)
                    require_whole_blocks(entry, num_shards, quantised)
                    _Swap(entry.row, num_shards, quantised).attach(module)


class _Swap:
    """Hooks that replace a layer's weight with its fake-quantised form during the forward pass."""

    def __init__(self, row: Row, num_shards: int, quantised: QuantisedFormat) -> None:
        self._of = row, num_shards, quantised
        self._kept: list[Any] = []

    def attach(self, module: Module) -> None:
        if hasattr(module, "gradient_accumulation_fusion"):  # the quantised weight is not a parameter with a main_grad
            vars(module)["gradient_accumulation_fusion"] = False
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._behind, always_call=True)

    def _before(self, module: Module, _inputs: Any) -> None:
        weight = module._parameters["weight"]
        assert isinstance(weight, Parameter), "the layer's forward pass is not reentrant"
        self._kept.append(weight)
        module._parameters["weight"] = fake_quantised(weight, *self._of)  # type: ignore[assignment]

    def _behind(self, module: Module, _inputs: Any, _output: Any) -> None:
        if self._kept:
            module._parameters["weight"] = self._kept.pop()
