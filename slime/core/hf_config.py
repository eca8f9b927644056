"""A checkpoint's `config.json` as a flat mapping, whatever stands around the language model.

What the keys mean for a model is said in `slime.models`.
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
"""A `config.json` as `read_hf_config` gives it."""


def read_hf_config(hf_checkpoint: str) -> dict[str, Any]:
    """The checkpoint's config.json, see `text_config`. Raises `ConfigError` if it is missing or damaged."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        what_to_do = download_hint(hf_checkpoint) or "give a local folder in HF format"
        raise ConfigError(f"got --hf-checkpoint {hf_checkpoint}, but {path} does not exist; {what_to_do}")
    config = text_config(read_json(path, "--hf-checkpoint", "checkpoint, fetched again"))
    if "wrapper_type" in config and num_experts_of(config):
        config["_stacked_experts"], config["_stacked_mtp_experts"] = _stacks_experts(path.parent, config)
    return config


def _stacks_experts(directory: Path, config: HfConfig) -> tuple[bool, bool]:
    """Whether files hold the experts of a layer in one tensor, which config.json does not say; of the model's layers,
    and of that of multi-token prediction.

    Released multimodal models do, but for quantised ones; transformers writes them one by one. Without weights, or
    with damaged ones, which their reader refuses: as released.
    """
    names = tensor_names(directory)
    if not names:
        as_released = quantisation_of(config) is None
        return as_released, as_released
    stacked = [name for name in names if name.endswith(".experts.gate_up_proj")]
    of_mtp = [name for name in stacked if name.startswith("mtp.")]
    return len(stacked) > len(of_mtp), bool(of_mtp)


def tensor_names(directory: Path) -> tuple[str, ...]:
    """Tensors of the index of a checkpoint, or of its first file if it has none; nothing of a damaged one."""
    index, files = directory / "model.safetensors.index.json", sorted(directory.glob("*.safetensors"))
    try:
        if index.is_file():
            return tuple(json.loads(index.read_text())["weight_map"])
        with files[0].open("rb") as file:
            return tuple(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (IndexError, KeyError, ValueError):
        return ()


def quantisation_of(config: HfConfig) -> Mapping[str, Any] | None:
    """What config.json says of quantised weights; None if they are not."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found or None


def text_config(config: HfConfig) -> dict[str, Any]:
    """A config with its `text_config` lifted to the top; `wrapper_type` then names the multimodal model around it.

    Whether embeddings are tied is said by the model around it alone, in transformers and in SGLang.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {k: v for k, v in config.items() if k != "text_config"}
    tied = bool(config.get("tie_word_embeddings"))
    return {**outer, **text, "tie_word_embeddings": tied, "wrapper_type": str(config.get("model_type"))}


def num_experts_of(config: HfConfig) -> int:
    """Routed experts of each layer, under the name that the family gives them; 0 for a dense model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def context_length_of(config: HfConfig) -> int | None:
    """Most tokens of prompt and response together, as SGLang reads it; None for a config that does not say.

    A rotary embedding that is stretched multiplies it, unless it names the length from which it was stretched.
    """
    length = next((config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)), None)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = "original_max_position_embeddings" not in rope and rope.get("rope_type", rope.get("type")) != "llama3"
    factor = rope.get("factor") or 1
    return None if length is None else int(length * (factor if stretched else 1))
