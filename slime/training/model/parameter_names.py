"""Converts local parameter names, as in one rank's model chunk, to global names.

A chunk numbers its layers and experts from zero, whereas weight tables, checkpoints and gradients number them across
the whole model. Each expert in a stacked parameter has its own global name; `Held` locates the expert in the stack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.training.model.policy_model import PolicyModel

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+")
_STACK = re.compile(r"(?<=\.mlp\.experts\.)(?=linear_fc[12]\.)")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
BUFFERS = ("mlp.router.expert_bias",)
"""Name suffixes of buffers that are part of the model but are not trained."""


@dataclass(frozen=True, slots=True)
class Held:
    """The local storage of a parameter with a global name."""

    parameter: Tensor
    """The parameter, or the stack of experts that contains it."""
    number: int | None
    """Index of the expert in its stack; None if the parameter is not stacked."""

    def of(self, like: Tensor) -> Tensor:
        """Returns the view of `like` that belongs to this name. `like` has the shape of `parameter` (a gradient)."""
        return like if self.number is None else like.detach()[self.number]

    @property
    def start(self) -> int:
        """Offset in the flattened `parameter`."""
        return 0 if self.number is None else self.number * self.parameter[0].numel()


def global_names(chunk: PolicyModel, local_name: str) -> tuple[str, ...]:
    """Returns the global names of a chunk's parameter: a single name, or one per expert in a stack, in order."""
    if not _STACK.search(local_name):
        return (global_name(chunk, local_name),)
    count = int(chunk.config.num_moe_experts or 0) // mpu.get_expert_model_parallel_world_size()
    names = (_STACK.sub(f"local_experts.{i}.", local_name) for i in range(count))
    return tuple(global_name(chunk, name) for name in names)


def global_name(chunk: PolicyModel, local_name: str) -> str:
    """Returns the global name of a parameter. The last stage's copy of a tied embedding shares the embedding's name."""
    if local_name == OUTPUT and chunk.share_embeddings_and_output_weights:
        return EMBEDDING
    name = _LAYER.sub(lambda m: str(int(m[0]) + chunk.layer_offset), local_name)
    if is_expert(name):
        size, rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
        first = rank * (int(chunk.config.num_moe_experts or 0) // size)
        name = _EXPERT.sub(lambda m: str(int(m[0]) + first), name)
    return name


def is_expert(name: str) -> bool:
    """Returns whether the parameter belongs to a routed expert."""
    return _EXPERT.search(name) is not None


def held_by(chunks: Sequence[PolicyModel]) -> dict[str, Held]:
    """Maps each global name on this rank to its local storage, including `BUFFERS`."""
    out: dict[str, Held] = {}
    for chunk in chunks:
        buffers = (pair for pair in chunk.named_buffers() if pair[0].endswith(BUFFERS))
        for local_name, parameter in itertools.chain(chunk.named_parameters(), buffers):
            for name, held in _parts(chunk, local_name, parameter):
                assert name not in out, f"two parameters on this rank have the global name {name}"
                out[name] = held
    return out


def _parts(chunk: PolicyModel, local_name: str, parameter: Tensor) -> Iterator[tuple[str, Held]]:
    names = global_names(chunk, local_name)
    stacked = _STACK.search(local_name) is not None
    yield from ((name, Held(parameter, number if stacked else None)) for number, name in enumerate(names))
