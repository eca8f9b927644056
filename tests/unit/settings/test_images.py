"""Laws of `--multimodal-keys`: what is read of images has its settings, anything else is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.sources import image_column
from slime.core.hf_config import read_hf_config
from slime.models import architecture, family_of, images_problem
from slime.settings import parse_args
from slime.settings.flag_parser import OVERRIDE
from tests.support.command_line import QWEN3_VL, complete, refused

KEYS = ["--multimodal-keys", '{"image": "images"}', "--apply-chat-template"]


def _base(folder: Path, config: dict[str, Any] | None = None) -> list[str]:
    words = complete(folder)
    (Path(words[1]) / "config.json").write_text(json.dumps(config or QWEN3_VL))
    return words


def test_engines_make_patches_as_the_trainer_does(tmp_path: Path) -> None:
    base = _base(tmp_path)
    args = parse_args([*base, *KEYS])
    assert args.multimodal_keys == {"image": "images"}
    assert args.sglang["disable_fast_image_processor"] is True
    assert "disable_fast_image_processor" not in parse_args(base).sglang, "text alone pays nothing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('--multimodal-keys {"video":"videos"}', "only images are supported"),
        ('--multimodal-keys {"image":"images","audio":"sounds"}', "only images are supported"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2, because with images each rank"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2, because with images each rank"),
        ("--context-parallel-size 2", "--context-parallel-size 2, because with images each rank"),
        ("--lora-rank 4", "--lora-rank, which is not tested with images"),
        ("--advantage-estimator ppo", "--advantage-estimator ppo, whose critic does not support images"),
        ("--use-prefix-sharing", "the layers of qwen3_vl_text do not support it"),
        ("--loss-type sft_loss", "--loss-type sft_loss, which does not support images"),
    ],
)
def test_what_is_not_trained_with_images_is_refused_by_name(words: str, said: str, tmp_path: Path) -> None:
    ranks = ["--actor-num-gpus-per-node", "2"] if "parallel" in words else []
    assert said in refused([*_base(tmp_path), *KEYS, OVERRIDE, *words.split(), *ranks])


def test_a_generate_function_may_render_images_itself_and_agents_need_no_column(tmp_path: Path) -> None:
    function = ["--custom-generate-function-path", "examples.agent_openai_loop:generate"]
    base = _base(tmp_path)
    assert parse_args([*base, *KEYS[:2], *function]).multimodal_keys == {"image": "images"}
    args = parse_args([*base, "--multimodal-keys", "{}", *function])
    assert args.multimodal_keys == {} and args.sglang["disable_fast_image_processor"] is True
    assert image_column(args) is None
    assert "--lora-rank, which is not tested" in refused([*base, "--multimodal-keys", "{}", "--lora-rank", "4"])


def test_without_a_template_and_with_another_model_there_are_no_images(tmp_path: Path) -> None:
    assert "needs --apply-chat-template" in refused([*_base(tmp_path), *KEYS[:2]])
    assert "qwen3 cannot be trained on images" in refused([*complete(tmp_path / "other"), *KEYS])
    codes = {**QWEN3_VL, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert "a quantised hf_checkpoint" in refused([*_base(tmp_path / "codes", codes), *KEYS])
    alone = {**QWEN3_VL["text_config"]}  # type: ignore[dict-item]
    assert "no vision_config" in refused([*_base(tmp_path / "alone", alone), *KEYS])


def test_a_config_whose_positions_are_of_another_kind_is_refused(tmp_path: Path) -> None:
    text: dict[str, Any] = dict(QWEN3_VL["text_config"])  # type: ignore[call-overload]
    for rope in (
        {"rope_type": "default", "rope_theta": 1e6},
        {**text["rope_parameters"], "mrope_section": [6, 5, 4]},
        {**text["rope_parameters"], "mrope_interleaved": False},
    ):
        words = _base(tmp_path / str(rope), {**QWEN3_VL, "text_config": {**text, "rope_parameters": rope}})
        assert "mrope_section" in refused(words)


def test_frequencies_take_turns_among_time_height_and_width(tmp_path: Path) -> None:
    config = read_hf_config(_base(tmp_path)[1])
    axes = family_of(config).rotary_axes(config)
    assert axes == (0, 1, 2) * 5 + (0,)
    assert images_problem(config) is None and architecture(config)["qk_layernorm"] is True


PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "model_type": "qwen3_vl"},
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
"""As Qwen3-VL-4B-Instruct is published, in the spelling of transformers 4."""


def test_a_published_checkpoint_is_read(tmp_path: Path) -> None:
    base = _base(tmp_path, PUBLISHED)
    assert parse_args([*base, *KEYS, "--spec", "slime_plugins.models.qwen3_vl", "get_spec"]).multimodal_keys
    config = read_hf_config(base[1])
    settings = architecture(config)
    assert (settings["rotary_base"], settings["rope_scaling"], settings["kv_channels"]) == (5e6, None, 128)
    axes = family_of(config).rotary_axes(config)
    assert axes is not None and [axes.count(axis) for axis in range(3)] == [24, 20, 20] and axes[-4:] == (0,) * 4
    assert [family_of(config).layer(config, number) is not None for number in range(4)] == [True, True, True, False]


def test_flags_of_images_are_read_without_what_reads_images(tmp_path: Path) -> None:
    code = (
        "import sys; from slime.settings import parse_args; parse_args(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'PIL', 'megatron') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, *_base(tmp_path), *KEYS]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
