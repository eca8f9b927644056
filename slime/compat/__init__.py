"""Required changes to stock SGLang and megatron-core, one file each. Imports have no side effects.

Most changes are hooks (`HOOKS` in `sglang_token_versions` and others), which `sglang_patches` registers with SGLang's
plugin registry. A hook declares which SGLang versions need it, and `slime.serving.launch` always checks that the
registered hooks took effect. All other changes are patches, mostly for machines without a GPU. Each patch is a function
that checks its own effect and reports the symptom, the upstream version and when it can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slime.core.engine_versions import is_installed


class Hook(NamedTuple):
    when: str
    """BEFORE, AFTER, AROUND or REPLACE."""
    target: str
    """The full name of a function or method of SGLang."""
    function: Callable[..., Any]
    versions: str = ""
    """The SGLang versions that need the hook, as a requirement specifier. Empty: all supported versions."""

    @property
    def is_needed(self) -> bool:
        """Whether the installed SGLang needs the hook."""
        return is_installed("sglang", self.versions)


def register(hooks: Iterable[Hook]) -> None:
    """Registers hooks with SGLang. Call it before this process loads SGLang's plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if hook.is_needed:
            HookRegistry.register(hook.target, hook.function, HookType[hook.when])
