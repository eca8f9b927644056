"""The record of a model: its parts are whole together, and it follows parameters that move."""

from __future__ import annotations

from typing import Any

import torch

from slime.models import table_for
from slime.training.model.parameter_names import Held
from slime.training.state.adapter_files import with_adapters
from slime.training.state.sharded_model import ShardedModel, ShardedTensor

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 4,
    "hidden_size": 8,
    "intermediate_size": 6,
    "vocab_size": 16,
    "tie_word_embeddings": False,
}
LINEAR = "decoder.layers.1.mlp.linear_fc2."


def record() -> ShardedModel:
    """Of one rank that has all of a model with one adapter, but for the output layer, which a later stage holds."""
    table = with_adapters(table_for(CONFIG), {LINEAR + "weight"}, 2)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for entry in table.entries:
        first, *more = entry.row.shapes
        shape = first if entry.row.dim is None else (sum(s[0] for s in (first, *more)), *first[1:])
        held = Held(torch.randn(shape, generator=generator), None) if "output_layer" not in entry.megatron else None
        tensors[entry.megatron] = ShardedTensor(entry, shape, torch.float32, held=held)
    return ShardedModel(table, tensors, torch.device("cpu"), adapter_scale=2.0)


def test_a_model_is_its_base_and_its_adapters() -> None:
    model = record()
    assert set(model.adapters.tensors) == {LINEAR + "lora_a", LINEAR + "lora_b"}
    assert model.base.tensors.keys() | model.adapters.tensors.keys() == model.tensors.keys()
    assert model.base.table.entries == table_for(CONFIG).entries
    assert {own.name for own in model.own} == model.tensors.keys() - {"output_layer.weight"} == model.shards.keys()


def test_another_place_of_its_shards_leaves_the_model_alone() -> None:
    """Law: what a rank has not, it has not elsewhere either."""
    model = record()
    zeros = {name: torch.zeros_like(shard) for name, shard in model.shards.items()}
    moved = model.base.at(zeros)
    assert moved.shards.keys() == model.base.shards.keys() and not any(t.any() for t in moved.shards.values())
    assert all(t.any() for t in model.shards.values())


def test_a_shard_is_where_its_parameter_is_now() -> None:
    stack = torch.nn.Parameter(torch.zeros(3, 2))
    entry = record().table.entries[0]
    own = ShardedTensor(entry, (2,), torch.float32, held=Held(stack, 1))
    stack.data = torch.arange(6.0).view(3, 2)
    assert own.shard.tolist() == [2.0, 3.0]


def test_a_merged_weight_is_that_of_the_formula() -> None:
    model, name = record(), LINEAR + "weight"
    a, b = model.shards[LINEAR + "lora_a"], model.shards[LINEAR + "lora_b"]
    merged = model.merged(model.tensors[name])
    assert torch.equal(merged, 2.0 * (b @ a) + model.shards[name]) and not torch.equal(merged, model.shards[name])
    other = model.tensors["decoder.layers.0.mlp.linear_fc2.weight"]
    assert model.merged(other) is other.shard
