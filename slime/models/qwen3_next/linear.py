"""Which layers have linear attention, and how far its heads can be split."""

from __future__ import annotations

from slime.core.hf_config import HfConfig


def is_linear(config: HfConfig, layer: int) -> bool:
    """Whether the layer's attention is linear; the others have full attention. False for families without any."""
    if kinds := config.get("layer_types"):
        return bool(kinds[layer] == "linear_attention")
    if not config.get("linear_num_key_heads"):
        return False
    return (layer + 1) % int(config.get("full_attention_interval") or 4) != 0


def split_problem(key_heads: int, tp_size: int, cp_size: int) -> str | None:
    """Why these ranks cannot share the heads of linear attention; None if they can. Each has whole key heads."""
    if key_heads % (tp_size * cp_size) == 0:
        return None
    if cp_size == 1:
        return (
            f"got tensor_model_parallel_size {tp_size} for {key_heads} key heads of linear attention; choose a divisor"
        )
    return (
        f"got tensor_model_parallel_size {tp_size} and context_parallel_size {cp_size} for {key_heads} key heads of "
        f"linear attention, each of which runs through whole sequences on one of these {tp_size * cp_size} ranks; "
        "choose sizes whose product divides the heads"
    )
