"""The addresses of engines that run already: from the command line, or from a file that may change while a run goes on.

10.0.0.7:30000        # a line of the file; empty lines and what follows a # are left out
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.core.errors import ConfigError
from slime.core.processes import server_url

FILE_MARK = "@"


def address_file(given: Sequence[str]) -> Path | None:
    """The file that `--rollout-external-engine-addrs @FILE` names. Raises `ConfigError` if it names more besides."""
    files = [word for word in given if word.startswith(FILE_MARK)]
    if not files:
        return None
    if len(given) > 1:
        raise ConfigError(
            f"got --rollout-external-engine-addrs {' '.join(given)}: a file is the whole list; give it alone, or "
            "addresses"
        )
    return Path(files[0].removeprefix(FILE_MARK))


def read_addresses(given: Sequence[str]) -> tuple[str, ...]:
    """The addresses as they are now, `http://host:port` each. Raises `ConfigError` with the place of a wrong one."""
    file = address_file(given)
    if file is None:
        return _distinct([(word, "--rollout-external-engine-addrs") for word in given])
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"got --rollout-external-engine-addrs {given[0]}, which cannot be read: {error}") from error
    words = [(line.partition("#")[0].strip(), f"{file}:{number}") for number, line in enumerate(lines, 1)]
    found = _distinct([(word, where) for word, where in words if word])
    if not found:
        raise ConfigError(f"got {file}, which has no address; write one HOST:PORT in each line")
    return found


def _distinct(words: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    found: list[str] = []
    for word, where in words:
        try:
            url = server_url(word)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if url in found:
            raise ConfigError(f"{where}: got {word} twice, and each engine is one; drop one of them")
        found.append(url)
    return tuple(found)
