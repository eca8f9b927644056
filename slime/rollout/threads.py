"""Threads for synchronous user code: one for each call, which nobody has to wait for, not even the end of the process.
And a few for slime's own functions (`beside`), which never wait for those.

asyncio's own pool has a few threads, which calls that never return would use up, and Python waits for them when it
exits. Consumes: calls. Produces: their results, or what they raise. Waits for nothing; a caller that stops waiting
leaves its thread behind.

Invariants
1. At most `MOST_AT_ONCE` calls of an event loop that somebody waits for run at a time.
2. What a function raises reaches who waits, as an exception that an event loop survives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from slime.core.blame import raised_by_user
from slime.core.errors import DeadlineExceeded, HookError, HookExited
from slime.rollout.progress import HEARTBEAT, waiting

T = TypeVar("T")

MOST_AT_ONCE = 64
"""Calls that run side by side."""


class DaemonThreads(concurrent.futures.Executor):
    """A daemon thread for each call."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Runs it in a thread of its own."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # of whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=f"user-{getattr(fn, '__name__', 'call')}", daemon=True).start()
        return future


_THREADS = DaemonThreads()
_OWN = concurrent.futures.ThreadPoolExecutor(max_workers=4, thread_name_prefix="slime")  # threads start when they work
_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
LEFT_BEHIND: set[int] = set()
"""Identities of threads that nobody waits for any more, and that still run."""


class Stalled(BaseException):
    """Raised by the watchdog inside of code that keeps the event loop from turning. No `Exception`, because code that
    tries again and again would catch it."""

    def __str__(self) -> str:
        return "user code kept the event loop from turning until --execution-timeout-s"


def exited(error: BaseException) -> HookExited | DeadlineExceeded:
    """What a function raised that is not an `Exception`, as an error, with its place."""
    if isinstance(error, Stalled):
        return DeadlineExceeded(f"{error}{raised_by_user(error)}")
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return HookExited(f"{said}{raised_by_user(error)}")


async def beside(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function of slime's beside the event loop, which goes on. Raises what it raises.

    Whatever user code does with asyncio's own threads, and with those of `run_in_thread`, it comes to its turn.
    """
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_OWN, call)


async def run_in_thread(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function beside the event loop, in the caller's context. `name`: what errors call it.

    Raises what it raises: `HookExited` for `SystemExit` and the like, `HookError` for `StopIteration`, which asyncio
    cannot carry to who waits.
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
            raise HookError(f"got StopIteration from {name}; give next() a default") from leak
        except Exception:
            raise
        except BaseException as error:
            raise exited(error) from error
        finally:
            identity.clear()
            LEFT_BEHIND.discard(me)
            if beat is not None:
                beat.threads.discard(me)

    with waiting():  # for others
        await slots.acquire()
    try:
        return await loop.run_in_executor(_THREADS, call)
    except asyncio.CancelledError:
        LEFT_BEHIND.update(identity)
        raise
    finally:
        slots.release()
