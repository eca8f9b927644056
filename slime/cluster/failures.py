"""What Ray says of a failed call, as one error of ours with one sentence; the trace stays behind it, for the log.

the actor's method raised an error of ours      that error, as it was raised
it raised anything else                         `ActorFailed`: what, in which process, where (the user's own line)
its constructor raised                          the same
its process is gone                             `ActorDied`: which process, during what
Ray itself cannot go on (disk, memory, a host)  `ClusterFailed`: what Ray said, during what
"""

from __future__ import annotations

import re
from typing import Any

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from slime.core import errors
from slime.core.blame import RAISED_AT, Process, first_line, one_line, place_in
from slime.core.errors import ActorDied, ActorFailed, ClusterFailed, SlimeError
from slime.core.text import shorten

_introduced: dict[str, Process] = {}
"""Ray's id of an actor that this process started -> what it is."""
RAY_CHARS = 600
"""Of what Ray says of itself."""
_ACTOR, _CLASS, _HOST = (re.compile(rf"{key}: (\S+)") for key in ("actor_id", "class_name", "ip"))
_OURS = re.compile(r"^slime\.core\.errors\.(\w+): (.*)\Z", re.MULTILINE | re.DOTALL)
_DETAIL = re.compile(r"Worker exit detail: ([^.\n]+\.)")


def introduce(actor: Any, process: Process) -> Any:
    """The same actor; its end will be that of `process`."""
    _introduced[actor._actor_id.hex()] = process
    return actor


def translated(error: RayError, for_what: str) -> SlimeError:
    """The error to raise instead of Ray's, `from` it. `for_what`: what the driver waited for."""
    if isinstance(error, RayTaskError):
        return _raised(error, for_what)
    if isinstance(error, OutOfMemoryError):
        return ActorDied(f"Ray ended a process during {for_what}, because memory ran out: {first_line(str(error))}")
    text = str(error)
    if not isinstance(error, RayActorError | WorkerCrashedError):
        said = shorten(" ".join(text.split()), RAY_CHARS)  # its reason may be on any line
        return ClusterFailed(f"Ray: {type(error).__name__}: {said}, during {for_what}")
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return _not_started(text)
    return ActorDied(_process(text).ended(None, during=for_what) + _detail(text))


def _raised(error: RayTaskError, for_what: str) -> SlimeError:
    cause, trace = error.cause, str(error)
    if isinstance(cause, SlimeError):
        return cause
    what = one_line(cause) if isinstance(cause, Exception) else _last_line(trace)
    return ActorFailed(f"got {what}{_place(trace)}, during {for_what}")


def _not_started(text: str) -> SlimeError:
    """Of an actor whose constructor raised Ray keeps the trace alone; an error of ours is made again from its text."""
    match = _OURS.search(text)
    kind = getattr(errors, match[1], None) if match else None
    if match and isinstance(kind, type) and issubclass(kind, SlimeError):
        return kind(match[2].strip())
    return ActorFailed(f"a process could not start: got {_last_line(text)}{_place(text)}")


def _place(trace: str) -> str:
    place = place_in(trace)
    return f"{RAISED_AT}{place}" if place is not None else ""


def _last_line(trace: str) -> str:
    """The exception itself, which ends a trace."""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    return first_line(lines[-1]) if lines else "an error without a text"


def _process(text: str) -> Process:
    actor, kind, host = (pattern.search(text) for pattern in (_ACTOR, _CLASS, _HOST))
    if actor and (known := _introduced.get(actor[1])):
        return known
    return Process(kind[1] if kind else "a process", host[1] if host else "some host")


def _detail(text: str) -> str:
    """What Ray knows of its end; of a connection that ended, whatever ended the process, nothing."""
    detail = None if "connection error" in text else _DETAIL.search(text)
    return f" (Ray: {detail[1]})" if detail else ""
