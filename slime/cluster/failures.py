"""What Ray says of a failed call, as one error of ours with one sentence; the trace stays behind it, for the log.

the actor's method raised an error of ours      that error, as it was raised
it raised anything else                         `ActorFailed`: what, in which process, where (the user's own line)
its constructor raised                          the same
its process is gone                             `ActorDied`: which process, during what
Ray itself cannot go on (disk, memory, a host)  `ClusterFailed`: what Ray said, during what
"""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from slime.core import errors
from slime.core.blame import RAISED_AT, first_line, one_line, place_in
from slime.core.errors import ActorDied, ActorFailed, ClusterFailed, SlimeError
from slime.core.text import shorten

WHO = {
    "TrainActor": "a training rank",
    "RolloutActor": "the process of the rollout side",
    "EngineActor": "the owner of an engine",
    "EpisodeActor": "a worker of the rollout",
    "HostActor": "the owner of a host's guardian",
}
"""Ray's name of an actor -> ours."""
RAY_CHARS = 600
"""Of what Ray says of itself."""
_CLASS, _PID = re.compile(r"class_name: (\w+)"), re.compile(r"pid: (\d+)")
_OURS = re.compile(r"^slime\.core\.errors\.(\w+): (.*)\Z", re.MULTILINE | re.DOTALL)
_DETAIL = re.compile(r"Worker exit detail: ([^.\n]+\.)")


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
    return ActorDied(f"{_name(text)} died during {for_what}{_detail(text)}")


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


def _name(text: str) -> str:
    kind, pid = _CLASS.search(text), _PID.search(text)
    name = WHO.get(kind[1], kind[1]) if kind else "a process"
    return f"{name} (pid {pid[1]})" if pid else name


def _detail(text: str) -> str:
    if "connection error" in text:  # Ray sees a connection that ended, whatever ended the process
        return ": it was killed, or it crashed"
    detail = _DETAIL.search(text)
    return f": {detail[1]}" if detail else ""
