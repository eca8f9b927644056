"""Several problems in one error: whoever mends the first should not have to start again to hear of the second."""

from __future__ import annotations

from collections.abc import Sequence

from slime.core.errors import ConfigError


def refuse(problems: Sequence[str]) -> None:
    """Raises one `ConfigError` with all problems, each once and in their order; returns if there are none."""
    told = list(dict.fromkeys(problems))
    if len(told) == 1:
        raise ConfigError(told[0])
    if told:
        raise ConfigError(f"{len(told)} problems:" + "".join(f"\n  {i}. {text}" for i, text in enumerate(told, 1)))
