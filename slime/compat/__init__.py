"""Changes that stock SGLang and megatron-core need, one file each. Nothing happens on import.

On every machine SGLang calls hooks from its own plugin registry (`HOOKS` of `sglang_token_versions` and others), which
`slime.serving.launch` registers and checks. The rest are patches, mostly for machines without a GPU: each is a function
that reports its symptom, the upstream version and when it can be removed, and checks its own effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Hook = tuple[str, str, Callable[..., Any]]
"""When SGLang calls the function (BEFORE, AFTER, AROUND, REPLACE), its target in SGLang, the function."""


def register(hooks: Iterable[Hook]) -> None:
    """Call before a process of SGLang loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for when, target, function in hooks:
        HookRegistry.register(target, function, HookType[when])
