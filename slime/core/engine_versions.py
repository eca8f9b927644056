"""Supported and installed versions of SGLang and megatron-core.

Each slime release is tested with the oldest and the newest supported version (`WINDOW`). Versions in between should
work. `slime upgrade-check` tests whether newer ones do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

WINDOW: Mapping[str, tuple[str, str]] = {
    "sglang": ("0.5.16", "0.5.23"),
    "megatron-core": ("0.16.1", "0.19.2"),
}
"""Package -> (oldest, newest) tested version."""


@cache
def installed(package: str) -> Version | None:
    """Returns the installed version of a package, or None if it is not installed."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def parsed(version: object) -> Version | None:
    """Parses a version. Returns None if it is invalid."""
    try:
        return Version(str(version))
    except InvalidVersion:
        return None


def matches(version: Version | None, versions: str) -> bool:
    """Returns whether `version` satisfies the specifier `versions` (">=0.5.17,<0.6"). An empty one allows any version.

    A pre-release counts as the release it precedes, because it has the same interface. None never matches.
    """
    return version is not None and SpecifierSet(versions).contains(Version(version.base_version), prereleases=True)


def is_installed(package: str, versions: str) -> bool:
    """Returns whether the installed version of `package` satisfies `versions`. False if it is not installed."""
    return matches(installed(package), versions)


BEFORE_SESSIONS, WITH_SESSIONS = "<0.5.23", ">=0.5.23"
"""SGLang versions without and with weight update sessions (`/begin_weight_update`). Many interfaces changed between the
two ends of the window. Which release changed which interface has not been investigated."""
