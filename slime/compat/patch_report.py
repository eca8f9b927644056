"""`PatchReport`: a description of an upstream patch and whether it took effect."""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.engine_versions import WINDOW, installed
from slime.core.errors import EngineError

SGLANG = "sglang 0.5.16"
"""The SGLang version with which every patch was verified to be necessary."""


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
