"""Laws of the weight tables: every tensor named once, and HF -> shards -> HF is the identity, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.core.errors import CheckpointError, ConfigError, WeightSyncError
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.weights.hf_shards import export, load_shard
from tests.support.experts import by_checkpoint_name

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size": 20,
    "intermediate_size": 36,
    "vocab_size": 51,
}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    {"model_type": "qwen2", **SIZES},
    {"model_type": "qwen3", **SIZES},
    {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    {"model_type": "qwen3_moe", **SIZES, "num_local_experts": 3, "moe_intermediate_size": 8},
]


def random_hf(table: FamilyTable, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(table.shape_of(n), generator=generator).to(dtype) for n in table.hf_names}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c['model_type']}-{len(c)}")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_load_then_export_is_the_identity(config: dict[str, Any], tp_size: int) -> None:
    table = table_for(config)
    hf = random_hf(table)
    back: dict[str, torch.Tensor] = {}
    for name in table.megatron_names:
        shards = [
            load_shard(table, name, hf.__getitem__, tp_rank=r, tp_size=tp_size, vocab_multiple=8)
            for r in range(tp_size)
        ]
        assert all(s.shape == shards[0].shape for s in shards)
        back.update(export(table, name, shards))
    assert list(back) == list(table.hf_names)
    for name, tensor in hf.items():
        assert torch.equal(back[name], tensor), name


def test_qkv_rows_are_grouped_per_kv_head_and_fc1_per_shard() -> None:
    table = table_for(CONFIGS[3])
    hf = random_hf(table)
    prefix, d = "model.layers.1.", SIZES["head_dim"]
    q, k, v = (hf[f"{prefix}self_attn.{p}_proj.weight"] for p in "qkv")
    shard = load_shard(table, "decoder.layers.1.self_attention.linear_qkv.weight", hf.__getitem__, tp_rank=1, tp_size=2)
    assert torch.equal(shard, torch.cat([q[2 * d :], k[d:], v[d:]]))
    fc1 = load_shard(table, "decoder.layers.1.mlp.linear_fc1.weight", hf.__getitem__, tp_rank=1, tp_size=2)
    assert torch.equal(
        fc1, torch.cat([hf[f"{prefix}mlp.gate_proj.weight"][18:], hf[f"{prefix}mlp.up_proj.weight"][18:]])
    )


def test_vocabulary_padding_is_zero_and_never_exported() -> None:
    table = table_for(CONFIGS[0])
    hf = random_hf(table)
    shards = [
        load_shard(table, "embedding.word_embeddings.weight", hf.__getitem__, tp_rank=r, tp_size=2, vocab_multiple=16)
        for r in range(2)
    ]
    assert shards[0].shape[0] == 32 and not shards[1][51 - 32 :].any()
    ((_, out),) = export(table, "embedding.word_embeddings.weight", shards)
    assert out.shape[0] == 51


def test_the_names_are_those_of_transformers() -> None:
    import transformers

    for config in CONFIGS:
        classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
        prefix = classes[config["model_type"]]
        model_config = getattr(transformers, f"{prefix}Config")(
            **{k: v for k, v in config.items() if k != "model_type"}
        )
        with torch.device("meta"):
            model = getattr(transformers, f"{prefix}ForCausalLM")(model_config)
        table = table_for(model_config.to_dict())
        named = {n: tuple(p.shape) for n, p in by_checkpoint_name(model.named_parameters()).items()}
        table.check(hf_names=named)
        assert {n: table.shape_of(n) for n in named} == named


def test_a_missed_or_doubled_tensor_is_refused_by_name() -> None:
    table = table_for(CONFIGS[3])
    names = list(table.hf_names)
    table.check(table.megatron_names, names)
    with pytest.raises(ConfigError, match=r"missing model.norm.weight"):
        table.check(hf_names=[n for n in names if n != "model.norm.weight"])
    with pytest.raises(ConfigError, match=r"duplicate model.norm.weight"):
        table.check(hf_names=[*names, "model.norm.weight"])
    with pytest.raises(ConfigError, match=r"unknown decoder.layers.9.mlp"):
        table.check(megatron_names=[*table.megatron_names, "decoder.layers.9.mlp.linear_fc1.weight"])
    with pytest.raises(WeightSyncError, match=r"decoder.layers.9"):
        table.entry("decoder.layers.9.mlp.linear_fc1.weight")


def test_a_tied_checkpoint_may_carry_its_redundant_head() -> None:
    table = table_for(CONFIGS[0])
    table.check(hf_names=[*table.hf_names, "lm_head.weight"])


def test_wrong_shapes_and_uneven_cuts_are_refused() -> None:
    table = table_for(CONFIGS[3])
    hf = random_hf(table)
    hf["model.norm.weight"] = hf["model.norm.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*\[19\].*\[20\]"):
        load_shard(table, "decoder.final_layernorm.weight", hf.__getitem__, tp_rank=0, tp_size=1)
    with pytest.raises(ConfigError, match="2 KV heads"):
        load_shard(table, "decoder.layers.0.self_attention.linear_qkv.weight", hf.__getitem__, tp_rank=0, tp_size=4)


def test_an_unknown_family_names_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"bert.*llama.*qwen3"):
        table_for({"model_type": "bert"})
