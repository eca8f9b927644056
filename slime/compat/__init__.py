"""Required changes to stock SGLang and megatron-core, one file each. Imports have no side effects.

Most changes are hooks (`HOOKS` in `sglang_token_versions` and others), which `sglang_patches` registers with SGLang's
plugin registry. A hook declares which SGLang versions need it, and `slime.serving.launch` always checks that the
registered hooks took effect. All other changes are patches, mostly for machines without a GPU. Each patch is a function
that checks its own effect and reports the symptom, the upstream version and when it can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from slime.core.engine_interface import WINDOW, installed, is_installed
from slime.core.errors import EngineError


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


SGLANG = "sglang 0.5.16"
"""The SGLang version on which every patch was verified to be needed."""


@dataclass(frozen=True, slots=True)
class PatchReport:
    """One patch, as printed by `slime doctor`."""

    name: str
    """Short name of what is replaced."""
    symptom: str
    """What a user sees without the patch."""
    upstream: str
    """The package and versions that need the patch."""
    removal: str
    """The condition under which the patch can be deleted."""
    applied: bool
    """False if the patch is not needed on this machine."""
    took_effect: bool
    """Whether the check after applying it succeeded. False if it was not applied."""


def megatron_report(
    name: str, symptom: str, removal: str, *, versions: str | None = None, took_effect: bool = True
) -> PatchReport:
    """Reports a megatron-core patch. `versions`: a phrase for the versions that need it. None: all supported ones."""
    upstream = f"megatron-core {versions or ' to '.join(WINDOW['megatron-core'])}"
    return PatchReport(name, symptom, upstream, removal, applied=took_effect, took_effect=took_effect)


def require_effect(condition: bool, patch: str) -> None:
    """Raises `EngineError` if a megatron-core patch did not take effect."""
    if not condition:
        oldest, newest = WINDOW["megatron-core"]
        raise EngineError(
            f"the patch {patch!r} of megatron-core had no effect: the installed version {installed('megatron-core')} "
            f"is modified or not supported by slime; install megatron-core=={newest} "
            f"(=={oldest} for Python 3.11)"
        )
