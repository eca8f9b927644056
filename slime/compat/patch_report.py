"""`PatchReport` describes a patch of an upstream package and whether it took effect."""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.errors import EngineError

MEGATRON_VERSION = "0.16.1"
"""The megatron-core version for which every patch was verified to be necessary."""
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


def megatron_report(name: str, symptom: str, removal: str) -> PatchReport:
    return PatchReport(name, symptom, f"megatron-core {MEGATRON_VERSION}", removal, applied=True, took_effect=True)


def require_effect(condition: bool, patch: str) -> None:
    """Raises `EngineError` if a patch of megatron-core did not take effect."""
    if not condition:
        raise EngineError(
            f"the patch {patch!r} of megatron-core had no effect, because the installed version is not "
            f"{MEGATRON_VERSION} or was changed; install megatron-core=={MEGATRON_VERSION}"
        )
