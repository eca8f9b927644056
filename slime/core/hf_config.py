"""Reads a checkpoint's `config.json` as a flat mapping, for language models and multimodal models.

`slime.models` interprets the keys.
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
"""The result of `read_hf_config`."""


def read_hf_config(hf_checkpoint: str) -> dict[str, Any]:
    """Returns config.json, flattened by `text_config`. Raises `ConfigError` if the file is missing or corrupt."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        what_to_do = download_hint(hf_checkpoint) or "choose a local folder in Hugging Face format"
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: {path} does not exist; {what_to_do}")
    config = text_config(read_json(path, "--hf-checkpoint", "complete checkpoint (download it again)"))
    if "wrapper_type" in config and num_experts_of(config):
        config["_stacked_experts"], config["_stacked_mtp_experts"] = _stacks_experts(path.parent, config)
    return config


def _stacks_experts(directory: Path, config: HfConfig) -> tuple[bool, bool]:
    """Returns whether a single tensor stores all experts of a layer: (in the model's layers, in the MTP layers).

    config.json does not contain this. Released multimodal checkpoints stack the experts unless they are quantised;
    transformers saves experts one by one. If the weights are missing or corrupt, this function assumes a released
    checkpoint and leaves error reporting to the code that loads the weights.
    """
    names = tensor_names(directory)
    if not names:
        as_released = quantisation_of(config) is None
        return as_released, as_released
    stacked = [name for name in names if name.endswith(".experts.gate_up_proj")]
    of_mtp = [name for name in stacked if name.startswith("mtp.")]
    return len(stacked) > len(of_mtp), bool(of_mtp)


def tensor_names(directory: Path) -> tuple[str, ...]:
    """Returns tensor names from the checkpoint's index or else its first file. Empty if neither can be read."""
    index, files = directory / "model.safetensors.index.json", sorted(directory.glob("*.safetensors"))
    try:
        if index.is_file():
            return tuple(json.loads(index.read_text())["weight_map"])
        with files[0].open("rb") as file:
            return tuple(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (IndexError, KeyError, ValueError):
        return ()


def quantisation_of(config: HfConfig) -> Mapping[str, Any] | None:
    """Returns the quantisation settings in config.json, or None if the weights are not quantised."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found or None


def text_config(config: HfConfig) -> dict[str, Any]:
    """Merges `text_config` into the top level. `wrapper_type` then has the `model_type` of the multimodal model.

    Like transformers and SGLang, reads `tie_word_embeddings` only from the outer config.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {k: v for k, v in config.items() if k != "text_config"}
    tied = bool(config.get("tie_word_embeddings"))
    return {**outer, **text, "tie_word_embeddings": tied, "wrapper_type": str(config.get("model_type"))}


def other_media_ids(config: HfConfig) -> frozenset[int]:
    """Returns the placeholders of media other than images."""
    return frozenset(int(config[name]) for name in ("video_token_id", "audio_token_id") if config.get(name) is not None)


def num_experts_of(config: HfConfig) -> int:
    """Returns the number of routed experts per layer, whatever key the family uses. 0 for a dense model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def context_length_of(config: HfConfig) -> int | None:
    """Returns the maximum length of prompt plus response, derived as in SGLang. None if the config does not define one.

    RoPE scaling multiplies the length, unless the config also contains the original length.
    """
    length = next((config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)), None)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = "original_max_position_embeddings" not in rope and rope.get("rope_type", rope.get("type")) != "llama3"
    factor = rope.get("factor") or 1
    return None if length is None else int(length * (factor if stretched else 1))
