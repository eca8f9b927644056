"""The commit protocol for checkpoints: a step is saved completely or not at all. Needs neither torch nor ranks.

    parts = begin(root, rollout_id)          creates an empty folder that `latest` ignores
    ... every rank and the Data Buffer write their files to `parts`; the caller waits for all of them ...
    path = commit(parts, rollout_id, seals)  writes the manifest with hashes, flushes, renames, then updates `latest`
    prune(root, keep_last=3)                 removes old checkpoints, but never `latest`

Invariants
1. `latest` only ever points to complete checkpoints. After a crash at any point, it points to the previous one or to
   the new one.
2. `verify` detects every missing, added, truncated or modified file.
3. A folder is renamed before its files are removed, so a folder with a final name is always complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
import types
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core import lease
from slime.core.cores import usable_cores
from slime.core.errors import SAVE_FLAG, CheckpointError, DeadlineExceeded
from slime.core.files import read_checkpoint_json, sync_to_disk, write_json

MANIFEST = "manifest.json"
LATEST = "latest.json"
SET_ASIDE = "set_aside.json"
_NAME = re.compile(r"step_(\d{6,})")
_WRITING, _REPLACED, _REMOVED = ".writing_", ".replaced_", ".removed_"

Seal = dict[str, Any]
"""Size and hash of a file: `bytes`, `sha256`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    rollout_id: int
    """The last step that the checkpoint includes."""


class HashedFile:
    """A file that is hashed as it is written, and flushed to disk at the end of the `with` block."""

    seal: Seal

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        """Appends `content` without blocking other threads."""
        self._sha256.update(content)
        self._file.write(content)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.seal = {"sha256": self._sha256.hexdigest(), "bytes": self._file.tell()}


def begin(root: Path, rollout_id: int) -> Path:
    """Creates an empty folder for the files of step `rollout_id`, after removing what crashed saves left in `root`.

    Raises `CheckpointError` if a folder with the step's name is not a checkpoint, or if another run has taken over
    `root` (`slime.core.lease`).
    """
    lease.check(root)
    for remains in root.glob(".*_step_*"):
        name = remains.name.removeprefix(_REPLACED)
        if name != remains.name and not (root / name / MANIFEST).is_file():
            remains.rename(root / name)  # a run was killed between the two renames of a repeated step
        elif remains.name.startswith((_WRITING, _REPLACED, _REMOVED)):
            shutil.rmtree(remains)
    final = root / f"step_{rollout_id:06d}"
    if final.exists() and not (final / MANIFEST).is_file():
        raise CheckpointError(f"{final} is named like a checkpoint but has no {MANIFEST}; move it elsewhere")
    parts = root / f"{_WRITING}{final.name}"
    parts.mkdir(parents=True)
    return parts


def commit(
    parts: Path,
    rollout_id: int,
    seals: Mapping[str, Seal] | None = None,
    *,
    settings: Mapping[str, Any] = types.MappingProxyType({}),
) -> Path:
    """Turns `parts` into a checkpoint: hashes, manifest, rename, `latest`. Call it once, after all files are written.

    `seals` maps paths relative to `parts` to the seals of files that were hashed and flushed as they were written. All
    other files are hashed and flushed here. `settings`: see `settings_of`. Raises `CheckpointError` if files are
    missing or differ from their seals, or if another run has taken over the folder.
    """
    lease.check(parts.parent)
    files = {str(f.relative_to(parts)): f for f in sorted(parts.rglob("*")) if f.is_file() and f.name != MANIFEST}
    if not files:
        raise CheckpointError(f"{parts} contains no files; write the files before committing")
    entries = dict(seals or {})
    for name, file in files.items():
        if name not in entries:
            entries[name] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
            sync_to_disk(file)
    odd = sorted(n for n, seal in entries.items() if n not in files or files[n].stat().st_size != seal["bytes"])
    if odd:
        raise CheckpointError(f"{odd} in {parts} are missing or have the wrong size; is the disk full?")
    manifest = {"rollout_id": rollout_id, "committed_ns": time.time_ns(), "files": entries, "settings": {**settings}}
    write_json(parts / MANIFEST, manifest | {"sha256": _json_sha256(manifest)}, indent=1)
    for folder in (*(f for f in parts.rglob("*") if f.is_dir()), parts):
        sync_to_disk(folder)
    root = parts.parent
    final = root / f"step_{rollout_id:06d}"
    stale = root / f"{_REPLACED}{final.name}"
    if final.exists():  # a step repeated after a resume; the old folder stays complete until the new one is renamed
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
    parts.rename(final)
    sync_to_disk(root)
    write_json(root / LATEST, {"path": final.name, "rollout_id": rollout_id}, indent=1)
    shutil.rmtree(stale, ignore_errors=True)
    if final.name in (names := _names_set_aside(root)):  # this branch has saved the step again
        write_json(root / SET_ASIDE, {"checkpoints": sorted(names - {final.name})}, indent=1)
    return final


