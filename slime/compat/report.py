"""`PatchReport`: what one patch of an upstream package is for, and whether it took effect here."""

from __future__ import annotations

from dataclasses import dataclass


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
