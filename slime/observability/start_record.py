"""Records a launch's code, input files and environment.

The record is part of `run.json`, so that `slime rerun` can report what has changed. Only the beginning and
the end of a large file, such as gigabytes of weights, are hashed.

Invariants
1. Recording never fails a run: an unreadable file is recorded as such.
2. Files and variables with names that look like secrets are omitted, and secrets in a diff are hidden.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.text import HIDDEN

SECRET = re.compile(
    r"(^|_)((?<!input_)(?<!label_)(?<!tool_)(?<!metadata_)(?<!reward_)keys?(_b)?|token|secret|webhook|password|"
    r"watermark_config)$"
)
"""Lower-case names of settings and variables whose values are never written."""

SLIME = Path(__file__).parents[1] / "__init__.py"
OUTPUTS = frozenset(
    (
        *("run_dir", "save", "save_hf", "save_debug_rollout_data", "save_debug_train_data", "dump_details"),
        *("memory_snapshot_dir", "tensorboard_dir", "wandb_dir", "update_weight_disk_dir"),
    )
)
"""Settings for folders and files that a run writes."""
SHARED_OUTPUTS = frozenset(("tensorboard_dir", "wandb_dir"))
"""Output folders that several runs can share. Each run writes to its own subfolder."""
NO_INPUTS = OUTPUTS | {"origins", "idle", "run_id", "components.run_id"}
ENVIRONMENT = re.compile(
    r"(OMP|MKL|NCCL|GLOO|CUDA|CUBLAS|TORCH|PYTORCH|SGLANG|SGL|MEGATRON|NVTE|HF|TRANSFORMERS|TOKENIZERS|RAY|WANDB)_\w+"
    r"|PYTHONPATH|PYTHONHASHSEED|SLIME_(?!RUN_ID)\w+"
)
"""Environment variables that affect a run's results or where it finds files."""
MAX_HASHED_BYTES = 256 << 20
"""Only the beginning and the end of larger files are hashed."""
MAX_TOTAL_BYTES = 1 << 30
"""Maximum number of bytes hashed in total. After that, only the beginning and the end of each file are hashed."""
END_BYTES = 1 << 20
MAX_FILES = 1000
"""Maximum number of files per setting. If a folder has more, only part of it is recorded."""
MAX_DIFF_BYTES = 1 << 20
"""Maximum recorded size of one checkout's uncommitted changes."""
GIT_LIMIT_S = 10
NOT_READ = "not read"
"""Used instead of a hash if git failed or timed out."""
_SECRET_FILES = ("*.env", ".env*", "*.pem", "*.key", "*secret*", "*credential*", "*password*")
_SECRET_LINE = re.compile(r"(?im)^([+ -].*(?:key|token|secret|password)\w*[\"']?\s*[:=]\s*[\"']?)([^\s\"',)]{8,})")
_SECRET_JSON = re.compile(r"(\"\w*(?:key|token|secret|password)\"\s*:\s*\")[^\"]*(\")", re.I)


@dataclass(frozen=True, slots=True)
class Checkout:
    root: str
    commit: str
    diff: str
    """Uncommitted changes of tracked files with secrets removed, at most `MAX_DIFF_BYTES`."""
    diff_sha256: str | None
    """Hash of all uncommitted changes. None if there are none, `NOT_READ` if git failed."""


def hide_secrets(command: Sequence[str]) -> list[str]:
    """Hides the values of secret flags in a command line, in both forms (`--wandb-key x`, `--wandb-key=x`).

    Keeps `@FILE`, because it only says where the secret is stored.
    """
    out: list[str] = []
    hide = False  # until the next flag, because a flag may take several values
    for word in command:
        flag, equals, value = word.partition("=")
        secret = flag.startswith("--") and SECRET.search(flag.lstrip("-").replace("-", "_")) is not None
        is_flag = word.startswith("--")
        shown = _SECRET_JSON.sub(rf"\g<1>{HIDDEN}\g<2>", word)
        if (value if is_flag else word).startswith("@"):
            out.append(word)
        else:
            out.append(HIDDEN if hide and not is_flag else f"{flag}={HIDDEN}" if secret and equals else shown)
        hide = secret and not equals if is_flag else hide
    return out


def environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if ENVIRONMENT.fullmatch(name) and not SECRET.search(name.lower())
    }


