"""Waiting for actors: every wait has a name, a limit and an owner.

Consumes references to calls of actors, produces their results or the first error. `wait_for` waits for all of them and
is woken by Ray when they are there; it also polls, so that a progress callback can draw while the driver waits, Ctrl-C
is answered at once, and an actor that died is reported as what it was instead of as a lost object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slime.core.errors import DeadlineExceeded, EngineError, SlimeError

POLL_S = 0.5


def wait_for(
    refs: Sequence[Any],
    *,
    for_what: str,
    limit_s: float,
    owner: str = "driver",
    on_poll: Callable[[], str] | None = None,
) -> list[Any]:
    """Results of all `refs`, in order. The first failure is raised at once, as the actor raised it.

    `on_poll` is called about twice a second and returns the last progress as text. Raises `DeadlineExceeded` when
    `limit_s` runs out, `EngineError` if an actor process died.
    """
    deadline = time.monotonic() + limit_s
    pending, last_progress = list(refs), "none"
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        for ref in done:
            _get(ref, for_what)  # a failure ends the wait without waiting for the others
        if on_poll is not None:
            last_progress = on_poll()
        if pending and time.monotonic() > deadline:
            raise DeadlineExceeded.waiting(owner=owner, for_what=for_what, limit_s=limit_s, last_progress=last_progress)
    return [_get(ref, for_what) for ref in refs]


def peek(ref: Any) -> Any:
    """The result of `ref` if it is there, else None; also None if the call failed. Never waits, never raises."""
    done, _ = ray.wait([ref], timeout=0)
    try:
        return ray.get(ref) if done else None
    except (RayTaskError, RayActorError):
        return None


def _get(ref: Any, for_what: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeError):
            raise cause from error
        raise
    except RayActorError as error:
        raise EngineError(f"a process died during {for_what}: {error}; see logs/ in the run folder") from error
