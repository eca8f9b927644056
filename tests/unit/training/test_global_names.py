"""A parameter has one name in the whole model, whatever chunk of it a rank holds; sizes form whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.core.errors import ConfigError
from slime.core.topology import ParallelSizes
from slime.training.model.parameter_names import Held, global_name, is_expert


class Chunk:
    """What `global_name` asks of a model chunk."""

    share_embeddings_and_output_weights = True
    layer_offset = 6


def test_layers_count_from_the_first_stage() -> None:
    chunk: Any = Chunk()
    assert global_name(chunk, "decoder.layers.1.mlp.linear_fc1.weight") == "decoder.layers.7.mlp.linear_fc1.weight"
    assert global_name(chunk, "decoder.final_layernorm.weight") == "decoder.final_layernorm.weight"


def test_the_copy_of_a_tied_embedding_has_its_name() -> None:
    chunk: Any = Chunk()
    assert global_name(chunk, "output_layer.weight") == "embedding.word_embeddings.weight"


def test_routers_are_no_experts() -> None:
    assert is_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    assert not is_expert("decoder.layers.0.mlp.router.weight")


def test_an_expert_is_a_view_of_its_stack() -> None:
    stack = torch.nn.Parameter(torch.arange(24.0).view(4, 2, 3))
    held = Held(stack, 2)
    assert held.start == 12 and torch.equal(held.of(stack).flatten(), stack.flatten()[12:18])
    held.of(stack).zero_()
    assert not stack[2].any() and stack[1].all(), "a view, which needs no gradient"
    alone = Held(stack, None)
    assert alone.of(stack) is stack and alone.start == 0


def test_what_models_leave_is_data_parallel() -> None:
    names = {"tensor_model": 2, "pipeline_model": 2, "expert_model": 4}
    sizes = ParallelSizes.of({f"{name}_parallel_size": size for name, size in names.items()})
    assert sizes.dp(16) == 4
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 2"):
        sizes.dp(6)
    with pytest.raises(ConfigError, match="--expert-model-parallel-size 4"):
        sizes.dp(12)
    with pytest.raises(ConfigError, match="requires more than one pipeline stage"):
        ParallelSizes.of({"virtual_pipeline_model_parallel_size": 2})