def checkouts(*places: Path) -> list[Checkout]:
    """Returns the git checkouts that track these files or folders, without duplicates."""
    found: dict[str, Checkout] = {}
    for place in places:
        root = _root_of(place)
        if root is not None and root not in found:
            commit = _git(Path(root), "rev-parse", "HEAD")
            without = [f":(exclude,glob,icase)**/{pattern}" for pattern in _SECRET_FILES]
            diff = _git(Path(root), "diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", ".", *without)
            if commit:
                digest = NOT_READ if diff is None else _digest(diff)
                found[root] = Checkout(root, commit.strip(), _shown(diff or ""), digest)
    return list(found.values())


def _root_of(place: Path) -> str | None:
    """Returns the root of the checkout that tracks `place`. None for a package in a folder that git ignores."""
    folder = place if place.is_dir() else place.parent
    root = _git(folder, "rev-parse", "--show-toplevel")
    return root.strip() if root and _git(folder, "ls-files", "--", str(place)) else None


def _git(where: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-c", "core.quotepath=off", *words]
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _shown(diff: str) -> str:
    hidden = _SECRET_LINE.sub(rf"\g<1>{HIDDEN}", diff)
    if len(hidden.encode()) <= MAX_DIFF_BYTES:
        return hidden
    return hidden.encode()[:MAX_DIFF_BYTES].decode(errors="ignore") + f"\n(truncated after {MAX_DIFF_BYTES} bytes)\n"


def _digest(text: str) -> str | None:
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def input_files(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the files referenced by settings (data, hooks, YAML, model files) with their sizes and hashes.

    `settings`: as JSON. Values can be paths, folders, glob patterns, paths with a slice (`@[a:b]`) or `{rollout_id}`,
    or functions in modules that are already loaded.
    """
    out: dict[str, dict[str, Any]] = {}
    left = MAX_TOTAL_BYTES
    for name, value in _strings(settings):
        if name == "load" and value == settings.get("save"):
            continue  # an output of this run
        for path in itertools.islice(_files_of(value), MAX_FILES):
            if str(path) not in out:
                facts = _fingerprint(path, min(left, MAX_HASHED_BYTES))
                left -= facts["bytes"] if facts["hashed"] == "all" else 0
                out[str(path)] = {"setting": name, "path": str(path), **facts}
    return list(out.values())


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value:
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in NO_INPUTS and not SECRET.search(str(key)):
                yield from _strings(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner, name)


def _files_of(value: str) -> Iterator[Path]:
    text = re.sub(r"@\[[^\]]*\]$", "", value)
    text = text.rpartition(":")[0] if ".py:" in text else text
    module = _module_file(text)
    if module is not None:
        yield module
    if "/" not in text and "." not in text:
        return  # a plain word is not treated as a path, even if a file with that name exists
    pattern = glob.escape(text).replace("{rollout_id}", "*") if "{rollout_id}" in text else text
    try:
        for found in sorted(glob.glob(pattern, recursive=True)) if not os.path.exists(text) else [text]:
            path = Path(found).resolve()
            yield from sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    except (OSError, ValueError):
        return


def _module_file(value: str) -> Path | None:
    """Returns the source file of a user function `pkg.mod:fn` or `pkg.mod.fn` if its module is loaded."""
    name = value.rpartition(":")[0] or value.rpartition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) if name.partition(".")[0] != "slime" else None
    return Path(file).resolve() if file else None


def _fingerprint(path: Path, most: int) -> dict[str, Any]:
    """Returns a file's size and hash. Beyond `most` bytes, only the beginning and the end are hashed."""
    try:
        size = path.stat().st_size
        whole = size <= max(most, 2 * END_BYTES)
        digest = hashlib.sha256()
        with path.open("rb") as file:
            if whole:
                while chunk := file.read(END_BYTES):
                    digest.update(chunk)
            else:
                digest.update(file.read(END_BYTES))
                file.seek(-END_BYTES, os.SEEK_END)
                digest.update(file.read(END_BYTES))
        return {"bytes": size, "sha256": digest.hexdigest(), "hashed": "all" if whole else "ends"}
    except OSError as error:
        return {"bytes": None, "sha256": None, "hashed": f"not read: {error.strerror}"}
