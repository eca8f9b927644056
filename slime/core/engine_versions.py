"""The versions of SGLang and megatron-core that slime works with, and the installed ones.

Each release is tried with the oldest and the newest version (`WINDOW`). Versions in between are expected to work, and
newer ones may: `slime upgrade-check` tries them.
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
"""Package -> (oldest, newest) version that the tests run with."""


@cache
def installed(package: str) -> Version | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def parsed(version: object) -> Version | None:
    """Returns the version that a text names; None if it names none."""
    try:
        return Version(str(version))
    except InvalidVersion:
        return None


def matches(version: Version | None, versions: str) -> bool:
    """Whether `version` is among `versions`, written as in requirements (">=0.5.17,<0.6"). Empty: any version.

    A pre-release counts as the release that it precedes, because it has the same interface. None never matches.
    """
    return version is not None and SpecifierSet(versions).contains(Version(version.base_version), prereleases=True)


def is_installed(package: str, versions: str) -> bool:
    """Whether the installed version of `package` is among `versions`. False if it is not installed."""
    return matches(installed(package), versions)


BEFORE_SESSIONS, WITH_SESSIONS = "<0.5.23", ">=0.5.23"
"""SGLang versions without and with sessions of weight updates (`/begin_weight_update`). Many interfaces changed between
the two versions of the window, and nobody has looked which release in between changed which one."""
