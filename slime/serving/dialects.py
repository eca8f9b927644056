"""What differs between versions of SGLang at the routes that slime uses.

`Dialect` is that of the newest version. An older version that is still supported has a subclass, which is deleted with
the version. `dialect_of` chooses by the version that a server reports, because an external engine
(`--rollout-external-engine-addrs`) may have a different version from the one that is installed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version

from slime.core.engine_versions import BEFORE_SESSIONS, WINDOW, matches, parsed
from slime.core.errors import EngineError

logger = logging.getLogger(__name__)

Post = Callable[[str, Mapping[str, Any]], Any]
"""Posts a JSON body to a route. Raises `EngineError` if the server refuses."""
OPEN = "already open"
"""Part of SGLang's refusal to open a second session."""


class Dialect:
    """SGLang 0.5.23: weights are sent in a session, which restores packed weights at its begin and packs them at its
    end."""

    def begin_update(self, post: Post) -> None:
        """Opens a session. If one is open, its sender has died or failed, so ends it and opens a new one."""
        try:
            post("begin_weight_update", {})
        except EngineError as error:
            if OPEN not in str(error):
                raise
            post("end_weight_update", {})
            post("begin_weight_update", {})

    def end_update(self, post: Post) -> None:
        post("end_weight_update", {})

    def place(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the place of the rank whose digests are in `report`. A draft model is at the same place."""
        info: Mapping[str, Any] = report["parallelism_info"][0]
        return info


class WithoutSessions(Dialect):
    """SGLang 0.5.16: weights are sent at any time."""

    def begin_update(self, post: Post) -> None:
        pass

    def end_update(self, post: Post) -> None:
        pass

    def place(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        info: Mapping[str, Any] = report["parallelism_info"]
        return info


def dialect_of(version: str, url: str) -> Dialect:
    """Returns the dialect of the server at `url`, which reports `version`. Warns outside the versions that are tried.

    Raises `EngineError` if that cannot be parsed.
    """
    found = parsed(version)
    if found is None:
        raise EngineError(f"the server at {url} reports {version!r} as its SGLang version")
    oldest, newest = map(Version, WINDOW["sglang"])
    if not oldest <= found <= newest:
        logger.warning("engine %s runs SGLang %s; slime is tested with %s to %s", url, found, oldest, newest)
    return WithoutSessions() if matches(found, BEFORE_SESSIONS) else Dialect()
