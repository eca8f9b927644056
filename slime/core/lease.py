"""`Lease`: ensures that only one run, across all hosts, writes to a folder at a time.

A lease file in the folder identifies the owner, whose background thread renews it. A new run takes over the folder
immediately if it sees that the owner's process is gone, which is only possible on the same host. Otherwise, it polls
the file. If the owner renews the lease, acquisition fails. If the owner does not renew it for `SILENCE_S` (and on the
same host shows no other sign of life, see `liveness`), the new run takes over. The old owner detects the loss at its
next `check`, which precedes every write that could destroy the new owner's files.

All coordination goes through this file. Acquisition polls and blocks for at most about `SILENCE_S` (longer on a loaded
host), and only if the owner might be dead.

Invariants
1. Clocks of different hosts are never compared: an owner counts its renewals, and a new run watches the count.
2. A run that has lost its lease never writes the file again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.core.errors import CheckpointError, ConfigError
from slime.core.files import replace_text
from slime.core.liveness import Silence, processor_s
from slime.core.user_files import read_small

logger = logging.getLogger(__name__)

FILE_NAME = ".owner.json"
BEAT_S = 5.0
"""Seconds between renewals."""
SILENCE_S = 60.0
"""An owner that does not renew its lease for this long loses it. Longer than a brief file server outage."""
MOST_BYTES = 65_536
"""Maximum size of a valid lease file."""
_LOOK_S = 0.5

_held: dict[Path, Lease] = {}
"""Leases held by this process, by folder."""


def check(folder: Path) -> None:
    """Raises `CheckpointError` if this process has lost its lease on `folder`.

    Call this before replacing or removing anything in the folder.
    """
    lease = _held.get(folder.resolve())
    if lease is not None:
        lease.check()


class Lease:
    """Context manager that holds this run's lease on a folder."""

    def __init__(self, folder: Path, run_id: str, *, flag: str, file: Path | None = None) -> None:
        """`flag`: the setting that names the folder. `file`: the lease file; by default inside the folder."""
        self.folder, self._flag = folder.resolve(), flag
        self._file = file or self.folder / FILE_NAME
        self._own: dict[str, Any] = {"token": uuid.uuid4().hex, "run_id": run_id, **_this_process(), "beat": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="slime-lease", daemon=True)

    def __enter__(self) -> Lease:
        """Acquires the lease. Raises `ConfigError` if the folder is not writable or another run is using it."""
        self._made = not self._file.parent.exists()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise ConfigError(
                f"{self._flag} {self.folder} is not writable ({error.strerror or error}); choose another folder"
            ) from error
        _held[self.folder] = self
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        _held.pop(self.folder, None)
        with contextlib.suppress(OSError):
            if (owner := self._read()) is not None and not self._is_other(owner):
                self._file.unlink()
            if self._made:
                self._file.parent.rmdir()  # a failed launch leaves nothing behind

    def check(self) -> None:
        """Raises `CheckpointError` if another run has taken over the folder."""
        owner = self._read()
        if owner is not None and self._is_other(owner):
            raise CheckpointError(
                f"{self.folder} now belongs to {_who(owner)}, which took over after this run failed to renew its lease "
                f"for {SILENCE_S:.0f} s, so this run stops writing there; stop one of the two runs"
            )

    def _take(self) -> None:
        watched, silence = None, Silence()
        while True:
            owner = self._read()
            if owner is None and self._create():
                return
            if owner is None:
                continue
            if _is_gone(owner):
                return self._write()
            if watched is None or owner["token"] != watched["token"]:
                here = [owner["pid"]] if owner["space"] == _space() else []
                watched, silence = owner, Silence(partial(processor_s, here))
                logger.info(
                    "%s belongs to %s; waiting up to %.0f s to see whether that run is alive",
                    self.folder,
                    _who(owner),
                    SILENCE_S,
                )
            elif owner["beat"] != watched["beat"]:
                raise ConfigError(
                    f"{self._flag} {self.folder}: {_who(owner)} is writing there; choose another folder, or stop that "
                    "run first"
                )
            elif silence.exceeds(SILENCE_S):
                logger.warning("%s was silent for %.0f s; taking over %s", _who(owner), silence.lasts_s, self.folder)
                return self._write()
            time.sleep(_LOOK_S)

    def _create(self) -> bool:
        """Atomically creates the lease file. Returns False if it already exists."""
        draft = self._file.with_name(f"{self._file.name}.{self._own['token']}")
        draft.write_text(json.dumps(self._own))
        try:
            os.link(draft, self._file)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # retried at the next renewal
                owner = self._read()
                if owner is not None and self._is_other(owner):
                    return
                self._own["beat"] += 1
                self._write()

    def _is_other(self, owner: dict[str, Any]) -> bool:
        return bool(owner and owner["token"] != self._own["token"])

    def _write(self) -> None:
        replace_text(self._file, json.dumps(self._own), durable=False)

    def _read(self) -> dict[str, Any] | None:
        """Returns the owner, None if there is no file, or {} if the file is corrupt, for example after a power loss."""
        try:
            owner = json.loads(read_small(self._file, MOST_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFBIG):
                raise
            owner = None
        except ValueError:
            owner = None
        return owner if isinstance(owner, dict) and owner.keys() == self._own.keys() else {}


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "space": _space(), "pid": os.getpid(), "started": _started(os.getpid())}


def _space() -> str:
    """Identifies the scope in which pids are unique: the machine's current boot and the PID namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> float | None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time())
    return None


def _is_gone(owner: dict[str, Any]) -> bool:
    """Returns whether the lease file is corrupt or its owner was a process on this host that has exited."""
    return not owner or (owner["space"] == _space() and _started(owner["pid"]) != owner["started"])


def _who(owner: dict[str, Any]) -> str:
    return f"run {owner['run_id']} (process {owner['pid']} on {owner['host']})"
