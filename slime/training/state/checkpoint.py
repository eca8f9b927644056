"""The commit protocol of checkpoints: all parts of one moment, or nothing. Pure file work; no torch, no ranks.

    parts = begin(root, rollout_id)      an empty folder, invisible to `latest`
    ... every rank and the Data Buffer write their files into `parts`; the caller waits for all of them ...
    path = commit(parts, rollout_id)     manifest with hashes, flush to disk, rename, then the name in `latest`

Invariants
1. `latest` names only folders that were complete when they got their name; a crash at any point leaves the previous
   one.
2. `verify` finds every missing, added, shortened or altered file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest.json"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    rollout_id: int
    """The last step that it contains."""


def begin(root: Path, rollout_id: int) -> Path:
    """An empty folder for the parts of step `rollout_id`; what a crash left in it is removed."""
    parts = root / f".writing_step_{rollout_id:06d}"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    return parts


def commit(parts: Path, rollout_id: int) -> Path:
    """Makes the parts a checkpoint: hashes, manifest, rename, `latest`. Called once, when every part is written.

    Raises `CheckpointError` if there is no part.
    """
    files = {str(f.relative_to(parts)): f for f in sorted(parts.rglob("*")) if f.is_file() and f.name != MANIFEST}
    if not files:
        raise CheckpointError(f"got no file in {parts}; write the parts before committing")
    entries = {}
    for name, file in files.items():
        entries[name] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
        _sync(file)
    _write_json(parts / MANIFEST, {"rollout_id": rollout_id, "files": entries})
    _sync(parts)
    root = parts.parent
    final = root / f"step_{rollout_id:06d}"
    if final.exists():  # a repeated step after a resume; the old one stays whole until the new one is complete
        stale = root / f".replaced_step_{rollout_id:06d}"
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
        parts.rename(final)
        shutil.rmtree(stale, ignore_errors=True)
    else:
        parts.rename(final)
    _sync(root)
    _write_json(root / LATEST, {"path": final.name, "rollout_id": rollout_id})
    _sync(root)
    return final


def latest(root: Path) -> Checkpoint | None:
    """The newest committed checkpoint under `root` (or `root` itself if it is one); None if there is none.

    Raises `CheckpointError` if `latest.json` names a folder that is gone and no other is left to fall back on.
    """
    if (root / MANIFEST).is_file():
        return Checkpoint(root, int(_read_json(root / MANIFEST)["rollout_id"]))
    named = root / LATEST
    if named.is_file():
        record = _read_json(named)
        path = root / record["path"]
        if (path / MANIFEST).is_file():
            return Checkpoint(path, int(record["rollout_id"]))
    # Between the two renames of a commit the name may be missing or old: complete folders speak for themselves.
    complete = [
        Checkpoint(p, int(match[1]))
        for p in (root.iterdir() if root.is_dir() else ())
        if (match := _NAME.fullmatch(p.name)) and (p / MANIFEST).is_file()
    ]
    if complete:
        return max(complete, key=lambda c: c.rollout_id)
    if named.is_file():
        raise CheckpointError(
            f"got {named} naming {record['path']}, which does not exist; restore it or remove {named}"
        )
    return None


def verify(path: Path) -> None:
    """Compares every file with the manifest. Raises `CheckpointError` that names the files that differ."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"got no {MANIFEST} in {path}; it is no committed checkpoint")
    want = _read_json(manifest)["files"]
    have = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file() and f.name != MANIFEST}
    wrong = [f"{name} is missing" for name in sorted(set(want) - have)]
    wrong += [f"{name} is not in the manifest" for name in sorted(have - set(want))]
    for name in sorted(set(want) & have):
        file = path / name
        if file.stat().st_size != want[name]["bytes"] or _sha256(file) != want[name]["sha256"]:
            wrong.append(f"{name} was altered")
    if wrong:
        raise CheckpointError(f"got a damaged checkpoint {path}: {'; '.join(wrong)}; load an older one")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, data: object) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"got {error} from {path}; the file is damaged, load an older checkpoint") from error
    return data
