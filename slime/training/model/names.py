"""Names of parameters in the whole model, from their names in one rank's chunk of it.

A chunk counts its own layers and experts from zero; weight tables, checkpoints and gradients speak of the whole model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.training.model.policy import PolicyModel

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
BUFFERS = ("mlp.router.expert_bias",)
"""Ends of the names of buffers that belong to the model as parameters do, but are not trained."""


def global_name(chunk: PolicyModel, local_name: str) -> str:
    """The name in the whole model. The last stage's copy of a tied embedding has the embedding's name."""
    if local_name == OUTPUT and chunk.share_embeddings_and_output_weights:
        return EMBEDDING
    name = _LAYER.sub(lambda m: str(int(m[0]) + chunk.layer_offset), local_name)
    if is_expert(name):
        size, rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
        first = rank * (int(chunk.config.num_moe_experts or 0) // size)
        name = _EXPERT.sub(lambda m: str(int(m[0]) + first), name)
    return name


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one routed expert: on one expert-parallel rank, whole there."""
    return _EXPERT.search(name) is not None


def parameters_of(chunks: Sequence[PolicyModel]) -> dict[str, Tensor]:
    """Global name -> parameter of all chunks of this rank; with the buffers of a model's weights."""
    out: dict[str, Tensor] = {}
    for chunk in chunks:
        buffers = (pair for pair in chunk.named_buffers() if pair[0].endswith(BUFFERS))
        for local_name, parameter in itertools.chain(chunk.named_parameters(), buffers):
            name = global_name(chunk, local_name)
            assert name not in out, f"two parameters of one rank are called {name}"
            out[name] = parameter
    return out
