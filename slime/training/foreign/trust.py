"""Whether a file of pickles may be opened at all: somebody has to say so. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError


def require_trust(path: Path, *, trusted: bool) -> None:
    """Raises `ConfigError` unless the user trusts `path`; nothing of it has been read then."""
    if not trusted:
        raise ConfigError(
            f"got {path}, which is made of pickles, and a pickle is a program; give --trust-pickle if you know where "
            "it comes from: it is then read as data alone, in a process without network and without other files"
        )
