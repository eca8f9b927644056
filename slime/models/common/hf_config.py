"""What keys of a `config.json` mean that many families share, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.core.hf_config import HfConfig, num_experts_of

_FALLBACK_THETA = 10000.0


def rope_of(config: HfConfig) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling object or None), from the spelling of transformers 4 or 5."""
    parameters: HfConfig = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", _FALLBACK_THETA))
    scaling = config.get("rope_scaling") or {k: v for k, v in parameters.items() if k != "rope_theta"}
    return float(theta), dict(scaling) if scaling and rope_kind(scaling) != "default" else None


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """The kind of a scaling object, in either spelling; "default" for none."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def is_sparse(config: HfConfig, layer: int) -> bool:
    """Whether this layer has routed experts."""
    if not num_experts_of(config):
        return False
    if kinds := config.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < int(config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def rotary_percent(config: HfConfig, default: float) -> float:
    """The rotated part of a head, in the spelling of transformers 4 or 5."""
    parameters: HfConfig = config.get("rope_parameters") or {}
    return float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default)
