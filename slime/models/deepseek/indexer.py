"""Which layers of a model with sparse attention choose keys, and which use the choice of a layer before them."""

from __future__ import annotations

from slime.core.hf_config import HfConfig


def indexer_kinds(config: HfConfig) -> list[str]:
    """Of each layer "full" (it chooses keys) or "shared" (it uses the choice before it); empty without an indexer."""
    if not config.get("index_topk"):
        return []
    num_layers = int(config["num_hidden_layers"])
    if kinds := config.get("indexer_types"):
        return list(kinds)
    if pattern := config.get("index_topk_pattern"):
        names = {"F": "full", "S": "shared"}
        return [names.get(kind, kind) for kind in pattern]
    every, offset = max(int(config.get("index_topk_freq") or 1), 1), int(config.get("index_skip_topk_offset") or 2)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]
