"""Patterns choose what is trained; idle ones are refused by name."""

from __future__ import annotations

import pytest

from slime.core.errors import ConfigError
from slime.models import table_for
from slime.training.model.trained import trained_names
from tests.support.command_line import QWEN3

TABLE = table_for(QWEN3)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
SPARSE = table_for({**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": []})


def test_without_patterns_every_parameter_is_trained() -> None:
    assert trained_names(TABLE, None, None) == set(TABLE.megatron_names)


def test_both_names_of_a_parameter_count() -> None:
    left = trained_names(TABLE, None, ("embed_tokens", r"layers\.0\.mlp"))
    gone = set(TABLE.megatron_names) - left
    assert "embedding.word_embeddings.weight" in gone and "decoder.layers.1.mlp.linear_fc1.weight" in left
    assert {n for n in gone if "layers" in n} == {f"decoder.layers.0.mlp.linear_fc{i}.weight" for i in (1, 2)}
    assert trained_names(TABLE, (r"layers\.1\.self_attn\.k_proj",), None) == {
        "decoder.layers.1.self_attention.linear_qkv.weight"
    }


@pytest.mark.parametrize(
    ("only", "freeze", "said"),
    [
        (None, ("mlp", "nonsense"), "--freeze-params-name-list 'nonsense' matches no"),
        (("nonsense",), None, "--only-train-params-name-list 'nonsense' matches no"),
        (None, (".",), "freezes all parameters"),
    ],
)
def test_idle_patterns_are_refused(only: tuple[str, ...], freeze: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trained_names(TABLE, only, freeze)


def test_experts_of_a_layer_go_together() -> None:
    left = trained_names(SPARSE, None, (r"layers\.1\.mlp\.experts\..*fc1",))
    gone = set(SPARSE.megatron_names) - left
    assert gone == {f"decoder.layers.1.mlp.experts.local_experts.{i}.linear_fc1.weight" for i in range(4)}
    for only, freeze in (((r"experts\.3\.",), None), (None, (r"layers\.0\.mlp\.experts\.0\.gate",))):
        with pytest.raises(ConfigError, match=r"separates decoder\.layers\.0\.mlp\.experts.* all or none"):
            trained_names(SPARSE, only, freeze)
