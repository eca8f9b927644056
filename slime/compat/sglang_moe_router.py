"""Renews the float32 copy of an expert router's weight that SGLang keeps for GLM-4.5 to 4.7 (and 4.7-Flash).

SGLang 0.5.16 makes the copy in the first forward pass and never renews it (`Glm4MoeGate._weight_fp32`), so in half
precision the router would keep choosing experts with outdated weights. Digests do not cover the copy, because it is not
a resident tensor. After each weight update the hook overwrites the copy in place, because captured CUDA graphs read it
there. SGLang 0.5.23 keeps no copy.
"""

from __future__ import annotations

from typing import Any

from slime.compat import Hook
from slime.compat.sglang_draft import models
from slime.compat.sglang_token_versions import UPDATES
from slime.core.engine_versions import BEFORE_SESSIONS


def _renew(_answer: Any, manager: Any, *_: Any, **__: Any) -> None:
    for model in models(manager):
        for module in model.modules():
            if getattr(module, "_weight_fp32", None) is not None:
                module._weight_fp32.copy_(module.weight.data)


HOOKS = tuple(Hook("AFTER", update, _renew, BEFORE_SESSIONS) for update in UPDATES)
