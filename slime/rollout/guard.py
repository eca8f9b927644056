"""Protects a rollout from user code: time limits, threads for synchronous functions, and an event-loop watchdog.

    samples = await supervised(generate(...), what="execution 3 of group 1 in mine.generate", limit_s=1800.0)
    alive()        # a generate function calls this periodically during its own long waits

Limits apply to the time without progress. A call to `alive` counts as progress, and so does the end of a `waiting`
block, in which engine clients, graders and sandboxes wait under their own limits. Tasks, and threads that slime starts,
inherit the `Heartbeat` of their call through `HEARTBEAT`.

Invariants
1. Time in a `waiting` block does not count. Progress of a call is also progress of the enclosing calls.
2. User code ends with a result, an `Exception` or a cancellation by slime. If user code cancels itself or raises an
   exception like `SystemExit`, even in tasks that it starts, the error becomes `HookExited`; otherwise asyncio would
   stop the event loop.
3. A task or thread that ignores its cancellation is left behind: it is counted, a warning names it, and nothing waits
   for it any longer, not even process exit.
4. At most `MOST_AT_ONCE` awaited calls run in threads at a time. Slime's own functions use other threads (`beside`).
5. If user code blocks the event loop until the limit, the watchdog interrupts the code, at most `MOST_BROKEN_OFF`
   times: the execution expires, and the loop continues. The watchdog never interrupts slime or library code.
6. If code cannot be interrupted (such as a sleep, or a regular expression that holds the GIL), the process exits
   `GRACE_S` later. `faulthandler` dumps the stack of every thread and exits the process from a thread that does not
   need the GIL.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import faulthandler
import functools
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextvars import Context, ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from slime.core.blame import Place, blamed, raised_by_user
from slime.core.errors import DeadlineExceeded, HookError, HookExited


class Heartbeat:
    """Tracks when a supervised call last made progress."""

    def __init__(self, loop: asyncio.AbstractEventLoop, parent: Heartbeat | None = None) -> None:
        """`parent`: the heartbeat of the enclosing call."""
        self._loop, self._parent = loop, parent
        self._at, self._num_waiting = loop.time(), 0
        self.num_beats = 0
        self.threads: set[int] = set()
        """Ids of the threads that are running on behalf of the call."""

    def beat(self) -> None:
        """Records progress. Thread-safe."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._beat()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._beat)

    def silent_s(self) -> float:
        return 0.0 if self._num_waiting else self._loop.time() - self._at

    def _beat(self) -> None:
        self._at, self.num_beats = self._loop.time(), self.num_beats + 1
        if self._parent is not None:
            self._parent._beat()

    def _waits(self, num: int) -> None:
        self._num_waiting += num
        if self._parent is not None:
            self._parent._waits(num)


HEARTBEAT: ContextVar[Heartbeat | None] = ContextVar("slime_heartbeat", default=None)


def alive() -> None:
    """Reports that the calling code is making progress (`--execution-timeout-s`); does nothing outside a rollout."""
    beat = HEARTBEAT.get()
    if beat is not None:
        beat.beat()


class Waiting:
    """The handle that `waiting` yields to its block."""

    def __init__(self, beat: Heartbeat | None) -> None:
        self._beat = beat

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """Marks a block in which user code processes a chunk of the awaited response, so the clock runs again."""
        if self._beat is None:
            yield
            return
        self._beat._waits(-1)
        self._beat._beat()
        try:
            yield
        finally:
            self._beat._waits(1)


@contextlib.contextmanager
def waiting() -> Iterator[Waiting]:
    """Marks a block that waits on the event loop under its own limit, so the clock stops."""
    beat = HEARTBEAT.get()
    if beat is None:
        yield Waiting(None)
        return
    beat._waits(1)
    try:
        yield Waiting(beat)
    finally:
        beat._waits(-1)
        beat._beat()


# ---- threads -----------------------------------------------------------------------------------------------------
T = TypeVar("T")

MOST_AT_ONCE = 64


class DaemonThreads(concurrent.futures.Executor):
    """Runs each call in a daemon thread, because asyncio's pool is small and Python joins its threads at exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # re-raised where the result is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=f"user-{getattr(fn, '__name__', 'call')}", daemon=True).start()
        return future


_THREADS = DaemonThreads()
_OWN = concurrent.futures.ThreadPoolExecutor(max_workers=4, thread_name_prefix="slime")  # starts threads when needed
_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
LEFT_BEHIND: set[int] = set()
"""Ids of threads that are still running but no longer awaited."""


class Stalled(BaseException):
    """Raised by the watchdog in code that blocks the event loop. Not an `Exception`, so that retry loops do not catch
    it.
    """

    def __str__(self) -> str:
        return "user code blocked the event loop for longer than --execution-timeout-s allows"


def exited(error: BaseException) -> HookExited | DeadlineExceeded:
    """Converts a `BaseException` from user code into an error that names the line that raised it."""
    if isinstance(error, Stalled):
        return DeadlineExceeded(f"{error}{raised_by_user(error)}")
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return HookExited(f"{said}{raised_by_user(error)}")


async def beside(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls an internal function in a thread.

    User code cannot delay the call, because asyncio and `run_in_thread` use other threads.
    """
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_OWN, call)


