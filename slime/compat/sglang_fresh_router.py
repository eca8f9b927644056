"""Makes an engine forget the float32 copy of a router's weight that SGLang keeps of GLM-4.5 to 4.7 (and 4.7-Flash).

SGLang 0.5.16 makes the copy in the first forward pass and never renews it (`Glm4MoeGate._weight_fp32`): in half
precision it would go on choosing experts with the first weights that it was sent. The copy is no resident tensor, so
digests do not show it. The stock engine is told to call `forgetting` by `--forward-hooks`; to be removed when SGLang
renews the copy after a weight update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KEEPS_A_COPY = ("glm4_moe", "glm4_moe_lite")
"""`model_type` values."""


def forward_hooks(model_path: str, others: str | None) -> str | None:
    """SGLang's `forward_hooks` for this checkpoint, as JSON: `others`, and one on each router that keeps a copy."""
    config = Path(model_path) / "config.json"
    if not config.is_file() or json.loads(config.read_text()).get("model_type") not in KEEPS_A_COPY:
        return others
    own = {
        "name": "fresh router",
        "target_modules": ["model.layers.*.mlp.gate"],
        "hook_factory": f"{__name__}:forgetting",
    }
    return json.dumps([*json.loads(others or "[]"), own])


def forgetting(_config: Mapping[str, Any]) -> Callable[..., None]:
    """A hook behind a router's forward pass that drops its copy; the next pass makes it anew."""

    def forget(module: Any, _inputs: Any, _output: Any) -> None:
        module._weight_fp32 = None

    return forget
