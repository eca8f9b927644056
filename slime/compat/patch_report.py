"""`PatchReport` describes a patch of an upstream package and whether it took effect."""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.engine_versions import WINDOW, installed
from slime.core.errors import EngineError

SGLANG = "sglang 0.5.16"
"""The SGLang version for which every patch was verified to be necessary."""


@dataclass(frozen=True, slots=True)
class PatchReport:
    """One patch, as `slime doctor` prints it."""

    name: str
    """Short name of the replaced part."""
    symptom: str
    """What a user sees without the patch."""
    upstream: str
    """The package and version that need the patch."""
    removal: str
    """The condition under which the patch can be deleted."""
    applied: bool
    """False if this machine does not need the patch."""
    took_effect: bool
    """Whether a check after applying succeeded; False if not applied."""


def megatron_report(
    name: str, symptom: str, removal: str, *, versions: str | None = None, took_effect: bool = True
) -> PatchReport:
    """`versions`: the versions of megatron-core that need the patch, in words; None: all in the window."""
    upstream = f"megatron-core {versions or ' to '.join(WINDOW['megatron-core'])}"
    return PatchReport(name, symptom, upstream, removal, applied=took_effect, took_effect=took_effect)


def require_effect(condition: bool, patch: str) -> None:
    """Raises `EngineError` if a patch of megatron-core did not take effect."""
    if not condition:
        oldest, newest = WINDOW["megatron-core"]
        raise EngineError(
            f"the patch {patch!r} of megatron-core had no effect: the installed version, {installed('megatron-core')}, "
            f"was changed or is not one of those that slime works with; install megatron-core=={newest} "
            f"(=={oldest} for Python 3.11)"
        )