async def run_in_thread(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a user function in a thread, in the caller's context. `name`: name of the function in error messages.

    Propagates the function's errors, but raises `HookExited` for exceptions like `SystemExit`, and `HookError` for
    `StopIteration`, which asyncio cannot propagate.
    """
    loop, context, beat = asyncio.get_running_loop(), contextvars.copy_context(), HEARTBEAT.get()
    slots = _SLOTS.setdefault(loop, asyncio.Semaphore(MOST_AT_ONCE))
    identity: list[int] = []

    def call() -> Any:
        me = threading.get_ident()
        identity.append(me)
        if beat is not None:
            beat.threads.add(me)
        try:
            return context.run(function, *args, **kwargs)
        except StopIteration as leak:
            raise HookError(f"{name} raised StopIteration; pass next() a default") from leak
        except Exception:
            raise
        except BaseException as error:
            raise exited(error) from error
        finally:
            identity.clear()
            LEFT_BEHIND.discard(me)
            if beat is not None:
                beat.threads.discard(me)

    with waiting():  # for a free slot
        await slots.acquire()
    try:
        return await loop.run_in_executor(_THREADS, call)
    except asyncio.CancelledError:
        LEFT_BEHIND.update(identity)
        raise
    finally:
        slots.release()


# ---- limits ------------------------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)

END_LIMIT_S = 5.0
"""How long (s) a cancelled user task may take to end. Callers that end several tasks use a multiple of this."""
_LEFT_BEHIND: set[asyncio.Task[Any]] = set()


async def supervised(work: Coroutine[Any, Any, T], *, what: str, limit_s: float | None) -> T:
    """Awaits a user's coroutine. `what`: its name in errors. `limit_s`: seconds without progress; None or 0: no limit.

    Raises `DeadlineExceeded` at the limit, `HookExited` if user code exits or cancels itself, and any error of the
    coroutine.
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
        raise HookExited(f"an unrequested cancellation{raised_by_user(error)}") from error


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], limit_s: float = END_LIMIT_S) -> None:
    """Cancels tasks, waits up to `limit_s` for them to end, and leaves the rest behind. Discards all results."""
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
                task.exception()  # else asyncio logs that the exception was never retrieved


def num_left_behind() -> int:
    """Returns the number of user tasks and threads that are still running but no longer awaited."""
    return len(_LEFT_BEHIND) + len(LEFT_BEHIND)


def _leave_behind(task: asyncio.Task[Any], limit_s: float) -> None:
    stands = place_of_task(task)
    logger.warning(
        "%s did not end within %g s of its cancellation and is left behind, running at %s",
        task.get_name(),
        limit_s,
        stands or "an unknown line",
    )
    _LEFT_BEHIND.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _LEFT_BEHIND.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("%s, which had been left behind, has ended: %r", task.get_name(), error)


def _expired(what: str, limit_s: float, task: asyncio.Task[Any], beat: Heartbeat) -> DeadlineExceeded:
    frames = sys._current_frames()
    in_threads = [place for one in beat.threads if one in frames and (place := place_of_frame(frames[one]))]
    place = in_threads[0] if in_threads else place_of_task(task)
    return DeadlineExceeded.waiting(
        owner=what,
        for_what=f"progress (--execution-timeout-s); it is at {place or 'an unknown line'}",
        limit_s=limit_s,
        last_progress=f"{beat.num_beats} heartbeats so far" if beat.num_beats else "none",
    )


# ---- which line is running -------------------------------------------------------------------------------------------


def place_of_frame(frame: FrameType) -> Place | None:
    """Returns the line to blame in a running thread."""
    stack = traceback.extract_stack(frame)
    return blamed(Place(one.filename, one.lineno or 0, one.name) for one in stack)


def place_of_task(task: asyncio.Task[Any]) -> Place | None:
    """Returns the line to blame in a waiting task, by following the coroutines and tasks that it awaits."""
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
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)


def _waits_for(task: asyncio.Task[Any]) -> asyncio.Task[Any] | None:
    """Returns a task that `task` awaits, possibly one of several."""
    waits_for: Any = getattr(task, "_fut_waiter", None)
    among = [waits_for, *(getattr(waits_for, "_children", None) or ())]
    return next((one for one in among if isinstance(one, asyncio.Task) and not one.done()), None)


# ---- exceptions that must not leave a task ---------------------------------------------------------------------------


