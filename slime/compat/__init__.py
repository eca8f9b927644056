"""Changes that stock SGLang and megatron-core need, one file each. Nothing happens on import.

Most changes are hooks (`HOOKS` of `sglang_token_versions` and others), which `sglang_patches` registers in SGLang's
plugin registry. A hook says which SGLang versions need it. `slime.serving.launch` checks on every machine that the
registered hooks are in place. The rest are patches, mostly for machines without a GPU. Each patch is a function that
checks its own effect and reports its symptom, the upstream version and when it can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slime.core.engine_versions import is_installed


class Hook(NamedTuple):
    when: str
    """BEFORE, AFTER, AROUND or REPLACE."""
    target: str
    """A function or method of SGLang, by its full name."""
    function: Callable[..., Any]
    versions: str = ""
    """The SGLang versions that need the hook, as in requirements. Empty: every version in the window."""

    @property
    def is_needed(self) -> bool:
        """Whether the installed SGLang needs the hook."""
        return is_installed("sglang", self.versions)


def register(hooks: Iterable[Hook]) -> None:
    """Registers hooks with SGLang. Call it before the process loads SGLang's plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if hook.is_needed:
            HookRegistry.register(hook.target, hook.function, HookType[hook.when])
