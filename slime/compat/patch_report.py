"""`PatchReport`: what one patch of an upstream package is for, and whether it took effect here."""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.errors import EngineError

MEGATRON_VERSION = "0.16.1"
"""megatron-core version for which every patch was seen to be needed."""


@dataclass(frozen=True, slots=True)
class PatchReport:
    """One patch, as `slime doctor` prints it."""

    name: str
    """What was replaced."""
    symptom: str
    """What a user sees without it."""
    upstream: str
    """Package and version that need it."""
    removal: str
    """When it can be deleted."""
    applied: bool
    """False: not needed on this machine, nothing was touched."""
    took_effect: bool
    """Seen after applying; False where not applied."""


def megatron_report(name: str, symptom: str, removal: str) -> PatchReport:
    """Of a patch of megatron-core that `require_effect` saw take effect."""
    return PatchReport(name, symptom, f"megatron-core {MEGATRON_VERSION}", removal, applied=True, took_effect=True)


def require_effect(condition: bool, patch: str) -> None:
    """Raises `EngineError` if a patch of megatron-core did not take effect."""
    if not condition:
        raise EngineError(
            f"got no effect from the patch {patch!r} of megatron-core, because the installed version is not "
            f"{MEGATRON_VERSION} or was changed; install megatron-core=={MEGATRON_VERSION}"
        )
