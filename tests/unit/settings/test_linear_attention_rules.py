"""What linear attention cannot do is refused before a process starts: a cut of heads, kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.models import architecture
from slime.models.qwen3_next.config import is_linear
from slime.settings import parse_args
from tests.support.command_line import refused
from tests.support.qwen_next import EXPERTS, LINEAR

NEXT = {**LINEAR, **EXPERTS, "model_type": "qwen3_next", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}


def _of(base: list[str], config: dict) -> list[str]:
    folder = Path(base[base.index("--hf-checkpoint") + 1])
    (folder / "config.json").write_text(json.dumps(config))
    return base


def test_a_config_says_all_of_the_shape(base: list[str]) -> None:
    megatron = parse_args(_of(base, NEXT)).megatron
    assert megatron["linear_attention_freq"] == [1, 0, 1, 0] and megatron["linear_num_value_heads"] == 6
    assert megatron["rotary_percent"] == 0.25 and megatron["attention_output_gate"]
    assert not megatron["moe_router_pre_softmax"], "the chosen experts' weights sum to one"
    assert "--linear-num-key-heads 4" in refused([*_of(base, NEXT), "--linear-num-key-heads", "4"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--actor-num-gpus-per-node 4 --context-parallel-size 4", "choose sizes whose product divides the heads"),
        (
            "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --context-parallel-size 2",
            "context_parallel_size 2 cannot split 2 key heads of linear attention evenly",
        ),
        ("--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4", "choose a divisor"),
        ("--qwen-gdn-backend fla", "the trainer runs on a CPU"),
        ("--qwen-gdn-backend triton", "qwen-gdn-backend"),
    ],
)
def test_what_it_cannot_do_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*_of(base, NEXT), *flags.split()])


@pytest.mark.parametrize("sizes", ["--context-parallel-size 2", "--tensor-model-parallel-size 2"])
def test_ranks_that_divide_its_heads_are_taken(base: list[str], sizes: str) -> None:
    parse_args([*_of(base, NEXT), "--actor-num-gpus-per-node", "2", *sizes.split()])


def test_a_choice_of_kernels_without_linear_attention_is_refused(base: list[str]) -> None:
    words = [*base, "--qwen-gdn-backend", "torch"]
    assert "a checkpoint of model_type qwen3_next" in parse_args(words).idle["qwen_gdn_backend"]
    assert "a checkpoint of model_type qwen3_next" in refused([*words, "--strict"])
    assert "--layernorm-zero-centered-gamma" in refused([*base, "--layernorm-zero-centered-gamma"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"linear_num_value_heads": 5},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"output_gate_type": "sigmoid"},
        {"attn_output_gate": False},
    ],
)
def test_what_is_not_trained_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        architecture({**NEXT, **wrong})


def test_layers_follow_the_interval_where_no_list_is_given() -> None:
    config = {k: v for k, v in LINEAR.items() if k not in ("layer_types", "full_attention_interval")}
    assert [is_linear({**config, "full_attention_interval": 3}, layer) for layer in range(4)] == [1, 1, 0, 1]
    assert [is_linear(config, layer) for layer in range(4)] == [True, True, True, False]
    assert not is_linear({"num_hidden_layers": 4}, 0), "a family without linear attention"


@pytest.mark.parametrize(("name", "stacked"), [("gate_up_proj", True), ("0.gate_proj.weight", False)])
def test_the_files_say_how_experts_are_stored(tmp_path: Path, name: str, stacked: bool) -> None:
    text = {**NEXT, "model_type": "qwen3_5_moe_text"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    assert read_hf_config(str(tmp_path))["_stacked_experts"], "without weights: as published"
    names = {f"model.language_model.layers.0.mlp.experts.{name}": "a", "mtp.layers.0.mlp.experts.gate_up_proj": "b"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert read_hf_config(str(tmp_path))["_stacked_experts"] is stacked
    index.unlink()
    header = json.dumps(names).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_hf_config(str(tmp_path))["_stacked_experts"] is stacked
