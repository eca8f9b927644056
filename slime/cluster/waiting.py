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
from ray.exceptions import RayError

from slime.cluster.failures import translated
from slime.core.errors import ActorDied, DeadlineExceeded
from slime.core.silence import Silence

POLL_S = 0.5


def wait_for(
    refs: Sequence[Any],
    *,
    for_what: str,
    limit_s: float,
    owner: str = "driver",
    on_poll: Callable[[], str] | None = None,
    flag: str = "",
) -> list[Any]:
    """Results of all `refs`, in order. The first failure is raised at once (`failures.translated`).

    `on_poll` is called about twice a second and returns the last progress as text; `flag` raises the limit. Raises
    `DeadlineExceeded` when `limit_s` runs out (later on a busy machine: `slime.core.silence`), the actor's own error if
    it is one of ours, `ActorFailed` for any other (also of Ray itself), and `ActorDied` if its process is gone.
    """
    silence = Silence()
    pending, last_progress = list(refs), "none"
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        for ref in done:
            _get(ref, for_what)  # a failure ends the wait without waiting for the others
        if on_poll is not None:
            last_progress = on_poll()
        if pending and silence.exceeds(limit_s):
            raise DeadlineExceeded.waiting(
                owner=owner, for_what=for_what, limit_s=silence.lasts_s, last_progress=last_progress, flag=flag
            )
    return [_get(ref, for_what) for ref in refs]


def all_there(refs: Sequence[Any]) -> bool:
    """Whether the results, or failures, of all `refs` are there. Never waits."""
    return not ray.wait(list(refs), num_returns=len(refs), timeout=0)[1] if refs else True


def peek(ref: Any) -> Any:
    """The result of `ref` if it is there, else None; also None if the call failed. Never waits, never raises."""
    done, _ = ray.wait([ref], timeout=0)
    try:
        return ray.get(ref) if done else None
    except RayError:
        return None


def first_death(refs: Sequence[Any], *, for_what: str, limit_s: float) -> ActorDied | None:
    """Of calls to some actors, the end of the first that turns out to be gone. Never raises.

    Who is dead answers at once with that; who is busy does not answer, which says nothing.
    """
    deadline, pending = time.monotonic() + limit_s, list(refs)
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, timeout=min(POLL_S, limit_s))
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                if isinstance(end := translated(error, for_what), ActorDied):
                    return end
    return None


def _get(ref: Any, for_what: str) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        raise translated(error, for_what) from error
