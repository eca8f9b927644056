"""The context of a rollout, for generate functions, hooks and users' rollout functions.

    from slime.rollout.context import current
    generation = await current().client.generate(ids, sampling_params)

The context is a context variable, which asyncio tasks and `asyncio.to_thread` inherit; nothing is global. Other threads
and grader processes have no context.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from slime.core.errors import HookError
from slime.core.files import ImageFolder
from slime.core.hf_config import read_hf_config
from slime.rewards.pool import GraderPool
from slime.rollout.client.call import Pictures
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.teacher_client import TeacherClient
from slime.rollout.types import Progress
from slime.settings import Args

if TYPE_CHECKING:
    from slime.rollout.loopback_router import LoopbackRouter
    from slime.rollout.workers.episodes import Episodes


class Models(dict[str, EngineClient]):
    """Model name -> client. Raises `HookError` for models that are not served."""

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

    def pictures(self, digests: Sequence[str]) -> Pictures:
        """Returns the images of a sample (`Sample.images`) for `EngineClient`. Raises `DataError` if one is missing."""
        token_id = int(read_hf_config(self.args.hf_checkpoint)["image_token_id"])
        return Pictures.of(digests, ImageFolder.of_run(self.args.run_dir), token_id)

    def engine(self) -> EngineClient:
        """Returns `client`. Raises `HookError` if no engine is running."""
        if self.client is None:
            raise HookError(
                "this rollout function runs without engines, so it cannot generate; use one that runs with engines"
            )
        return self.client


_CURRENT: ContextVar[RolloutContext | None] = ContextVar("slime_rollout_context", default=None)


_GRADER_PROCESS = "slime.rewards.grader_worker"
"""Main module of a grader process."""


def current() -> RolloutContext:
    """Returns the context of the running rollout. Outside one, raises a `HookError` that says where and what to do."""
    context = _CURRENT.get()
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
