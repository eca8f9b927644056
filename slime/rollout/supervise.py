"""Limits around user code on the event loop: no call is without one, no end of it is waited for without one.

    samples = await supervised(generate(...), what="execution 3 of group 1 in mine.generate", limit_s=1800.0)

Consumes: a user's coroutine, which runs in a task of its own, and its `Heartbeat`. Produces: its result, or an
exception that an event loop survives. Waits for: the task, as long as there is progress; a task that it has cancelled,
for `END_LIMIT_S`. Is woken by: the end of the task, or the clock of the event loop.

Invariants
1. User code ends in a result, an `Exception`, or a cancellation of ours. `SystemExit` and the like, which asyncio lets
   out of the event loop, also from tasks that user code makes, and a cancellation of its own become `HookExited`.
2. A task that does not end when it is cancelled is left behind: named in a warning, counted, and waited for no more.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Coroutine, Iterable, Iterator
from contextvars import Context
from types import FrameType
from typing import Any, TypeVar

from slime.core.blame import Place, blamed, raised_by_user
from slime.core.errors import DeadlineExceeded, HookExited
from slime.rollout import threads
from slime.rollout.progress import HEARTBEAT, Heartbeat

T = TypeVar("T")

logger = logging.getLogger(__name__)

END_LIMIT_S = 5.0
"""How long a cancelled task of user code may take to end. Who waits for several of them waits a multiple of it."""
_LEFT_BEHIND: set[asyncio.Task[Any]] = set()


async def supervised(work: Coroutine[Any, Any, T], *, what: str, limit_s: float | None) -> T:
    """The result of a user's coroutine. `what`: who waits, in words; `limit_s`: seconds without progress, None or 0
    for no limit.

    Raises `DeadlineExceeded` at the limit, `HookExited`, and whatever else the coroutine raises.
    """
    loop = asyncio.get_running_loop()
    contain_tasks(loop)
    beat = Heartbeat(loop, HEARTBEAT.get())
    token = HEARTBEAT.set(beat)
    try:
        task = loop.create_task(Contained(work), name=what)
    finally:
        HEARTBEAT.reset(token)
    try:
        while not task.done():
            left_s = limit_s - beat.silent_s() if limit_s else None
            if left_s is not None and left_s <= 0:
                raise _expired(what, limit_s or 0.0, task, beat)
            await asyncio.wait([task], timeout=left_s)
    finally:
        if not task.done():
            await end_tasks([task])
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise HookExited(f"a cancellation that nobody asked for{raised_by_user(error)}") from error


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], limit_s: float = END_LIMIT_S) -> None:
    """Cancels tasks and waits until they have ended, for `limit_s` at most: the others are left behind. What they
    return or raise is nobody's.
    """
    those = list(tasks)
    running = [task for task in those if not task.done()]
    for task in running:
        task.cancel()
    try:
        if running:
            await asyncio.wait(running, timeout=limit_s)
    finally:
        for task in those:
            if not task.done():
                _leave_behind(task, limit_s)
            elif not task.cancelled():
                task.exception()  # else asyncio says that nobody looked


def num_left_behind() -> int:
    """Tasks and threads of user code that nobody waits for any more, and that still run."""
    return len(_LEFT_BEHIND) + len(threads.LEFT_BEHIND)


def _leave_behind(task: asyncio.Task[Any], limit_s: float) -> None:
    stands = place_of_task(task)
    logger.warning(
        "%s did not end within %g s of its cancellation and is left behind; it stands at %s",
        task.get_name(),
        limit_s,
        stands or "an unknown place",
    )
    _LEFT_BEHIND.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _LEFT_BEHIND.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("%s, which was left behind, has ended: %r", task.get_name(), error)


def _expired(what: str, limit_s: float, task: asyncio.Task[Any], beat: Heartbeat) -> DeadlineExceeded:
    frames = sys._current_frames()
    in_threads = [place for one in beat.threads if one in frames and (place := place_of_frame(frames[one]))]
    place = in_threads[0] if in_threads else place_of_task(task)
    return DeadlineExceeded.waiting(
        owner=what,
        for_what=f"progress (--execution-timeout-s); it stands at {place or 'an unknown place'}",
        limit_s=limit_s,
        last_progress=f"sign {beat.num_beats} of it" if beat.num_beats else "none",
    )


# ---- where code stands -----------------------------------------------------------------------------------------------


def place_of_frame(frame: FrameType) -> Place | None:
    """The line of a running thread, as `blamed` says."""
    stack = traceback.extract_stack(frame)
    return blamed(Place(one.filename, one.lineno or 0, one.name) for one in stack)


def place_of_task(task: asyncio.Task[Any]) -> Place | None:
    """The line at which a task waits, through the coroutines and tasks that it waits for, as `blamed` says."""
    return blamed(_places(task))


def _places(task: asyncio.Task[Any] | None) -> Iterator[Place]:
    seen = set[int]()
    while task is not None and id(task) not in seen:
        seen.add(id(task))
        inner: Any = task.get_coro()
        while inner is not None:
            if isinstance(inner, Contained):
                inner = inner.coroutine
            frame = _either(inner, "cr_frame", "gi_frame")
            if frame is not None:
                yield Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            inner = _either(inner, "cr_await", "gi_yieldfrom")
        task = _waits_for(task)


def _either(thing: Any, *names: str) -> Any:
    """The first of these attributes that it has, and that is not None."""
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)


def _waits_for(task: asyncio.Task[Any]) -> asyncio.Task[Any] | None:
    """The task that it waits for, perhaps with others."""
    waits_for: Any = getattr(task, "_fut_waiter", None)
    among = [waits_for, *(getattr(waits_for, "_children", None) or ())]
    return next((one for one in among if isinstance(one, asyncio.Task) and not one.done()), None)


# ---- what may not leave a task ---------------------------------------------------------------------------------------


class Contained(Coroutine[Any, Any, T]):
    """A coroutine out of which no exception comes that would end the event loop, or pass for something else."""

    __slots__ = ("__weakref__", "coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine

    def send(self, value: Any) -> Any:
        """One step."""
        try:
            return self.coroutine.send(value)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise threads.exited(error) from error

    def throw(self, *given: Any) -> Any:
        """One step, which begins with an exception."""
        try:
            return self.coroutine.throw(*given)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise threads.exited(error) from error

    def close(self) -> None:
        """Ends it."""
        self.coroutine.close()

    def __await__(self) -> Any:
        return self.coroutine.__await__()


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Tasks that supervised code makes are contained, too. Leaves a task factory of the user's alone."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None, **given: Any
) -> asyncio.Task[Any]:
    beat = HEARTBEAT.get() if context is None else context.get(HEARTBEAT)
    if beat is not None and not isinstance(coroutine, Contained):
        coroutine = Contained(coroutine)
    return asyncio.Task(coroutine, loop=loop, context=context, **given)