def set_aside(root: Path, *, after: int) -> list[str]:
    """Protects checkpoints of steps after `after` from `prune`. Returns the names of all protected checkpoints.

    A run that resumes from an earlier step calls this first, because the later steps belong to another branch.
    """
    names = _names_set_aside(root) | {found.path.name for found in _complete(root) if found.rollout_id > after}
    if names:
        write_json(root / SET_ASIDE, {"checkpoints": sorted(names)}, indent=1)
    return sorted(names)


def _names_set_aside(root: Path) -> set[str]:
    file = root / SET_ASIDE
    return set(read_checkpoint_json(file)["checkpoints"]) if file.is_file() else set()


def prune(
    root: Path, *, keep_last: int | None, retain_interval: int | None = None, keep: Collection[Path] = ()
) -> list[Path]:
    """Removes all but the `keep_last` newest checkpoints of this branch (None: keeps all). Returns the removed paths.

    Always keeps `latest`, the checkpoints in `keep`, every `retain_interval`-th step, and the checkpoints of other
    branches (`set_aside`).
    """
    if keep_last is None:
        return []
    named = latest(root)
    kept = {path.resolve() for path in (*keep, *([named.path] if named else []))}
    other_branches = _names_set_aside(root)
    gone = []
    for old in [found for found in _complete(root) if found.path.name not in other_branches][keep_last:]:
        retained = retain_interval is not None and (old.rollout_id + 1) % retain_interval == 0
        if retained or old.path.is_symlink() or old.path.resolve() in kept:
            continue
        nameless = root / f"{_REMOVED}{old.path.name}"
        old.path.rename(nameless)
        shutil.rmtree(nameless)
        gone.append(old.path)
    return gone


def latest(root: Path) -> Checkpoint | None:
    """Returns the newest committed checkpoint under `root`, or `root` itself if it is one, or None if there is none.

    Raises `CheckpointError` if `latest.json` points to a folder that does not exist or has no manifest.
    """
    if (root / MANIFEST).is_file():
        return Checkpoint(root, int(read_checkpoint_json(root / MANIFEST)["rollout_id"]))
    named = root / LATEST
    if not named.is_file():  # the first commit was killed before it wrote the file
        return next(iter(_complete(root)), None)
    record = read_checkpoint_json(named)
    for name in (record["path"], _REPLACED + record["path"]):  # if killed between the two renames of a repeated step
        if (root / name / MANIFEST).is_file():
            return Checkpoint(root / name, int(record["rollout_id"]))
    raise CheckpointError(f"{named} points to {record['path']}, which is missing or has no {MANIFEST}{_offer(root)}")


def settings_of(path: Path) -> dict[str, Any]:
    """Returns the settings that were passed to `commit` for the checkpoint at `path`; {} if there were none."""
    return dict(read_checkpoint_json(path / MANIFEST).get("settings") or {})


def find(root: Path, rollout_id: int | None = None) -> Checkpoint | None:
    """Returns the checkpoint of a step, or `latest` if `rollout_id` is None.

    If the step is missing, raises `CheckpointError` with the list of available steps.
    """
    if rollout_id is None:
        return latest(root)
    there = [one] if (root / MANIFEST).is_file() and (one := latest(root)) else _complete(root)
    found = next((c for c in there if c.rollout_id == rollout_id), None)
    if found is None:
        raise CheckpointError(
            f"{root} has no checkpoint for --ckpt-step {rollout_id}; available steps: "
            f"{sorted(c.rollout_id for c in there)}"
        )
    return found


