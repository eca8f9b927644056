"""A complete command line for tests of the configuration, and what it says when it refuses one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.settings import Args, parse_args
from slime.settings.all_flags import flag_table
from slime.settings.command_line import groups, name_of
from slime.settings.flag_parser import OVERRIDE

QWEN3 = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
_MROPE = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "image_token_id": 8,
    "tie_word_embeddings": True,
    "text_config": {**QWEN3, "model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
    "vision_config": {"depth": 2, "deepstack_visual_indexes": [0], "spatial_merge_size": 2},
}
"""The config of a model that reads images."""


def complete(folder: Path) -> list[str]:
    """The flags of a run on files that it writes into `folder`; what a test adds goes before them."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(QWEN3))
    data = folder / "data.jsonl"
    data.write_text('{"input": "1+1", "label": "2"}\n' * 10)
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--run-dir", str(folder / "run")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-rollout", "3", "--rm-type", "math"),
        OVERRIDE,
    ]


def last_of_each(words: Iterable[object]) -> list[str]:
    """The words of a test's base and of what the test adds to it, where the last value of a setting is meant."""
    table, kept = flag_table(), {}
    for number, group in enumerate(groups([str(word) for word in words])):
        flag, _ = table.by_name.get("--" + name_of(group).replace("_", "-"), (None, True))
        key = number if flag is None or flag.append else (flag.owner, flag.dest)
        kept.pop(key, None)
        kept[key] = group
    return [word for group in kept.values() for word in group]


def refused(argv: list[str], **kwargs: bool) -> str:
    """The message of the refusal."""
    with pytest.raises(ConfigError) as error:
        parse_args(argv, **kwargs)
    return str(error.value)


def listed(args: Args) -> str:
    """What is told to have no effect, a line for each setting."""
    return "\n".join(f"{name} {text}" for name, text in args.idle.items())
