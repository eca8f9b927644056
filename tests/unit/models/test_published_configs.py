"""The configs of published models are taken as they are: architecture, weight map, and cost of a sync."""

from __future__ import annotations

import math
import time

import pytest
import torch

from slime.core.errors import ConfigError
from slime.core.hf_config import text_config
from slime.models import architecture, table_for
from slime.serving.payloads import digest
from slime.weights.engine_layout import ExpectedDigests
from tests.support.marks import quick
from tests.support.published import SYNCED


@pytest.mark.parametrize("name", quick(SYNCED, "Qwen2.5-7B", "DeepSeek-V3"))
def test_a_published_config_has_an_architecture_and_all_parameters(name: str) -> None:
    config, billions = SYNCED[name]
    config = text_config(config)
    settings, table = architecture(config), table_for(config)
    assert settings["num_layers"] == len(table.layers)
    assert settings["untie_embeddings_and_output_weights"] == (not table.tied)
    total = sum(math.prod(s) for e in table.entries for s in e.row.shapes)
    assert total / 1e9 == pytest.approx(billions, rel=2e-4)


@pytest.mark.slow
def test_digests_of_many_experts_take_time_in_proportion() -> None:
    """49152 expert tensors of Qwen3-Next, without data: what remains is bookkeeping, while engines are paused."""
    table = table_for(SYNCED["Qwen3-Next-80B-A3B"][0])
    expected = ExpectedDigests(table, [], digest)
    tensors = [(name, torch.empty(table.shape_of(name), device="meta")) for name in table.hf_names]
    started = time.process_time()
    for name, tensor in tensors:
        expected.add(name, tensor)
    assert time.process_time() - started < 2, "each tensor looks at all experts of its layer"
    assert expected.finish() == {}


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
def test_the_model_around_the_language_model_says_whether_embeddings_are_tied(outer: bool, inner: bool) -> None:
    """As transformers and SGLang have it: otherwise a checkpoint's own lm_head would be passed over in silence."""
    wrapper = SYNCED["Qwen3.5-35B-A3B"][0]
    text = {**wrapper["text_config"], "tie_word_embeddings": inner}
    config = text_config({**wrapper, "tie_word_embeddings": outer, "text_config": text})
    assert table_for(config).tied is outer and architecture(config)["untie_embeddings_and_output_weights"] is not outer


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("GLM-5", {"index_init_tokens": 4}),
        ("GLM-5", {"index_local_tokens": 64}),
        ("GLM-5", {"indexer_types": ["full"]}),
        ("GLM-5", {"attention_bias": True}),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}}),
        ("gpt-oss-20b", {"swiglu_limit": None}),
        ("gpt-oss-20b", {"layer_types": None}),
        ("MiniMax-M2.5", {"use_qk_norm": None}),
        ("MiniMax-M2.5", {"partial_rotary_factor": 0.25}),
        ("DeepSeek-V3", {"rope_scaling": {"type": "yarn", "factor": 40}}),
        ("Qwen2.5-7B", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
        ("Qwen2.5-7B", {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}),
        ("Qwen2.5-7B", {"rope_scaling": {"rope_type": "linear"}}),
    ],
)
def test_what_is_not_trained_is_refused_by_its_name(name: str, wrong: dict[str, object]) -> None:
    said = {
        "rope_scaling": "rotary scaling",
        "layer_types": "sliding_attention|has no layer_types",
        "quantization_config": "mxfp4",
    }
    key = next(iter(wrong))
    with pytest.raises(ConfigError, match=said.get(key, key)):
        architecture({**SYNCED[name][0], **wrong})