def _complete(root: Path) -> list[Checkpoint]:
    """Returns all checkpoints with a final name and a readable manifest, most recently committed first."""
    there = []
    for path in root.iterdir() if root.is_dir() else ():
        with suppress(CheckpointError):
            if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file():
                there.append((int(read_checkpoint_json(path / MANIFEST).get("committed_ns", 0)), int(match[1]), path))
    return [Checkpoint(path, rollout_id) for _, rollout_id, path in sorted(there, reverse=True)]


def _offer(root: Path, damaged: Path | None = None) -> str:
    """Returns a suffix for error messages: the newest undamaged checkpoint, and how to load it."""
    other = undamaged(root, damaged)
    if other is not None:
        return f"; the previous good one is {other.path}: --load {root} --ckpt-step {other.rollout_id}"
    return f"; {root} has no other complete checkpoint"


def undamaged(root: Path, but: Path | None = None) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint other than the one at `but`, or None. Reads the files of all it tries."""
    there = (other for other in _complete(root) if other.path != but and not _damage(other.path))
    return next(there, None)


def verify(path: Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Compares every file with the manifest. With `share` (i, n), hashes only every n-th file, starting with file i.

    Raises `CheckpointError` with a list of damaged files and the newest undamaged checkpoint.
    """
    wrong = _damage(path, share)
    if wrong:
        raise CheckpointError(f"the checkpoint {path} is damaged: {'; '.join(wrong)}{_offer(path.parent, path)}")


def _damage(path: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing, so the checkpoint was not committed"]
    try:
        manifest = read_checkpoint_json(path / MANIFEST)
        seal, want = manifest.pop("sha256"), manifest["files"]
    except (CheckpointError, KeyError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    if seal != _json_sha256(manifest):
        return [f"{MANIFEST} was altered"]
    have = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file() and f.name != MANIFEST}

    def fault(name: str) -> str | None:
        file = path / name
        if name not in have:
            return f"{name} is missing"
        if name not in want:
            return f"{name} is not in the manifest"
        size = file.stat().st_size
        if size != want[name]["bytes"]:
            return f"{name} has {size} bytes instead of {want[name]['bytes']}"
        return None if name not in hashed or _sha256(file) == want[name]["sha256"] else f"{name} was altered"

    hashed = set(sorted(want, key=lambda name: (-want[name]["bytes"], name))[share[0] :: share[1]])
    with ThreadPoolExecutor(max_workers=min(8, usable_cores())) as pool:
        return [text for text in pool.map(fault, sorted(have | set(want))) if text]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# Background saves: a daemon thread writes and commits a checkpoint while training continues. The driver polls after
# each step, or waits with a timeout; the thread wakes the driver when it finishes.
#
# 1. At most one save runs at a time: call `finish` before `start`.
# 2. If the thread fails, the next `poll` or `finish` raises its error, once.

Facts = Mapping[str, float]
"""Metrics that a save reports."""


class BackgroundSave:
    def __init__(self) -> None:
        self._future: Future[Facts] | None = None
        self._what = ""

    def start(self, write: Callable[[], Facts], *, what: str) -> None:
        """Runs `write` in a daemon thread. `what` describes it in error messages."""
        assert self._future is None, f"{self._what} is still running; call finish first"
        future: Future[Facts] = Future()

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:  # raised by `finish`
                future.set_exception(error)

        self._future, self._what = future, what
        threading.Thread(target=run, name=what, daemon=True).start()

    def poll(self) -> Facts:
        """Returns the metrics of a save if it has finished, otherwise {}. Raises the error of a failed save."""
        return self.finish(limit_s=0) if self._future is not None and self._future.done() else {}

    def finish(self, *, limit_s: float) -> Facts:
        """Waits for the running save, if any, and returns its metrics. Raises its error, or `DeadlineExceeded`."""
        if self._future is None:
            return {}
        done, _ = wait([self._future], timeout=limit_s)
        if not done:
            raise DeadlineExceeded.waiting(owner="driver", for_what=self._what, limit_s=limit_s, flag=SAVE_FLAG)
        future, self._future = self._future, None
        return future.result()
