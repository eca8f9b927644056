"""Changes that stock SGLang and megatron-core need, one file each. Nothing happens on import.

Most changes are hooks (`HOOKS` of `sglang_token_versions` and others), which `sglang_patches` registers in SGLang's
plugin registry. `slime.serving.launch` checks on every machine that the hooks are in place. The other changes are
patches, mostly for machines without a GPU. Each patch is a function that checks whether it took effect and reports the
symptom, the upstream version and when the patch can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Hook = tuple[str, str, Callable[..., Any]]
"""(when, target, function). `when`: BEFORE, AFTER, AROUND or REPLACE the `target`, a name in SGLang."""


def register(hooks: Iterable[Hook]) -> None:
    """Registers hooks with SGLang. Call it before the process loads SGLang's plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for when, target, function in hooks:
        HookRegistry.register(target, function, HookType[when])
