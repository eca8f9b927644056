"""Waits for actor calls with timeouts and progress, and translates Ray's errors to slime's.

    the actor's method raised a slime error         that error
    it raised any other exception                   `ActorFailed`: the error, the process, and the line of user code
    its constructor raised                          same
    its process died                                `ActorDied`: the process, and what the driver was waiting for
    Ray itself failed (disk, memory, a host)        `ClusterFailed`: Ray's message, and what the driver was waiting for

Error messages are one sentence; the traceback is chained for the log. `wait_for` polls, so that progress is shown while
the driver waits, and Ctrl-C works immediately.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from slime.core import errors
from slime.core.blame import RAISED_AT, Process, crash_in, error_line, first_line, place_in
from slime.core.errors import ActorDied, ActorFailed, ClusterFailed, DeadlineExceeded, SlimeError
from slime.core.liveness import Silence
from slime.core.text import shorten

_introduced: dict[str, Process] = {}
"""Ray actor id -> description of the actor's process, for actors started by this process."""
RAY_CHARS = 600
_ACTOR, _CLASS, _HOST = (re.compile(rf"{key}: (\S+)") for key in ("actor_id", "class_name", "ip"))
_OURS = re.compile(r"^slime\.core\.errors\.(\w+): (.*)\Z", re.MULTILINE | re.DOTALL)
_DETAIL = re.compile(r"Worker exit detail: ([^.\n]+\.)")


def introduce(actor: Any, process: Process) -> Any:
    """Registers a description of the actor's process for error messages. Returns the actor."""
    _introduced[actor._actor_id.hex()] = process
    return actor


def translated(error: RayError, for_what: str) -> SlimeError:
    """Translates an error from Ray. `for_what`: what the driver was waiting for."""
    if isinstance(error, RayTaskError):
        return _raised(error, for_what)
    if isinstance(error, OutOfMemoryError):
        return ActorDied(f"Ray killed a process during {for_what} because memory ran out: {first_line(str(error))}")
    text = str(error)
    if not isinstance(error, RayActorError | WorkerCrashedError):
        said = shorten(" ".join(text.split()), RAY_CHARS)  # the reason may be on any line
        return ClusterFailed(f"Ray: {type(error).__name__}: {said}, during {for_what}")
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return _not_started(text)
    return ActorDied(_process(text).ended(None, during=for_what) + _detail(text))


def _raised(error: RayTaskError, for_what: str) -> SlimeError:
    cause, trace = error.cause, str(error)
    if isinstance(cause, SlimeError):
        return cause
    what = error_line(cause) if isinstance(cause, Exception) else _last_line(trace)
    return ActorFailed(f"{what}{_place(trace)}, during {for_what}")


def _not_started(text: str) -> SlimeError:
    """Returns the error of an actor's constructor, parsed from the traceback because Ray drops the exception."""
    match = _OURS.search(text)
    kind = getattr(errors, match[1], None) if match else None
    if match and isinstance(kind, type) and issubclass(kind, SlimeError):
        return kind(match[2].strip())
    return ActorFailed(f"a process could not start: {_last_line(text)}{_place(text)}")


def _place(trace: str) -> str:
    place = place_in(trace)
    return f"{RAISED_AT}{place}" if place is not None else ""


def _last_line(trace: str) -> str:
    """Returns the exception at the end of a traceback."""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    return first_line(lines[-1]) if lines else "an error without a message"


def _process(text: str) -> Process:
    actor, kind, host = (pattern.search(text) for pattern in (_ACTOR, _CLASS, _HOST))
    if actor and (known := _introduced.get(actor[1])):
        return known
    return Process(kind[1] if kind else "a process", host[1] if host else "some host")


def _detail(text: str) -> str:
    """Returns Ray's explanation of a process's death, or "" if Ray only noticed a broken connection."""
    detail = None if "connection error" in text else _DETAIL.search(text)
    return f" (Ray: {detail[1]})" if detail else ""


Follower = Callable[[str], None]
"""Takes what the driver waits for. Called by `wait_for`; may raise to end the wait."""
_followers: dict[Follower, float] = {}
"""Follower -> when it was last called."""


@contextmanager
def followed_by(follower: Follower) -> Iterator[None]:
    """Calls `follower` about twice a second in the calls of `wait_for` in the block, however short each of them is."""
    _followers[follower] = time.monotonic()
    try:
        yield
    finally:
        del _followers[follower]


def _call_followers(for_what: str) -> None:
    now = time.monotonic()
    for follower, called_s in list(_followers.items()):
        if now - called_s >= POLL_S:
            _followers[follower] = now
            follower(for_what)


