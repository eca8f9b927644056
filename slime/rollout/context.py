"""The context of a rollout, for generate functions, hooks and users' rollout functions.

    from slime.rollout.context import current
    generation = await current().client.generate(ids, sampling_params)

The context is a context variable, which asyncio tasks and `asyncio.to_thread` inherit. Other threads of a rollout
process have the context of the latest call of the user's rollout function (`offer_to_threads`), because such a function
may keep a thread that generates between its calls. Grader processes have no context.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from slime.core.errors import HookError
from slime.core.files import ImageFolder
from slime.core.hf_config import other_media_ids, read_hf_config
from slime.core.topology import EVAL_FLEET
from slime.rewards.pool import GraderPool
from slime.rollout.client.call import Pictures
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.teacher_client import TeacherClient
from slime.rollout.types import Chat, Progress
from slime.settings import Args

if TYPE_CHECKING:
    from slime.rollout.loopback_router import LoopbackRouter
    from slime.rollout.workers.episodes import Episodes


P = ParamSpec("P")
R = TypeVar("R")


class Models(dict[str, EngineClient]):
    """Model name -> client. Raises `HookError` for models that are not served."""

    def split(self, policy: str) -> tuple[Models, Models]:
        """Returns the clients for generating and those for evaluating, which differ in the client of the policy if
        there is an `--eval-fleet`.
        """
        others = {name: client for name, client in self.items() if name != EVAL_FLEET}
        if EVAL_FLEET not in self:
            return self, self
        return Models(others), Models({**others, policy: self[EVAL_FLEET]})

    def __missing__(self, name: str) -> EngineClient:
        known = ", ".join(self) or "none"
        raise HookError(f"no engine serves the model {name!r}; served models (--sglang-config): {known}")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    args: Args
    client: EngineClient | None
    """Client of the policy's engines; None if no engine is running (SFT, replay)."""
    tokenizer: Any
    """The HF tokenizer of `--hf-checkpoint`; None without a checkpoint."""
    graders: GraderPool | None
    progress: Progress
    loop: asyncio.AbstractEventLoop
    """The manager's event loop, on which user functions in threads schedule coroutines."""
    teacher: TeacherClient | None = None
    """Client of the server at `--opd-teacher-url`."""
    rollout_id: int | None = None
    models: Mapping[str, EngineClient] = field(default_factory=Models)
    """Clients of all models, including the policy, by name in `--sglang-config`. Without that flag, the policy is
    called "default".
    """
    eval_datasets: tuple[Any, ...] = ()
    """`slime.rollout.evaluate.EvalDataset` records."""
    workers: Episodes | None = None
    """Runs the groups; None to run them in this process."""
    loopback: LoopbackRouter | None = None
    """The address of this process for HTTP clients of user code."""
    on_eval_fleet: bool = False
    """Whether this is an evaluation on the engines of `--eval-fleet`, so that `client` is their client."""

    def pictures(self, digests: Sequence[str]) -> Pictures:
        """Returns the images of a sample (`Sample.images`) for `EngineClient`. Raises `DataError` if one is missing."""
        config, folder = read_hf_config(self.args.hf_checkpoint), ImageFolder.of_run(self.args.run_dir)
        return Pictures.of(digests, folder, int(config["image_token_id"]), other_media_ids(config))

    def engine(self) -> EngineClient:
        """Returns `client`. Raises `HookError` if no engine is running."""
        if self.client is None:
            raise HookError(
                "this rollout function runs without engines, so it cannot generate; use one that runs with engines"
            )
        return self.client

    @property
    def chat(self) -> Chat:
        """The running execution's conversations with the policy. Raises `HookError` outside a generate function, and
        without engines or a tokenizer.
        """
        running = EXECUTION.get()
        if running is None:
            raise HookError("current().chat belongs to one execution; use it in a generate function or a sample hook")
        if running.chat is None:
            client = self.engine()
            if client.chats is None:
                raise HookError("current().chat needs a tokenizer; set --hf-checkpoint")
            running.chat = client.chats.open(client, running.params)
        return running.chat


@dataclass(slots=True)
class RunningExecution:
    params: Mapping[str, Any]
    """The run's sampling parameters for this execution."""
    prompt: Any = None
    """The sample's prompt."""
    chat: Chat | None = None
    """Opened by the first use."""


EXECUTION: ContextVar[RunningExecution | None] = ContextVar("slime_execution", default=None)
_CURRENT: ContextVar[RolloutContext | None] = ContextVar("slime_rollout_context", default=None)


_GRADER_PROCESS = "slime.rewards.grader_worker"
"""Main module of a grader process."""


@dataclass(slots=True)
class _Offered:
    """What threads get that no context variable reaches."""

    variables: Context
    """Context variables of the latest call of the rollout function."""
    threads: weakref.WeakSet[threading.Thread]
    """The threads that asked."""

    def take(self) -> RolloutContext | None:
        self.threads.add(threading.current_thread())
        return self.variables.get(_CURRENT)


_OFFERED: list[_Offered] = []
"""Empty, or one item. Written by the thread of the manager's event loop."""


def offer_to_threads() -> None:
    """Offers the current context to threads without one, until `withdraw_from_threads`."""
    known = [thread for one in _OFFERED for thread in one.threads]
    _OFFERED[:] = [_Offered(copy_context(), weakref.WeakSet(known))]


def withdraw_from_threads() -> None:
    _OFFERED.clear()


def offered() -> Context | None:
    """Returns a copy of the offered context variables."""
    return next((one.variables.copy() for one in _OFFERED), None)


def num_threads_asking() -> int:
    """Returns the number of running threads that have asked for the offered context."""
    return sum(thread.is_alive() for one in _OFFERED for thread in one.threads)


def _known() -> RolloutContext | None:
    """Returns the context of this task, or else the offered one."""
    return _CURRENT.get() or next((one.take() for one in _OFFERED), None)


def on_rollout_loop(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Makes an async function run on the rollout's event loop, whichever loop awaits it.

    Outside a rollout, the function runs on the caller's loop.
    """

    @functools.wraps(function)
    async def call(*given: P.args, **named: P.kwargs) -> R:
        context = _known()
        if context is None or context.loop is asyncio.get_running_loop():
            return await function(*given, **named)
        variables = None if _CURRENT.get() is not None else offered()
        variables, work = variables or copy_context(), function(*given, **named)
        return await asyncio.wrap_future(variables.run(asyncio.run_coroutine_threadsafe, work, context.loop))

    return call


def current() -> RolloutContext:
    """Returns the context of the running rollout. Outside one, raises a `HookError` that says where and what to do."""
    context = _known()
    if context is None:
        raise HookError(f"current() of slime.rollout.context was called {_place_without_context()}")
    return context


def _place_without_context() -> str:
    """Returns where the caller of `current` runs and what it can do instead, as the end of a sentence."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == _GRADER_PROCESS:
        return (
            "in a grader process, which has no rollout; a reward function can use its args and sample. To compute "
            "rewards with the engines, set sample.reward in the generate function or in --rollout-sample-hook-path"
        )
    if _is_importing():
        return "while a module is imported, before any rollout; call it inside the generate function or the hook"
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        return (
            f"in the thread {thread.name}, which has no rollout; call it before the thread starts and pass the result, "
            "or start the thread with asyncio.to_thread"
        )
    return "outside a rollout; call it in a generate function, a sample hook, a filter or a rollout function"


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def use(context: RolloutContext) -> Iterator[RolloutContext]:
    """Makes `context` current within the block and in tasks created there."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
