"""Secrets: what is written in place of one, and the keys of engines."""

from __future__ import annotations

from dataclasses import dataclass, field

HIDDEN = "<hidden>"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """What engines ask for. Who may generate need not be allowed to replace weights."""

    use: str | None = field(default=None, repr=False)
    """For requests: what the run's own code, the router and its users send. None: they ask for nothing."""
    admin: str | None = field(default=None, repr=False)
    """For what changes or ends something (SGLang's `admin_api_key`): weights, memory, pauses, aborts. No user has it.
    None: the engines ask for `use` there, too."""

    @property
    def control(self) -> str | None:
        """What control routes ask for."""
        return self.admin or self.use


NO_KEYS = EngineKeys()