POLL_S = 0.5
TOGETHER_S = 1.0
"""How long to wait after a death for failures of other processes, one of which may be the actual cause."""


def wait_for(
    refs: Sequence[Any],
    *,
    for_what: str,
    limit_s: float,
    owner: str = "driver",
    on_poll: Callable[[], str] | None = None,
    flag: str = "",
) -> list[Any]:
    """Returns the results of all `refs` in order. If a call fails, raises its translated error without waiting longer.

    `on_poll`: called about twice a second, returns the progress as text. `flag`: setting for the time limit. Raises
    `DeadlineExceeded` after `limit_s`, or later on a loaded machine (`slime.core.liveness`).
    """
    silence = Silence()
    pending, last_progress = list(refs), "none"
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        if (cause := _cause(done, pending)) is not None:
            raise translated(cause, for_what) from cause
        if on_poll is not None:
            last_progress = on_poll()
        _call_followers(for_what)
        if pending and silence.exceeds(limit_s):
            raise DeadlineExceeded.waiting(
                owner=owner, for_what=for_what, limit_s=silence.lasts_s, last_progress=last_progress, flag=flag
            )
    try:
        return ray.get(list(refs))
    except RayError as error:
        raise translated(error, for_what) from error


def put_once(value: Any) -> Any:
    """Returns an object ref of `value`, for an argument of many calls: each call would serialize the value again.

    Without Ray, returns the value.
    """
    return ray.put(value) if ray.is_initialized() else value


def all_there(refs: Sequence[Any]) -> bool:
    """Returns whether all calls have finished or failed. Does not block."""
    return not ray.wait(list(refs), num_returns=len(refs), timeout=0)[1] if refs else True


def peek(ref: Any) -> Any:
    """Returns the result of a call, or None if it has not finished or has failed. Does not block or raise."""
    return peek_all([ref]).get(ref)


def outcomes(refs: Sequence[Any]) -> dict[Any, Any]:
    """Returns the finished calls -> their results, or the `RayError` of those that failed. Does not block or raise."""
    return _read(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else [])


def _read(done: Sequence[Any]) -> dict[Any, Any]:
    """Asks Ray once for the results of all finished calls, unless one has failed."""
    try:
        return dict(zip(done, ray.get(list(done)) if done else [], strict=True))
    except RayError:
        return {ref: _outcome(ref) for ref in done}


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def peek_all(refs: Sequence[Any]) -> dict[Any, Any]:
    """Returns the finished calls -> their results, or None for those that failed. Does not block or raise."""
    return {ref: None if isinstance(result, RayError) else result for ref, result in outcomes(refs).items()}


def first_death(refs: Sequence[Any], *, for_what: str, limit_s: float) -> ActorDied | None:
    """Returns the first actor death reported by any of these calls within the limit, or None. Never raises.

    Ray reports dead actors immediately. A busy actor that does not respond does not count as dead.
    """
    deadline, pending = time.monotonic() + limit_s, list(refs)
    while pending and time.monotonic() < deadline:
        ray.wait(pending, timeout=min(POLL_S, limit_s))  # returns with the first one, and then all that are there
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
        cause = _cause(done, pending, only=_died)
        if cause is not None and isinstance(death := translated(cause, for_what), ActorDied):
            return death
    return None


def _cause(
    done: Sequence[Any], pending: Sequence[Any], *, only: Callable[[RayError], bool] = lambda failure: True
) -> RayError | None:
    """Returns the most likely root cause among the failures of `done` that satisfy `only`, or None.

    When a rank is killed, its peers crash soon afterwards, and Ray may report them first.
    """
    failures = list(filter(only, _failures(done)))
    if pending and any(map(_died, failures)):
        late, _ = ray.wait(list(pending), num_returns=len(pending), timeout=TOGETHER_S)
        failures += filter(only, _failures(late))
    return min(failures, key=_distance, default=None)


def _failures(refs: Sequence[Any]) -> list[RayError]:
    return [result for result in _read(refs).values() if isinstance(result, RayError)]


def _died(failure: RayError) -> bool:
    """Returns whether a process died after it had started. Exceptions do not count, even if a death caused them."""
    died = isinstance(failure, RayActorError | WorkerCrashedError | OutOfMemoryError)
    return died and not isinstance(failure, RayTaskError) and not getattr(failure, "actor_init_failed", False)


def _distance(failure: RayError) -> int:
    """Sort key, likeliest root cause first: 0 for a process killed from outside (no crash report), 1 for an exception,
    2 for a crash, which may be due to a lost connection to a peer."""
    if not _died(failure):
        return 1
    log = _process(str(failure)).log
    return 2 if log is not None and crash_in(log) else 0