class Contained(Coroutine[Any, Any, T]):
    """Wraps a coroutine and converts exceptions that would stop the event loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._step(self.coroutine.send, value)

    def throw(self, *given: Any) -> Any:
        return self._step(self.coroutine.throw, *given)

    @staticmethod
    def _step(step: Callable[..., Any], *given: Any) -> Any:
        try:
            return step(*given)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise exited(error) from error

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Any:
        return self.coroutine.__await__()


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Makes the loop wrap tasks of supervised code in `Contained`, unless the user has set a task factory."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None, **given: Any
) -> asyncio.Task[Any]:
    beat = HEARTBEAT.get() if context is None else context.get(HEARTBEAT)
    if beat is not None and not isinstance(coroutine, Contained):
        coroutine = Contained(coroutine)
    return asyncio.Task(coroutine, loop=loop, context=context, **given)


# ---- the watchdog ------------------------------------------------------------------------------------------------
LAST_WORDS = "rollout_stall.txt"
"""File in the log folder in which a rollout process records why it killed itself."""
WARN_S, GRACE_S = 10.0, 30.0
"""Seconds without an event-loop iteration before the first warning, and seconds from the interruption to process exit.
"""
LOOK_S = 1.0
MOST_BROKEN_OFF = 3
"""Maximum number of interruptions. If code blocks the loop more often, the process exits."""
_TIMED_OUT = "Timeout ("
"""A `faulthandler` report starts with this."""
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)


class Watchdog:
    """Watches an event loop from a separate thread until `close`. Must be constructed on the loop's thread.

    The watchdog schedules a callback on the loop and waits for it. While the callback is overdue, the watchdog warns
    and names the running line (also in `stall`), and at the limit it interrupts the code. If the loop stays blocked,
    the process exits and leaves a file that says why (`last_words`).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limit_s: float,
        last_words: Path | None = None,
        warn_s: float = WARN_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """`limit_s`: seconds without an iteration; 0: no limit. `last_words`: path of the file; None: the watchdog
        never kills the process.
        """
        self._loop, self._limit_s, self._warn_s, self._grace_s = loop, limit_s, warn_s, grace_s
        self._look_s = min(LOOK_S, warn_s / 4)
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._longest_s, self._num_broken_off = 0.0, 0
        self.stall = ""
        """Describes the code that is blocking the loop; empty while the loop runs."""
        self._path = last_words if limit_s else None
        self._file = None
        if self._path is not None:
            self._file = self._path.open("w")
            self._file.write(f"0x{self._watched:016x} {limit_s + grace_s:g}\n")
            self._file.flush()
        self._put_off_end()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def take_longest_s(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def close(self) -> None:
        """Stops watching and deletes the `last_words` file."""
        self._closed.set()
        if self._path is not None and self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        try:
            self._look()
        finally:  # once unwatched, faulthandler must not kill the process
            if self._file is not None:
                faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._closed.wait(self._look_s):
            turned, asked = threading.Event(), time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._has_turned, turned)
            except RuntimeError:  # the loop is closed
                return
            self._wait(turned, asked)
            self._longest_s = max(self._longest_s, time.monotonic() - asked)
            self.stall = ""

    def _wait(self, turned: threading.Event, asked: float) -> None:
        """Waits for an iteration of the loop; warns and interrupts when due."""
        warn_s, was_broken = self._warn_s, not self._limit_s
        while not turned.wait(self._look_s) and not self._closed.is_set():
            stands_s = time.monotonic() - asked
            place = self._place()
            if stands_s >= self._warn_s:
                self.stall = f"{place or 'something'} has blocked the event loop for {stands_s:.0f} s"
            if stands_s >= warn_s:
                warn_s *= 2
                logger.warning("%s; use await there, or call it in a thread (asyncio.to_thread)", self.stall)
            if stands_s >= self._limit_s and not was_broken:
                was_broken = True
                if place is not None and not place.is_ours and not place.is_library:
                    self._break_off()

    def _break_off(self) -> None:
        if self._num_broken_off < MOST_BROKEN_OFF:
            self._num_broken_off += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), ctypes.py_object(Stalled))

    def _has_turned(self, turned: threading.Event) -> None:
        turned.set()
        self._put_off_end()

    def _put_off_end(self) -> None:
        if self._file is not None and not self._closed.is_set():
            faulthandler.dump_traceback_later(self._limit_s + self._grace_s, exit=True, file=self._file)

    def _place(self) -> Place | None:
        """Returns the line that the loop is running, ignoring the frames that started the loop."""
        frame = sys._current_frames().get(self._watched)
        stack = traceback.extract_stack(frame) if frame is not None else []
        begin = max((number for number, one in enumerate(stack, 1) if one.name == "run_forever"), default=0)
        return blamed(Place(one.filename, one.lineno or 0, one.name) for one in stack[begin:])


def last_words(path: Path) -> str | None:
    """Reads the file of a `Watchdog`. Returns why its process killed itself; None if it did not."""
    with contextlib.suppress(OSError):
        head, _, report = path.read_text(errors="replace").partition("\n")
        if _TIMED_OUT not in report:
            return None
        thread, _, limit_s = head.partition(" ")
        of_thread = report.partition(f"Thread {thread}")[2].partition("\n\n")[0]
        found = [Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(of_thread)]
        return (
            f"{blamed(reversed(found)) or 'something'} blocked the rollout's event loop for {limit_s} s "
            "(--execution-timeout-s), so the process exited; use await there, or call it in a thread "
            "(asyncio.to_thread)"
        )
    return None
