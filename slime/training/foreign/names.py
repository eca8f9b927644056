"""Where a Megatron-core checkpoint keeps a parameter: its names there are not those of a model's parameters.

A layer or an expert has a tensor of its own (`decoder.layers.3.`, `experts.experts.5.`), or all of them share one with
an axis for them in front. A norm ahead of a linear layer has the name of a part of it where Transformer Engine fuses
the two. Gate and up of an MLP are one tensor, or two.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from slime.models.common.table import FamilyTable

_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.",
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}
"""Norm of a layer -> the linear layer behind it, which Transformer Engine has in one module with it."""
_LAYER, _LAYERS = re.compile(r"^decoder\.layers\.(\d+)\."), "decoder.layers."
_EXPERT, _EXPERTS = re.compile(r"\.experts\.local_experts\.(\d+)\."), ".experts.experts."
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_NOT_WEIGHTS = re.compile(r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state_machine|\._extra_state(/|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a checkpoint, or one of those that are stacked in it."""

    key: str
    at: tuple[int, ...] = ()
    """Its numbers on the leading axes: layer, expert."""


class Places:
    """Where checkpoints keep the parameters of one model."""

    def __init__(self, table: FamilyTable) -> None:
        self._own = frozenset(table.megatron_names)

    def find(self, parameter: str, stored: Container[str]) -> tuple[Place, ...]:
        """Where a checkpoint that stores tensors of these names keeps a parameter; nothing if it does not.

        Several places lie end to end.
        """
        return next((form for form in self.forms(parameter) if all(place.key in stored for place in form)), ())

    def written(self, parameter: str) -> Place:
        """Where slime writes it: layers by themselves, norms in the names of Transformer Engine, experts stacked."""
        fused, linear = _fused(parameter)
        name = fused if linear in self._own else parameter
        *_, (key, at) = _unstacked(name, _EXPERT, _EXPERTS)
        return Place(key, at)

    def forms(self, parameter: str) -> Iterator[tuple[Place, ...]]:
        """All that it may look like."""
        for name in dict.fromkeys((parameter, _fused(parameter)[0])):
            for key, layer in _unstacked(name, _LAYER, _LAYERS):
                for stored, expert in _unstacked(key, _EXPERT, _EXPERTS):
                    at = layer + expert
                    yield (Place(stored, at),)
                    if _GATED.search(stored):
                        yield Place(f"{stored}_w", at), Place(f"{stored}_v", at)


def _fused(parameter: str) -> tuple[str, str]:
    """A norm's name as a part of the linear layer behind it, which layers of experts have, too, in Megatron's local
    layers; and the weight of that layer. What is not such a norm keeps its name.
    """
    for norm, linear in _FUSED.items():
        prefix, found, kind = parameter.rpartition(norm)
        if found:
            return f"{prefix}{linear}layer_norm_{kind}", f"{prefix}{linear}weight"
    return parameter, ""


def is_weight(key: str) -> bool:
    """Whether a tensor of a checkpoint belongs to the model, and not to the optimizer or the run."""
    return not _NOT_WEIGHTS.search(key)


def _unstacked(name: str, pattern: re.Pattern[str], stack: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A name as it is, and those under which what `pattern` counts is stacked: (name, number on the axis)."""
    found = pattern.search(name)
    yield name, ()
    if found is None:
        return
    before, number, behind = name[: found.start()], found[1], name[found.end() :]
    if pattern is _EXPERT:
        yield f"{before}{stack}{number}.{behind}", ()
    yield f"{before}{stack}{behind}", (int(number),)
