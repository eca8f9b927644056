"""Renews the float32 copy of a router's weight that SGLang keeps of GLM-4.5 to 4.7 (and 4.7-Flash).

SGLang 0.5.16 makes the copy in the first forward pass and never renews it (`Glm4MoeGate._weight_fp32`): in half
precision it would go on choosing experts with the first weights that it was sent. The copy is not a resident tensor, so
digests do not show it. Behind each weight update the copy is written over in its place, where captured CUDA graphs read
it. To be removed when SGLang renews it itself.
"""

from __future__ import annotations

from typing import Any

from slime.compat.sglang_draft import models
from slime.compat.sglang_token_versions import UPDATES


def register() -> None:
    """Call before SGLang's scheduler loads its plugins, which puts the hooks in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for update in UPDATES:
        HookRegistry.register(update, _renew, HookType.AFTER)


def _renew(_answer: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Behind a weight update."""
    for model in models(manager):
        for module in model.modules():
            if getattr(module, "_weight_fp32", None) is not None:
                module._weight_fp32.copy_(module.weight.data)
