"""Which layers have linear attention."""

from __future__ import annotations

from slime.core.hf_config import HfConfig


def is_linear(config: HfConfig, layer: int) -> bool:
    """Whether the layer's attention is linear; the others have full attention. False for families without any."""
    if kinds := config.get("layer_types"):
        return bool(kinds[layer] == "linear_attention")
    if not config.get("linear_num_key_heads"):
        return False
    return (layer + 1) % int(config.get("full_attention_interval") or 4) != 0
