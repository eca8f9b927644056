"""A checkpoint's `config.json` as a flat mapping, for language models and for the multimodal models around them.

`slime.models` knows what the keys mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.core.files import download_hint
from slime.core.user_files import read_json

HfConfig = Mapping[str, Any]
"""As `read_hf_config` returns it."""


def read_hf_config(hf_checkpoint: str) -> dict[str, Any]:
    """The checkpoint's config.json, flattened by `text_config`. Raises `ConfigError` if it is missing or damaged."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        what_to_do = download_hint(hf_checkpoint) or "give a local folder in HF format"
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: {path} does not exist; {what_to_do}")
    config = text_config(read_json(path, "--hf-checkpoint", "checkpoint, fetched again"))
    if "wrapper_type" in config and num_experts_of(config):
        config["_stacked_experts"], config["_stacked_mtp_experts"] = _stacks_experts(path.parent, config)
    return config


def _stacks_experts(directory: Path, config: HfConfig) -> tuple[bool, bool]:
    """Whether files store all experts of a layer in one tensor: (in the model's layers, in multi-token prediction).

    config.json does not say it. Released multimodal models do, unless they are quantised; transformers stores experts
    one by one. Without weights, or with damaged ones, which their reader will refuse, this assumes a released model.
    """
    names = tensor_names(directory)
    if not names:
        as_released = quantisation_of(config) is None
        return as_released, as_released
    stacked = [name for name in names if name.endswith(".experts.gate_up_proj")]
    of_mtp = [name for name in stacked if name.startswith("mtp.")]
    return len(stacked) > len(of_mtp), bool(of_mtp)


def tensor_names(directory: Path) -> tuple[str, ...]:
    """Tensor names from the checkpoint's index, or from its first file without an index; empty if that is damaged."""
    index, files = directory / "model.safetensors.index.json", sorted(directory.glob("*.safetensors"))
    try:
        if index.is_file():
            return tuple(json.loads(index.read_text())["weight_map"])
        with files[0].open("rb") as file:
            return tuple(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (IndexError, KeyError, ValueError):
        return ()


def quantisation_of(config: HfConfig) -> Mapping[str, Any] | None:
    """config.json's description of quantised weights; None without."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found or None


def text_config(config: HfConfig) -> dict[str, Any]:
    """A config with its `text_config` lifted to the top; `wrapper_type` then names the multimodal model around it.

    Like transformers and SGLang, takes `tie_word_embeddings` from the outer model alone.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {k: v for k, v in config.items() if k != "text_config"}
    tied = bool(config.get("tie_word_embeddings"))
    return {**outer, **text, "tie_word_embeddings": tied, "wrapper_type": str(config.get("model_type"))}


def num_experts_of(config: HfConfig) -> int:
    """Routed experts of each layer, whatever the family calls them; 0 for a dense model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def context_length_of(config: HfConfig) -> int | None:
    """The maximum length of prompt and response together, as SGLang reads it; None if the config does not say.

    A scaled rotary embedding multiplies it, unless the config names the original length.
    """
    length = next((config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)), None)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = "original_max_position_embeddings" not in rope and rope.get("rope_type", rope.get("type")) != "llama3"
    factor = rope.get("factor") or 1
    return None if length is None else int(length * (factor if stretched else 1))
