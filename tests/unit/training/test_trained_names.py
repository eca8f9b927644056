"""Patterns choose what is trained; idle ones are refused by name."""

from __future__ import annotations

import pytest

from slime.core.errors import ConfigError
from slime.models import table_for
from slime.training.model.frozen import trained_names
from tests.support.command_line import QWEN3

TABLE = table_for(QWEN3)


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
        (None, ("mlp", "nonsense"), "--freeze-params-name-list 'nonsense', which matches no"),
        (("nonsense",), None, "--only-train-params-name-list 'nonsense', which matches no"),
        (None, (".",), "nothing to train"),
    ],
)
def test_idle_patterns_are_refused(only: tuple[str, ...], freeze: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trained_names(TABLE, only, freeze)
