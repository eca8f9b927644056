"""Which versions follow on which: a full one, and the deltas on it, each on the one before. Pure rules.

1. The first weight sync of a start is a full version, and so is every `every`-th one, the first that an engine takes
   part in, and the one after a failure.
2. A delta stands on the digest of its base, not on its number.
3. What a copy lacks is found by walking back from the wanted version to what the copy holds, or to a full version.
4. A version may go once a full one that is not older has been confirmed by every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slime.core.errors import WeightSyncError
from slime.weights.delta.manifest import Base, Manifest
from slime.weights.version_folder import version_of


def is_full(*, since_full: int | None, every: int, confirmed: bool, all_known: bool) -> bool:
    """Whether the next version is a full one.

    `since_full`: deltas since the last full version, None before the first one; `confirmed`: every engine had the
    version before; `all_known`: those that will get this one did.
    """
    return since_full is None or since_full + 1 >= every or not confirmed or not all_known


def steps_to(target: Base, held: str | None, read: Callable[[int], Manifest]) -> list[Manifest]:
    """The versions to apply, oldest first, to a copy that holds the version of digest `held` (None: nothing usable).

    The first of them is a full version unless it stands on `held`; empty if the copy has the target. `read` raises
    `WeightSyncError` for a version that is not there. Raises that, too, for one that is another than it should be.
    """
    steps: list[Manifest] = []
    wanted: Base | None = target
    while wanted is not None and wanted.digest != held:
        manifest = read(wanted.version)
        if (manifest.version, manifest.digest) != (wanted.version, wanted.digest):
            raise WeightSyncError(
                f"got version {manifest.version} ({manifest.digest[:12]}) in the place of version {wanted.version} "
                f"({wanted.digest[:12]}); the chain is broken, send a full version"
            )
        if manifest.base is not None and manifest.base.version >= manifest.version:
            raise WeightSyncError(f"got version {manifest.version} on {manifest.base.version}, which is not older")
        steps.append(manifest)
        wanted = manifest.base
    return steps[::-1]


def prunable(folders: Iterable[str], *, newest_full: int) -> list[str]:
    """Of names in the shared folder, versions that nobody needs: `newest_full` was confirmed by every engine."""
    found = {name: version for name in folders if (version := version_of(name)) is not None}
    return sorted(name for name, version in found.items() if version < newest_full)
