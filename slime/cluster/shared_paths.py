"""Which folders every host of a run has to see, and whether it does: looked at before any engine starts.

    written by the run    run folder, --save, --save-hf, folder of the disk transport     one folder, under one path
    read by its ranks     --hf-checkpoint, and what else is loaded                        the same files, copies will do
    the start's folder    relative paths mean the same, and a user's modules are found    it exists

The driver writes a token into each folder of the first kind, and every host reads it back. For the second kind both
list the files with their sizes. A file system that tells of new files late gets `SEEN_WITHIN_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime.core.errors import ConfigError
from slime.settings import Args
from slime.settings.topology_yaml import topology_of

DISK_FOLDER = "update_weight_disk_dir"
"""A setting of the disk transport."""
SEEN_WITHIN_S = 30.0
"""NFS keeps what it knows of a folder for as long, unless it is mounted otherwise."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Contract:
    """What the driver asks of every other host."""

    tokens: dict[str, tuple[str, str]]
    """Flag -> (file, its content)."""
    digests: dict[str, tuple[str, str]]
    """Flag -> (folder, `listing` of it)."""
    start_folder: str


@contextmanager
def contract_of(args: Args, run_dir: Path, *, under_way: bool = False) -> Iterator[Contract]:
    """Writes the tokens, and removes them after the block.

    `under_way`: the run has started; folders of checkpoints, which it may be writing now, are not listed.
    """
    tokens: dict[str, tuple[str, str]] = {}
    made: list[Path] = []
    try:
        for flag, folder in _written(args, run_dir).items():
            made += _make(folder)
            file, token = folder / f".seen-by-every-host-{secrets.token_hex(4)}", secrets.token_hex(16)
            file.write_text(token)
            tokens[flag] = (str(file), token)
        digests = {flag: (str(folder), listing(folder)) for flag, folder in _read(args, under_way).items()}
        yield Contract(tokens, digests, os.getcwd())
    finally:
        for name, _ in tokens.values():
            Path(name).unlink(missing_ok=True)
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # it is used by now
                folder.rmdir()


def not_seen(contract: Contract, *, limit_s: float = SEEN_WITHIN_S) -> list[str]:
    """What this host does not see as the driver does, in words; empty if it sees all."""
    deadline = time.monotonic() + limit_s
    while (problems := _look(contract)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return problems


def require_seen(found: dict[str, list[str]]) -> None:
    """Raises one `ConfigError` with what each host does not see. `found`: host -> `not_seen` of it."""
    told = [f"{host} does not see {problem}" for host, problems in found.items() for problem in problems]
    if told:
        raise ConfigError(
            f"got paths that are not shared: {'; '.join(told)}. Processes on every host of a run read and write these "
            "under one path; put them on a file system that all hosts mount at the same place, or use one host"
        )


def listing(folder: Path) -> str:
    """A digest of the names and sizes of the files in a folder, and of its config.json; of a file, of its size."""
    hasher = hashlib.sha256()
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    for file in files:
        if file.is_file():
            hasher.update(f"{file.name} {file.stat().st_size}\n".encode())
    if (folder / "config.json").is_file():
        hasher.update((folder / "config.json").read_bytes())
    return hasher.hexdigest()


def _written(args: Args, run_dir: Path) -> dict[str, Path]:
    """Flag -> folder that one process writes and others, on other hosts, write or read."""
    found = {"--run-dir": run_dir}
    if args.save:
        found["--save"] = Path(args.save)
    if args.save_hf:
        parts = Path(args.save_hf).parts
        whole = next((i for i, part in enumerate(parts) if "{" in part), len(parts))
        found["--save-hf"] = Path(*parts[:whole]) if whole else Path()
    if args.update_weight_transport == "disk":
        found["--update-weight-disk-dir"] = Path(getattr(args, DISK_FOLDER))
    return {flag: folder.absolute() for flag, folder in found.items()}


def _read(args: Args, under_way: bool) -> dict[str, Path]:
    """Flag -> folder, or file, that is there before the run, that every rank reads, and that nobody changes now."""
    changing = {Path(path).absolute() for path in (args.load, args.save) if path} if under_way else set()
    given = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--load": args.load,
        "--load or --ref-load": args.initial_weights,
        "--ref-load": args.ref_load,
        "--critic-load": args.critic_load,
        "--opd-teacher-load": args.opd_teacher_load,
        **(
            {f"--sglang-config, model {m.name}": m.path for m in topology_of(args).models} if args.sglang_config else {}
        ),
    }
    found = {flag: Path(path).absolute() for flag, path in given.items() if path and Path(path).exists()}
    return {flag: path for flag, path in found.items() if path not in changing}


def _make(folder: Path) -> list[Path]:
    """Makes a folder and what is missing above it; returns what it made, the outermost first."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _look(contract: Contract) -> list[str]:
    problems = []
    for flag, (name, token) in contract.tokens.items():
        try:
            seen = Path(name).read_text()
        except OSError as error:
            problems.append(f"{flag} {Path(name).parent} ({error.strerror})")
            continue
        if seen != token:
            problems.append(f"{flag} {Path(name).parent} (another folder is there)")
    for flag, (path, digest) in contract.digests.items():
        if not Path(path).exists():
            problems.append(f"{flag} {path} (no such folder)")
        elif listing(Path(path)) != digest:
            problems.append(f"{flag} {path} with the same files (names, sizes, config.json)")
    if not os.path.isdir(contract.start_folder):
        problems.append(f"the folder of the start {contract.start_folder} (no such folder)")
    return problems
